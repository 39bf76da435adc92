"""Finds checkpoints by their manifests, never by their names, and chooses the newest that is whole."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ckpt_engine.errors import CheckpointError, NoCheckpointError
from ckpt_engine.image.manifest import Manifest
from ckpt_engine.restore.integrity import check_files, read_manifest, resolve, verify
from ckpt_engine.storage.backend import Backend, backend_for, is_local, join, local_path
from ckpt_engine.storage.names import MANIFEST, parse_hidden

__all__ = ["Entry", "Scan", "candidates", "is_checkpoint", "newest", "read_manifest", "scan"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A checkpoint with an intact manifest; its data is not checked yet."""

    path: str
    manifest: Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """What a directory holds: checkpoints, newest first by (step, time), and what is wrong with others."""

    entries: tuple[Entry, ...]
    problems: tuple[str, ...]


def is_checkpoint(path: str) -> bool:
    """Whether ``path`` is a complete checkpoint by its commit record. The data is not read.

    >>> is_checkpoint("/nowhere/epoch=0.ckpt")
    False
    """
    try:
        read_manifest(path)
    except CheckpointError:
        return False
    return True


def scan(root: str) -> Scan:
    """Every checkpoint in the directory ``root``; one that does not exist holds none.

    What is plainly something else (logs, checkpoints of other tools that are single files) is passed over. A
    checkpoint that a symbolic link names again is listed once.
    """
    backend = backend_for(root)
    if not backend.isdir(root):
        return Scan(entries=(), problems=())
    entries: list[Entry] = []
    problems: list[str] = []
    seen: set[str] = set()
    for path in _paths(backend, root):
        entry = _entry(backend, path, problems)
        if entry is not None and (identity := _identity(path)) not in seen:
            seen.add(identity)
            entries.append(entry)
    entries.sort(key=lambda entry: (entry.manifest.step, entry.manifest.created), reverse=True)
    return Scan(entries=tuple(entries), problems=tuple(problems))


def candidates(
    root: str, *, verify_data: bool = True, on_problem: Callable[[str], None] = _LOG.warning
) -> Iterator[Entry]:
    """The usable checkpoints in ``root``, newest first; ``on_problem`` is told of each one passed over."""
    found = scan(root)
    for problem in found.problems:
        on_problem(problem)
    for entry in found.entries:
        problems = verify(entry.path) if verify_data else check_files(resolve(entry.path), entry.manifest)
        if not problems:
            yield entry
        for problem in problems:
            on_problem(problem)


def newest(root: str, *, verify: bool = True, on_problem: Callable[[str], None] = _LOG.warning) -> Entry:
    """The newest checkpoint in ``root`` that is whole.

    Args:
        root: The directory of checkpoints, a local path or URL.
        verify: Read and check all data. Without, only names and sizes are checked.
        on_problem: Told of every damaged or partial checkpoint, so that none is passed over in silence.

    Raises:
        NoCheckpointError: There is none; the message lists what is wrong with those that were found.
    """
    problems: list[str] = []

    def note(problem: str) -> None:
        problems.append(problem)
        on_problem(problem)

    for entry in candidates(root, verify_data=verify, on_problem=note):
        return entry
    raise NoCheckpointError(no_checkpoint_message(root, problems))


def no_checkpoint_message(root: str, problems: list[str]) -> str:
    """Why no checkpoint of ``root`` can be used.

    >>> no_checkpoint_message("runs", [])
    'No checkpoint in runs. Start without one, or point to the directory that holds them.'
    """
    if not problems:
        return f"No checkpoint in {root}. Start without one, or point to the directory that holds them."
    listed = "\n  ".join(problems)
    return f"No usable checkpoint in {root}. Found, but damaged or incomplete:\n  {listed}"


def _entry(backend: Backend, path: str, problems: list[str]) -> Entry | None:
    try:
        return Entry(path=path, manifest=read_manifest(path))
    except NoCheckpointError as error:
        if _looks_like_ours(backend, path):
            problems.append(str(error))
    except CheckpointError as error:
        problems.append(str(error))
    return None


def _paths(backend: Backend, root: str) -> Iterator[str]:
    """Real directories before links to them; of what is hidden only replaced ones without a successor."""
    visible, links, hidden = [], [], []
    for name in backend.listdir(root):
        path, parsed = join(root, name), parse_hidden(name)
        if parsed is not None:
            if parsed[1] == "replaced":
                hidden.append((path, join(join(root, parsed[0]), MANIFEST)))
        elif is_local(root) and os.path.islink(local_path(path)):
            links.append(path)
        else:
            visible.append(path)
    yield from visible
    yield from links
    for path, successor in hidden:
        if not backend.exists(successor):
            yield path


def _identity(path: str) -> str:
    directory = resolve(path)
    return os.path.realpath(local_path(directory)) if is_local(directory) else directory


def _looks_like_ours(backend: Backend, path: str) -> bool:
    if backend.isdir(path):
        return path.endswith(".ckpt") or any(name.startswith("rank-") for name in backend.listdir(path))
    try:
        return path.endswith(".ckpt") and backend.size(path) == 0
    except OSError:
        return False
