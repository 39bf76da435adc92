from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from ckpt_engine.errors import SaveFailedError
from ckpt_engine.windows import SkippedError, Windows
from tests.unit.windowing import Bench


def _windows(**options: Any) -> tuple[Bench, Windows]:
    bench = Bench(**{"warm": 2, **options})
    windows = Windows(bench.config, bench.pool, bench.replay, bench.persist, bench.context.clock)
    windows.opener = bench.opener
    return bench, windows


def _free(bench: Bench) -> bool:
    bench.replay.drain(20)
    arenas = [bench.pool.acquire(4096, 0.0) for _ in range(bench.config.max_images)]
    for arena in arenas:
        if arena is not None:
            bench.pool.release(arena)
    return all(arena is not None for arena in arenas)


@pytest.mark.parametrize(("step", "opens"), [(1, False), (3, False), (4, True), (5, True), (6, True), (7, False)])
def test_a_window_of_three_opens_two_steps_before_its_target_and_shorter_ones_later(step: int, opens: bool) -> None:
    bench, windows = _windows()
    windows.maybe_open(step, 6)
    assert (windows.window is not None) == opens
    if windows.window is not None:
        assert windows.window.plan.steps == 7 - step
        windows.settle()
    assert _free(bench)


def test_only_the_target_is_sealed() -> None:
    _, windows = _windows()
    windows.maybe_open(2, 2)
    assert windows.seal(1) is None
    image = windows.seal(2)
    assert image is not None
    assert windows.seal(2) is image


def test_a_second_save_of_another_state_is_not_the_windows() -> None:
    bench, windows = _windows()
    windows.maybe_open(2, 2)
    assert windows.seal(2) is not None
    with torch.no_grad():
        bench.model[0].weight.mul_(0.5)  # type: ignore[operator,union-attr]
    assert windows.seal(2) is None


def test_jobs_behind_a_sealed_window_wait_for_it_and_keep_their_order() -> None:
    bench, windows = _windows()
    order: list[int] = []
    windows.in_order(lambda: order.append(0))
    windows.maybe_open(2, 2)
    windows.in_order(lambda: order.append(1))
    windows.seal(2)
    windows.in_order(lambda: order.append(2))
    windows.in_order(lambda: order.append(3))
    assert order == [0, 1]
    windows.settle()
    assert order == [0, 1, 2, 3]
    assert _free(bench)


def test_a_window_that_was_not_saved_is_dropped() -> None:
    bench, windows = _windows()
    windows.maybe_open(2, 4)
    assert windows.window is not None
    windows.settle()
    assert windows.window is None
    assert _free(bench)


def test_a_window_knows_when_its_layout_is_out_of_date() -> None:
    bench, windows = _windows()
    bench.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    windows.maybe_open(2, 4)
    assert not windows.outdated()
    bench.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    assert windows.outdated()


def test_a_direct_copy_owns_its_values() -> None:
    bench, windows = _windows()
    tensor = torch.arange(10.0)
    image = windows.copy_directly({"model.x": tensor})
    tensor.zero_()
    assert torch.equal(image.layout.views(image.arena.tensor)["model.x"], torch.arange(10.0))
    image.release()
    assert _free(bench)


def test_a_direct_copy_that_fails_gives_its_memory_back() -> None:
    bench, windows = _windows()
    with pytest.raises(NotImplementedError):
        windows.copy_directly({"model.x": torch.empty(3, device="meta")})
    assert _free(bench)


def test_a_planned_copy_is_skipped_when_asked_and_others_wait() -> None:
    _, windows = _windows(max_images=1, when_busy="skip", save_timeout_s=0.2)
    image = windows.copy_directly({"model.x": torch.ones(3)}, planned=True)
    with pytest.raises(SkippedError, match="all 1 images are still being written"):
        windows.copy_directly({"model.x": torch.ones(3)}, planned=True)
    with pytest.raises(SaveFailedError, match="No host memory"):
        windows.copy_directly({"model.x": torch.ones(3)})
    threading.Timer(0.05, image.release).start()
    windows.copy_directly({"model.x": torch.ones(3)}).release()


def test_a_window_that_holds_the_only_memory_gives_way() -> None:
    bench, windows = _windows(max_images=1)
    windows.maybe_open(2, 4)
    windows.copy_directly({"model.x": torch.ones(3)}).release()
    assert windows.window is None
    assert _free(bench)


def test_a_failing_window_is_dropped_with_a_warning_and_its_target_taken_in_one_step() -> None:
    bench, windows = _windows()
    windows.maybe_open(2, 4)
    with pytest.warns(UserWarning, match="window for step 4 failed"), windows.safely():
        raise RuntimeError("torn")
    assert windows.window is None
    assert _free(bench)
    windows.maybe_open(2, 4)
    assert windows.window is None
    windows.maybe_open(4, 4)
    assert windows.window is not None


def test_a_failing_window_that_was_saved_fails_its_saves() -> None:
    _, windows = _windows()
    windows.maybe_open(2, 2)
    image = windows.seal(2)
    assert image is not None
    image.users += 1
    with windows.safely():
        raise RuntimeError("torn")
    assert image.window is not None
    with pytest.raises(SaveFailedError, match="torn"):
        image.window.result()


def test_time_inside_the_engine_counts_as_stall_once() -> None:
    _, windows = _windows()
    windows.maybe_open(2, 2)
    assert windows.window is not None
    with windows.stall():
        windows.window.stats.stall_s += 5.0
        threading.Event().wait(0.01)
    assert 5.0 <= windows.window.stats.stall_s < 6.0
