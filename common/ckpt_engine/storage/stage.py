"""Where the files of a checkpoint gather before it is one, and how it becomes one.

On a file system the files gather in a hidden directory that takes the checkpoint's name at the end. An
object store has no rename: there the files go to their place at once and the manifest, written last, is
the commit.
"""

from __future__ import annotations

import contextlib
import os
from typing import Protocol

from ckpt_engine.errors import SaveFailedError
from ckpt_engine.storage.backend import Backend, backend_for, basename, join, local_path, parent
from ckpt_engine.storage.cleanup import erase, has_manifest, is_abandoned
from ckpt_engine.storage.exchange import Exchange, flush_directory, install, make_directories
from ckpt_engine.storage.names import MANIFEST, OWNER, hidden, parse_hidden
from ckpt_engine.storage.owner import Owner


class Stage(Protocol):
    """``directory`` takes files after :meth:`begin`; then one of :meth:`publish` and :meth:`discard`."""

    directory: str

    def begin(self) -> None: ...
    def publish(self, manifest: bytes) -> None: ...
    def discard(self) -> None: ...


class LocalStage:
    """A hidden directory beside the destination."""

    def __init__(self, destination: str, save_id: str, exchange: Exchange) -> None:
        self._target = local_path(destination)
        self._aside = hidden(self._target, "replaced", save_id)
        self._exchange = exchange
        self._backend = backend_for(self._target)
        self._made = self._published = False
        self.directory = hidden(self._target, "incomplete", save_id)

    def begin(self) -> None:
        """Make the directory and note who owns it; one that a dead process left under its name goes first."""
        make_directories(parent(self._target))
        if os.path.lexists(self.directory):
            if not is_abandoned(self.directory):
                raise SaveFailedError(
                    f"{self.directory} is being written by another save; use another save_id, or remove it "
                    "if no process writes there."
                )
            erase(self.directory)
        os.mkdir(self.directory)
        self._made = True
        self._backend.write_bytes(join(self.directory, OWNER), Owner.current().to_bytes())

    def publish(self, manifest: bytes) -> None:
        """All content durable first, then the name; what it replaces goes when that is durable too."""
        self._backend.write_bytes(join(self.directory, MANIFEST), manifest)
        self._backend.remove_file(join(self.directory, OWNER))
        flush_directory(self.directory)
        old = install(self.directory, self._target, self._aside, self._exchange)
        self._published = True
        flush_directory(parent(self._target))
        with contextlib.suppress(OSError):  # committed; what cannot be removed now is swept later
            if old is not None:
                erase(old)
            for path in _replaced(self._backend, self._target):
                erase(path)

    def discard(self) -> None:
        """Remove what was written; what cannot be removed now is swept later."""
        if self._made and not self._published:
            with contextlib.suppress(OSError):
                erase(self.directory)


class ObjectStage:
    """The destination itself, in a store without rename.

    A checkpoint that exists there is first copied to a hidden name, where readers find it, because its
    objects are about to be overwritten one by one.
    """

    def __init__(self, destination: str, save_id: str) -> None:
        self.directory = destination.rstrip("/")
        self._aside = hidden(self.directory, "replaced", save_id)
        self._backend = backend_for(destination)
        self._cleared = self._published = False

    def begin(self) -> None:
        """Copy what is there aside and clear the place."""
        self._backend.makedirs(parent(self.directory))
        if self._backend.isfile(self.directory):
            self._backend.copy_file(self.directory, self._aside)
        elif has_manifest(self._backend, self.directory):
            _copy_checkpoint(self._backend, self.directory, self._aside)
        self._cleared = True
        _clear(self._backend, self.directory)
        self._backend.makedirs(self.directory)

    def publish(self, manifest: bytes) -> None:
        """Write the manifest object; what it replaces goes after."""
        self._backend.write_bytes(join(self.directory, MANIFEST), manifest)
        self._published = True
        with contextlib.suppress(Exception):
            for path in _replaced(self._backend, self.directory):
                _clear(self._backend, path)

    def discard(self) -> None:
        """Remove what was written and put back what was there; a copy that stays aside is still found."""
        if self._published:
            return
        with contextlib.suppress(Exception):
            if self._cleared:
                _clear(self._backend, self.directory)
                if self._backend.isfile(self._aside):
                    self._backend.copy_file(self._aside, self.directory)
                elif has_manifest(self._backend, self._aside):
                    _copy_checkpoint(self._backend, self._aside, self.directory)
            _clear(self._backend, self._aside)


def _copy_checkpoint(backend: Backend, source: str, target: str) -> None:
    """Copy the files of a checkpoint, the manifest last."""
    backend.makedirs(target)
    names = [name for name in backend.listdir(source) if backend.isfile(join(source, name))]
    for name in sorted(names, key=lambda name: name == MANIFEST):
        backend.copy_file(join(source, name), join(target, name))


def _clear(backend: Backend, path: str) -> None:
    backend.remove_file(join(path, MANIFEST))
    backend.remove_file(path)
    backend.remove_tree(path)


def _replaced(backend: Backend, target: str) -> list[str]:
    """Earlier versions of ``target`` that a commit put aside and did not come to remove."""
    where, wanted = parent(target), (basename(target), "replaced")
    return [join(where, name) for name in backend.listdir(where) if parse_hidden(name) == wanted]
