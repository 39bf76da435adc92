from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_engine.config import CheckpointConfig
from ckpt_engine.engine import Engine
from ckpt_engine.errors import ConfigError
from ckpt_engine.restore.reader import load


class Training:
    """A small model and its engine."""

    def __init__(self, *, attach: bool = True, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(20, 30)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        config = {"mode": "multi_step", "window_steps": 3, "block_bytes": 4096, **options}
        self.engine = Engine(CheckpointConfig(**config))
        if attach:
            self.attach()
        self.step = 0

    def attach(self) -> None:
        self.engine.attach([self.optimizer], dict(self.model.named_parameters()), step=0)

    def state(self) -> dict[str, Any]:
        return {"state_dict": self.model.state_dict(), "optimizer_states": [self.optimizer.state_dict()]}

    def round(self) -> None:
        self.engine.step_begin()
        self.engine.step_begin()
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 20) * self.step).pow(2).sum().backward()
        self.optimizer.step()
        self.step += 1
        self.engine.step_end(self.step)

    def to(self, step: int) -> Training:
        while self.step < step:
            self.round()
        return self


def test_an_expected_save_lands_on_its_step_after_a_window(tmp_path: Path) -> None:
    run = Training()
    run.engine.expect(6)
    run.to(4)
    assert run.engine.window is not None
    run.to(6)
    truth = copy.deepcopy(dict(run.model.state_dict()))
    handle = run.engine.save(f"{tmp_path}/6", run.state(), step=6, meta={"epoch": 1})
    assert not handle.done
    run.round()
    record = handle.wait(20)
    assert (record.window_steps, record.mode, record.step) == (3, "multi_step", 6)
    loaded = load(f"{tmp_path}/6")
    assert loaded.manifest.window["replayed_updates"] == 2
    assert all(torch.equal(loaded.state["state_dict"][name], truth[name]) for name in truth)  # type: ignore[index]
    assert run.engine.close(20) == []


def test_no_window_opens_before_it_must_or_after_it_was_withdrawn() -> None:
    run = Training()
    run.engine.expect(6)
    run.to(3)
    assert run.engine.window is None
    run.to(4)
    assert run.engine.window is not None
    run.engine.expect(None)
    assert run.engine.window is None
    run.to(6)
    assert run.engine.window is None


def test_a_window_whose_save_never_came_is_dropped() -> None:
    run = Training()
    run.engine.expect(4)
    run.to(4)
    assert run.engine.window is not None
    run.round()
    assert run.engine.window is None
    assert run.engine.close(20) == []
    assert run.engine.records == []


def test_an_engine_is_attached_once_at_a_time() -> None:
    run = Training()
    with pytest.raises(ConfigError, match="call detach"):
        run.attach()
    run.engine.detach()
    run.attach()


def test_an_engine_without_a_model_copies_directly(tmp_path: Path) -> None:
    run = Training(attach=False)
    run.to(3)
    record = run.engine.save(f"{tmp_path}/a", run.state(), step=3).wait(20)
    assert (record.window_steps, record.mode) == (0, "async")
    with run.engine.muted():
        run.optimizer.step()
    assert not run.engine.updating
    assert run.engine.close(20) == []


def test_the_recorded_step_may_differ_from_the_round(tmp_path: Path) -> None:
    run = Training().to(3)
    run.engine.save(f"{tmp_path}/a", run.state(), step=3, recorded_step=300).wait(20)
    run.engine.save(f"{tmp_path}/b", run.state(), step=None).wait(20)
    assert [load(f"{tmp_path}/{name}").manifest.step for name in "ab"] == [300, 0]


def test_sync_is_durable_when_save_returns(tmp_path: Path) -> None:
    run = Training(mode="sync", window_steps=None).to(3)
    assert run.engine.save(f"{tmp_path}/a", run.state(), step=3).done


def test_actions_follow_the_saves_before_them(tmp_path: Path) -> None:
    run = Training()
    run.engine.expect(4)
    run.to(4)
    run.engine.save(f"{tmp_path}/a", run.state(), step=4)
    seen: list[bool] = []
    run.engine.after_saves(lambda: seen.append((tmp_path / "a").is_dir()))
    assert seen == []
    run.engine.settle()
    run.engine.drain(20)
    assert seen == [True]


def test_metrics_are_appended_one_line_a_save(tmp_path: Path) -> None:
    run = Training(metrics_path=str(tmp_path / "metrics.jsonl")).to(3)
    for name in "ab":
        run.engine.save(f"{tmp_path}/{name}", run.state(), step=3).wait(20)
    run.engine.close(20)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 3]


def test_the_timeline_knows_the_parts_of_a_window(tmp_path: Path) -> None:
    run = Training()
    run.engine.expect(5)
    run.to(5)
    run.engine.save(f"{tmp_path}/a", run.state(), step=5)
    run.round()
    run.engine.close(20)
    lanes = {span.lane for span in run.engine.timeline.spans}
    assert {"forward+backward", "update", "state copies", "gradient copies", "replay", "persist"} <= lanes


def test_updating_is_true_only_inside_an_update() -> None:
    run = Training()
    seen: list[bool] = []
    run.optimizer.register_step_post_hook(lambda *_: seen.append(run.engine.updating))
    run.round()
    assert not run.engine.updating


def test_memory_is_counted_and_freed(tmp_path: Path) -> None:
    run = Training()
    run.engine.expect(5)
    run.to(5)
    run.engine.save(f"{tmp_path}/a", run.state(), step=5)
    run.round()
    memory = run.engine.memory
    assert memory["images_peak"] >= memory["images"] > 0
    assert memory["gradients_peak"] > 0
    run.engine.close(20)
    assert run.engine.memory["images"] == 0


def test_calls_on_an_engine_that_watches_nothing_do_no_harm() -> None:
    engine = Engine()
    engine.expect(3)
    engine.step_begin()
    engine.before_zero_grad()
    engine.before_backward()
    engine.step_end(1)
    engine.pause()
    engine.resume()
    engine.settle()
    engine.cancel()
    engine.detach()
    assert engine.wait(5) == []
    assert engine.close(5) == []
    assert engine.window is None
