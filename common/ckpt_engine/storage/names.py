"""The names a checkpoint is made of, and the hidden names beside it while it is being written or replaced."""

from __future__ import annotations

import re
from typing import Literal

from ckpt_engine.errors import ConfigError
from ckpt_engine.storage.backend import basename, join, parent

MANIFEST = "manifest.json"
OWNER = "owner.json"

HiddenKind = Literal["incomplete", "replaced"]
_HIDDEN = re.compile(r"^\.(?P<name>.+)\.(?P<kind>incomplete|replaced)-(?P<id>[A-Za-z0-9_-]+)$")
_FILE = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,254}\Z")
_ID = re.compile(r"^[A-Za-z0-9_-]{1,64}\Z")


def hidden(destination: str, kind: HiddenKind, save_id: str) -> str:
    """The hidden name beside ``destination``: what is being written, or the checkpoint that is being
    replaced.

    >>> hidden("runs/a.ckpt", "incomplete", "7f")
    'runs/.a.ckpt.incomplete-7f'
    """
    return join(parent(destination), f".{basename(destination)}.{kind}-{check_id(save_id)}")


def parse_hidden(name: str) -> tuple[str, str] | None:
    """The checkpoint's name and the kind of a hidden name; None for any other name.

    >>> parse_hidden(".a.ckpt.replaced-7f"), parse_hidden("a.ckpt")
    (('a.ckpt', 'replaced'), None)
    """
    match = _HIDDEN.match(name)
    return (match["name"], match["kind"]) if match else None


def check_id(save_id: str) -> str:
    """``save_id`` if it can be part of a file name."""
    if not _ID.match(save_id):
        raise ConfigError(f"save_id={save_id!r} cannot be part of a file name: use letters, digits, '-' and '_'.")
    return save_id


def check_file_name(name: str) -> str:
    """``name`` if it may be a data file of a checkpoint: one visible component, not a reserved name."""
    if not _FILE.match(name) or ".." in name:
        raise ConfigError(
            f"{name!r} cannot name a file of a checkpoint: use letters, digits, '.', '-' and '_', a letter or "
            "digit first."
        )
    if name in (MANIFEST, OWNER):
        raise ConfigError(f"{name!r} is written by the transaction itself; give the file another name.")
    return name


def check_destination(destination: str) -> str:
    """``destination`` if its last component can name a checkpoint."""
    name = basename(destination)
    if name in ("", ".", "..") or name.endswith(":"):
        raise ConfigError(f"{destination!r} does not end in a name; give a checkpoint such as 'runs/a.ckpt'.")
    return destination
