"""The link for CUDA devices: streams of its own, pinned host memory, and no host synchronisation inside a step.

Copies are ordered behind what the caller has put on its stream when they are submitted, and the caller's next update is
ordered behind them by events on the device. Gradients and state have a stream each: the host runs ahead of the device,
so gradients are often submitted while their backward pass has hardly begun, and on one stream the state behind them
would wait for it too. Gradients go to the device at once. A feeder thread keeps only a few pieces of state there, so
that gradients overtake; a barrier puts the rest of its jobs there itself before the caller's stream waits for them.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ckpt_engine.capture.cuda_driver import CudaDriver, Driver
from ckpt_engine.capture.link import Copy, Rate, Ticket, pieces
from ckpt_engine.errors import SaveTimeoutError

AHEAD = 4
"""Pieces of state on the stream at once: enough to keep the wire busy, few enough to let gradients pass."""
SMALL = 1024 * 1024
"""Smaller host memory is not worth a registration; it is reached through pinned memory of torch's allocator."""


class CudaTicket:
    """One job of a :class:`CudaLink`: its copies, and the events around them."""

    def __init__(self, link: CudaLink, lane: Lane, copies: Sequence[Copy], on_done: Callable[[], None] | None) -> None:
        self.lane = lane
        self.pending = deque(piece for copy in copies for piece in pieces(copy))
        self.nbytes = sum(copy.nbytes for copy in copies)
        self.on_done = on_done
        self.error: BaseException | None = None
        self.ready = link.driver.event(timing=False)
        self.begin = link.driver.event(timing=True)
        self.end = link.driver.event(timing=True)
        self.started = False
        self.enqueued = False
        self.finished = threading.Event()
        # Sources must outlive their copies, whatever the caller lets go of.
        self.sources = [copy.src for copy in copies]
        self.staged: list[Copy] = []
        self._link = link

    def done(self) -> bool:
        """Whether every copy of the job has been made, or one has failed."""
        return self.finished.is_set()

    def wait(self, timeout: float) -> None:
        """Wait on the host for the job; raises what a copy raised, or SaveTimeoutError."""
        if not self.finished.wait(timeout):
            raise self._link.late(timeout)
        if self.error is not None:
            raise self.error


