"""The link for CUDA devices: a stream of its own, pinned host memory, and no host synchronisation inside a step.

Copies are ordered behind what the caller has put on its stream when they are submitted, and the caller's next update is
ordered behind them by events on the device. A feeder thread keeps only a few pieces of state on the stream, so that
gradients overtake; a barrier puts the rest of its jobs there itself before the caller's stream waits for them.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ckpt_engine.capture.link import Copy, Rate, Ticket, pieces
from ckpt_engine.errors import SaveTimeoutError

AHEAD = 4
"""Pieces of state on the stream at once: enough to keep the wire busy, few enough to let gradients pass."""
_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every CUDA context of the process."""


def _event(*, timing: bool = False) -> Any:
    return torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class CudaTicket:
    """One job of a :class:`CudaLink`: its copies, and the events around them."""

    def __init__(self, link: CudaLink, copies: Sequence[Copy], on_done: Callable[[], None] | None) -> None:
        self.pending = deque(piece for copy in copies for piece in pieces(copy))
        self.nbytes = sum(copy.nbytes for copy in copies)
        self.on_done = on_done
        self.error: BaseException | None = None
        self.ready = _event()
        self.begin = _event(timing=True)
        self.end = _event(timing=True)
        self.started = False
        self.enqueued = False
        self.finished = threading.Event()
        # Sources must outlive their copies, whatever the caller lets go of.
        self.sources = [copy.src for copy in copies]
        self._link = link

    def done(self) -> bool:
        """Whether every copy of the job has been made, or one has failed."""
        return self.finished.is_set()

    def wait(self, timeout: float) -> None:
        """Wait on the host for the job; raises what a copy raised, or SaveTimeoutError."""
        if not self.finished.wait(timeout):
            rank = os.environ.get("RANK", "0")
            raise SaveTimeoutError(
                f"Copies from {self._link.device} were not finished after {timeout:g} s on rank {rank}: the device "
                "may hang; raise save_timeout_s if it is only slow."
            )
        if self.error is not None:
            raise self.error


