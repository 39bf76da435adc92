"""Negative controls: leave out one part of the algorithm and the comparison must notice."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.capture import gradients, shadow
from ckpt_engine.capture.shadow import LogEntry, ShadowOptimizer
from ckpt_engine.config import CheckpointConfig
from ckpt_engine.engine import Engine
from ckpt_engine.opener import Opener
from tests.equivalence.harness import Recipe, differences, load_state, run_and_save

CONFIG = CheckpointConfig(mode="multi_step", window_steps=4, block_bytes=4096, audit="off")
RECIPE = Recipe(options={"weight_decay": 0.1}, clip="norm")


def _train(
    folder: Path, config: CheckpointConfig = CONFIG, on_engine: Callable[[Engine], None] | None = None
) -> dict[int, dict[str, Any]]:
    """Save step 9 from a window whose full first comparison, which would repair what differs, is switched off."""
    init = Opener.__init__

    def verified(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.verified = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Opener, "__init__", verified)
        _, truth, _ = run_and_save(RECIPE, str(folder), config=config, steps=12, saves=(9,), on_engine=on_engine)
    return truth


def _wrong(folder: Path) -> list[str]:
    truth = _train(folder)
    return differences(load_state(f"{folder}/step-9"), truth[9])


def test_the_control_itself_is_equal(tmp_path: Path) -> None:
    assert _wrong(tmp_path) == []


def test_without_replay_the_checkpoint_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_engine.watch.end_rehearsal", lambda *_, **__: _Passed())
    monkeypatch.setattr(ShadowOptimizer, "replay", lambda self, entry: None)
    assert _wrong(tmp_path) != []


def test_with_a_stale_learning_rate_the_checkpoint_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = ShadowOptimizer.replay

    def stale(self: ShadowOptimizer, entry: LogEntry) -> None:
        for group in entry.hyper:
            group["lr"] = group["lr"] * 1.01
        original(self, entry)

    monkeypatch.setattr("ckpt_engine.watch.end_rehearsal", lambda *_, **__: _Passed())
    monkeypatch.setattr(ShadowOptimizer, "replay", stale)
    assert _wrong(tmp_path) != []


def test_with_unclipped_gradients_the_checkpoint_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = gradients.GradientLog._stage

    def unclipped(self: Any, entry: LogEntry, blocks: Any) -> Any:
        copies, buffers = original(self, entry, blocks)
        scaled = [shadow_copy.__class__(shadow_copy.dst, shadow_copy.src * 1.5) for shadow_copy in copies]
        return scaled, buffers

    monkeypatch.setattr(gradients.GradientLog, "_stage", unclipped)
    assert _wrong(tmp_path) != []


def test_a_wrong_replay_never_commits_when_audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_engine.watch.end_rehearsal", lambda *_, **__: _Passed())
    monkeypatch.setattr(ShadowOptimizer, "replay", lambda self, entry: None)
    config = CheckpointConfig(mode="multi_step", window_steps=4, block_bytes=4096, audit="full")
    failures: list[Exception] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        # Reported at a later step, or by wait() when the run is too short for that.
        _train(tmp_path, config, on_engine=lambda engine: failures.extend(engine.wait()))
    reports = [str(failure) for failure in failures] + [str(warning.message) for warning in seen]
    assert [report for report in reports if "differs from the live state" in report] != []
    assert list(tmp_path.iterdir()) == []


def test_the_first_window_repairs_a_replay_that_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_engine.watch.end_rehearsal", lambda *_, **__: _Passed())
    monkeypatch.setattr(ShadowOptimizer, "replay", lambda self, entry: None)
    config = CheckpointConfig(mode="multi_step", window_steps=4, block_bytes=4096)
    with pytest.warns(UserWarning, match="copied directly"):
        _, truth, _ = run_and_save(RECIPE, str(tmp_path), config=config, steps=12, saves=(9,))
    assert differences(load_state(f"{tmp_path}/step-9"), truth[9]) == []


def test_the_rehearsal_finds_a_wrong_replay_before_any_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow.ShadowOptimizer, "replay", lambda self, entry: None)
    with pytest.warns(UserWarning, match="AdamW is checkpointed by copying its state"):
        _, truth, engine = run_and_save(RECIPE, str(tmp_path), config=CONFIG, steps=12, saves=(9,))
    assert differences(load_state(f"{tmp_path}/step-9"), truth[9]) == []
    assert engine.records[0].gradient_bytes == 0


class _Passed:
    passed = True
    max_error = 0.0
