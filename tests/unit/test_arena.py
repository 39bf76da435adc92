"""Host memory is allocated once and used again; nobody waits for ever and nothing is given to two users."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.errors import CheckpointError, ConfigError
from ckpt_engine.image import arena
from ckpt_engine.image.arena import HUGE, PAGE, ArenaPool, HostBuffer, StagingPool


def _mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return any(low <= address < high for low, high in spans)


@pytest.mark.parametrize("size", [0, 1, PAGE, PAGE + 1, HUGE - 1, HUGE, HUGE + 1])
def test_a_buffer_is_whole_zeroed_aligned_pages(size: int) -> None:
    buffer = HostBuffer(size)
    assert buffer.nbytes >= max(size, 1)
    assert buffer.nbytes % (HUGE if size >= HUGE else PAGE) == 0
    assert buffer.tensor.data_ptr() % PAGE == 0
    assert buffer.tensor.numel() == len(buffer.memory) == buffer.nbytes
    assert int(buffer.tensor.max()) == 0
    buffer.close()


def test_tensor_and_memory_are_the_same_bytes() -> None:
    buffer = HostBuffer(100)
    buffer.tensor[7] = 9
    buffer.memory[8] = 10
    assert buffer.memory[7] == 9
    assert int(buffer.tensor[8]) == 10
    buffer.close()


def test_closing_frees_the_memory_once_no_tensor_views_it() -> None:
    buffer = HostBuffer(3 * HUGE)
    view, address = buffer.tensor[5:], buffer.tensor.data_ptr()
    view[0] = 3
    buffer.close()
    buffer.close()
    assert int(view[0]) == 3
    assert _mapped(address)
    del view
    gc.collect()
    assert not _mapped(address)


def test_impossible_sizes_are_refused_with_advice() -> None:
    with pytest.raises(ConfigError, match="-1 bytes"):
        HostBuffer(-1)
    with pytest.raises(CheckpointError, match="lower max_images"):
        HostBuffer(1 << 60)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_pool_that_can_never_give_is_refused(limit: int) -> None:
    with pytest.raises(ConfigError, match="max_images"):
        ArenaPool(limit=limit)


def test_a_released_buffer_is_used_again() -> None:
    pool = ArenaPool(limit=2)
    first = pool.acquire(5000, 0)
    assert first is not None
    pool.release(first)
    assert pool.acquire(4000, 0) is first
    assert pool.allocated_bytes == pool.peak_bytes == first.nbytes


def test_the_smallest_buffer_that_fits_is_taken() -> None:
    pool = ArenaPool(limit=2)
    large, small = pool.acquire(10 * PAGE, 0), pool.acquire(PAGE, 0)
    assert large is not None
    assert small is not None
    pool.release(large)
    pool.release(small)
    assert pool.acquire(100, 0) is small


def test_no_more_than_the_limit_are_out_and_the_wait_ends() -> None:
    pool = ArenaPool(limit=1)
    assert pool.acquire(1, 0) is not None
    assert pool.acquire(1, 0.01) is None


def test_a_waiting_user_gets_the_buffer_that_is_released() -> None:
    pool = ArenaPool(limit=1)
    first = pool.acquire(1, 0)
    assert first is not None
    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(pool.acquire, 1, 60)
        pool.release(first)
        assert waiting.result(timeout=60) is first


def test_a_small_free_buffer_makes_room_for_a_larger_one() -> None:
    pool = ArenaPool(limit=1)
    small = pool.acquire(PAGE, 0)
    assert small is not None
    pool.release(small)
    large = pool.acquire(4 * PAGE, 0)
    assert large is not None
    assert pool.allocated_bytes == pool.peak_bytes == large.nbytes == 4 * PAGE


def test_releasing_twice_does_not_lend_a_buffer_twice() -> None:
    pool = ArenaPool(limit=2)
    buffer = pool.acquire(1, 0)
    assert buffer is not None
    pool.release(buffer)
    pool.release(buffer)
    assert pool.acquire(1, 0) is not pool.acquire(1, 0)


def test_a_failed_allocation_does_not_use_up_the_limit() -> None:
    pool = ArenaPool(limit=1)
    with pytest.raises(CheckpointError):
        pool.acquire(1 << 60, 0)
    assert pool.acquire(1, 0) is not None
    assert pool.allocated_bytes == PAGE


def test_a_buffer_can_be_released_while_another_is_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ArenaPool(limit=2)
    first = pool.acquire(1, 0)
    assert first is not None
    making, go_on = threading.Event(), threading.Event()

    class SlowBuffer(HostBuffer):
        def __init__(self, nbytes: int) -> None:
            making.set()
            assert go_on.wait(60)
            super().__init__(nbytes)

    monkeypatch.setattr(arena, "HostBuffer", SlowBuffer)
    with ThreadPoolExecutor(2) as executor:
        second = executor.submit(pool.acquire, HUGE, 0)
        assert making.wait(60)
        released = executor.submit(pool.release, first)
        try:
            released.result(timeout=30)
        finally:
            go_on.set()
        assert second.result(timeout=60) is not first


def test_a_closed_pool_frees_buffers_as_they_come_back() -> None:
    pool = ArenaPool(limit=2)
    one, two = pool.acquire(1, 0), pool.acquire(1, 0)
    assert one is not None
    assert two is not None
    pool.release(one)
    pool.close()
    assert pool.allocated_bytes == two.nbytes
    pool.release(two)
    assert pool.allocated_bytes == 0
    assert pool.peak_bytes == 2 * PAGE


@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=20))
def test_staging_buffers_are_large_enough_and_counted_exactly(sizes: list[int]) -> None:
    pool = StagingPool()
    taken = [pool.take(size) for size in sizes]
    assert all(size <= t.numel() <= max(64, size + size // 8 + 64) for size, t in zip(sizes, taken, strict=True))
    assert len({t.data_ptr() for t in taken}) == len(sizes)
    assert pool.outstanding == pool.allocated_bytes == pool.peak_bytes == sum(t.numel() for t in taken)
    for buffer in taken:
        pool.give(buffer)
    assert pool.outstanding == 0
    again = [pool.take(size) for size in sizes]
    assert {t.data_ptr() for t in again} == {t.data_ptr() for t in taken}
    assert pool.peak_bytes == pool.allocated_bytes == sum(t.numel() for t in taken)


def test_a_staging_buffer_given_back_twice_is_refused() -> None:
    pool = StagingPool()
    buffer = pool.take(10)
    pool.give(buffer[:10])
    with pytest.raises(ConfigError, match="once"):
        pool.give(buffer)
    with pytest.raises(ConfigError):
        pool.give(torch.empty(64, dtype=torch.uint8))
    assert pool.outstanding == 0


def test_many_threads_never_share_a_staging_buffer() -> None:
    pool = StagingPool()

    def work(mark: int) -> bool:
        kept = True
        for _ in range(200):
            buffer = pool.take(256)
            buffer.fill_(mark)
            kept &= bool((buffer == mark).all())
            pool.give(buffer)
        return kept

    with ThreadPoolExecutor(4) as executor:
        assert all(executor.map(work, range(4)))
    assert pool.outstanding == 0
    assert pool.peak_bytes <= 4 * 256


def test_reserved_buffers_are_there_for_the_next_images() -> None:
    pool = ArenaPool(limit=2)
    pool.reserve(3 * 2**20)
    held = pool.allocated_bytes
    first, second = pool.acquire(3 * 2**20, 0.0), pool.acquire(2 * 2**20, 0.0)
    assert first is not None
    assert second is not None
    assert pool.allocated_bytes == held >= 6 * 2**20
