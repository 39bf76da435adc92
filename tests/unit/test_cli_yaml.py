"""LightningCLI: the callback from a YAML file, and its help."""

from __future__ import annotations

import contextlib
import io
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI

from ckpt_engine.config import CheckpointConfig
from lightning_ckpt import OverlappedCheckpoint
from tests.lightning_runs import QUIET, Tiny, names, rows


class WithData(Tiny):
    def train_dataloader(self) -> Any:
        return rows()


def write(folder: Path, init_args: dict[str, Any], **run: Any) -> str:
    callbacks = [{"class_path": "lightning_ckpt.OverlappedCheckpoint", "init_args": init_args}]
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"trainer": {**QUIET, **run, "callbacks": callbacks}, "model": {"width": 6}}))
    return str(path)


def callback_of(cli: LightningCLI) -> OverlappedCheckpoint:
    callback = cli.trainer.checkpoint_callback
    assert isinstance(callback, OverlappedCheckpoint)
    return callback


def test_a_yaml_file_trains_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = {
        "dirpath": str(tmp_path / "c"),
        "every_n_train_steps": 2,
        "save_top_k": -1,
        "capture": "multi_step",
        "window_steps": 2,
        "filename": "{step}",
    }
    cli = LightningCLI(
        WithData,
        args=["fit", "--config", write(tmp_path, options, max_steps=4, default_root_dir=str(tmp_path / "root"))],
        seed_everything_default=1,
    )
    assert cli.trainer.global_step == 4
    assert names(tmp_path / "c") == ["step=2.ckpt", "step=4.ckpt"]
    assert callback_of(cli).config == CheckpointConfig(mode="multi_step", window_steps=2)


@pytest.mark.parametrize("last", [True, False, "link", None])
def test_options_of_every_type_come_through(tmp_path: Path, last: Any) -> None:
    options = {
        "dirpath": str(tmp_path),
        "save_last": last,
        "monitor": "val_loss",
        "mode": "max",
        "train_time_interval": "0:00:30",
        "on_failure": "raise",
        "save_on_sigterm": False,
    }
    callback = callback_of(LightningCLI(Tiny, args=["--config", write(tmp_path, options)], run=False))
    assert callback.save_last == last
    assert callback.mode == "max"
    assert callback._train_time_interval == timedelta(seconds=30)
    assert callback.config.on_failure == "raise"
    assert not callback.save_on_sigterm


def test_the_whole_config_can_be_given_as_a_mapping(tmp_path: Path) -> None:
    options = {"config": {"mode": "one_step", "max_images": 3, "audit": "full"}}
    callback = callback_of(LightningCLI(Tiny, args=["--config", write(tmp_path, options)], run=False))
    assert callback.config == CheckpointConfig(mode="one_step", max_images=3, audit="full")


def test_a_wrong_option_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        LightningCLI(Tiny, args=["--config", write(tmp_path, {"capture": "fast"})], run=False)
    assert "capture" in capsys.readouterr().err


def test_help_shows_each_option_with_a_sentence() -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
        LightningCLI(Tiny, args=["fit", "--trainer.callbacks.help=lightning_ckpt.OverlappedCheckpoint"])
    text = " ".join(out.getvalue().split())
    for option, sentence in {
        "dirpath": "Directory or fsspec URL for checkpoints",
        "save_top_k": "How many of the best to keep; -1 keeps all, 0 saves none.",
        "every_n_train_steps": "Save every n optimizer steps.",
        "capture": "How state is captured",
        "window_steps": "A fixed number of steps for a window",
        "save_on_sigterm": "Save when the process is asked to end (SIGTERM).",
        "config": "All engine settings at once",
    }.items():
        assert option in text
        assert sentence in text
    assert "'auto', 'multi_step', 'one_step', 'async', 'sync'" in text
