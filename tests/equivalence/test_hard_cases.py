"""Training loops that break checkpointers: each must give the right checkpoint, or none, and train on unharmed."""

from __future__ import annotations

import copy
import random
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ckpt_engine.capture.emulated_link import EmulatedLink
from ckpt_engine.capture.rng import rng_state, same_streams
from ckpt_engine.config import CheckpointConfig
from ckpt_engine.engine import Engine
from ckpt_engine.restore.reader import load
from tests.equivalence.harness import Recipe, Run, differences, load_state

STEPS = 12
SAVES = (6, 10)


class Loop:
    """A training loop small enough to take apart: a model, optimizers, and what happens around each moment."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        *,
        inputs: Callable[[int], Tensor] | None = None,
        fenced: bool = True,
        **options: Any,
    ) -> None:
        self.model, self.optimizers = model, optimizers
        self.inputs = inputs or (lambda step: torch.randn(4, 8, generator=torch.Generator().manual_seed(step)))
        config = {"mode": "multi_step", "window_steps": 4, "block_bytes": 4096, "audit": "full", **options}
        self.engine = Engine(CheckpointConfig(**config))
        self.engine.attach(optimizers, self.tensors(), step=0, fenced=fenced)
        self.step = 0
        self.truth: dict[int, Any] = {}
        self.before: dict[int, Callable[[], object]] = {}
        self.inside: dict[int, Callable[[], object]] = {}
        self.after: dict[int, Callable[[], object]] = {}

    def tensors(self) -> dict[str, Tensor]:
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def state(self) -> dict[str, Any]:
        return {
            "state_dict": self.model.state_dict(),
            "optimizer_states": [o.state_dict() for o in self.optimizers],
            "step": self.step,
        }

    def round(self) -> None:
        number = self.step + 1
        self.before.get(number, _nothing)()
        self.engine.step_begin()
        self.engine.before_zero_grad()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self.model(self.inputs(number)).float().abs().pow(2).mean()
        self.engine.before_backward()
        loss.backward()
        self.inside.get(number, _nothing)()
        for optimizer in self.optimizers:
            optimizer.step()
        self.step = number
        self.after.get(number, _nothing)()
        self.engine.step_end(number)

    def save(self, folder: Path, name: str | None = None, **options: Any) -> Any:
        name = name or f"step-{self.step}"
        self.truth[name] = copy.deepcopy(self.state())  # type: ignore[index]
        return self.engine.save(f"{folder}/{name}", self.state(), step=self.step, **options)

    def run(self, folder: Path, *, steps: int = STEPS, saves: tuple[int, ...] = SAVES) -> Loop:
        todo = [step for step in saves if step > self.step]
        self.engine.expect(todo[0] if todo else None)
        while self.step < steps:
            self.round()
            if self.step in todo:
                todo.remove(self.step)
                self.save(folder)
                self.engine.expect(todo[0] if todo else None)
        return self

    def finish(self, folder: Path) -> Loop:
        """Close, then compare every checkpoint with the copy that was taken by hand."""
        failures = self.engine.close(60)
        assert failures == []
        for name, truth in self.truth.items():
            assert differences(dense(load_state(f"{folder}/{name}")), dense(truth)) == [], name
        assert self.engine.memory["images"] == 0
        assert self.engine._staging.outstanding == 0
        return self


def _nothing() -> None:
    return None


def dense(state: Any) -> Any:
    """The same state with sparse tensors made dense, for comparison."""
    if isinstance(state, dict):
        return {key: dense(value) for key, value in state.items()}
    if isinstance(state, list):
        return [dense(value) for value in state]
    return state.to_dense() if isinstance(state, Tensor) else state


def mlp(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 40), nn.Tanh(), nn.Linear(40, 8))


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, **options)


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def strict() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# -- the layout changes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before", "inside", "after"])
@pytest.mark.parametrize("at", [3, 4, 5, 6, 7])
def test_parameters_that_join_an_optimizer(moment: str, at: int, tmp_path: Path, strict: None) -> None:
    model = mlp()
    late = list(model[4].parameters())  # type: ignore[index]
    early = [p for p in model.parameters() if all(p is not q for q in late)]
    optimizer = torch.optim.AdamW(early, lr=1e-2)
    loop = Loop(model, [optimizer])
    getattr(loop, moment)[at] = lambda: optimizer.add_param_group({"params": late, "lr": 3e-3})
    loop.run(tmp_path).finish(tmp_path)


@pytest.mark.parametrize("at", [3, 4, 5, 6, 7])
def test_parameters_that_leave_an_optimizer(at: int, tmp_path: Path, strict: None) -> None:
    model = mlp()
    optimizer = adamw(model)
    loop = Loop(model, [optimizer])

    def leave() -> None:
        gone = optimizer.param_groups[0]["params"].pop()
        optimizer.state.pop(gone, None)

    loop.before[at] = leave
    if at == 7:
        loop.run(tmp_path, steps=6, saves=(6,)).engine.settle()
    loop.run(tmp_path).finish(tmp_path)


def test_state_that_is_dropped_before_it_was_copied_costs_the_save(tmp_path: Path, quiet: None) -> None:
    model = mlp()
    optimizer = adamw(model)
    loop = Loop(model, [optimizer])
    loop.before[7] = optimizer.state.clear
    loop.run(tmp_path).engine.close(60)
    assert [(record.step, record.ok) for record in loop.engine.records] == [(6, False), (10, True)]
    assert "went away before they were copied" in loop.engine.records[0].error
    assert not (tmp_path / "step-6").exists()
    assert differences(load_state(f"{tmp_path}/step-10"), loop.truth["step-10"]) == []  # type: ignore[index]


def test_an_empty_group_that_joins(tmp_path: Path, strict: None) -> None:
    model = mlp()
    optimizer = adamw(model)
    loop = Loop(model, [optimizer])
    loop.before[5] = lambda: optimizer.param_groups.append({**optimizer.param_groups[0], "params": []})
    loop.run(tmp_path).finish(tmp_path)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("at", [4, 5, 6, 7])
@pytest.mark.parametrize("kind", ["same", "turned", "bfloat16"])
def test_data_that_is_swapped(kind: str, at: int, moment: str, tmp_path: Path, quiet: None) -> None:
    model = mlp()
    loop = Loop(model, [torch.optim.SGD(model.parameters(), lr=1e-2)])
    weight = model[2].weight  # type: ignore[index]

    def swap() -> None:
        if kind == "same":
            weight.data = weight.data.clone() * 1.5
        elif kind == "turned":
            weight.data = weight.data.t().contiguous().t()
        else:
            for parameter in model.parameters():
                parameter.data = parameter.data.bfloat16()
            loop.inputs = lambda step: torch.ones(4, 8, dtype=torch.bfloat16) * step

    getattr(loop, moment)[at] = swap
    if (at, moment) == (7, "before"):
        loop.run(tmp_path, steps=6, saves=(6,)).engine.settle()
    loop.run(tmp_path).finish(tmp_path)


# -- writes from outside -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["optimizer", "model", "fresh"])
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("at", [4, 5, 6])
def test_state_loaded_in_the_middle_of_a_window(what: str, moment: str, at: int, tmp_path: Path, strict: None) -> None:
    model = mlp()
    optimizer = adamw(model)
    loop = Loop(model, [optimizer])
    kept: dict[str, Any] = {}
    loop.after[2] = lambda: kept.update(copy.deepcopy(loop.state()))

    def load_back() -> None:
        if what == "optimizer":
            optimizer.load_state_dict(kept["optimizer_states"][0])
        elif what == "model":
            model.load_state_dict(kept["state_dict"])
        else:
            optimizer.load_state_dict(adamw(model).state_dict())

    getattr(loop, moment)[at] = load_back
    loop.run(tmp_path).finish(tmp_path)


def test_loading_after_settle_does_not_reach_the_checkpoint(tmp_path: Path, strict: None) -> None:
    model = mlp()
    loop = Loop(model, [adamw(model)]).run(tmp_path, steps=6, saves=(6,))
    loop.engine.settle()
    model.load_state_dict(mlp(9).state_dict())
    loop.run(tmp_path, steps=9, saves=())
    loop.finish(tmp_path)


@pytest.mark.parametrize("when", [3, 5, 6, 7, 9])
def test_frozen_parameters_that_change_between_saves(when: int, tmp_path: Path, strict: None) -> None:
    for through_data in (False, True):
        model = mlp()
        model.register_parameter("base", nn.Parameter(torch.randn(500, 64), requires_grad=False))
        loop = Loop(model, [adamw(model[4])])  # type: ignore[index]
        for parameter in model[0].parameters():  # type: ignore[index]
            parameter.requires_grad_(False)

        def change(model: nn.Module = model, through_data: bool = through_data) -> None:
            with torch.no_grad():
                base = model.base.data if through_data else model.base  # type: ignore[union-attr]
                base[7, 3] += 1.0  # type: ignore[index]
                model[0].bias.data.add_(0.5)  # type: ignore[index,union-attr]

        loop.before[when] = change
        folder = tmp_path / str(through_data)
        loop.run(folder, steps=20, saves=(6, 10, 14, 18)).finish(folder)


class WritesItsWeight(nn.Linear):
    """Renormalises its own weight in every forward, in place."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.div_(self.weight.norm(dim=1, keepdim=True).clamp_min(1.0) * 1.01)
        return super().forward(x)


