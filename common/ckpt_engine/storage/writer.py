"""Streams an image from host memory into a new file in large aligned writes, with digests on the way.

Direct I/O needs memory, offset and length aligned to the device's blocks. File systems differ in where
they say no: some when direct I/O is asked for, some at the first write. Either way, and for the tail that
is not a whole block, writing goes on through the page cache from the byte that was reached. The final
``fsync`` makes both durable.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator

from ckpt_engine.errors import CheckpointError, ConfigError, SaveFailedError
from ckpt_engine.image.checksum import CHUNK_BYTES, digests
from ckpt_engine.image.manifest import FileRecord
from ckpt_engine.storage.backend import Backend, basename, is_local, local_path, parent, write_fully

ALIGNMENT = 4096
_REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def write_image(path: str, memory: memoryview, *, chunk_bytes: int = CHUNK_BYTES, direct: bool = True) -> FileRecord:
    """Write ``memory`` to the new local file ``path`` and flush it to the device.

    Args:
        path: A file that does not exist yet; existing files are never written into, they may be linked
            elsewhere.
        memory: The bytes of the file, not changed by anyone until this returns.
        chunk_bytes: Bytes per write and per digest.
        direct: Bypass the page cache where the file system takes it.

    Raises:
        SaveFailedError: The file could not be written in full; nothing is left under ``path``.
    """
    data = _flat(memory)
    target = local_path(path)
    found: list[str] = []
    try:
        fd = _open_new(target, direct)
        try:
            _write_all(fd, digesting(data, chunk_bytes, found))
            os.fsync(fd)
        except BaseException:
            os.unlink(target)
            raise
        finally:
            os.close(fd)
    except OSError as error:
        raise save_failed(path, len(data), error) from error
    return FileRecord(name=basename(path), size=len(data), chunk_bytes=chunk_bytes, digests=tuple(found))


def upload_image(backend: Backend, path: str, memory: memoryview, *, chunk_bytes: int = CHUNK_BYTES) -> FileRecord:
    """Like :func:`write_image`, through any backend."""
    data = _flat(memory)
    found: list[str] = []
    try:
        backend.write_chunks(path, digesting(data, chunk_bytes, found))
    except CheckpointError:
        raise
    except Exception as error:  # remote file systems raise their driver's own classes
        raise save_failed(path, len(data), error) from error
    return FileRecord(name=basename(path), size=len(data), chunk_bytes=chunk_bytes, digests=tuple(found))


def digesting(data: memoryview, chunk_bytes: int, found: list[str]) -> Iterator[memoryview]:
    """Cut ``data`` into chunks; each is digested into ``found`` just before it is written, while in cache."""
    for start in range(0, len(data), chunk_bytes):
        chunk = data[start : start + chunk_bytes]
        found.extend(digests(chunk, chunk_bytes))
        yield chunk


def save_failed(path: str, needed: int, error: BaseException) -> SaveFailedError:
    """What to tell the user about ``error``, with the space needed and left where space is the cause."""
    number = error.errno if isinstance(error, OSError) else None
    if number in _NO_SPACE:
        return SaveFailedError(
            f"No space to write {path}: it needs {_bytes(needed)} and {_free(path)}. "
            "Free space, raise the quota or file-size limit, or keep fewer checkpoints."
        )
    if isinstance(error, FileExistsError):
        return SaveFailedError(f"{path} exists already and is never written into; save under another name.")
    return SaveFailedError(f"Writing {path} ({_bytes(needed)}) failed: {error}. Check the storage and its rights.")


def _flat(memory: memoryview) -> memoryview:
    if not memory.c_contiguous:
        raise ConfigError("An image is written from contiguous memory; pass a contiguous memoryview.")
    return memory if memory.format == "B" and memory.ndim == 1 else memory.cast("B")


def _open_new(path: str, direct: bool) -> int:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    if direct:
        # Asked for after opening: an open that is refused may or may not have created the file.
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | _O_DIRECT)
    return fd


def _write_all(fd: int, chunks: Iterator[memoryview]) -> None:
    for chunk in chunks:
        done = _write_direct(fd, chunk) if _is_direct(fd) else 0
        if done < len(chunk):
            _leave_direct(fd)
            write_fully(fd, chunk[done:])


def _write_direct(fd: int, chunk: memoryview) -> int:
    """Write the whole blocks of ``chunk``; returns the bytes written before the tail or before a refusal."""
    end = len(chunk) - len(chunk) % ALIGNMENT
    done = 0
    try:
        while done < end and done % ALIGNMENT == 0:
            done += os.write(fd, chunk[done:end])
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
    return done


def _is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & _O_DIRECT)


def _leave_direct(fd: int) -> None:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~_O_DIRECT)


def _bytes(needed: int) -> str:
    return f"{needed:,} bytes" if needed else "a few kilobytes"


def _free(path: str) -> str:
    if not is_local(path):
        return "the store refused more"
    try:
        status = os.statvfs(local_path(parent(path)))
    except OSError:
        return "the free space is unknown"
    return f"{status.f_bavail * status.f_frsize:,} are free"
