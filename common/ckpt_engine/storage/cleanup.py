"""Removes checkpoints so that no half of one is ever taken for a whole, and what killed saves left behind."""

from __future__ import annotations

import contextlib
import os
import secrets
import time

from ckpt_engine.errors import CheckpointError, ConfigError
from ckpt_engine.image.manifest import Manifest
from ckpt_engine.storage.backend import Backend, backend_for, is_local, join, local_path, parent
from ckpt_engine.storage.exchange import flush_directory
from ckpt_engine.storage.names import MANIFEST, OWNER, check_destination, hidden, parse_hidden
from ckpt_engine.storage.owner import Owner

STALE_AFTER_S = 3600.0


def remove_checkpoint(url: str) -> None:
    """Remove a checkpoint: the manifest, which makes it one, first.

    A plain file or a symbolic link is removed itself, never what a link points to. Hard links of its data
    in other checkpoints stay whole. Nothing happens if there is nothing; ranks and processes may race.

    Raises:
        ConfigError: ``url`` is a directory *of* checkpoints, or no name at all.
    """
    check_destination(url)
    backend = backend_for(url)
    if not backend.exists(url):
        return
    if is_local(url) and (os.path.islink(local_path(url)) or not backend.isdir(url)):
        backend.remove_file(url)
        flush_directory(parent(local_path(url)))
        return
    _refuse_collection(backend, url)
    if is_local(url):
        _remove_directory(local_path(url))
        return
    backend.remove_file(url)
    backend.remove_file(join(url, MANIFEST))
    backend.remove_tree(url)


def erase(directory: str) -> None:
    """Remove a local directory, file or link where it is, the manifest first."""
    backend = backend_for(directory)
    if os.path.islink(directory) or not os.path.isdir(directory):
        backend.remove_file(directory)
        return
    manifest = join(directory, MANIFEST)
    if os.path.lexists(manifest):
        with contextlib.suppress(FileNotFoundError):
            backend.remove_file(manifest)
            flush_directory(directory)
    backend.remove_tree(directory)


def sweep_incomplete(root: str, *, older_than: float = STALE_AFTER_S) -> list[str]:
    """Remove what killed saves left in ``root``, and put back a checkpoint whose replacement never arrived.

    A staging directory goes when the process that owns it is dead. Where that cannot be known (another
    host, or no readable owner record) it goes when nothing in it was written for ``older_than`` seconds.
    Remote stores are left alone: there a file's owner cannot be known, and a commit removes the leftovers
    of its own name.

    Returns:
        The paths removed or put back, sorted.
    """
    if not is_local(root) or not os.path.isdir(local_path(root)):
        return []
    directory, touched = local_path(root), []
    for name in sorted(os.listdir(directory)):
        parsed = parse_hidden(name)
        if parsed is None:
            continue
        path, target = join(directory, name), join(directory, parsed[0])
        with contextlib.suppress(OSError):  # another process sweeps too, or we have no right to
            if parsed[1] == "incomplete":
                done = _sweep_staging(path, older_than)
            else:
                done = _sweep_replaced(path, target, older_than)
            if done:
                touched.append(path)
    return touched


def is_abandoned(staging: str, older_than: float = STALE_AFTER_S) -> bool:
    """Whether nobody writes into a local staging directory any more."""
    try:
        liveness = Owner.from_bytes(backend_for(staging).read_bytes(join(staging, OWNER))).liveness()
    except (OSError, ValueError):
        liveness = "unknown"
    if liveness == "unknown":
        return _idle_seconds(staging) > older_than
    return liveness == "dead"


def has_manifest(backend: Backend, path: str) -> bool:
    """Whether the directory ``path`` holds an intact commit record; OSError where that cannot be told."""
    try:
        Manifest.from_bytes(backend.read_bytes(join(path, MANIFEST)))
    except (FileNotFoundError, NotADirectoryError, CheckpointError):
        return False
    return True


def _remove_directory(path: str) -> None:
    # Renamed first: a removal that is killed half-way leaves a hidden name to sweep, not a damaged
    # checkpoint.
    aside = hidden(path, "incomplete", f"removed-{secrets.token_hex(4)}")
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return
    except OSError:
        aside = path
    erase(aside)
    flush_directory(parent(path))


def _refuse_collection(backend: Backend, url: str) -> None:
    if backend.exists(join(url, MANIFEST)) or not backend.isdir(url):
        return
    for name in backend.listdir(url):
        if backend.exists(join(join(url, name), MANIFEST)):
            raise ConfigError(f"{url} is a directory of checkpoints ({name}, ...): remove them one by one.")


def _sweep_staging(path: str, older_than: float) -> bool:
    if not is_abandoned(path, older_than):
        return False
    erase(path)
    return True


def _sweep_replaced(path: str, target: str, older_than: float) -> bool:
    if has_manifest(backend_for(target), target):
        flush_directory(parent(path))
        erase(path)
        return True
    # A commit that is under way has just renamed it: the change time of the directory itself tells.
    if os.path.lexists(target) or time.time() - os.lstat(path).st_ctime <= older_than:
        return False
    os.rename(path, target)
    flush_directory(parent(path))
    return True


def _idle_seconds(path: str) -> float:
    newest = os.lstat(path).st_mtime
    if os.path.isdir(path) and not os.path.islink(path):
        with os.scandir(path) as entries:
            newest = max([newest, *(entry.stat(follow_symlinks=False).st_mtime for entry in entries)])
    return time.time() - newest
