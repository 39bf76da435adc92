"""Optimizers of other people, and steps that go wrong."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ckpt_engine.config import CheckpointConfig
from ckpt_engine.engine import Engine
from tests.equivalence.hard_loop import SAVES, STEPS, Loop, adamw, mlp
from tests.equivalence.harness import differences, load_state


class SignMomentum(torch.optim.Optimizer):
    """A third-party optimizer that follows the rules: state and parameter in, the same out."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["n"], state["m"] = 0, torch.zeros_like(p)
                state["n"] += 1
                state["m"] = state["m"] * 0.9 + p.grad
                p.sub_(state["m"].sign(), alpha=group["lr"] / state["n"] ** 0.5)


class HiddenClock(SignMomentum):
    """Its learning rate depends on a count that all instances share."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        HiddenClock.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=1e-2 / HiddenClock.calls)


class Noisy(SignMomentum):
    """Langevin dynamics: draws from the global stream."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad + torch.randn_like(p), alpha=1e-3)


class KeepsItsParameters(SignMomentum):
    """Steps over a list of its own: a careless twin would step the live parameters a second time."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, lr)
        self.mine = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for p in self.mine:
            if p.grad is not None:
                p.sub_(p.grad, alpha=1e-2)


class Remembers(SignMomentum):
    """Keeps a history in an attribute."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, lr)
        self.history: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.history.append(len(self.history))
        return super().step()


class Twice(torch.optim.SGD):
    """Sharpness-aware minimisation: climbs, evaluates again, and steps from where it was."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        assert closure is not None
        closure()
        params = [p for group in self.param_groups for p in group["params"]]
        kept = [p.clone() for p in params]
        for p in params:
            p.add_(p.grad, alpha=0.05)
        loss = closure()
        for p, old in zip(params, kept, strict=True):
            p.copy_(old)
            p.sub_(p.grad, alpha=0.01)
        return loss


class Doubled(torch.optim.AdamW):
    """Overrides step and calls it twice."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        super().step()
        return super().step()


def _trained(make: Callable[[nn.Module], torch.optim.Optimizer], folder: Path | None) -> tuple[Loop, Any]:
    """Train with the engine saving, or with an engine that is not attached to anything."""
    HiddenClock.calls = 0
    model = mlp()
    loop = Loop(model, [make(model)])
    if folder is None:
        loop.engine.close(10)
        loop.engine = Engine()
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    loop.run(folder or Path("unused"), saves=SAVES if folder else ())
    return loop, copy.deepcopy(loop.state())


def test_a_third_party_optimizer_that_can_be_replayed_is(tmp_path: Path, strict: None) -> None:
    loop, end = _trained(lambda m: SignMomentum(m.parameters()), tmp_path)
    loop.finish(tmp_path)
    assert all(record.window_steps == 4 and record.gradient_bytes for record in loop.engine.records)
    assert differences(end, _trained(lambda m: SignMomentum(m.parameters()), None)[1]) == []


@pytest.mark.parametrize("cls", [HiddenClock, Noisy, KeepsItsParameters])
def test_one_that_cannot_is_copied_in_one_step_with_one_warning(cls: Any, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        loop, end = _trained(lambda m: cls(m.parameters()), tmp_path)
        loop.finish(tmp_path)
    assert len(seen) == 1, [str(w.message) for w in seen]
    assert f"{cls.__name__} is checkpointed by copying its state" in str(seen[0].message)
    assert [(record.ok, record.window_steps) for record in loop.engine.records] == [(True, 1), (True, 1)]
    if cls is not HiddenClock:
        # A class attribute is shared with whoever runs the class: the one rehearsal counts once.
        assert differences(end, _trained(lambda m: cls(m.parameters()), None)[1]) == []


def test_a_replay_does_not_write_into_attributes_of_the_live_optimizer(tmp_path: Path, strict: None) -> None:
    loop, _ = _trained(lambda m: Remembers(m.parameters()), tmp_path)
    loop.finish(tmp_path)
    assert loop.optimizers[0].history == list(range(STEPS))  # type: ignore[attr-defined]


def test_an_optimizer_that_joins_parameters_after_it_failed_its_rehearsal(tmp_path: Path, quiet: None) -> None:
    HiddenClock.calls = 0
    model = mlp()
    optimizer = HiddenClock(list(model.parameters())[:4])
    loop = Loop(model, [optimizer])
    loop.before[3] = lambda: optimizer.add_param_group({"params": list(model.parameters())[4:]})
    loop.run(tmp_path).finish(tmp_path)
    assert all(record.gradient_bytes == 0 for record in loop.engine.records)


def test_a_step_that_overrides_and_steps_twice(tmp_path: Path, quiet: None) -> None:
    loop, end = _trained(lambda m: Doubled(m.parameters()), tmp_path)
    loop.finish(tmp_path)
    assert differences(end, _trained(lambda m: Doubled(m.parameters()), None)[1]) == []


def test_a_closure_that_is_called_twice(tmp_path: Path, quiet: None) -> None:
    model = mlp()
    optimizer = Twice(model.parameters(), lr=1e-2)
    engine = Engine(CheckpointConfig(mode="multi_step", window_steps=4, block_bytes=4096, audit="full"))
    engine.attach([optimizer], dict(model.named_parameters()), step=0, fenced=True)

    def closure() -> Tensor:
        engine.before_zero_grad()
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(4, 8)).pow(2).mean()
        engine.before_backward()
        loss.backward()
        return loss

    truth = {}
    engine.expect(6)
    for step in range(1, 14):
        engine.step_begin()
        optimizer.step(closure)
        engine.step_end(step)
        if step in (6, 11):
            truth[step] = copy.deepcopy({"state_dict": model.state_dict()})
            state = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}
            engine.save(f"{tmp_path}/{step}", state, step=step)
            engine.expect(11 if step == 6 else None)
    assert engine.close(60) == []
    for step, expected in truth.items():
        assert differences(load_state(f"{tmp_path}/{step}")["state_dict"], expected["state_dict"]) == []


