"""Saves at odd moments, and what the engine must not do to training."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from ckpt_engine.capture.rng import rng_state, same_streams
from ckpt_engine.config import CheckpointConfig
from ckpt_engine.engine import Engine
from ckpt_engine.restore.reader import load
from tests.equivalence.hard_loop import Loop, adamw, mlp
from tests.equivalence.harness import Recipe, Run, differences, load_state


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