class Lane:
    """A stream, and the jobs on it whose end has not been seen yet, in the order of the stream."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.finishing: deque[CudaTicket] = deque()


class CudaLink:
    """Copies device tensors to the host on streams of its own.

    Args:
        device: The CUDA device of the sources.
        driver: How to reach it; by default through ``torch.cuda``.
    """

    def __init__(self, device: torch.device, *, driver: Driver | None = None) -> None:
        self.device = device
        self.bytes_copied = 0
        self.driver: Driver = driver or CudaDriver(device)
        self._state = Lane(self.driver.stream(urgent=False))
        self._gradients = Lane(self.driver.stream(urgent=True))
        self._rate = Rate()
        self._waiting: deque[CudaTicket] = deque()
        self._in_flight: deque[Any] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._pinning = threading.Lock()
        self._pinned: dict[int, int] = {}
        self._refused: set[tuple[int, int]] = set()
        self._threads = [
            threading.Thread(target=self._feed, name="ckpt-cuda-feed", daemon=True),
            threading.Thread(target=self._finish, args=(self._state,), name="ckpt-cuda-state", daemon=True),
            threading.Thread(target=self._finish, args=(self._gradients,), name="ckpt-cuda-gradients", daemon=True),
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
        ticket = CudaTicket(self, self._gradients if urgent else self._state, copies, on_done)
        ticket.ready.record(self.driver.current_stream())
        with self._changed:
            if self._closed:
                raise SaveTimeoutError("The link is closed: create a new engine to save again.")
            if urgent:
                self._enqueue_all(ticket)
            else:
                self._waiting.append(ticket)
            self._changed.notify_all()
        return ticket

    def barrier(self, tickets: Iterable[Ticket], timeout: float) -> float:
        """Make the caller's stream wait for ``tickets`` on the device; the host does not wait."""
        waiting = [ticket for ticket in tickets if isinstance(ticket, CudaTicket)]
        with self._changed:
            for ticket in waiting:
                # The feeder may not have come to them yet, and an event that is not recorded holds nobody up.
                self._enqueue_all(ticket)
            self._changed.notify_all()
        stream = self.driver.current_stream()
        for ticket in waiting:
            stream.wait_event(ticket.end)
        for ticket in waiting:
            if ticket.error is not None:
                raise ticket.error
        return 0.0

    def drain(self, timeout: float) -> None:
        """Wait on the host until nothing is queued."""
        with self._changed:
            if not self._changed.wait_for(self._idle, timeout):
                raise self.late(timeout)

    def late(self, timeout: float) -> SaveTimeoutError:
        """The error of a wait that was too long."""
        rank = os.environ.get("RANK", "0")
        return SaveTimeoutError(
            f"Copies from {self.device} were not finished after {timeout:g} s on rank {rank}: the device may hang; "
            "raise save_timeout_s if it is only slow."
        )

    def pin(self, buffer: Tensor) -> None:
        """Register host memory with the driver, once per buffer; without it copies are slow but right."""
        pointer, nbytes = buffer.data_ptr(), buffer.numel() * buffer.element_size()
        with self._pinning:
            if nbytes < SMALL or self._pinned.get(pointer) == nbytes or (pointer, nbytes) in self._refused:
                return
            if pointer in self._pinned:
                self._unpin(pointer)
            error = self.driver.register(pointer, nbytes)
            if error == 0:
                self._pinned[pointer] = nbytes
                return
            first = not self._refused
            self._refused.add((pointer, nbytes))
        if first:
            warnings.warn(
                f"Host memory could not be pinned (CUDA error {error}): copies will be slow. Raise the limit on "
                "locked memory (ulimit -l).",
                stacklevel=2,
            )

    def unpin(self, buffer: Tensor) -> None:
        """Take the registration back before the memory is freed."""
        with self._pinning:
            self._refused.discard((buffer.data_ptr(), buffer.numel() * buffer.element_size()))
            if buffer.data_ptr() in self._pinned:
                self._unpin(buffer.data_ptr())

    def close(self) -> None:
        """Finish what is queued, stop the threads and give pinned memory back."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(60)
        if any(thread.is_alive() for thread in self._threads):
            return  # The device hangs: memory that it may still write to stays registered.
        with self._pinning:
            for pointer in list(self._pinned):
                self._unpin(pointer)

    def _unpin(self, pointer: int) -> None:
        self.driver.unregister(pointer)
        del self._pinned[pointer]

    def _idle(self) -> bool:
        return not (self._waiting or self._state.finishing or self._gradients.finishing)

    # -- onto the device; the lock is held -------------------------------------------------------------------------

    def _enqueue_all(self, ticket: CudaTicket) -> None:
        while not ticket.enqueued:
            self._enqueue_one(ticket)

    def _enqueue_one(self, ticket: CudaTicket) -> None:
        """Put the next piece of a job on its stream."""
        stream = ticket.lane.stream
        try:
            if not ticket.started:
                ticket.started = True
                stream.wait_event(ticket.ready)
                ticket.begin.record(stream)
            if ticket.pending:
                self._copy(ticket, ticket.pending.popleft())
        except BaseException as error:
            ticket.error = ticket.error or error
            ticket.pending.clear()
        if not ticket.pending:
            self._close_job(ticket)

    def _copy(self, ticket: CudaTicket, piece: Copy) -> None:
        piece.check()
        target = piece.dst
        if not self.driver.lands(piece.dst, piece.src) and (piece.nbytes < SMALL or not piece.dst.is_contiguous()):
            # A transfer into pageable memory would stop the host until it is over.
            target = self.driver.pinned_like(piece.src)
            ticket.staged.append(Copy(piece.dst, target))
        self.driver.copy(target, piece.src, ticket.lane.stream)
        if ticket.lane is self._state:
            event = self.driver.event(timing=False)
            event.record(ticket.lane.stream)
            self._in_flight.append(event)

    def _close_job(self, ticket: CudaTicket) -> None:
        try:
            ticket.end.record(ticket.lane.stream)
        except BaseException as error:
            ticket.error = ticket.error or error
        ticket.enqueued = True
        if ticket in self._waiting:
            self._waiting.remove(ticket)
        ticket.lane.finishing.append(ticket)
        self._changed.notify_all()

    # -- threads ---------------------------------------------------------------------------------------------------

    def _feed(self) -> None:
        with self.driver.on_device():
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting or self._closed)
                    if not self._waiting:
                        return
                    oldest = self._in_flight.popleft() if len(self._in_flight) >= AHEAD else None
                    if oldest is None:
                        self._enqueue_one(self._waiting[0])
                        continue
                # Outside the lock: submitting and barriers go on while the wire is full.
                # A device that has failed says so again at the end of each job, to whoever waits for it.
                with suppress(Exception):
                    oldest.synchronize()

    def _finish(self, lane: Lane) -> None:
        with self.driver.on_device():
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: lane.finishing or (self._closed and not self._waiting))
                    if not lane.finishing:
                        return
                    ticket = lane.finishing[0]
                self._settle(ticket)
                with self._changed:
                    lane.finishing.popleft()
                    self._changed.notify_all()
                del ticket

    def _settle(self, ticket: CudaTicket) -> None:
        try:
            ticket.end.synchronize()
            if ticket.error is None:
                for copy in ticket.staged:
                    copy.dst.copy_(copy.src)
                self._rate.add(ticket.nbytes, ticket.begin.elapsed_time(ticket.end) / 1e3)
                with self._changed:
                    self.bytes_copied += ticket.nbytes
                if ticket.on_done is not None:
                    ticket.on_done()
        except BaseException as error:
            ticket.error = ticket.error or error
        finally:
            ticket.sources, ticket.staged, ticket.on_done = [], [], None
            ticket.finished.set()
