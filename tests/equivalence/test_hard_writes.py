"""Writes from outside the optimizer, and gradients that are not what they seem."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckpt_engine.capture.emulated_link import EmulatedLink
from ckpt_engine.config import CheckpointConfig
from ckpt_engine.engine import Engine
from ckpt_engine.restore.reader import load
from tests.equivalence.hard_loop import Loop, adamw, mlp
from tests.equivalence.harness import differences, load_state


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
