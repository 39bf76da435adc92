"""The order in which the CUDA link puts work on streams, on a simulated device."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ckpt_engine.capture.cuda_link import AHEAD, SMALL, CudaLink
from ckpt_engine.capture.link import PIECE_BYTES, Copy
from ckpt_engine.errors import CheckpointError, SaveTimeoutError
from tests.unit.simulated_device import Device


@pytest.fixture
def device() -> Iterator[Device]:
    device = Device()
    yield device
    device.stop()


@pytest.fixture
def link(device: Device) -> Iterator[CudaLink]:
    link = CudaLink(torch.device("cuda", 0), driver=device)
    yield link
    device.release()
    link.close()


def pair(value: float, numel: int = 8) -> Copy:
    return Copy(torch.zeros(numel), torch.full((numel,), value))


def test_copies_read_what_the_callers_stream_had_written_by_then(device: Device, link: CudaLink) -> None:
    gate = device.hold()
    copy = pair(1.0)
    device.training.put(lambda: copy.src.fill_(5.0))
    ticket = link.submit([copy])
    gate.set()
    ticket.wait(30)
    assert copy.dst.tolist() == [5.0] * 8


def test_an_update_behind_a_barrier_does_not_reach_the_copy(device: Device, link: CudaLink) -> None:
    gate = device.hold()
    copies = [pair(float(index), PIECE_BYTES // 2) for index in range(2 * AHEAD)]
    tickets = [link.submit([copy], urgent=index % 2 == 1) for index, copy in enumerate(copies)]
    assert link.barrier(tickets, 30) == 0.0
    assert not any(ticket.done() for ticket in tickets)
    for copy in copies:
        device.training.put(lambda source=copy.src: source.fill_(-1.0))
    gate.set()
    device.settle()
    for index, (ticket, copy) in enumerate(zip(tickets, copies, strict=True)):
        ticket.wait(30)
        assert copy.src[0] == -1.0
        assert torch.all(copy.dst == float(index))


def test_state_that_is_ready_does_not_wait_for_gradients_that_are_not(device: Device, link: CudaLink) -> None:
    gate = device.hold()
    gradients = pair(2.0)
    urgent = link.submit([gradients], urgent=True)
    # State from a stream on which nothing is pending: on one stream with the gradients it would be stuck behind them.
    device.training = device.stream(urgent=False)
    state = pair(1.0, 4 * PIECE_BYTES)
    link.submit([state]).wait(30)
    assert torch.all(state.dst == 1.0)
    assert not urgent.done()
    gate.set()
    urgent.wait(30)
    assert gradients.dst.tolist() == [2.0] * 8


def test_gradients_overtake_state_that_waits(device: Device, link: CudaLink) -> None:
    order: list[str] = []
    gate = device.hold()
    pieces = 3 * AHEAD
    source = torch.ones(pieces * PIECE_BYTES, dtype=torch.uint8)
    state = Copy(torch.zeros_like(source), source)
    late = link.submit([state], on_done=lambda: order.append("state"))
    assert device.held_back.wait(30)
    urgent = link.submit([pair(1.0)], urgent=True, on_done=lambda: order.append("gradients"))
    gate.set()
    urgent.wait(30)
    late.wait(30)
    assert order == ["gradients", "state"]
    assert device.enqueued[: AHEAD + 1] == [PIECE_BYTES] * AHEAD + [32]


def test_tensors_of_any_form_arrive(device: Device, link: CudaLink) -> None:
    sources = [torch.randn(64, 32).t(), torch.tensor(3.5), torch.empty(0, 4), torch.randn(3, 5)[:, ::2]]
    sources.append(torch.randn(2000, 1500).t())
    targets = [torch.zeros(source.shape) for source in sources[:-1]] + [torch.zeros(2000, 1500).t()]
    link.submit([Copy(dst, src) for dst, src in zip(targets, sources, strict=True)]).wait(30)
    assert all(torch.equal(dst, src) for dst, src in zip(targets, sources, strict=True))
    assert link.bytes_copied == sum(source.numel() * 4 for source in sources)
    assert link.bandwidth == link.bytes_copied


def test_small_pageable_memory_is_reached_through_pinned_memory() -> None:
    device = Device(pinned=False)
    link = CudaLink(torch.device("cuda", 0), driver=device)
    copy = pair(3.0)
    gate = device.hold()
    ticket = link.submit([copy], urgent=True)
    assert link.barrier([ticket], 30) == 0.0
    gate.set()
    device.settle()
    ticket.wait(30)
    assert copy.dst.tolist() == [3.0] * 8
    link.close()
    device.stop()


def test_what_a_copy_raises_comes_out_of_ticket_and_barrier(device: Device, link: CudaLink) -> None:
    called: list[int] = []
    device.refuse = RuntimeError("out of memory")
    tickets = [link.submit([pair(1.0)], urgent=urgent, on_done=lambda: called.append(1)) for urgent in (False, True)]
    for ticket in tickets:
        with pytest.raises(RuntimeError, match="out of memory"):
            ticket.wait(30)
    with pytest.raises(RuntimeError, match="out of memory"):
        link.barrier(tickets, 30)
    device.refuse = None
    link.submit([pair(1.0)]).wait(30)
    assert called == []


def test_a_failed_barrier_still_orders_the_copies_that_work(device: Device, link: CudaLink) -> None:
    gate = device.hold()
    good = pair(4.0)
    tickets = [link.submit([Copy(torch.zeros(2), torch.zeros(3))]), link.submit([good])]
    with pytest.raises(CheckpointError, match="equal size"):
        link.barrier(tickets, 30)
    device.training.put(lambda: good.src.fill_(-1.0))
    gate.set()
    device.settle()
    tickets[1].wait(30)
    assert good.dst.tolist() == [4.0] * 8


def test_a_device_that_fails_fails_everything_queued_instead_of_hanging(device: Device, link: CudaLink) -> None:
    gate = device.hold()
    copies = [pair(1.0, PIECE_BYTES // 4) for _ in range(3 * AHEAD)]
    device.broken = RuntimeError("illegal memory access")
    tickets = [link.submit([copy]) for copy in copies]
    for ticket in tickets:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            ticket.wait(30)
    gate.set()


def test_a_failing_callback_is_reported_by_its_ticket(link: CudaLink) -> None:
    def fail() -> None:
        raise ValueError("observer")

    with pytest.raises(ValueError, match="observer"):
        link.submit([pair(1.0)], on_done=fail).wait(30)


def test_waits_are_bounded_and_name_the_rank(device: Device, link: CudaLink) -> None:
    gate = device.hold()
    ticket = link.submit([pair(1.0)])
    for wait in (ticket.wait, link.drain):
        with pytest.raises(SaveTimeoutError, match="rank 0"):
            wait(0.01)
    gate.set()
    link.drain(30)
    assert ticket.done()


def test_sources_live_until_they_are_copied_and_no_longer(device: Device, link: CudaLink) -> None:
    gate = device.hold()
    source: Tensor = torch.full((8,), 2.0)
    alive, target = weakref.ref(source), torch.zeros(8)
    ticket = link.submit([Copy(target, source)])
    del source
    gc.collect()
    assert alive() is not None
    gate.set()
    link.drain(30)
    device.settle()
    gc.collect()
    assert ticket.done()
    assert target.tolist() == [2.0] * 8
    assert alive() is None


def test_memory_is_pinned_once_and_given_back(device: Device, link: CudaLink) -> None:
    first, second = (torch.zeros(SMALL, dtype=torch.uint8) for _ in range(2))
    for buffer in (first, first, second, torch.zeros(SMALL - 1, dtype=torch.uint8)):
        link.pin(buffer)
    assert device.registered.keys() == {first.data_ptr(), second.data_ptr()}
    assert device.registrations == 2
    link.unpin(first)
    assert device.registered.keys() == {second.data_ptr()}
    link.close()
    assert device.registered == {}


def test_memory_that_cannot_be_pinned_is_tried_once_with_one_warning(device: Device, link: CudaLink) -> None:
    buffers = [torch.zeros(SMALL, dtype=torch.uint8) for _ in range(2)]
    device.register_error = 2
    with pytest.warns(UserWarning, match=r"CUDA error 2.*ulimit -l"):
        link.pin(buffers[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        link.pin(buffers[0])
        link.pin(buffers[1])
    assert device.registrations == 2


def test_close_finishes_what_is_queued_and_refuses_more(device: Device, link: CudaLink) -> None:
    gate = device.hold()
    copy = pair(1.0, 2 * AHEAD * PIECE_BYTES // 4)
    ticket = link.submit([copy])
    threading.Timer(0.01, gate.set).start()
    link.close()
    assert ticket.done()
    assert torch.all(copy.dst == 1.0)
    with pytest.raises(SaveTimeoutError, match="closed"):
        link.submit([copy])
