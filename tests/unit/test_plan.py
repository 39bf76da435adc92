from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.capture.plan import Measurements, WindowPlan, capacity, equal_budgets, plan_window, stall
from ckpt_engine.errors import ConfigError

GB = 10**9


def measured(x: float, r: float, *, direct: float = 0.0) -> Measurements:
    """A process whose state takes ``x`` steps to copy, with ``r`` bytes of gradient per byte of replayed state."""
    state = int(x * GB)
    late = int(direct * state)
    return Measurements(
        bandwidth=GB, step_s=1.0, hidden_s=1.0, state_bytes=state, grad_bytes=int(r * (state - late)), direct_bytes=late
    )


@pytest.mark.parametrize(
    ("r", "steps", "carried"),
    [(1 / 6, 2, 1.83), (1 / 6, 5, 3.59), (1 / 6, 10, 5.03), (1 / 3, 3, 2.11), (1 / 3, 20, 3.00), (1 / 7, 20, 6.68)],
)
def test_capacity_follows_the_closed_form(r: float, steps: int, carried: float) -> None:
    assert capacity(1.0, r, steps) == pytest.approx(carried, abs=0.006)


def test_without_gradients_every_step_carries_its_whole_budget() -> None:
    assert capacity(3.0, 0.0, 4) == 12.0


@given(st.floats(0.05, 5.5), st.floats(0.01, 0.5), st.integers(1, 30))
def test_parts_add_up_to_the_state_and_steps_stay_within_the_limit(x: float, r: float, most: int) -> None:
    m = measured(x, r)
    plan = plan_window(m, mode="auto", steps=None, max_steps=most)
    assert sum(plan.budgets) == m.state_bytes
    assert 1 <= plan.steps == len(plan.budgets) <= most
    assert all(part >= 0 for part in plan.budgets)


@given(st.floats(0.05, 5.5), st.floats(0.01, 0.5))
def test_a_schedule_without_a_stall_fits_new_state_and_owed_gradients_into_every_step(x: float, r: float) -> None:
    m = measured(x, r)
    plan = plan_window(m, mode="auto", steps=None, max_steps=30)
    if plan.expected_stall_s > 0:
        return
    taken = 0.0
    for part in plan.budgets:
        assert part + m.ratio * taken <= m.budget * (1 + 1e-6) + plan.steps
        taken += part


@given(st.floats(0.05, 5.5), st.floats(0.01, 0.5))
def test_the_fewest_steps_without_a_stall_are_taken(x: float, r: float) -> None:
    m = measured(x, r)
    plan = plan_window(m, mode="auto", steps=None, max_steps=30)
    if plan.expected_stall_s == 0 and plan.steps > 1:
        assert stall(m, plan.steps - 1) > 0


@given(st.floats(0.05, 9.0), st.floats(0.01, 0.9), st.integers(1, 12), st.integers(1, 12))
def test_a_fixed_number_of_steps_is_honoured_up_to_the_limit(x: float, r: float, steps: int, most: int) -> None:
    plan = plan_window(measured(x, r), mode="multi_step", steps=steps, max_steps=most)
    assert plan.steps == min(steps, most)
    assert sum(plan.budgets) == int(x * GB)


def test_beyond_the_limit_the_least_stall_is_taken() -> None:
    m = measured(8.0, 1 / 6)
    plan = plan_window(m, mode="auto", steps=None, max_steps=20)
    assert plan.expected_stall_s == pytest.approx(min(stall(m, k) for k in range(1, 21)), abs=0.02)
    assert 0 < plan.expected_stall_s < 8.0 - 1.0


def test_state_that_cannot_be_replayed_waits_for_the_last_part() -> None:
    m = measured(2.0, 1 / 6, direct=0.4)
    plan = plan_window(m, mode="multi_step", steps=4, max_steps=20)
    assert plan.budgets[-1] >= m.direct_bytes


