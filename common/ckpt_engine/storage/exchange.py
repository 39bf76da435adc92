"""Puts a finished directory in the place of another so that the name is never without a checkpoint."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
from collections.abc import Callable

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2

Exchange = Callable[[str, str], None]


def exchange_names(first: str, second: str) -> None:
    """Swap what two names of one file system refer to, in one atomic step.

    Raises:
        OSError: The kernel or the file system cannot do that (ENOSYS, EINVAL), or a name does not exist.
    """
    function = _renameat2()
    if function is None:
        raise OSError(errno.ENOSYS, "this C library has no renameat2", first)
    names = (os.fsencode(first), os.fsencode(second))
    if function(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), first, None, second)


def install(staging: str, target: str, aside: str, exchange: Exchange = exchange_names) -> str | None:
    """Give ``staging`` the name ``target``.

    Where ``target`` exists the two are exchanged atomically. Where that is not possible the old one is
    renamed to ``aside`` first, a name under which a reader still finds it, and the new one takes its place.

    Returns:
        Where the old content is now, to be removed once the directory is flushed; None if there was none.
    """
    if not os.path.lexists(target):
        os.rename(staging, target)
        return None
    try:
        exchange(staging, target)
    except OSError:
        os.rename(target, aside)
    else:
        return staging
    try:
        os.rename(staging, target)
    except BaseException:
        os.rename(aside, target)
        raise
    return aside


def flush_directory(path: str) -> None:
    """Make the names in a directory durable; file systems that cannot flush a directory are left alone."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def make_directories(path: str) -> None:
    """``mkdir -p``, every new name flushed so that a power cut does not take the directory away again."""
    missing = []
    current = path or "."
    while not os.path.isdir(current):
        missing.append(current)
        current = os.path.dirname(current) or "."
    for directory in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another rank was faster
            os.mkdir(directory)
        flush_directory(os.path.dirname(directory) or ".")


@functools.cache
def _renameat2() -> Callable[..., int] | None:
    library = ctypes.CDLL(None, use_errno=True)
    function = getattr(library, "renameat2", None)
    if function is None:
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    function.restype = ctypes.c_int
    return function  # type: ignore[no-any-return]