@pytest.mark.parametrize("mode", ["multi_step", "one_step", "async"])
def test_a_forward_that_writes_weights(mode: str, tmp_path: Path, quiet: None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), WritesItsWeight(64, 8))
    options = {"mode": mode, "window_steps": 4 if mode == "multi_step" else None}
    loop = Loop(model, [adamw(model)], **options).run(tmp_path).finish(tmp_path)
    assert [record.ok for record in loop.engine.records] == [True, True]


def test_a_forward_that_begins_to_write_weights_late_costs_one_save_at_most(tmp_path: Path, quiet: None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8))
    loop = Loop(model, [adamw(model)], mode="one_step", window_steps=None)

    def shrink(module: nn.Module, _: Any) -> None:
        with torch.no_grad():
            module.weight.mul_(0.99)  # type: ignore[operator,union-attr]

    loop.before[7] = lambda: model[0].register_forward_pre_hook(shrink)
    loop.run(tmp_path, steps=20, saves=(6, 9, 12, 15))
    loop.engine.close(60)
    good = [record.step for record in loop.engine.records if record.ok]
    assert good == [9, 12, 15]
    for step in good:
        assert differences(load_state(f"{tmp_path}/step-{step}"), loop.truth[f"step-{step}"]) == []  # type: ignore[index]
    assert not (tmp_path / "step-6").exists()