def test_state_that_is_born_inside_a_window(tmp_path: Path, strict: None) -> None:
    """A head that first gets gradients in the middle of a window."""

    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.one, self.two = nn.Linear(8, 40), nn.Linear(40, 8), nn.Linear(40, 8)
            self.both = False

        def forward(self, x: Tensor) -> Tensor:
            y = self.body(x)
            return self.one(y) + self.two(y) if self.both else self.one(y)  # type: ignore[no-any-return]

    for at in (4, 5, 6, 7):
        model = TwoHeads()
        loop = Loop(model, [adamw(model)])
        loop.before[at] = lambda model=model: setattr(model, "both", True)
        loop.run(tmp_path / str(at)).finish(tmp_path / str(at))


class Breaks(torch.optim.AdamW):
    """Raises inside step when told to, before or after it has written."""

    trouble = ""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        trouble, self.trouble = self.trouble, ""
        if trouble == "before":
            raise FloatingPointError(trouble)
        result = super().step(closure)
        if trouble == "after":
            raise FloatingPointError(trouble)
        return result


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("trouble", ["before", "after"])
@pytest.mark.parametrize("retry", [False, True])
@pytest.mark.parametrize("at", [2, 4, 6, 7])
def test_an_exception_inside_step_that_the_loop_survives(
    trouble: str, retry: bool, at: int, fused: bool, tmp_path: Path, quiet: None
) -> None:
    model = mlp()
    optimizer = Breaks(model.parameters(), lr=1e-2, fused=fused)
    loop = Loop(model, [optimizer])

    def break_it() -> None:
        optimizer.trouble = trouble
        with pytest.raises(FloatingPointError):
            optimizer.step()
        if not retry:
            optimizer.zero_grad()

    loop.inside[at] = break_it
    loop.run(tmp_path).finish(tmp_path)


@pytest.mark.parametrize("skip_at", [5, 6, 7])
@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_skips_around_the_target(skip_at: int, fused: bool, tmp_path: Path, strict: None) -> None:
    model = mlp()
    optimizer = adamw(model, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    engine = Engine(CheckpointConfig(mode="multi_step", window_steps=4, block_bytes=4096, audit="full"))
    engine.attach([optimizer], dict(model.named_parameters()), step=0, fenced=True)
    engine.expect(6)
    truth: Any = None
    for step in range(1, 10):
        engine.step_begin()
        engine.before_zero_grad()
        optimizer.zero_grad()
        loss = model(torch.full((4, 8), float(step))).pow(2).mean()
        engine.before_backward()
        scaler.scale(loss * (float("inf") if step == skip_at else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        engine.step_end(step)
        if step == 6:
            state = {"state_dict": model.state_dict(), "o": optimizer.state_dict(), "s": scaler.state_dict()}
            truth = copy.deepcopy(state)
            engine.save(f"{tmp_path}/out", state, step=6)
    assert engine.close(60) == []
    assert differences(load_state(f"{tmp_path}/out"), truth) == []


@pytest.mark.parametrize("numbers", [[1, 2, 3, 5, 6, 7, 8], [2, 4, 6, 8, 10], [1, 2, 2, 3, 3, 6, 7], [5, 6, 1, 6, 7]])
def test_step_numbers_with_gaps_and_repeats(numbers: list[int], tmp_path: Path, strict: None) -> None:
    model = mlp()
    optimizer = adamw(model)
    engine = Engine(CheckpointConfig(mode="multi_step", window_steps=4, block_bytes=4096, audit="full"))
    engine.attach([optimizer], dict(model.named_parameters()), step=0)
    engine.expect(6)
    truth: Any = None
    for index, number in enumerate(numbers):
        engine.step_begin()
        optimizer.zero_grad()
        model(torch.full((4, 8), float(index))).pow(2).mean().backward()
        optimizer.step()
        engine.step_end(number)
        if number == 6:
            state = {"state_dict": model.state_dict(), "o": optimizer.state_dict()}
            truth = copy.deepcopy(state)
            engine.save(f"{tmp_path}/out", state, step=6)
    assert engine.close(60) == []
    assert differences(load_state(f"{tmp_path}/out"), truth) == []
