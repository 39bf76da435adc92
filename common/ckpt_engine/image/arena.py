"""Host memory for images and gradients: allocated once, touched once, used again for ever.

The first touch of fresh memory costs many times a copy into memory that is there, and direct I/O from huge pages runs
at twice the speed: hence private anonymous mappings with ``MADV_HUGEPAGE``, kept between saves.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from ckpt_engine.errors import CheckpointError, ConfigError

LINE = 64
PAGE = 4096
HUGE = 2 * 1024 * 1024


class HostBuffer:
    """Page-aligned private memory.

    Example:
        >>> buffer = HostBuffer(10_000)
        >>> buffer.nbytes, buffer.tensor.dtype, len(buffer.memory)
        (12288, torch.uint8, 12288)
        >>> buffer.close()

    Attributes:
        nbytes: Its size, rounded up to whole pages (huge pages where it is large).
        tensor: The memory as a flat uint8 tensor.
        memory: The same memory for reading and writing files.

    Raises:
        ConfigError: The size is negative.
        CheckpointError: The host has not that much memory.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes < 0:
            raise ConfigError(f"A buffer of {nbytes} bytes cannot be: give the size of the image.")
        unit = HUGE if nbytes >= HUGE else PAGE
        self.nbytes = max(unit, -(-nbytes // unit) * unit)
        # The tensor and the memoryview hold the mapping; nothing else does, so it goes when they go.
        mapping = _map(self.nbytes)
        self.memory = memoryview(mapping)
        self.tensor = torch.frombuffer(mapping, dtype=torch.uint8)
        self.tensor.zero_()

    def close(self) -> None:
        """Let the memory go; it is freed when the last tensor that views it is."""
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self.memory = memoryview(b"")


def _map(nbytes: int) -> mmap.mmap:
    try:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise CheckpointError(
            f"The host has no {nbytes} bytes left for an image ({error}): lower max_images or free host memory."
        ) from error
    if nbytes >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without transparent huge pages refuses: ordinary pages work too.
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


class ArenaPool:
    """At most ``limit`` buffers for whole images.

    Args:
        limit: How many may be in use at once.
        before_free: Called with a buffer's tensor before its memory is given back.

    Example:
        >>> pool = ArenaPool(limit=1)
        >>> arena = pool.acquire(5000, timeout=0)
        >>> pool.acquire(5000, timeout=0) is None
        True
        >>> pool.release(arena)
        >>> pool.acquire(5000, timeout=0) is arena
        True

    Attributes:
        allocated_bytes: Host memory held now.
        peak_bytes: The most it ever was.

    Raises:
        ConfigError: ``limit`` is below 1.
    """

    def __init__(self, limit: int = 2, *, before_free: Callable[[Tensor], None] | None = None) -> None:
        if limit < 1:
            raise ConfigError(f"A pool of {limit} images can never give one: set max_images to 1 or more.")
        self._limit = limit
        self._before_free = before_free
        self._closed = False
        self._coming = 0
        self._changed = threading.Condition()
        self._free: list[HostBuffer] = []
        self._used: list[HostBuffer] = []
        self.allocated_bytes = 0
        self.peak_bytes = 0

    def acquire(self, nbytes: int, timeout: float | None) -> HostBuffer | None:
        """A buffer of at least ``nbytes``; None when all are in use after ``timeout`` seconds (None: for ever)."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while len(self._used) + self._coming >= self._limit:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._changed.wait(left)
            buffer = self._fitting(nbytes)
            if buffer is not None:
                self._used.append(buffer)
                return buffer
            self._make_room()
            self._coming += 1
        return self._allocate(nbytes)

    def release(self, buffer: HostBuffer) -> None:
        """Give a buffer back for the next image; giving it back twice changes nothing."""
        with self._changed:
            if any(one is buffer for one in self._used):
                self._used = [one for one in self._used if one is not buffer]
                if self._closed:
                    self._forget(buffer)
                else:
                    self._free.append(buffer)
                self._changed.notify_all()

    def reserve(self, nbytes: int) -> None:
        """Allocate and touch every buffer that is not there yet, so that no save has to wait for it."""
        taken = [self.acquire(nbytes, timeout=0.0) for _ in range(self._limit)]
        for buffer in taken:
            if buffer is not None:
                self.release(buffer)

    def close(self) -> None:
        """Free the buffers that nobody uses now, and the others as they are released."""
        with self._changed:
            self._closed = True
            for buffer in self._free:
                self._forget(buffer)
            self._free.clear()

    def _fitting(self, nbytes: int) -> HostBuffer | None:
        fitting = [buffer for buffer in self._free if buffer.nbytes >= nbytes]
        if not fitting:
            return None
        best = min(fitting, key=lambda buffer: buffer.nbytes)
        self._free = [buffer for buffer in self._free if buffer is not best]
        return best

    def _make_room(self) -> None:
        # Too small a buffer is of no more use once images have grown: free it before the larger one is made.
        while self._free and len(self._free) + len(self._used) + self._coming >= self._limit:
            self._forget(self._free.pop(0))

    def _allocate(self, nbytes: int) -> HostBuffer:
        # Outside the lock: touching a large buffer takes seconds, in which others must be able to give theirs back.
        buffer = None
        try:
            buffer = HostBuffer(nbytes)
            return buffer
        finally:
            with self._changed:
                self._coming -= 1
                if buffer is not None:
                    self._used.append(buffer)
                    self.allocated_bytes += buffer.nbytes
                    self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
                self._changed.notify_all()

    def _forget(self, buffer: HostBuffer) -> None:
        self.allocated_bytes -= buffer.nbytes
        if self._before_free is not None:
            self._before_free(buffer.tensor)
        buffer.close()


class StagingPool:
    """Small host buffers for gradients on their way to replay, kept by size and used again.

    Example:
        >>> pool = StagingPool()
        >>> first = pool.take(100)
        >>> pool.outstanding >= 100
        True
        >>> pool.give(first)
        >>> pool.take(100).data_ptr() == first.data_ptr(), pool.outstanding
        (True, 128)

    Attributes:
        allocated_bytes: Host memory held now, in use or free.
        outstanding: Bytes in use.
        peak_bytes: The most that was ever held.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._out: dict[int, Tensor] = {}
        self.allocated_bytes = 0
        self.outstanding = 0
        self.peak_bytes = 0

    def take(self, nbytes: int) -> Tensor:
        """A uint8 buffer of at least ``nbytes``, its content undefined."""
        size = _size_class(nbytes)
        with self._lock:
            free = self._free[size]
            buffer = free.pop() if free else self._new(size)
            self._out[buffer.data_ptr()] = buffer
            self.outstanding += size
            return buffer

    def give(self, buffer: Tensor) -> None:
        """Give a buffer back; a view from its start stands for it.

        Raises:
            ConfigError: It is not out: twice given back, two users would write to it at once.
        """
        with self._lock:
            whole = self._out.pop(buffer.data_ptr(), None)
            if whole is None:
                raise ConfigError("A staging buffer was given back that is not out: give each back once.")
            self.outstanding -= whole.numel()
            self._free[whole.numel()].append(whole)

    def _new(self, size: int) -> Tensor:
        buffer = torch.empty(size, dtype=torch.uint8)
        self.allocated_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        return buffer


def _size_class(nbytes: int) -> int:
    """Cache lines for small sizes, an eighth of the magnitude for larger ones: few classes, little waste."""
    step = max(LINE, 1 << max(0, nbytes.bit_length() - 4))
    return max(LINE, -(-nbytes // step) * step)