def stalled(m: Measurements, plan: WindowPlan) -> float:
    """Seconds by which the steps of a plan are overfull, counted from its parts."""
    taken, over = 0, 0.0
    for part in plan.budgets:
        over += max(0.0, part + m.ratio * taken - m.budget)
        taken += part
    return over / m.bandwidth


@given(st.floats(0.05, 9.0), st.floats(0.0, 3.0), st.floats(0.0, 1.0), st.one_of(st.none(), st.integers(1, 12)))
def test_the_stall_that_is_promised_is_the_one_that_the_parts_make(
    x: float, r: float, late: float, steps: int | None
) -> None:
    m = measured(x, r, direct=late)
    plan = plan_window(m, mode="auto", steps=steps, max_steps=20)
    assert plan.expected_stall_s == pytest.approx(stalled(m, plan), abs=1e-6)
    assert plan.budgets[-1] >= m.direct_bytes
    assert sum(plan.budgets) == m.state_bytes


@given(st.floats(0.05, 9.0), st.floats(0.01, 1.0), st.integers(1, 20))
def test_the_stall_is_what_the_closed_form_leaves(x: float, r: float, steps: int) -> None:
    m = measured(x, r)
    left = max(0.0, m.state_bytes - capacity(m.budget, m.ratio, steps)) / m.bandwidth
    assert stall(m, steps) == pytest.approx(left, abs=1e-6)


def test_gradients_owed_beside_late_state_are_counted() -> None:
    # The last step copies 0.9 of what it can, and owes a third more for what was copied before.
    m = Measurements(
        bandwidth=GB, step_s=1.0, hidden_s=1.0, state_bytes=19 * GB // 10, grad_bytes=GB // 3, direct_bytes=9 * GB // 10
    )
    assert stall(m, 10) == pytest.approx(0.9 + 1 / 3 - 1, abs=1e-6)


@pytest.mark.parametrize(("steps", "most"), [(None, 0), (0, 5)])
def test_a_window_without_a_step_is_refused(steps: int | None, most: int) -> None:
    with pytest.raises(ConfigError, match="at least one step"):
        plan_window(measured(1.0, 0.1), mode="auto", steps=steps, max_steps=most)


def test_gradients_as_large_as_the_state_make_windows_useless() -> None:
    assert plan_window(measured(3.0, 1.0), mode="auto", steps=None, max_steps=20).steps == 1


def test_one_step_suffices_when_it_hides_everything() -> None:
    plan = plan_window(measured(0.8, 1 / 3), mode="auto", steps=None, max_steps=20)
    assert (plan.mode, plan.steps, plan.expected_stall_s) == ("one_step", 1, 0.0)


def test_multi_step_means_at_least_two() -> None:
    assert plan_window(measured(0.1, 1 / 3), mode="multi_step", steps=None, max_steps=20).steps == 2


@pytest.mark.parametrize(("mode", "steps"), [("auto", 1), ("multi_step", 4), ("one_step", 1)])
def test_before_anything_is_measured_the_plan_is_a_guess(mode: Any, steps: int) -> None:
    plan = plan_window(None, mode=mode, steps=None, max_steps=20)
    assert plan.steps == steps
    assert plan.reason != ""


def test_an_unmeasured_plan_divides_equally() -> None:
    plan = WindowPlan(mode="multi_step", steps=3, budgets=(), expected_stall_s=0.0, reason="")
    assert equal_budgets(plan, 11) == (3, 3, 5)


@pytest.mark.parametrize(
    "wrong", [{"bandwidth": 0.0}, {"step_s": 0.0}, {"hidden_s": -1.0}, {"direct_bytes": 11}, {"grad_bytes": -1}]
)
def test_impossible_measurements_are_refused(wrong: dict[str, Any]) -> None:
    good: dict[str, Any] = {"bandwidth": 1.0, "step_s": 1.0, "hidden_s": 1.0, "state_bytes": 10, "grad_bytes": 1}
    with pytest.raises(ConfigError):
        Measurements(**{**good, **wrong})
