"""Links copy tensors to the host while training runs. One interface; host, emulated and CUDA implementations.

A job is a batch of copies with one ticket. Urgent jobs (gradients, which live only within a step) overtake the others
(state), also in the middle: large copies are cut into pieces of 4 MiB (GoCkpt, section 4).
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ckpt_engine.errors import CheckpointError

PIECE_BYTES = 4 * 1024 * 1024
_MEASURABLE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy ``src`` into ``dst``: equal shapes and dtypes, any strides; ``dst`` on the host."""

    dst: Tensor
    src: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes to move."""
        return self.src.numel() * self.src.element_size()

    def check(self) -> None:
        """Refuse what ``Tensor.copy_`` would broadcast, and pieces would copy in part.

        Types are not looked at: a parameter whose data was swapped for another type in the middle of a window is
        found by the guard, which drops the window in good order.

        Raises:
            CheckpointError: The two differ in size.
        """
        if self.dst.shape != self.src.shape:
            raise CheckpointError(
                f"A copy needs tensors of equal size, not {tuple(self.src.shape)} into {tuple(self.dst.shape)}: the "
                "tensor was replaced while it was captured."
            )


class Ticket(Protocol):
    """The future of one job."""

    def done(self) -> bool:
        """Whether every copy of the job has been made, or one has failed."""

    def wait(self, timeout: float) -> None:
        """Wait for the job.

        Raises:
            SaveTimeoutError: It was not done after ``timeout`` seconds.
            Exception: What a copy raised.
        """


class DeviceLink(Protocol):
    """Copies tensors of one kind of device into host memory."""

    bytes_copied: int

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second, as measured by recent copies; None before the first large one."""

    def submit(
        self, copies: Sequence[Copy], *, urgent: bool = False, on_done: Callable[[], None] | None = None
    ) -> Ticket:
        """Queue copies of the tensors as they are now; sources must stay unchanged until a barrier has passed.

        ``on_done`` runs on a thread of the link, once, when all copies are made; not when one of them failed.
        """

    def barrier(self, tickets: Iterable[Ticket], timeout: float) -> float:
        """Order what the caller does next behind the copies of ``tickets``; returns seconds the caller waited."""

    def drain(self, timeout: float) -> None:
        """Wait until nothing is queued."""

    def pin(self, buffer: Tensor) -> None:
        """Prepare host memory for fast copies; once per buffer."""

    def unpin(self, buffer: Tensor) -> None:
        """Undo :meth:`pin` before host memory is freed."""

    def close(self) -> None:
        """Finish what is queued and stop."""


class Rate:
    """A running estimate of bandwidth: the median of the recent measurements.

    Example:
        >>> rate = Rate()
        >>> rate.value is None
        True
        >>> for nbytes, seconds in ((2**21, 1.0), (2**21, 2.0), (2**21, 4.0)):
        ...     rate.add(nbytes, seconds)
        >>> rate.value == 2**20
        True
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=33)
        self._lock = threading.Lock()

    def add(self, nbytes: int, seconds: float) -> None:
        """Note a copy; small ones say more about latency than about bandwidth and are left out."""
        if nbytes >= _MEASURABLE and seconds > 0:
            with self._lock:
                self._recent.append(nbytes / seconds)

    @property
    def value(self) -> float | None:
        """Bytes per second."""
        with self._lock:
            return statistics.median(self._recent) if self._recent else None


def pieces(copy: Copy, piece_bytes: int = PIECE_BYTES) -> list[Copy]:
    """Cut a large copy: flat where both sides are contiguous, else along their first axes.

    Example:
        >>> import torch
        >>> [p.nbytes for p in pieces(Copy(torch.empty(10), torch.empty(10)), piece_bytes=16)]
        [16, 16, 8]
    """
    if copy.nbytes <= piece_bytes or copy.src.numel() <= 1 or copy.dst.shape != copy.src.shape:
        return [copy]
    if not (copy.dst.is_contiguous() and copy.src.is_contiguous()):
        return [part for slab in _slabs(copy, piece_bytes) for part in pieces(slab, piece_bytes)]
    dst, src = copy.dst.view(-1), copy.src.view(-1)
    step = max(1, piece_bytes // src.element_size())
    return [Copy(dst[low : low + step], src[low : low + step]) for low in range(0, src.numel(), step)]


def _slabs(copy: Copy, piece_bytes: int) -> list[Copy]:
    """Cut along the first axis longer than 1, so that a contiguous side stays contiguous."""
    axis, length = next((axis, length) for axis, length in enumerate(copy.src.shape) if length > 1)
    rows = max(1, piece_bytes * length // copy.nbytes)
    return [
        Copy(copy.dst.narrow(axis, low, min(rows, length - low)), copy.src.narrow(axis, low, min(rows, length - low)))
        for low in range(0, length, rows)
    ]


def link_for(device: torch.device) -> DeviceLink:
    """The link that suits tensors on ``device``."""
    if device.type == "cuda":
        from ckpt_engine.capture.cuda_link import CudaLink

        return CudaLink(device)
    from ckpt_engine.capture.host_link import HostLink

    return HostLink()
