"""How many steps a window takes, and how much new state each of them copies.

GoCkpt (section 4) splits the state into equal parts and fixes the number of steps at 7. Here the link's budget of each
step is spent on the gradients owed first and on new state with what is left, so parts shrink as the debt grows. With a
budget of C bytes per step and r bytes of gradient per byte of state, K steps carry without any stall

    S_K = C (1 - (1 - r)^K) / r        (K C for r = 0)

and the least K with S_K >= the state is taken. Where no K carries it, the one with the least stall is.

Example:
    >>> round(capacity(1.0, 1 / 6, 5), 2)
    3.59
    >>> m = Measurements(bandwidth=1e9, step_s=1.0, hidden_s=1.0, state_bytes=3_000_000_000,
    ...                  grad_bytes=500_000_000, direct_bytes=0)
    >>> plan = plan_window(m, mode="auto", steps=None, max_steps=20)
    >>> plan.steps, sum(plan.budgets) == m.state_bytes, plan.expected_stall_s
    (4, True, 0.0)
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_engine.config import Mode
from ckpt_engine.errors import ConfigError

DEFAULT_STEPS = 4
_NEGLIGIBLE = 0.01
"""Stall, in steps, that is not worth a longer window."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurements:
    """What the planner knows about a training process.

    Args:
        bandwidth: Of the link, bytes per second.
        step_s: Length of a step, seconds.
        hidden_s: Part of it that copies can hide behind (forward and backward), seconds.
        state_bytes: All that a window copies.
        grad_bytes: Gradients of the state that is replayed.
        direct_bytes: Part of the state that can be copied only in the last step.
    """

    bandwidth: float
    step_s: float
    hidden_s: float
    state_bytes: int
    grad_bytes: int
    direct_bytes: int = 0

    def __post_init__(self) -> None:
        if not (self.bandwidth > 0 and self.step_s > 0 and self.hidden_s >= 0):
            raise ConfigError("Bandwidth and step time must be above 0: measure a few steps before planning.")
        if not 0 <= self.direct_bytes <= self.state_bytes or self.grad_bytes < 0:
            raise ConfigError("Byte counts must not be negative, and direct_bytes is part of state_bytes.")

    @property
    def budget(self) -> float:
        """Bytes that one step hides."""
        return self.bandwidth * min(self.hidden_s, self.step_s)

    @property
    def ratio(self) -> float:
        """Bytes of gradient per byte of replayed state."""
        replayed = self.state_bytes - self.direct_bytes
        return self.grad_bytes / replayed if replayed else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowPlan:
    """A window's schedule.

    Args:
        mode: ``one_step`` or ``multi_step``.
        steps: Steps of training that the copy is spread over.
        budgets: Bytes of new state per step; the last entry stands for all that is left.
        expected_stall_s: Time that training will wait, seconds.
        reason: Why, in words.
    """

    mode: Mode
    steps: int
    budgets: tuple[int, ...]
    expected_stall_s: float
    reason: str


def capacity(budget: float, ratio: float, steps: int) -> float:
    """State that ``steps`` steps carry without a stall (S_K), in the unit of ``budget``."""
    if ratio <= 0:
        return budget * steps
    # Where a gradient is larger than its state, copying early only adds to the debt: one step carries as much.
    ratio = min(1.0, ratio)
    return budget * (1 - (1 - ratio) ** steps) / ratio


def stall(m: Measurements, steps: int) -> float:
    """Seconds that training waits when the window takes ``steps`` steps.

    All of it falls to the last step, which copies what is left, what could not be copied before, and the gradients
    owed for what was.
    """
    early = 0.0
    if steps > 1 and m.ratio <= 1:
        early = min(capacity(m.budget, m.ratio, steps - 1), m.state_bytes - m.direct_bytes)
    return max(0.0, m.state_bytes - (1 - m.ratio) * early - m.budget) / m.bandwidth