class Reassigns(nn.Module):
    """A large buffer that every forward replaces by a new tensor."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(1 << 18))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.average = self.average * 0.9 + y.detach().mean()
        return y


def test_buffers_that_are_replaced_by_new_tensors(tmp_path: Path, strict: None) -> None:
    torch.manual_seed(0)
    model = Reassigns()
    loop = Loop(model, [adamw(model)]).run(tmp_path).finish(tmp_path)
    assert [record.window_steps > 0 for record in loop.engine.records] == [False, True]
    names = [t.name for t in load(f"{tmp_path}/step-10").manifest.tensors]
    assert len(names) == len(set(names))


def test_a_parameter_object_that_is_replaced(tmp_path: Path, strict: None) -> None:
    model = mlp()
    model.register_parameter("base", nn.Parameter(torch.randn(100), requires_grad=False))
    loop = Loop(model, [adamw(model[4])])  # type: ignore[index]
    loop.before[8] = lambda: setattr(model, "base", nn.Parameter(torch.randn(100), requires_grad=False))
    loop.run(tmp_path, steps=16, saves=(6, 10, 14)).finish(tmp_path)


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["SGD", "SparseAdam", "Adagrad"])
def test_sparse_gradients(optimizer: str, tmp_path: Path, quiet: None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(90, 24, sparse=True), nn.Linear(24, 8))
    options: dict[str, Any] = {"momentum": 0.9} if optimizer == "SGD" else {}
    made = getattr(torch.optim, optimizer)(model[0].parameters(), lr=0.05, **options)
    inputs = lambda step: torch.randint(0, 90, (5, 6), generator=torch.Generator().manual_seed(step))  # noqa: E731
    loop = Loop(model, [made, adamw(model[1])], inputs=inputs)
    loop.run(tmp_path).finish(tmp_path)


def test_sparse_and_dense_gradients_in_one_optimizer(tmp_path: Path, quiet: None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(90, 24, sparse=True), nn.Linear(24, 8))
    inputs = lambda step: torch.randint(0, 90, (5, 6), generator=torch.Generator().manual_seed(step))  # noqa: E731
    loop = Loop(model, [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)], inputs=inputs)
    loop.run(tmp_path).finish(tmp_path)


def test_gradients_zeroed_in_place_without_the_declared_fences(tmp_path: Path, quiet: None) -> None:
    """The caller broke its word: the version counters of the gradients tell, and the save is right all the same."""
    model = mlp()
    optimizer = adamw(model)
    link = EmulatedLink(3e6)
    engine = Engine(CheckpointConfig(mode="multi_step", window_steps=4, block_bytes=4096, audit="full"), link=link)
    engine.attach([optimizer], dict(model.named_parameters()), step=0, fenced=True)
    engine.expect(6)
    truth: Any = None
    for step in range(1, 9):
        engine.step_begin()
        model(torch.full((4, 8), float(step))).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        engine.step_end(step)
        if step == 6:
            truth = copy.deepcopy(model.state_dict())
            engine.save(f"{tmp_path}/out", {"state_dict": model.state_dict(), "o": optimizer.state_dict()}, step=6)
    assert engine.close(60) == []
    assert differences(load_state(f"{tmp_path}/out")["state_dict"], dict(truth)) == []


@pytest.mark.parametrize("fenced", [True, False])
def test_gradient_buffers_reused_while_copies_are_slow(fenced: bool, tmp_path: Path, strict: None) -> None:
    """Persistent gradient buffers, zeroed in place; the link is slower than training."""
    model = mlp()
    optimizer = adamw(model)
    engine = Engine(
        CheckpointConfig(mode="multi_step", window_steps=4, block_bytes=4096, audit="full"), link=EmulatedLink(5e6)
    )
    engine.attach([optimizer], dict(model.named_parameters()), step=0, fenced=fenced)
    engine.expect(6)
    truth: Any = None
    for step in range(1, 9):
        engine.step_begin()
        engine.before_zero_grad()
        optimizer.zero_grad(set_to_none=False)
        engine.before_backward()
        model(torch.full((4, 8), float(step))).pow(2).mean().backward()
        optimizer.step()
        engine.step_end(step)
        if step == 6:
            truth = copy.deepcopy({"state_dict": model.state_dict(), "o": optimizer.state_dict()})
            engine.save(f"{tmp_path}/out", {"state_dict": model.state_dict(), "o": optimizer.state_dict()}, step=6)
            engine.settle()
    assert engine.close(60) == []
    assert differences(load_state(f"{tmp_path}/out"), truth) == []


def test_owed_bytes_below_one_gradient_only_slow_training_down(tmp_path: Path, strict: None) -> None:
    model = mlp()
    loop = Loop(model, [adamw(model)], owed_bytes=1).run(tmp_path).finish(tmp_path)
    assert all(record.window_steps == 4 and record.gradient_bytes > 0 for record in loop.engine.records)
    largest = sum(p.nbytes for p in model.parameters())
    assert loop.engine.memory["gradients_peak"] <= 2 * largest + 64 * 1024


# -- tensors -----------------------------------------------------------------------------------------------------------


class Zoo(nn.Module):
    """Parameters and large buffers of unusual types."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.wave = nn.Parameter(torch.randn(8, 300, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn(300, 8, dtype=torch.float64))
        large = torch.randn(1 << 20)
        self.register_buffer("eight", large.to(torch.float8_e4m3fn))
        self.register_buffer("eight_big", large.repeat(2).to(torch.float8_e5m2))
        self.register_buffer("wide_buffer", large[: 1 << 17].double())
        self.register_buffer("flags", large > 0)
        self.register_buffer("waves", torch.randn(1 << 17, dtype=torch.complex64))
        self.register_buffer("small", torch.tensor(3, dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.wave).abs().double() @ self.wide


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "RMSprop", "Adagrad"])
def test_complex_and_wide_parameters_and_every_kind_of_buffer(optimizer: str, tmp_path: Path, strict: None) -> None:
    model = Zoo()
    loop = Loop(model, [getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)])
    loop.run(tmp_path).finish(tmp_path)


