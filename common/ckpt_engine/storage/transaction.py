"""One save, all or nothing: hidden files first, the manifest last, then the name, flushed in that order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType
from typing import Literal

from ckpt_engine.errors import CheckpointError, ConfigError, SaveFailedError
from ckpt_engine.image.checksum import CHUNK_BYTES, digests
from ckpt_engine.image.manifest import FileRecord, Manifest
from ckpt_engine.storage.backend import backend_for, file_chunks, is_local, join, local_path
from ckpt_engine.storage.exchange import Exchange, exchange_names
from ckpt_engine.storage.names import check_destination, check_file_name, check_id
from ckpt_engine.storage.stage import LocalStage, ObjectStage, Stage
from ckpt_engine.storage.writer import save_failed, upload_image, write_image


class Transaction:
    """Writes one checkpoint directory. At every instant the destination is the old checkpoint or the new one.

    Used by one thread at a time. As a context manager it begins on entry and aborts on exit unless committed.

    Args:
        destination: A local path or fsspec URL. A checkpoint, a plain file or a symbolic link of that name is
            replaced on commit, never written into: its files may be linked from other checkpoints.
        save_id: Unique to this save; part of the hidden names.
        direct_io: Write images past the page cache where the file system takes it.
        exchange: Swaps two local names atomically; OSError where that is not possible.
    """

    def __init__(
        self,
        destination: str,
        *,
        save_id: str,
        direct_io: bool = True,
        exchange: Exchange = exchange_names,
    ) -> None:
        self.destination = check_destination(destination)
        self.save_id = check_id(save_id)
        self._direct_io = direct_io
        self._local = is_local(destination)
        self._backend = backend_for(destination)
        self._stage: Stage
        if self._local:
            self._stage = LocalStage(destination, save_id, exchange)
        else:
            self._stage = ObjectStage(destination, save_id)
        self._records: dict[str, FileRecord] = {}
        self._state: Literal["new", "open", "committed", "aborted"] = "new"

    def begin(self) -> None:
        """Make the place where the files gather.

        Raises:
            SaveFailedError: It cannot be made, or another live process is writing under the same ``save_id``.
        """
        self._require("new", "begin")
        self._state = "open"
        with _Failures(self.destination):
            self._stage.begin()

    def write_image(self, name: str, memory: memoryview, *, chunk_bytes: int = CHUNK_BYTES) -> FileRecord:
        """Write one large file straight from ``memory``, which nobody may change until this returns.

        Raises:
            SaveFailedError: It could not be written in full, for example because the disk is full.
        """
        path = self._new_path(name)
        if self._local:
            record = write_image(path, memory, chunk_bytes=chunk_bytes, direct=self._direct_io)
        else:
            record = upload_image(self._backend, path, memory, chunk_bytes=chunk_bytes)
        return self._add(record)

    def write_bytes(self, name: str, data: bytes) -> FileRecord:
        """Write one small file.

        Raises:
            SaveFailedError: It could not be written in full.
        """
        path = self._new_path(name)
        if self._local:
            return self._add(write_image(path, memoryview(data), direct=False))
        return self._add(upload_image(self._backend, path, memoryview(data)))

    def link_image(self, name: str, source_destination: str, record: FileRecord) -> FileRecord:
        """Take over a file of a committed checkpoint: a hard link where possible, else a
        checked copy.

        Args:
            name: Its name in this checkpoint.
            source_destination: The checkpoint that holds it.
            record: Its record in that checkpoint.

        Raises:
            SaveFailedError: It is gone, has another size, or a copy's digests differ.
        """
        source, target = join(source_destination, check_file_name(record.name)), self._new_path(name)
        with _Failures(target, record.size):
            found = backend_for(source).size(source)
            if found != record.size:
                raise SaveFailedError(f"{source} has {found} bytes instead of {record.size}; save it anew.")
            if not (self._local and is_local(source) and _hard_link(source, target)):
                self._backend.write_chunks(target, _checked_chunks(source, record))
        return self._add(replace(record, name=name))

    def commit(self, manifest: Manifest) -> None:
        """Make the checkpoint exist under its name. When this returns it is durable.

        Raises:
            SaveFailedError: The manifest does not describe what was written, or publishing failed; the old
                checkpoint is untouched then. Call :meth:`abort`.
        """
        self._require("open", "commit")
        with _Failures(self.destination):
            self._check(manifest)
            self._stage.publish(manifest.to_bytes())
        self._state = "committed"

    def abort(self) -> None:
        """Remove what was written. Does nothing after :meth:`commit` or before :meth:`begin`."""
        if self._state == "open":
            self._stage.discard()
        if self._state != "committed":
            self._state = "aborted"

    def __enter__(self) -> Transaction:
        try:
            self.begin()
        except BaseException:
            self.abort()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _check(self, manifest: Manifest) -> None:
        listed = {record.name: record for record in manifest.files}
        for name, written in self._records.items():
            if listed.get(name) != written:
                raise SaveFailedError(f"The manifest does not describe {name} as it was written; list its record.")
        for record in manifest.files:  # other ranks may have written some of them
            size = self._backend.size(join(self._stage.directory, record.name))
            if size != record.size:
                raise SaveFailedError(
                    f"{record.name} of {self.destination} has {size} bytes, not {record.size}; save again."
                )

    def _new_path(self, name: str) -> str:
        self._require("open", "write")
        if check_file_name(name) in self._records:
            raise ConfigError(f"{name} is written already in this save of {self.destination}; use another name.")
        return join(self._stage.directory, name)

    def _add(self, record: FileRecord) -> FileRecord:
        self._records[record.name] = record
        return record

    def _require(self, state: str, action: str) -> None:
        if self._state != state:
            raise ConfigError(
                f"Cannot {action}: the save of {self.destination} is {self._state}; make a new Transaction."
            )


class _Failures:
    """Reports any error of the storage as SaveFailedError; the engine's own errors pass."""

    def __init__(self, path: str, needed: int = 0) -> None:
        self._path, self._needed = path, needed

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, CheckpointError):
            raise save_failed(self._path, self._needed, error) from error


def _hard_link(source: str, target: str) -> bool:
    try:
        os.link(local_path(source), local_path(target), follow_symlinks=False)
    except FileNotFoundError:
        raise
    except OSError:
        return False
    return True


def _checked_chunks(source: str, record: FileRecord) -> Iterator[memoryview]:
    chunks = file_chunks(backend_for(source), source, record.chunk_bytes)
    for number, (chunk, wanted) in enumerate(zip(chunks, record.digests, strict=True)):
        if tuple(digests(chunk, record.chunk_bytes)) != (wanted,):
            raise SaveFailedError(f"Chunk {number} of {source} is damaged and cannot be taken over; save it anew.")
        yield chunk
