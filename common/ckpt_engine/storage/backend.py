"""Where checkpoints are kept: a local directory or any fsspec URL, behind one small interface.

Paths are plain strings everywhere, because a URL that passes through ``pathlib`` loses a slash. Only the
local backend turns them into file-system paths. A backend never follows a symbolic link when it reads a
*file*: what a checkpoint consists of are the regular files in its own directory, and a link that points
elsewhere is refused.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from ckpt_engine.errors import ConfigError

_URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.\-]*(://|::.*://)")
_LOCAL_SCHEMES = ("file://", "local://")
COPY_BYTES = 16 * 1024 * 1024


class Backend(Protocol):
    """The operations that saving and restoring need; every path is a string of the backend's own kind."""

    local: bool

    def exists(self, path: str) -> bool: ...
    def isdir(self, path: str) -> bool: ...
    def isfile(self, path: str) -> bool: ...
    def listdir(self, path: str) -> list[str]: ...
    def size(self, path: str) -> int: ...
    def read_bytes(self, path: str) -> bytes: ...
    def read_into(self, path: str, offset: int, memory: memoryview) -> None: ...
    def write_chunks(self, path: str, chunks: Iterable[memoryview]) -> None: ...
    def write_bytes(self, path: str, data: bytes) -> None: ...
    def copy_file(self, source: str, target: str) -> None: ...
    def remove_file(self, path: str) -> None: ...
    def remove_tree(self, path: str) -> None: ...
    def makedirs(self, path: str) -> None: ...


def is_url(path: str) -> bool:
    """Whether ``path`` names a scheme.

    >>> is_url("s3://bucket/run"), is_url("simplecache::s3://b/x"), is_url("/data/run"), is_url("a::b")
    (True, True, False, False)
    """
    return _URL.match(path) is not None


def is_local(path: str) -> bool:
    """Whether ``path`` is on a file system of this machine, named plainly or as a ``file://`` URL.

    >>> is_local("runs/a.ckpt"), is_local("file:///runs/a.ckpt"), is_local("memory://a.ckpt")
    (True, True, False)
    """
    return not is_url(path) or path.startswith(_LOCAL_SCHEMES)


def local_path(path: str) -> str:
    """``path`` without a ``file://`` scheme and without trailing slashes.

    >>> local_path("file:///data/run/"), local_path("run"), local_path("/")
    ('/data/run', 'run', '/')
    """
    for scheme in _LOCAL_SCHEMES:
        path = path.removeprefix(scheme)
    return path.rstrip("/") or ("/" if path.startswith("/") else path)


def join(path: str, name: str) -> str:
    """``name`` inside the directory ``path``.

    >>> join("s3://bucket/run/", "a.ckpt")
    's3://bucket/run/a.ckpt'
    """
    if not path:
        return name
    return f"{path}{name}" if path.endswith("/") else f"{path}/{name}"


def parent(path: str) -> str:
    """The directory that holds ``path``; "." for a bare local name.

    >>> parent("s3://bucket/run/a.ckpt/"), parent("a.ckpt"), parent("/a.ckpt"), parent("memory://a.ckpt")
    ('s3://bucket/run', '.', '/', 'memory://')
    """
    head, slash, _ = path.rstrip("/").rpartition("/")
    if not slash:
        return "."
    return f"{head}/" if head == "" or head.endswith(":/") else head


def basename(path: str) -> str:
    """The last component of ``path``.

    >>> basename("s3://bucket/run/a.ckpt/")
    'a.ckpt'
    """
    return path.rstrip("/").rpartition("/")[2]


class LocalBackend:
    """A file system of this machine; writes are durable when they return."""

    local = True

    def exists(self, path: str) -> bool:
        return os.path.lexists(self._path(path))

    def isdir(self, path: str) -> bool:
        return self._path(path).is_dir()

    def isfile(self, path: str) -> bool:
        return self._path(path).is_file()

    def listdir(self, path: str) -> list[str]:
        """Sorted names in the directory ``path``."""
        return sorted(os.listdir(self._path(path)))

    def size(self, path: str) -> int:
        """Bytes in the regular file ``path``; OSError for anything else, a symbolic link included."""
        status = os.lstat(self._path(path))
        _require_regular(status, path)
        return status.st_size

    def read_bytes(self, path: str) -> bytes:
        fd = self._open(path)
        with os.fdopen(fd, "rb") as handle:
            return handle.read()

    def read_into(self, path: str, offset: int, memory: memoryview) -> None:
        """Fill ``memory`` from byte ``offset`` on; EOFError where the file ends before it is full."""
        fd = self._open(path)
        try:
            done = 0
            while done < len(memory):
                count = os.preadv(fd, [memory[done:]], offset + done)
                if count == 0:
                    raise EOFError(f"{path} ends at byte {offset + done} before {offset + len(memory)}.")
                done += count
        finally:
            os.close(fd)

    def write_chunks(self, path: str, chunks: Iterable[memoryview]) -> None:
        """Write a new file and flush it to the device. Never writes into an existing one; leaves no part."""
        target = self._path(path)
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            try:
                for chunk in chunks:
                    write_fully(fd, chunk)
                os.fsync(fd)
            finally:
                os.close(fd)
        except BaseException:
            target.unlink(missing_ok=True)
            raise

    def write_bytes(self, path: str, data: bytes) -> None:
        self.write_chunks(path, [memoryview(data)])

    def copy_file(self, source: str, target: str) -> None:
        self.write_chunks(target, file_chunks(self, source))

    def remove_file(self, path: str) -> None:
        """Remove a file or a symbolic link (never what it points to); nothing happens if it is not there."""
        self._path(path).unlink(missing_ok=True)

    def remove_tree(self, path: str) -> None:
        """Remove a directory and all in it; parts that others remove meanwhile are no error."""
        target = self._path(path)
        while os.path.lexists(target):
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(target)

    def makedirs(self, path: str) -> None:
        self._path(path).mkdir(parents=True, exist_ok=True)

    @staticmethod
    def _path(path: str) -> Path:
        return Path(local_path(path))

    def _open(self, path: str) -> int:
        # O_NONBLOCK: opening a named pipe planted in a checkpoint must not hang a resume.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(self._path(path), flags)
        try:
            _require_regular(os.fstat(fd), path)
        except BaseException:
            os.close(fd)
            raise
        return fd


