from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.capture.host_link import HostLink
from ckpt_engine.capture.link import PIECE_BYTES, Copy, link_for, pieces
from ckpt_engine.errors import SaveTimeoutError


def test_tensors_of_any_form_arrive() -> None:
    link = HostLink()
    sources = [
        torch.randn(1000, 7),
        torch.randn(64, 32).t(),
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.randn(8).to(torch.bfloat16),
        torch.randn(4, dtype=torch.complex64),
        torch.arange(10) > 4,
        torch.randn(2 * PIECE_BYTES // 4 + 5),
    ]
    copies = [Copy(torch.empty_strided(s.size(), s.stride(), dtype=s.dtype), s) for s in sources]
    link.barrier([link.submit(copies)], 30)
    assert all(torch.equal(copy.dst, copy.src) for copy in copies)
    assert link.bytes_copied == sum(copy.nbytes for copy in copies)
    link.close()


@given(st.integers(0, 5000), st.integers(1, 4096))
def test_pieces_cover_a_copy_once(numel: int, piece_bytes: int) -> None:
    copy = Copy(torch.empty(numel), torch.arange(numel, dtype=torch.float32))
    for piece in pieces(copy, piece_bytes):
        assert piece.nbytes <= max(4, piece_bytes)
        piece.dst.copy_(piece.src)
    assert torch.equal(copy.dst, copy.src)


def test_an_urgent_job_overtakes_what_waits() -> None:
    order: list[str] = []
    gate, reached = threading.Event(), threading.Event()

    def hold(nbytes: int) -> None:
        reached.set()
        assert gate.wait(30)

    link = HostLink(throttle=hold)
    one = torch.zeros(1)
    first = link.submit([Copy(torch.empty(1), one)], on_done=lambda: order.append("first"))
    assert reached.wait(30)
    late = link.submit([Copy(torch.empty(1), one)], on_done=lambda: order.append("state"))
    urgent = link.submit([Copy(torch.empty(1), one)], urgent=True, on_done=lambda: order.append("gradient"))
    gate.set()
    link.barrier([first, late, urgent], 30)
    assert order == ["first", "gradient", "state"]
    link.close()


def test_an_urgent_job_gets_between_the_pieces_of_a_large_one() -> None:
    sizes: list[int] = []
    gate, reached = threading.Event(), threading.Event()

    def hold(nbytes: int) -> None:
        sizes.append(nbytes)
        reached.set()
        assert gate.wait(30)

    link = HostLink(throttle=hold)
    large = torch.zeros(4 * PIECE_BYTES, dtype=torch.uint8)
    tickets = [link.submit([Copy(torch.empty_like(large), large)])]
    assert reached.wait(30)
    tickets.append(link.submit([Copy(torch.empty(3), torch.zeros(3))], urgent=True))
    gate.set()
    link.barrier(tickets, 30)
    assert sizes == [PIECE_BYTES, 12, PIECE_BYTES, PIECE_BYTES, PIECE_BYTES]
    link.close()


def test_a_failing_copy_is_reported_by_its_ticket_only() -> None:
    link, called = HostLink(), list[int]()
    bad = link.submit([Copy(torch.empty(2), torch.zeros(3))], on_done=lambda: called.append(1))
    good = link.submit([Copy(torch.empty(3), torch.zeros(3))])
    with pytest.raises(RuntimeError, match="size"):
        bad.wait(30)
    good.wait(30)
    with pytest.raises(RuntimeError, match="size"):
        link.barrier([good, bad], 30)
    assert called == []
    assert link.bytes_copied == 12
    link.close()


def test_a_failing_callback_is_reported_too() -> None:
    link = HostLink()

    def fail() -> None:
        raise ValueError("observer")

    ticket = link.submit([Copy(torch.empty(1), torch.zeros(1))], on_done=fail)
    with pytest.raises(ValueError, match="observer"):
        ticket.wait(30)
    link.close()


def test_waits_are_bounded_and_name_the_rank() -> None:
    gate = threading.Event()
    link = HostLink(throttle=lambda _: gate.wait(30) and None)
    ticket = link.submit([Copy(torch.empty(1), torch.zeros(1))])
    with pytest.raises(SaveTimeoutError, match="rank 0"):
        ticket.wait(0.02)
    with pytest.raises(SaveTimeoutError):
        link.drain(0.02)
    gate.set()
    link.drain(30)
    link.close()


def test_an_empty_job_is_done_at_once() -> None:
    link = HostLink()
    done: list[int] = []
    assert link.submit([], on_done=lambda: done.append(1)).done()
    assert done == [1]
    link.close()


def test_close_finishes_what_is_queued_and_refuses_more() -> None:
    link = HostLink()
    target = torch.zeros(5)
    link.submit([Copy(target, torch.ones(5))])
    link.close()
    assert target.tolist() == [1.0] * 5
    with pytest.raises(SaveTimeoutError, match="closed"):
        link.submit([Copy(target, torch.ones(5))])


def test_bandwidth_is_measured_on_large_copies_only() -> None:
    clock = iter(range(1000))
    link = HostLink(clock=lambda: float(next(clock)))
    link.submit([Copy(torch.empty(8), torch.zeros(8))]).wait(30)
    assert link.bandwidth is None
    large = torch.zeros(PIECE_BYTES, dtype=torch.uint8)
    link.submit([Copy(torch.empty_like(large), large)]).wait(30)
    assert link.bandwidth == PIECE_BYTES
    link.close()


def test_host_tensors_get_the_host_link() -> None:
    link = link_for(torch.device("cpu"))
    assert isinstance(link, HostLink)
    link.close()