def plan_window(m: Measurements | None, *, mode: Mode, steps: int | None, max_steps: int) -> WindowPlan:
    """Choose the schedule of the next window.

    Args:
        m: Measurements; None when nothing has been measured yet.
        mode: ``one_step`` forces one step; ``multi_step`` at least two where ``max_steps`` allows; ``auto`` chooses.
        steps: A fixed number of steps, or None.
        max_steps: Never more than this.

    Raises:
        ConfigError: ``steps`` or ``max_steps`` is below 1.
    """
    if max_steps < 1 or (steps is not None and steps < 1):
        raise ConfigError(f"A window takes at least one step, not steps={steps} of max_steps={max_steps}.")
    if mode == "one_step" or max_steps == 1 or steps == 1:
        return _one_step(m, "one step was asked for" if mode == "one_step" or steps == 1 else "one step is left")
    if steps is not None:
        return _fixed(m, min(steps, max_steps))
    if m is None:
        count = 1 if mode == "auto" else min(DEFAULT_STEPS, max_steps)
        return _one_step(m, "nothing measured yet") if count == 1 else _fixed(m, count)
    best = _best(m, least=1 if mode == "auto" else 2, most=max_steps)
    if best == 1:
        return _one_step(m, f"one step hides {_part(m)} of the state")
    return _budgeted(m, best, f"one step hides {_part(m)} of the state; {best} steps leave the least stall")


def _best(m: Measurements, *, least: int, most: int) -> int:
    stalls = {count: stall(m, count) for count in range(least, most + 1)}
    floor = min(stalls.values()) + _NEGLIGIBLE * m.step_s * (min(stalls.values()) > 0)
    return next(count for count, seconds in stalls.items() if seconds <= floor)


def _one_step(m: Measurements | None, reason: str) -> WindowPlan:
    seconds = 0.0 if m is None else stall(m, 1)
    total = 0 if m is None else m.state_bytes
    return WindowPlan(mode="one_step", steps=1, budgets=(total,), expected_stall_s=seconds, reason=reason)


def _fixed(m: Measurements | None, steps: int) -> WindowPlan:
    reason = f"{steps} steps were asked for" if m is not None else f"{steps} equal parts, nothing measured yet"
    if m is None:
        # Sizes are not known here; a share of "everything" is: the window divides by what it has.
        return WindowPlan(mode="multi_step", steps=steps, budgets=(), expected_stall_s=0.0, reason=reason)
    budgets = _with_late(_shares(m.state_bytes, steps), m.state_bytes - m.direct_bytes)
    if max(_loads(m, budgets)) <= m.budget:
        return WindowPlan(mode="multi_step", steps=steps, budgets=budgets, expected_stall_s=0.0, reason=reason)
    return _budgeted(m, steps, reason)


def _loads(m: Measurements, budgets: tuple[int, ...]) -> list[float]:
    """Bytes that each step copies: new state, and gradients of what was copied before."""
    before = [sum(budgets[:j]) for j in range(len(budgets))]
    return [new + m.ratio * copied for new, copied in zip(budgets, before, strict=True)]


def _budgeted(m: Measurements, steps: int, reason: str) -> WindowPlan:
    """Parts that shrink as gradients are owed, scaled down where the steps carry more than there is."""
    full = capacity(m.budget, m.ratio, steps)
    scale = min(1.0, m.state_bytes / full) if full > 0 and m.ratio <= 1 else 0.0
    keep = max(0.0, 1 - m.ratio)
    budgets = [int(m.budget * scale * keep**j) for j in range(steps - 1)]
    left = m.state_bytes - sum(budgets)
    return WindowPlan(
        mode="multi_step",
        steps=steps,
        budgets=_with_late((*budgets, left), m.state_bytes - m.direct_bytes),
        expected_stall_s=stall(m, steps),
        reason=reason,
    )


def _with_late(shares: tuple[int, ...], early: int) -> tuple[int, ...]:
    """Move what is copied only at the end out of the other parts.

    Example:
        >>> _with_late((5, 5, 5), 8)
        (5, 3, 7)
    """
    taken, parts = 0, []
    for share in shares[:-1]:
        parts.append(min(share, early - taken))
        taken += parts[-1]
    return (*parts, sum(shares) - taken)


def _shares(total: int, steps: int) -> tuple[int, ...]:
    """Divide ``total`` into equal parts; what does not divide goes to the last.

    Example:
        >>> _shares(10, 4)
        (2, 2, 2, 4)
    """
    return (*[total // steps] * (steps - 1), total - total // steps * (steps - 1))


def equal_budgets(plan: WindowPlan, total: int) -> tuple[int, ...]:
    """The plan's budgets, or equal shares of ``total`` bytes where it has none.

    Example:
        >>> equal_budgets(plan_window(None, mode="multi_step", steps=2, max_steps=9), 10)
        (5, 5)
    """
    return plan.budgets or _shares(total, plan.steps)


def _part(m: Measurements) -> str:
    return f"{min(9.99, m.budget / m.state_bytes):.0%}" if m.state_bytes else "all"