class FsspecBackend:
    """Any file system that fsspec opens by URL. Nothing is renamed: an object appears whole when closed."""

    local = False

    def exists(self, path: str) -> bool:
        fs, name = self._resolve(path)
        return bool(fs.exists(name))

    def isdir(self, path: str) -> bool:
        fs, name = self._resolve(path)
        return bool(fs.isdir(name))

    def isfile(self, path: str) -> bool:
        fs, name = self._resolve(path)
        return bool(fs.isfile(name))

    def listdir(self, path: str) -> list[str]:
        """Sorted names in the directory ``path``."""
        fs, name = self._resolve(path)
        entries = {str(entry).rstrip("/") for entry in fs.ls(name, detail=False)}
        # Object stores keep an empty object for a directory made by hand and list it inside itself.
        return sorted(basename(entry) for entry in entries - {name.rstrip("/")})

    def size(self, path: str) -> int:
        fs, name = self._resolve(path)
        if not fs.isfile(name):
            raise FileNotFoundError(errno.ENOENT, "is not a file", path)
        return int(fs.size(name))

    def read_bytes(self, path: str) -> bytes:
        fs, name = self._resolve(path)
        return bytes(fs.cat_file(name))

    def read_into(self, path: str, offset: int, memory: memoryview) -> None:
        """Fill ``memory`` from byte ``offset`` on; EOFError where the object ends before it is full."""
        if not len(memory):
            return
        fs, name = self._resolve(path)
        data = fs.cat_file(name, start=offset, end=offset + len(memory))
        if len(data) != len(memory):
            raise EOFError(f"{path} ends at byte {offset + len(data)} before {offset + len(memory)}.")
        memory[:] = data

    def write_chunks(self, path: str, chunks: Iterable[memoryview]) -> None:
        """Write an object; on an error the upload is discarded where the file system can do that."""
        fs, name = self._resolve(path)
        handle = fs.open(name, "wb")
        try:
            for chunk in chunks:
                handle.write(chunk)
        except BaseException:
            if hasattr(handle, "discard"):
                handle.discard()
            raise
        handle.close()

    def write_bytes(self, path: str, data: bytes) -> None:
        self.write_chunks(path, [memoryview(data)])

    def copy_file(self, source: str, target: str) -> None:
        fs, name = self._resolve(source)
        fs.cp_file(name, self._resolve(target)[1])

    def remove_file(self, path: str) -> None:
        fs, name = self._resolve(path)
        if fs.isfile(name):
            fs.rm_file(name)

    def remove_tree(self, path: str) -> None:
        fs, name = self._resolve(path)
        if fs.exists(name):
            fs.rm(name, recursive=True)

    def makedirs(self, path: str) -> None:
        fs, name = self._resolve(path)
        fs.makedirs(name, exist_ok=True)

    @staticmethod
    def _resolve(path: str) -> tuple[Any, str]:
        """The file system and its own name for ``path``; listings are always fresh, other hosts write too."""
        import fsspec

        try:
            fs, name = fsspec.core.url_to_fs(path)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{path} cannot be opened: {error}. Install its fsspec driver.") from error
        fs.invalidate_cache()
        return fs, str(name)


def backend_for(url: str) -> Backend:
    """The backend that serves ``url``.

    >>> type(backend_for("runs/a.ckpt")).__name__, type(backend_for("memory://a.ckpt")).__name__
    ('LocalBackend', 'FsspecBackend')
    """
    return LocalBackend() if is_local(url) else FsspecBackend()


def file_chunks(backend: Backend, path: str, chunk_bytes: int = COPY_BYTES) -> Iterable[memoryview]:
    """The bytes of one file in order. Each chunk is valid until the next is asked for."""
    size = backend.size(path)
    scratch = memoryview(bytearray(min(size, chunk_bytes)))
    for offset in range(0, size, chunk_bytes):
        chunk = scratch[: min(chunk_bytes, size - offset)]
        backend.read_into(path, offset, chunk)
        yield chunk


def write_fully(fd: int, memory: memoryview) -> None:
    """``os.write`` until all of ``memory`` is written."""
    done = 0
    while done < len(memory):
        done += os.write(fd, memory[done:])


def _require_regular(status: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", path)
