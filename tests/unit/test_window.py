from __future__ import annotations

import pytest
import torch

from ckpt_engine.capture.units import view_key
from ckpt_engine.errors import SaveFailedError
from tests.unit.windowing import Bench


def _to_target(bench: Bench, window: object) -> None:
    while bench.step < 4:
        bench.round(window)


def test_a_window_of_three_steps_holds_the_target_state() -> None:
    bench = Bench(warm=2)
    window = bench.window()
    _to_target(bench, window)
    truth = bench.truth()
    window.seal()
    bench.round(window)
    assert window.captured
    assert bench.same(window, truth)
    assert window.result().passed
    assert len(window.stats.parts) == 3
    assert window.stats.replayed == 2
    assert window.stats.gradient_bytes > 0
    assert bench.staging.outstanding == 0


def test_parts_follow_the_budgets_and_the_last_takes_the_rest() -> None:
    bench = Bench(warm=2)
    window = bench.window()
    total = sum(block.nbytes for unit in window.units for block in unit.blocks)
    _to_target(bench, window)
    window.seal()
    window.finish()
    assert sum(window.stats.parts) == total
    assert max(window.stats.parts) < 0.6 * total


def test_finish_copies_what_is_missing_at_once() -> None:
    bench = Bench(warm=4)
    window = bench.window(steps=1)
    truth = bench.truth()
    window.seal()
    window.finish()
    bench.gradients()
    bench.update()
    assert bench.same(window, truth)
    assert window.stats.gradient_bytes == 0


def test_owned_tensors_are_those_of_the_image() -> None:
    bench = Bench(warm=2)
    window = bench.window()
    owned = window.owned()
    assert owned[view_key(bench.base)] == "model.base"
    assert set(owned.values()) == set(bench.truth())


def test_a_write_between_two_rounds_is_copied_again() -> None:
    bench = Bench(warm=2)
    window = bench.window()
    bench.round(window)
    with torch.no_grad():
        bench.model[0].weight.clamp_(-0.1, 0.1)  # type: ignore[operator,union-attr]
    bench.round(window)
    truth = bench.truth()
    window.seal()
    window.finish()
    assert bench.same(window, truth)
    assert window.stats.recaptured == 1
    assert window.reason == ""


def test_a_write_inside_a_round_moves_the_unit_to_the_boundary() -> None:
    bench = Bench(warm=2)
    window = bench.window()
    bench.round(window)
    window.begin_step()
    captured = next(unit for unit in window.units if unit.fqn == "0.weight")
    with torch.no_grad():
        bench.model[0].weight.mul_(0.9)  # type: ignore[operator,union-attr]
    bench.gradients()
    window.before_update(0, found_inf=None, scale=None)
    bench.update()
    window.after_update(0)
    assert captured.early
    assert "0.weight" in window.reason
    truth = bench.truth()
    window.seal()
    window.begin_step()
    with torch.no_grad():
        bench.model[0].weight.mul_(0.9)  # type: ignore[operator,union-attr]
    window.finish()
    assert bench.same(window, truth)
    assert window.result().passed


def test_a_write_after_the_boundary_was_closed_drops_the_save() -> None:
    bench = Bench(warm=2)
    window = bench.window()
    _to_target(bench, window)
    window.seal()
    window.begin_step()
    with torch.no_grad():
        bench.model[2].weight.mul_(0.9)  # type: ignore[operator,union-attr]
    window.finish()
    bench.replay.drain(20)
    with pytest.raises(SaveFailedError, match=r"2\.weight was written during the forward pass after step 4"):
        window.result()


def test_a_write_between_seal_and_the_next_round_is_seen() -> None:
    bench = Bench(warm=2)
    window = bench.window()
    _to_target(bench, window)
    window.seal()
    assert not window.moved()
    with torch.no_grad():
        bench.model[0].bias.add_(1)  # type: ignore[operator,union-attr]
    assert window.moved()
    truth = bench.truth()
    window.finish()
    assert bench.same(window, truth)


def test_an_announced_update_that_never_came_turns_replay_off() -> None:
    bench = Bench(warm=2)
    window = bench.window()
    bench.round(window)
    window.begin_step()
    bench.gradients()
    window.before_update(0, found_inf=None, scale=None)
    bench.update()
    truth = bench.truth()
    window.seal()
    window.finish()
    assert bench.same(window, truth)
    assert window.reason == "an update was not applied as announced"
    assert bench.staging.outstanding == 0


def test_an_unchanged_static_tensor_is_not_copied_twice_into_an_arena() -> None:
    bench = Bench(warm=4, max_images=1)
    copied = []
    for _ in range(3):
        window = bench.window(steps=1, target=bench.step)
        truth = bench.truth()
        window.seal()
        window.finish()
        assert bench.same(window, truth)
        copied.append(bench.context.link.bytes_copied)
        bench.pool.release(window.arena)
        bench.gradients()
        bench.update()
    assert copied[1] - copied[0] == copied[2] - copied[1] == copied[0] - bench.base.nbytes


@pytest.mark.parametrize("through_data", [False, True])
def test_a_static_tensor_that_changed_is_copied_again(through_data: bool) -> None:
    bench = Bench(warm=4, max_images=1)
    for _ in range(2):
        window = bench.window(steps=1, target=bench.step)
        with torch.no_grad():
            (bench.base.data if through_data else bench.base)[17] += 1
        truth = bench.truth()
        window.seal()
        window.finish()
        assert bench.same(window, truth)
        bench.pool.release(window.arena)


def test_a_dropped_window_forgets_static_tensors_it_had_begun_to_copy() -> None:
    bench = Bench(warm=4, max_images=1)
    window = bench.window(steps=1)
    window.seal()
    window.finish()
    bench.pool.release(window.arena)
    original = bench.base.data
    bench.base.data = original * 2
    window = bench.window(steps=3, target=8)
    window.begin_step()
    window.drop(20)
    bench.pool.release(window.arena)
    bench.base.data = original
    window = bench.window(steps=1)
    truth = bench.truth()
    window.seal()
    window.finish()
    assert bench.same(window, truth)


def test_a_dropped_window_gives_every_buffer_back() -> None:
    bench = Bench(warm=2)
    window = bench.window()
    bench.round(window)
    window.begin_step()
    bench.gradients()
    window.before_update(0, found_inf=None, scale=None)
    window.drop(20)
    assert bench.staging.outstanding == 0
    with pytest.raises(SaveFailedError, match="never completed"):
        window.result()


def test_an_image_that_differs_from_the_live_state_does_not_pass() -> None:
    bench = Bench(warm=4)
    window = bench.window(steps=1)
    window.seal()
    window.begin_step()
    bench.context.link.drain(20)
    window.arena.tensor[window.layout.offset("model.0.weight")] ^= 1
    window.finish()
    bench.replay.drain(20)
    with pytest.raises(SaveFailedError, match=r"differs from the live state in 1 tensor\(s\) \(model\.0\.weight\)"):
        window.result()
    assert window.failed


def test_state_that_went_away_after_the_seal_drops_the_save() -> None:
    bench = Bench(warm=4)
    window = bench.window(steps=1)
    window.seal()
    bench.optimizer.state.clear()
    with pytest.raises(SaveFailedError, match="Call settle"):
        window.begin_step()


def test_a_failed_window_fails_its_saves_with_the_cause() -> None:
    bench = Bench(warm=4)
    window = bench.window(steps=1)
    window.seal()
    window.fail(MemoryError("no room"))
    with pytest.raises(SaveFailedError, match="no room"):
        window.result()
