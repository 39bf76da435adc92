"""A device with streams and events that behave as CUDA documents them, run by a thread over host tensors.

It stands in for hardware that a test machine may not have: what is tested is the order in which a link puts work on
streams. Sources stay host tensors, and a copy reads them only when its turn comes on its stream.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Ready = Callable[[], bool]


class Stream:
    """Work in order; each piece waits until its condition holds."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.work: deque[tuple[Ready, Callable[[], None]]] = deque()

    def put(self, action: Callable[[], None], ready: Ready = lambda: True) -> None:
        with self.device.changed:
            self.work.append((ready, action))
            self.device.changed.notify_all()

    def wait_event(self, event: Event) -> None:
        # As cudaStreamWaitEvent: an event that was never recorded holds nobody up.
        mark = event.mark
        if mark is not None:
            self.put(lambda: None, mark.is_set)


class Event:
    """The last point at which it was recorded."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.mark: threading.Event | None = None

    def record(self, stream: Stream) -> None:
        mark = self.mark = threading.Event()
        stream.put(mark.set)

    def synchronize(self) -> None:
        if self.device.broken is not None:
            raise self.device.broken
        if threading.current_thread().name == "ckpt-cuda-feed":
            self.device.held_back.set()
        assert self.mark is None or self.mark.wait(30)

    def elapsed_time(self, end: Event) -> float:
        assert self.mark is not None
        assert self.mark.is_set()
        assert end.mark is not None
        assert end.mark.is_set()
        return 1000.0


class Device:
    """A driver for a CUDA link; ``pinned`` decides which host tensors a transfer lands in directly."""

    def __init__(self, *, pinned: bool = True) -> None:
        self.changed = threading.Condition()
        self.streams: list[Stream] = []
        self.training = self.stream(urgent=False)
        self.broken: BaseException | None = None
        self.refuse: BaseException | None = None
        self.register_error = 0
        self.registered: dict[int, int] = {}
        self.registrations = 0
        self.enqueued: list[int] = []
        self.held_back = threading.Event()
        self._staging: set[int] = set()
        self._gates: list[threading.Event] = []
        self._pinned = pinned
        self._running = True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stream(self, *, urgent: bool) -> Stream:
        stream = Stream(self)
        self.streams.append(stream)
        return stream

    def current_stream(self) -> Stream:
        return self.training

    def event(self, *, timing: bool) -> Event:
        return Event(self)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        yield

    def copy(self, dst: Tensor, src: Tensor, stream: Any) -> None:
        if self.refuse is not None:
            raise self.refuse

        over = threading.Event()

        def transfer() -> None:
            dst.copy_(src)
            over.set()

        stream.put(transfer)
        self.enqueued.append(src.numel() * src.element_size())
        if not self.lands(dst, src):
            # As cudaMemcpyAsync into pageable memory: the host goes on when the transfer is over.
            assert over.wait(5), "the host was stopped"

    def lands(self, dst: Tensor, src: Tensor) -> bool:
        return dst.is_contiguous() and (self._pinned or dst.data_ptr() in self._staging)

    def pinned_like(self, src: Tensor) -> Tensor:
        buffer = torch.empty(src.shape, dtype=src.dtype)
        self._staging.add(buffer.data_ptr())
        return buffer

    def register(self, pointer: int, nbytes: int) -> int:
        self.registrations += 1
        if not self.register_error:
            assert pointer not in self.registered
            self.registered[pointer] = nbytes
        return self.register_error

    def unregister(self, pointer: int) -> None:
        del self.registered[pointer]

    # -- for tests -------------------------------------------------------------------------------------------------

    def hold(self) -> threading.Event:
        """Put a long kernel on the training stream; it ends when the event is set."""
        gate = threading.Event()
        self._gates.append(gate)
        self.training.put(lambda: None, gate.is_set)
        return gate

    def release(self) -> None:
        """End every kernel that is held, so that a test that failed does not leave its link waiting."""
        for gate in self._gates:
            gate.set()

    def settle(self) -> None:
        """Wait until the training stream has run dry."""
        done = threading.Event()
        self.training.put(done.set)
        assert done.wait(30)

    def stop(self) -> None:
        self._running = False
        self._thread.join(30)

    def _run(self) -> None:
        while self._running:
            with self.changed:
                ready = [stream.work.popleft()[1] for stream in self.streams if stream.work and stream.work[0][0]()]
                if not ready:
                    # Gates are opened by tests without a notice.
                    self.changed.wait(0.002)
            for action in ready:
                action()
