from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch

from ckpt_engine.watch import Watcher
from tests.unit.windowing import Bench


class Watched(Bench):
    """A bench whose optimizer is watched, and a list of what was reported."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.opener.proven.clear()
        self.seen: list[Any] = []
        self.watcher = Watcher(
            self.context,
            self.opener,
            self.meter,
            lambda index, found_inf, scale: self.seen.append(("before", index, found_inf, scale)),
            lambda index: self.seen.append(("after", index)),
        )


class Unreplayable(torch.optim.SGD):
    """Follows a count that a twin shares with it."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        Unreplayable.calls += 1
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1 / Unreplayable.calls)


def test_both_moments_are_reported_with_the_optimizers_index() -> None:
    bench = Watched()
    bench.watcher.round_begins()
    bench.gradients()
    bench.update()
    assert bench.seen == [("before", 0, None, None), ("after", 0)]


def test_an_optimizer_is_rehearsed_once_its_state_exists() -> None:
    bench = Watched(warm=0)
    assert bench.opener.proven == set()
    for proven in (set(), {0}, {0}):
        bench.watcher.round_begins()
        bench.gradients()
        bench.update()
        assert bench.opener.proven == proven
    assert bench.opener.unreplayable == set()


def _three_rounds(bench: Watched) -> None:
    for _ in range(3):
        bench.watcher.round_begins()
        bench.gradients()
        bench.update()


def test_one_that_fails_is_named_once_and_copied() -> None:
    bench = Watched(cls=Unreplayable)
    with pytest.warns(UserWarning, match="Unreplayable is checkpointed by copying its state") as seen:
        _three_rounds(bench)
    assert len(seen) == 1
    assert bench.opener.unreplayable == {0}


def test_modes_without_replay_say_nothing_about_it() -> None:
    bench = Watched(cls=Unreplayable, mode="one_step", window_steps=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _three_rounds(bench)
    assert bench.opener.unreplayable == {0}


def test_what_the_forward_pass_writes_is_found_in_the_first_rounds() -> None:
    bench = Watched()
    bench.watcher.round_begins()
    with torch.no_grad():
        bench.model[2].bias.mul_(0.5)  # type: ignore[operator,union-attr]
    bench.gradients()
    bench.update()
    assert bench.opener.early == {id(bench.model[2].bias)}


def test_writes_between_rounds_are_no_writes_of_the_forward_pass() -> None:
    bench = Watched()
    for _ in range(4):
        bench.watcher.round_begins()
        bench.gradients()
        bench.update()
        with torch.no_grad():
            bench.model[2].bias.mul_(0.5)  # type: ignore[operator,union-attr]
    assert bench.opener.early == set()


def test_a_muted_watcher_reports_nothing_and_a_removed_one_neither() -> None:
    bench = Watched()
    bench.gradients()
    with bench.watcher.muted():
        bench.update()
    assert bench.seen == []
    bench.watcher.remove()
    bench.update()
    assert bench.seen == []


def test_a_step_that_raised_is_forgotten_with_the_next_round() -> None:
    bench = Watched()
    bench.watcher.round_begins()
    bench.gradients()

    def bad() -> float:
        raise ValueError("no data")

    with pytest.raises(ValueError, match="no data"):
        bench.optimizer.step(bad)
    assert not bench.watcher.updating
    bench.watcher.round_begins()
    bench.update()
    assert [event[0] for event in bench.seen] == ["before", "after"]


def test_the_scalers_flags_are_passed_on() -> None:
    bench = Watched(cls=partial(torch.optim.AdamW, fused=True))
    bench.gradients()
    bench.optimizer.found_inf, bench.optimizer.grad_scale = torch.tensor(1.0), torch.tensor(2.0)
    before = bench.model[0].weight.detach().clone()  # type: ignore[union-attr,operator]
    bench.optimizer.step()
    assert bench.seen[0] == ("before", 0, bench.optimizer.found_inf, bench.optimizer.grad_scale)
    assert torch.equal(bench.model[0].weight, before)  # type: ignore[arg-type]
    assert bench.opener.proven == set()
