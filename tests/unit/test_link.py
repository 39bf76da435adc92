"""What holds for every link: the CUDA one runs on a simulated device, and on a real one where there is one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.capture.cuda_link import CudaLink
from ckpt_engine.capture.emulated_link import EmulatedLink
from ckpt_engine.capture.host_link import HostLink
from ckpt_engine.capture.link import PIECE_BYTES, Copy, DeviceLink, Rate, link_for, pieces
from ckpt_engine.errors import CheckpointError
from tests.unit.simulated_device import Device

LINKS: dict[str, tuple[Callable[[], DeviceLink], str]] = {
    "host": (HostLink, "cpu"),
    "emulated": (lambda: EmulatedLink(1e12), "cpu"),
    "simulated": (lambda: CudaLink(torch.device("cuda", 0), driver=Device()), "cpu"),
}
if torch.cuda.is_available():
    LINKS["cuda"] = (lambda: link_for(torch.device("cuda")), "cuda")


@pytest.fixture(params=LINKS)
def made(request: pytest.FixtureRequest) -> Iterator[tuple[DeviceLink, str]]:
    make, device = LINKS[request.param]
    link = make()
    yield link, device
    link.close()
    if isinstance(link, CudaLink) and isinstance(link.driver, Device):
        link.driver.stop()


def test_tensors_of_any_form_arrive(made: tuple[DeviceLink, str]) -> None:
    link, device = made
    sources = [
        torch.randn(1000, 7),
        torch.randn(64, 32).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(6, 9)[::2, 1::3],
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.arange(10) > 4,
        torch.randn(5, dtype=torch.complex64).conj(),
        torch.randn(2 * PIECE_BYTES // 4 + 5),
        torch.randn(3000, 1100).t(),
    ]
    copies = []
    for source in sources:
        packed = torch.zeros(source.shape, dtype=source.dtype)
        alike = torch.empty_strided(source.size(), source.stride(), dtype=source.dtype).zero_()
        copies += [Copy(target, source.to(device)) for target in (packed, alike)]
    ticket = link.submit(copies)
    link.barrier([ticket], 30)
    ticket.wait(30)
    assert all(torch.equal(copy.dst, copy.src.cpu()) for copy in copies)
    assert link.bytes_copied == sum(copy.nbytes for copy in copies)
    assert link.bandwidth is not None
    assert link.bandwidth > 0


def test_a_barrier_orders_thousands_of_jobs(made: tuple[DeviceLink, str]) -> None:
    link, device = made
    source = torch.arange(3000.0, device=device)
    target = torch.zeros(3000)
    tickets = [link.submit([Copy(target[i], source[i])], urgent=i % 3 == 0) for i in range(3000)]
    link.barrier(tickets, 60)
    for ticket in tickets:
        ticket.wait(60)
    assert torch.equal(target, source.cpu())


@pytest.mark.parametrize(
    "target",
    [torch.zeros(1), torch.zeros(3, 2), torch.zeros(0)],
    ids=["smaller", "larger", "empty"],
)
def test_sizes_that_differ_are_refused_by_the_ticket(made: tuple[DeviceLink, str], target: torch.Tensor) -> None:
    link, device = made
    before = target.clone()
    ticket = link.submit([Copy(target, torch.ones(2, device=device))])
    with pytest.raises(CheckpointError, match="equal size"):
        ticket.wait(30)
    assert torch.equal(target, before)


def test_a_large_copy_into_a_larger_tensor_is_refused_whole(made: tuple[DeviceLink, str]) -> None:
    link, device = made
    target = torch.zeros(3 * PIECE_BYTES // 4)
    ticket = link.submit([Copy(target, torch.ones(2 * PIECE_BYTES // 4, device=device))])
    with pytest.raises(CheckpointError, match="equal size"):
        ticket.wait(30)
    assert not target.any()


def test_callbacks_run_once_when_all_copies_are_made(made: tuple[DeviceLink, str]) -> None:
    link, device = made
    target = torch.zeros(3 * PIECE_BYTES // 4)
    seen: list[tuple[bool, bool]] = []
    caller = threading.current_thread()

    def done() -> None:
        seen.append((bool(torch.all(target == 1)), threading.current_thread() is caller))

    link.submit([Copy(target, torch.ones(target.shape, device=device))], on_done=done).wait(30)
    link.drain(30)
    assert seen == [(True, False)]


@given(st.lists(st.integers(1, 6), max_size=4), st.randoms(use_true_random=False), st.integers(1, 200))
def test_pieces_of_tensors_in_any_layout_cover_them_once(shape: list[int], random: object, piece_bytes: int) -> None:
    order = list(range(len(shape)))
    random.shuffle(order)  # type: ignore[attr-defined]
    inverse = [order.index(axis) for axis in range(len(order))]
    numel = torch.Size(shape).numel()
    source = torch.arange(1.0, numel + 1).view([shape[axis] for axis in order]).permute(inverse)
    target = torch.zeros(shape)
    for piece in pieces(Copy(target, source), piece_bytes):
        assert piece.nbytes <= max(4, piece_bytes)
        piece.dst.add_(piece.src)
    assert torch.equal(target, source)


def test_pieces_of_a_contiguous_side_stay_contiguous() -> None:
    cut = pieces(Copy(torch.zeros(1, 300, 50), torch.zeros(50, 300).t().unsqueeze(0)), 4096)
    assert len(cut) > 1
    assert all(piece.dst.is_contiguous() for piece in cut)


def test_the_rate_is_a_median_of_large_copies() -> None:
    rate = Rate()
    rate.add(1024, 1e-9)
    rate.add(2**21, 0.0)
    assert rate.value is None
    for seconds in (1.0, 1.0, 1.0, 50.0):
        rate.add(2**21, seconds)
    assert rate.value == 2**21
