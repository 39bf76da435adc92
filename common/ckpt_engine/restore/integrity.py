"""Whether the files of a checkpoint are the ones its manifest describes: presence, size, and every byte."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ckpt_engine.errors import CheckpointError, CorruptCheckpointError, NoCheckpointError
from ckpt_engine.image.checksum import digests
from ckpt_engine.image.manifest import FileRecord, Manifest
from ckpt_engine.storage.backend import Backend, backend_for, basename, join, parent
from ckpt_engine.storage.names import MANIFEST, parse_hidden

READ_THREADS = max(2, min(4, os.cpu_count() or 1))
_OWN_PREFIX = "rank-"


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """One stretch of a file and the digest it must have."""

    file: str
    number: int
    offset: int
    nbytes: int
    chunk_bytes: int
    digest: str


def resolve(path: str) -> str:
    """The directory that holds checkpoint ``path``: itself, or what an unfinished replacement put aside."""
    backend = backend_for(path)
    if backend.exists(join(path, MANIFEST)) or not backend.isdir(parent(path)):
        return path
    wanted = (basename(path), "replaced")
    for name in backend.listdir(parent(path)):
        aside = join(parent(path), name)
        if parse_hidden(name) == wanted and backend.exists(join(aside, MANIFEST)):
            return aside
    return path


def read_manifest(path: str) -> Manifest:
    """The commit record of checkpoint ``path``.

    Raises:
        NoCheckpointError: There is none: nothing there, a save that never finished, or another kind of file.
        CorruptCheckpointError: It is damaged.
    """
    name = join(resolve(path), MANIFEST)
    try:
        return Manifest.from_bytes(backend_for(path).read_bytes(name))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NoCheckpointError(
            f"{path} is no complete checkpoint: it has no {MANIFEST}. The save did not finish, or this is "
            "another kind of file; choose another checkpoint."
        ) from error
    except (CheckpointError, OSError) as error:
        raise CorruptCheckpointError(f"{name} is damaged: {error}") from error


def verify(path: str) -> list[str]:
    """Everything that is wrong with checkpoint ``path``, each as a sentence naming the file; empty if it
    is whole.

    Reads every byte, in ``READ_THREADS`` threads, without holding more than a chunk for each.
    """
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    directory = resolve(path)
    problems = check_files(directory, manifest)
    if problems:
        return problems
    return check_chunks(directory, manifest.files)


def check_files(directory: str, manifest: Manifest) -> list[str]:
    """Files that are missing, of another size, or present although the manifest does not list them.

    An unlisted file counts where it shows that something else wrote here: one that is named like our own,
    or an empty one, which interrupted copies leave. Notes and the hidden files of other tools are left alone.
    """
    backend = backend_for(directory)
    problems = [problem for record in manifest.files if (problem := _check_size(backend, directory, record))]
    listed = {record.name for record in manifest.files} | {MANIFEST}
    unlisted = [name for name in backend.listdir(directory) if name not in listed]
    return problems + [
        f"{join(directory, name)} is not in the manifest: another save or an interrupted copy wrote into "
        "this checkpoint. Remove the file if the rest is known to be good."
        for name in unlisted
        if _is_stray(backend, directory, name)
    ]


def check_chunks(directory: str, records: Iterable[FileRecord]) -> list[str]:
    """Chunks whose bytes differ from their digests, or cannot be read."""
    local = threading.local()

    def check(chunk: Chunk) -> str | None:
        scratch = getattr(local, "scratch", None)
        if scratch is None or len(scratch) < chunk.nbytes:
            scratch = local.scratch = memoryview(bytearray(chunk.nbytes))
        return read_chunk(directory, chunk, scratch[: chunk.nbytes], compare=True)

    return for_each(check, [chunk for record in records for chunk in chunks_of(record)])


def chunks_of(record: FileRecord) -> Iterator[Chunk]:
    """The chunks of a file, as they were digested."""
    for number, digest in enumerate(record.digests):
        offset = number * record.chunk_bytes
        yield Chunk(
            file=record.name,
            number=number,
            offset=offset,
            nbytes=min(record.chunk_bytes, record.size - offset),
            chunk_bytes=record.chunk_bytes,
            digest=digest,
        )


def read_chunk(directory: str, chunk: Chunk, memory: memoryview, *, compare: bool) -> str | None:
    """Read one chunk into ``memory``; returns what is wrong with it, or None."""
    path = join(directory, chunk.file)
    place = f"{path}, chunk {chunk.number} (bytes {chunk.offset} to {chunk.offset + chunk.nbytes})"
    try:
        backend_for(directory).read_into(path, chunk.offset, memory)
    except (OSError, EOFError) as error:
        return f"{place} cannot be read: {error}"
    if compare and tuple(digests(memory, chunk.chunk_bytes)) != (chunk.digest,):
        return f"{place} is damaged: its bytes differ from those that were saved."
    return None


def for_each(action: Callable[[Chunk], str | None], chunks: list[Chunk]) -> list[str]:
    """Run ``action`` on all chunks, in parallel where there are several; the problems in file order."""
    if len(chunks) <= 2 * READ_THREADS and sum(chunk.nbytes for chunk in chunks) < 1 << 20:
        found = [action(chunk) for chunk in chunks]  # starting threads would cost more than it saves
    else:
        with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="ckpt-read") as pool:
            found = list(pool.map(action, chunks))
    return [problem for problem in found if problem]


def _check_size(backend: Backend, directory: str, record: FileRecord) -> str | None:
    path = join(directory, record.name)
    try:
        size = backend.size(path)
    except (FileNotFoundError, NotADirectoryError):
        return f"{path} is missing."
    except OSError as error:
        return f"{path} cannot be used: {error.strerror or error}."
    if size != record.size:
        return f"{path} has {size} bytes instead of {record.size}: it was cut off or overwritten."
    return None


def _is_stray(backend: Backend, directory: str, name: str) -> bool:
    if name.startswith((".", _OWN_PREFIX)):
        return not name.startswith(".")
    try:
        return backend.size(join(directory, name)) == 0
    except OSError:
        return False
