"""The link for tensors in host memory: one background thread that copies outside the interpreter lock."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ckpt_engine.capture.link import Copy, Rate, Ticket, pieces
from ckpt_engine.errors import SaveTimeoutError


class HostTicket:
    """One job of a :class:`HostLink`."""

    __slots__ = ("_link", "error", "finished", "left", "on_done", "waiter")

    def __init__(self, link: HostLink, left: int, on_done: Callable[[], None] | None) -> None:
        self._link = link
        self.left = left
        self.on_done = on_done
        self.error: BaseException | None = None
        self.finished = left == 0
        # Made only when somebody waits, so that a job costs no more than this object.
        self.waiter: threading.Event | None = None

    def done(self) -> bool:
        """Whether every copy of the job has been made, or one has failed."""
        return self.finished

    def wait(self, timeout: float) -> None:
        """Wait for the job; raises what a copy raised, or SaveTimeoutError."""
        self._link.wait_for([self], timeout)


class HostLink:
    """Copies on one daemon thread.

    Args:
        throttle: Called with a size in bytes before each piece is copied; the emulated link waits in it.
        clock: Seconds, monotonic.

    Example:
        >>> import torch
        >>> link, target = HostLink(), torch.empty(3)
        >>> ticket = link.submit([Copy(target, torch.ones(3))])
        >>> _ = link.barrier([ticket], timeout=10)
        >>> target
        tensor([1., 1., 1.])
        >>> link.close()
    """

    def __init__(
        self,
        *,
        throttle: Callable[[int], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.bytes_copied = 0
        self._throttle = throttle
        self._clock = clock
        self._rate = Rate()
        self._urgent: deque[tuple[HostTicket, Copy]] = deque()
        self._normal: deque[tuple[HostTicket, Copy]] = deque()
        self._changed = threading.Condition()
        self._busy = False
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second, as measured by recent copies."""
        return self._rate.value

    def submit(
        self, copies: Sequence[Copy], *, urgent: bool = False, on_done: Callable[[], None] | None = None
    ) -> Ticket:
        """Queue copies; urgent jobs go before all that is not."""
        parts = [piece for copy in copies for piece in pieces(copy)]
        ticket = HostTicket(self, len(parts), on_done)
        if not parts:
            if on_done is not None:
                on_done()
            return ticket
        with self._changed:
            if self._closed:
                raise SaveTimeoutError("The link is closed: create a new engine to save again.")
            (self._urgent if urgent else self._normal).extend((ticket, part) for part in parts)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ckpt-link", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return ticket

    def barrier(self, tickets: Iterable[Ticket], timeout: float) -> float:
        """Wait for ``tickets``; returns the seconds that took."""
        waiting = [ticket for ticket in tickets if isinstance(ticket, HostTicket)]
        if all(ticket.finished and ticket.error is None for ticket in waiting):
            return 0.0
        start = self._clock()
        self.wait_for(waiting, timeout)
        return self._clock() - start

    def wait_for(self, tickets: Sequence[HostTicket], timeout: float) -> None:
        """Wait until all ``tickets`` are done and raise the first error among them."""
        deadline = time.monotonic() + timeout
        # The last is done last as a rule: waiting for it first makes one wake-up of thousands.
        for ticket in reversed(tickets):
            if not self._waited(ticket, deadline):
                raise _late(timeout)
        for ticket in tickets:
            if ticket.error is not None:
                raise ticket.error

    def _waited(self, ticket: HostTicket, deadline: float) -> bool:
        with self._changed:
            if ticket.finished:
                return True
            waiter = ticket.waiter = ticket.waiter or threading.Event()
        return waiter.wait(max(0.0, deadline - time.monotonic()))

    def drain(self, timeout: float) -> None:
        """Wait until nothing is queued or being copied."""
        with self._changed:
            if not self._changed.wait_for(lambda: not (self._urgent or self._normal or self._busy), timeout):
                raise _late(timeout)

    def pin(self, buffer: Tensor) -> None:
        """Nothing to prepare: both sides are ordinary memory."""

    def unpin(self, buffer: Tensor) -> None:
        """Nothing was prepared."""

    def close(self) -> None:
        """Finish what is queued and stop the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(60)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._urgent or self._normal or self._closed)
                if not (self._urgent or self._normal):
                    return
                ticket, copy = (self._urgent or self._normal).popleft()
                self._busy = True
            error = self._copy(copy)
            self._finish(ticket, copy, error)
            del ticket, copy

    def _copy(self, copy: Copy) -> BaseException | None:
        try:
            copy.check()
            start = self._clock()
            if self._throttle is not None:
                self._throttle(copy.nbytes)
            with torch.no_grad():
                copy.dst.copy_(copy.src)
            self._rate.add(copy.nbytes, self._clock() - start)
        except BaseException as error:
            return error
        return None

    def _finish(self, ticket: HostTicket, copy: Copy, error: BaseException | None) -> None:
        with self._changed:
            self.bytes_copied += copy.nbytes if error is None else 0
            ticket.error = ticket.error or error
            ticket.left -= 1
            last = ticket.left == 0
        if last and ticket.error is None and ticket.on_done is not None:
            try:
                ticket.on_done()
            except BaseException as failure:
                ticket.error = ticket.error or failure
        with self._changed:
            self._busy = False
            if last:
                ticket.finished, ticket.on_done = True, None
                if ticket.waiter is not None:
                    ticket.waiter.set()
            if not (self._urgent or self._normal):
                self._changed.notify_all()


def _late(timeout: float) -> SaveTimeoutError:
    rank = os.environ.get("RANK", "0")
    return SaveTimeoutError(
        f"Copies to the host were not finished after {timeout:g} s on rank {rank}: the machine is stalled or out of "
        "memory; raise save_timeout_s if it is only slow."
    )