class CudaLink:
    """Copies device tensors to the host on a stream of its own.

    Args:
        device: The CUDA device of the sources.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes_copied = 0
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._rate = Rate()
        self._urgent: deque[CudaTicket] = deque()
        self._normal: deque[CudaTicket] = deque()
        self._in_flight: deque[Any] = deque()
        self._finishing: deque[CudaTicket] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._pinned: dict[int, int] = {}
        self._warned = False
        self._threads = [
            threading.Thread(target=self._feed, name="ckpt-cuda-feed", daemon=True),
            threading.Thread(target=self._finish, name="ckpt-cuda-finish", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second, as measured by recent jobs on the device."""
        return self._rate.value

    def submit(
        self, copies: Sequence[Copy], *, urgent: bool = False, on_done: Callable[[], None] | None = None
    ) -> Ticket:
        """Queue copies of the sources as they are at this point of the caller's current stream."""
        ticket = CudaTicket(self, copies, on_done)
        ticket.ready.record(torch.cuda.current_stream(self.device))
        with self._changed:
            if self._closed:
                raise SaveTimeoutError("The link is closed: create a new engine to save again.")
            (self._urgent if urgent else self._normal).append(ticket)
            self._changed.notify_all()
        return ticket

    def barrier(self, tickets: Iterable[Ticket], timeout: float) -> float:
        """Make the caller's stream wait for ``tickets`` on the device; the host does not wait."""
        waiting = [ticket for ticket in tickets if isinstance(ticket, CudaTicket)]
        with self._changed:
            for ticket in waiting:
                # The feeder may not have come to them yet, and an event that is not recorded holds nobody up.
                while not ticket.enqueued:
                    self._enqueue_one(ticket)
            self._changed.notify_all()
        stream = torch.cuda.current_stream(self.device)
        for ticket in waiting:
            if ticket.error is not None:
                raise ticket.error
            stream.wait_event(ticket.end)
        return 0.0

    def drain(self, timeout: float) -> None:
        """Wait on the host until nothing is queued."""
        with self._changed:
            idle = self._changed.wait_for(lambda: not (self._urgent or self._normal or self._finishing), timeout)
        if not idle:
            raise SaveTimeoutError(f"Copies from {self.device} were not finished after {timeout:g} s.")

    def unpin(self, buffer: Tensor) -> None:
        """Take the registration back before the memory is freed."""
        if buffer.data_ptr() in self._pinned:
            self._unpin(buffer.data_ptr())

    def pin(self, buffer: Tensor) -> None:
        """Register host memory with the driver, once per buffer; without it copies are slow but right."""
        pointer, nbytes = buffer.data_ptr(), buffer.numel() * buffer.element_size()
        if not nbytes or self._pinned.get(pointer) == nbytes:
            return
        if pointer in self._pinned:
            self._unpin(pointer)
        result = int(_runtime().cudaHostRegister(pointer, nbytes, _PORTABLE))
        if result == 0:
            self._pinned[pointer] = nbytes
        elif not self._warned:
            self._warned = True
            warnings.warn(
                f"Host memory could not be pinned (CUDA error {result}): copies will be slow. Raise the limit on "
                "locked memory (ulimit -l).",
                stacklevel=2,
            )

    def close(self) -> None:
        """Finish what is queued, stop the threads and give pinned memory back."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(60)
        for pointer in list(self._pinned):
            self._unpin(pointer)

    def _unpin(self, pointer: int) -> None:
        _runtime().cudaHostUnregister(pointer)
        del self._pinned[pointer]

    # -- the feeder ------------------------------------------------------------------------------------------------

    def _feed(self) -> None:
        with torch.cuda.device(self.device):
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._urgent or self._normal or self._closed)
                    if not (self._urgent or self._normal):
                        return
                    oldest = self._in_flight.popleft() if len(self._in_flight) >= AHEAD else None
                    if oldest is None:
                        self._enqueue_one((self._urgent or self._normal)[0])
                        continue
                # Outside the lock: submitting and barriers go on while the wire is full.
                oldest.synchronize()

    def _enqueue_one(self, ticket: CudaTicket) -> None:
        """Put the next piece of a job on the stream; the lock is held."""
        try:
            with torch.cuda.stream(self._stream), torch.no_grad():
                if not ticket.started:
                    ticket.started = True
                    self._stream.wait_event(ticket.ready)
                    ticket.begin.record(self._stream)
                if ticket.pending:
                    self._copy(ticket.pending.popleft())
        except BaseException as error:
            ticket.error = error
            ticket.pending.clear()
        if not ticket.pending:
            self._close_job(ticket)

    def _copy(self, piece: Copy) -> None:
        piece.dst.copy_(piece.src, non_blocking=True)
        # The caching allocator must not hand the source's memory out again before this stream has read it.
        piece.src.record_stream(self._stream)
        event = _event()
        event.record(self._stream)
        self._in_flight.append(event)

    def _close_job(self, ticket: CudaTicket) -> None:
        try:
            ticket.end.record(self._stream)
        except BaseException as error:
            ticket.error = ticket.error or error
        ticket.enqueued = True
        for queue in (self._urgent, self._normal):
            if ticket in queue:
                queue.remove(ticket)
        self._finishing.append(ticket)
        self._changed.notify_all()

    # -- the end of a job ------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._finishing or self._done())
                if not self._finishing:
                    return
                ticket = self._finishing[0]
            self._settle(ticket)
            with self._changed:
                self._finishing.popleft()
                self._changed.notify_all()

    def _done(self) -> bool:
        return self._closed and not (self._urgent or self._normal)

    def _settle(self, ticket: CudaTicket) -> None:
        try:
            ticket.end.synchronize()
            if ticket.error is None:
                self._rate.add(ticket.nbytes, ticket.begin.elapsed_time(ticket.end) / 1e3)
                self.bytes_copied += ticket.nbytes
                if ticket.on_done is not None:
                    ticket.on_done()
        except BaseException as error:
            ticket.error = ticket.error or error
        finally:
            ticket.sources = []
            ticket.finished.set()