def test_two_optimizers_that_share_a_parameter(tmp_path: Path, quiet: None) -> None:
    model = mlp()
    params = list(model.parameters())
    loop = Loop(model, [torch.optim.AdamW(params[:4], lr=1e-2), torch.optim.SGD(params[2:], lr=1e-2, momentum=0.9)])
    loop.run(tmp_path).finish(tmp_path)


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_parameters_on_overlapping_storage(optimizer: str, tmp_path: Path, quiet: None) -> None:
    torch.manual_seed(0)
    memory = torch.randn(2000)

    class Overlap(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(memory[:1500])
            self.b = nn.Parameter(memory[1000:])

        def forward(self, x: Tensor) -> Tensor:
            return x.sum() * self.a.sum() + self.b.pow(2)

    model = Overlap()
    loop = Loop(model, [getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)])
    loop.run(tmp_path).finish(tmp_path)


def test_a_flat_buffer_seen_as_many_parameters(tmp_path: Path, strict: None) -> None:
    torch.manual_seed(0)
    memory = torch.randn(3000)

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList([nn.Parameter(memory[i * 1000 : (i + 1) * 1000]) for i in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            return sum((x.mean() * p.pow(2)).sum() for p in self.parts)  # type: ignore[return-value]

    model = Flat()
    loop = Loop(model, [adamw(model)]).run(tmp_path).finish(tmp_path)
    assert all(record.window_steps == 4 and record.gradient_bytes for record in loop.engine.records)


# -- optimizers --------------------------------------------------------------------------------------------------------


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


# -- steps -------------------------------------------------------------------------------------------------------------


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


# -- saves -------------------------------------------------------------------------------------------------------------


def test_a_save_in_the_middle_of_a_round(tmp_path: Path, strict: None) -> None:
    model = mlp()
    loop = Loop(model, [adamw(model)])
    for number in (4, 5, 7):
        loop.inside[number] = lambda number=number: loop.save(tmp_path, f"inside-{number}")
    loop.run(tmp_path).finish(tmp_path)
    assert len(loop.truth) == 5


def test_two_saves_at_one_boundary_with_different_states(tmp_path: Path, strict: None) -> None:
    model = mlp()
    optimizer = adamw(model)
    loop = Loop(model, [optimizer]).run(tmp_path, steps=6, saves=(6,))
    loop.save(tmp_path, "again")
    loop.engine.save(f"{tmp_path}/weights", {"state_dict": model.state_dict()}, step=6)
    loop.engine.save(f"{tmp_path}/other", {"state_dict": model.state_dict(), "note": torch.ones(3)}, step=6)
    averaged = {name: value * 0.5 for name, value in model.state_dict().items()}
    kept = copy.deepcopy(model.state_dict())
    model.load_state_dict(averaged)
    loop.save(tmp_path, "averaged")
    model.load_state_dict(kept)
    loop.run(tmp_path).finish(tmp_path)
    assert differences(load_state(f"{tmp_path}/weights"), {"state_dict": dict(kept)}) == [] or dict(
        load_state(f"{tmp_path}/weights")
    ).keys() == {"state_dict"}
    assert list(load_state(f"{tmp_path}/other")) == ["state_dict", "note"]
    weights = load(f"{tmp_path}/weights")
    assert not [name for name in weights.tensors if name.startswith("optim.")]


def test_swapped_averages_through_data_between_two_saves(tmp_path: Path, strict: None) -> None:
    model = mlp()
    loop = Loop(model, [adamw(model)]).run(tmp_path, steps=6, saves=(6,))
    kept = [p.data for p in model.parameters()]
    for p in model.parameters():
        p.data = p.data * 0.5
    loop.save(tmp_path, "averaged")
    for p, old in zip(model.parameters(), kept, strict=True):
        p.data = old
    loop.run(tmp_path).finish(tmp_path)


def test_a_save_nobody_expected(tmp_path: Path, strict: None) -> None:
    model = mlp()
    loop = Loop(model, [adamw(model)])
    for step in range(1, 9):
        loop.round()
        if step in (1, 3, 8):
            loop.save(tmp_path)
    loop.finish(tmp_path)
    assert [record.window_steps for record in loop.engine.records] == [0, 0, 0]


def test_a_plan_that_changes_while_a_window_is_open(tmp_path: Path, strict: None) -> None:
    model = mlp()
    loop = Loop(model, [adamw(model)])
    engine = loop.engine
    engine.expect(6)
    for _ in range(4):
        loop.round()
    engine.expect(8)
    for _ in range(3):
        loop.round()
    engine.expect(None)
    engine.expect(9)
    loop.round()
    loop.round()
    loop.save(tmp_path)
    engine.expect(9)
    engine.expect(12)
    loop.run(tmp_path, steps=15, saves=(12,)).finish(tmp_path)
    assert len(loop.truth) == 2


def test_weights_only(tmp_path: Path, strict: None) -> None:
    model = mlp()
    optimizer = adamw(model)
    engine = Engine(CheckpointConfig(audit="full"))
    engine.attach([optimizer], dict(model.named_parameters()), step=0, weights_only=True)
    engine.expect(4)
    for step in range(1, 7):
        engine.step_begin()
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        engine.step_end(step)
        if step == 4:
            truth = copy.deepcopy(dict(model.state_dict()))
            engine.save(f"{tmp_path}/out", {"state_dict": model.state_dict()}, step=4)
    assert engine.close(60) == []
    assert differences(dict(load_state(f"{tmp_path}/out")["state_dict"]), truth) == []
    assert [record.mode for record in engine.records] == ["one_step"]


ENDS: Mapping[str, Callable[[Engine], object]] = {
    "cancel": Engine.cancel,
    "settle": Engine.settle,
    "pause": Engine.pause,
    "wait": lambda engine: engine.wait(60),
}


@pytest.mark.parametrize("act", list(ENDS))
@pytest.mark.parametrize("moment", ["before", "inside", "after"])
def test_cancel_settle_and_pause_at_every_point(act: str, moment: str, tmp_path: Path, strict: None) -> None:
    for at in range(1, 9):
        model = mlp()
        loop = Loop(model, [adamw(model)])
        getattr(loop, moment)[at] = lambda loop=loop: ENDS[act](loop.engine)
        folder = tmp_path / str(at)
        loop.run(folder).finish(folder)
        assert len(loop.engine.records) == 2


@pytest.mark.parametrize("moment", ["before", "inside", "after"])
def test_detach_and_close_at_every_point(moment: str, tmp_path: Path, strict: None) -> None:
    """What was saved before is kept; training goes on without the engine."""
    for at in range(1, 10):
        model = mlp()
        loop = Loop(model, [adamw(model)])
        getattr(loop, moment)[at] = loop.engine.detach if at % 2 else lambda loop=loop: loop.engine.close(60)
        loop.engine.expect(6)
        folder = tmp_path / str(at)
        while loop.step < 9:
            loop.round()
            if loop.step == 6 and at > 6:
                loop.save(folder)
        loop.finish(folder)
        assert len(loop.engine.records) == (at > 6)


# -- the whole engine --------------------------------------------------------------------------------------------------


def test_the_engine_does_not_change_training(tmp_path: Path) -> None:
    ends = []
    for attached in (False, True):
        run = Run(Recipe(options={"weight_decay": 0.1}, clip="norm"))
        engine = Engine(CheckpointConfig(mode="multi_step", window_steps=4, block_bytes=4096))
        if attached:
            engine.attach(run.optimizers, run.tensors(), step=0, fenced=True)
        engine.expect(5)
        while run.step < 16:
            run.one_round(engine)
            if attached and run.step % 5 == 0:
                engine.save(f"{tmp_path}/{run.step}", run.state(), step=run.step)
                engine.expect(run.step + 5)
        engine.close(60)
        ends.append((copy.deepcopy(run.state()), rng_state()))
    assert differences(ends[0][0], ends[1][0]) == []
    assert same_streams(ends[0][1], ends[1][1])


def test_a_large_frozen_base_is_copied_once_per_arena(tmp_path: Path, strict: None) -> None:
    torch.manual_seed(0)
    model = mlp()
    model.register_parameter("base", nn.Parameter(torch.randn(1 << 20), requires_grad=False))
    loop = Loop(model, [adamw(model)], window_steps=2)
    copied = []
    for target in range(4, 34, 3):
        loop.run(tmp_path, steps=target, saves=(target,))
        loop.round()
        loop.engine.wait(60)
        assert loop.engine._link is not None
        copied.append(loop.engine._link.bytes_copied)
    loop.finish(tmp_path)
    base = model.base.nbytes  # type: ignore[union-attr]
    assert copied[-1] < 2 * base + 11 * 3 * sum(p.nbytes for p in model.parameters() if p.requires_grad) * 2
    assert copied[-1] - copied[2] < base


def test_memory_stays_bounded_over_many_saves_and_threads_end(tmp_path: Path, strict: None) -> None:
    def ours() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("ckpt-")}

    before = ours()
    model = mlp()
    loop = Loop(model, [adamw(model)], audit="sample", window_steps=3)
    seen = []
    for target in range(5, 5 + 4 * 30, 4):
        loop.run(tmp_path, steps=target, saves=(target,))
        loop.round()
        loop.engine.wait(60)
        seen.append(loop.engine.memory)
        loop.truth.clear()
    loop.finish(tmp_path)
    assert len(loop.engine.records) == 30
    assert all(record.window_steps == 3 for record in loop.engine.records[2:])
    image = max(record.image_bytes for record in loop.engine.records)
    assert max(m["images_peak"] for m in seen) <= 2 * (image + 4096)
    gradients = sum(p.nbytes for p in model.parameters())
    assert seen[-1]["gradients_peak"] <= 2.2 * gradients
    assert seen[-1]["extras_peak"] == seen[0]["extras_peak"]
    assert ours() - before == set()
