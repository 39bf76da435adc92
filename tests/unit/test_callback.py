"""The callback: its options, what it does when a save fails, and what it leaves behind."""

from __future__ import annotations

import inspect
import json
import os
import threading
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from ckpt_engine.config import CheckpointConfig
from ckpt_engine.errors import ConfigError, SaveFailedError
from ckpt_engine.restore.catalog import is_checkpoint, scan
from lightning_ckpt import OverlappedCheckpoint, OverlappedCheckpointIO
from tests.equivalence.harness import differences
from tests.lightning_runs import BATCHES, Stop, Tiny, final, fit, names, rows, state_of


class InTheWay(Callback):
    """Puts a file where the directory of checkpoints was, for as long as it takes; root is stopped by it too."""

    def __init__(self, folder: Path, at: int, until: int) -> None:
        self.folder, self.at, self.until = folder, at, until
        self.aside = folder.with_name("aside")

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.at:
            trainer.checkpoint_callback.engine.drain()  # type: ignore[union-attr]
            self.folder.rename(self.aside)
            self.folder.write_text("in the way")
        if trainer.global_step == self.until:
            trainer.checkpoint_callback.engine.drain()  # type: ignore[union-attr]
            self.folder.unlink()
            self.aside.rename(self.folder)


def test_all_options_of_model_checkpoint_are_taken_with_their_defaults() -> None:
    theirs = inspect.signature(ModelCheckpoint.__init__).parameters
    ours = inspect.signature(OverlappedCheckpoint.__init__).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert {name: ours[name].default for name in theirs} == {name: p.default for name, p in theirs.items()}


def test_engine_settings_are_keywords_or_one_config() -> None:
    single = OverlappedCheckpoint(capture="multi_step", window_steps=5, on_failure="raise", metrics_path="m.jsonl")
    config = CheckpointConfig(mode="multi_step", window_steps=5, on_failure="raise", metrics_path="m.jsonl")
    assert single.config == config
    assert OverlappedCheckpoint(config=config).config is config
    assert OverlappedCheckpoint().config == CheckpointConfig()


def test_config_and_keywords_together_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"config= and mode, window_steps were both given"):
        OverlappedCheckpoint(capture="sync", window_steps=2, config=CheckpointConfig())


def test_the_word_mode_takes_the_engines_modes_too() -> None:
    callback = OverlappedCheckpoint(mode="multi_step")
    assert (callback.mode, callback.config.mode) == ("min", "multi_step")
    assert OverlappedCheckpoint(monitor="acc", mode="max").mode == "max"


def test_wrong_options_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match="mode"):
        OverlappedCheckpoint(mode="biggest")
    with pytest.raises(ConfigError, match="mode"):
        OverlappedCheckpoint(capture="fast")  # type: ignore[arg-type]
    with pytest.raises(MisconfigurationException, match="mutually exclusive"):
        OverlappedCheckpoint(every_n_train_steps=1, train_time_interval=timedelta(1))


@pytest.mark.parametrize("capture", ["auto", "multi_step", "one_step", "async", "sync"])
def test_training_is_the_same_with_and_without_the_callback(tmp_path: Path, capture: Any) -> None:
    plain = fit(enable_checkpointing=False)
    watched = fit(OverlappedCheckpoint(dirpath=tmp_path, capture=capture, every_n_train_steps=2, save_top_k=-1))
    assert differences(final(*watched), final(*plain)) == []
    assert len(scan(str(tmp_path)).entries) == 3 * BATCHES // 2


def test_the_io_is_installed_for_all_stages(tmp_path: Path) -> None:
    for entry in ("fit", "validate", "test"):
        run = L.Trainer(
            callbacks=[OverlappedCheckpoint(dirpath=tmp_path)],
            max_steps=1,
            logger=False,
            accelerator="cpu",
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        getattr(run, entry)(Tiny(), rows())
        assert isinstance(run.strategy.checkpoint_io, OverlappedCheckpointIO)


def test_without_dirpath_checkpoints_go_where_those_of_model_checkpoint_go(tmp_path: Path) -> None:
    callback = OverlappedCheckpoint()
    fit(callback, default_root_dir=tmp_path, max_epochs=1)
    assert names(tmp_path / "checkpoints") == [f"epoch=0-step={BATCHES}.ckpt"]


def test_a_fast_development_run_saves_nothing(tmp_path: Path) -> None:
    fit(OverlappedCheckpoint(dirpath=tmp_path, save_on_exception=True), fast_dev_run=2)
    assert names(tmp_path) == []


def test_weights_only_leaves_optimizers_and_schedules_out(tmp_path: Path) -> None:
    module, _ = fit(OverlappedCheckpoint(dirpath=tmp_path, save_weights_only=True, filename="w"), max_epochs=1)
    state = state_of(tmp_path / "w.ckpt")
    assert not {"optimizer_states", "lr_schedulers"} & set(state)
    assert differences(dict(state["state_dict"]), dict(module.state_dict())) == []


def test_two_callbacks_save_side_by_side(tmp_path: Path) -> None:
    steps = OverlappedCheckpoint(dirpath=tmp_path / "steps", every_n_train_steps=2, save_top_k=-1, window_steps=2)
    epochs = OverlappedCheckpoint(dirpath=tmp_path / "epochs", every_n_epochs=1, save_top_k=-1)
    with_both = fit(steps, epochs, max_epochs=2)
    assert len(scan(str(tmp_path / "steps")).entries) == BATCHES
    assert len(scan(str(tmp_path / "epochs")).entries) == 2
    assert differences(final(*with_both), final(*fit(enable_checkpointing=False, max_epochs=2))) == []


def test_each_save_leaves_one_record(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    fit(OverlappedCheckpoint(dirpath=tmp_path / "c", every_n_train_steps=3, metrics_path=str(path)), max_steps=9)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in records] == [3, 6, 9]
    assert all(record["ok"] for record in records)


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_failing_save_warns_training_goes_on_and_the_older_checkpoint_stays(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    callback = OverlappedCheckpoint(dirpath=folder, every_n_train_steps=2, capture="async", filename="{step}")
    with pytest.warns(UserWarning, match=r"step=4\.ckpt"):
        _, run = fit(callback, InTheWay(folder, at=3, until=4), max_steps=5)
    assert run.global_step == 5
    assert names(folder) == ["step=2.ckpt"], "the save of step 4 failed: what it would have replaced must stay"
    assert is_checkpoint(str(folder / "step=2.ckpt"))


def test_saves_after_a_failed_one_succeed_again(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    callback = OverlappedCheckpoint(
        dirpath=folder, every_n_train_steps=2, save_top_k=-1, capture="async", filename="{step}"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(callback, InTheWay(folder, at=3, until=4), max_steps=8)
    assert names(folder) == ["step=2.ckpt", "step=6.ckpt", "step=8.ckpt"]


def test_a_failing_save_raises_where_that_was_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    callback = OverlappedCheckpoint(dirpath=folder, every_n_train_steps=2, capture="async", on_failure="raise")
    with pytest.raises(SaveFailedError, match="step 4"):
        fit(callback, InTheWay(folder, at=3, until=99), max_steps=12)
    assert len(names(tmp_path / "aside")) == 1


def test_a_failure_at_the_very_end_is_not_swallowed(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    callback = OverlappedCheckpoint(dirpath=folder, every_n_train_steps=2, capture="async", on_failure="raise")
    with pytest.raises(SaveFailedError, match="step 4"):
        fit(callback, InTheWay(folder, at=3, until=99), max_steps=4)


def test_an_exception_of_the_users_comes_through_and_a_failed_save_is_a_note_on_it(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    callback = OverlappedCheckpoint(dirpath=folder, every_n_train_steps=2, save_on_exception=True)
    with pytest.raises(RuntimeError, match="stopped by the test") as raised:
        fit(callback, InTheWay(folder, at=4, until=99), Stop(5), default_root_dir=tmp_path / "file")
    assert raised.value.__traceback__ is not None
    assert callback.engine is None


def test_an_exception_inside_an_optimizer_step_saves_nothing(tmp_path: Path) -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            if self.state_dict()["param_groups"][0]["lr"] and len(self.steps) == 3:
                raise RuntimeError("inside the step")
            self.steps.append(1)
            return loss

        steps: list[int]

    class WithBroken(Tiny):
        def configure_optimizers(self) -> Any:
            optimizer = Broken(self.parameters(), lr=0.1)
            optimizer.steps = []
            return optimizer

    callback = OverlappedCheckpoint(
        dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}", save_on_exception=True
    )
    with pytest.raises(RuntimeError, match="inside the step") as raised:
        fit(callback, module=WithBroken())
    assert names(tmp_path) == ["step=1.ckpt", "step=2.ckpt", "step=3.ckpt"]
    assert any("middle of an optimizer step" in note for note in raised.value.__notes__)


def test_an_exception_cuts_an_open_window_short_without_a_trace(tmp_path: Path) -> None:
    callback = OverlappedCheckpoint(dirpath=tmp_path, every_n_train_steps=6, capture="multi_step", window_steps=4)
    with pytest.raises(RuntimeError, match="stopped by the test"):
        fit(callback, Stop(4))
    assert names(tmp_path) == []


def test_what_a_dead_process_left_is_swept_when_training_starts(tmp_path: Path) -> None:
    left = tmp_path / ".old.ckpt.incomplete-0123456789abcdef0123456789abcdef"
    left.mkdir()
    owner = {"host": os.uname().nodename, "pid": 2**22 + 5, "boot_id": "of another boot"}
    (left / "owner.json").write_text(json.dumps(owner))
    fit(OverlappedCheckpoint(dirpath=tmp_path, filename="a"), max_steps=1)
    assert "a.ckpt" in names(tmp_path)


def test_callbacks_with_different_options_keep_their_states_apart(tmp_path: Path) -> None:
    first = OverlappedCheckpoint(dirpath=tmp_path / "a", every_n_train_steps=2)
    second = OverlappedCheckpoint(dirpath=tmp_path / "b", every_n_train_steps=3)
    assert first.state_key != second.state_key
    fit(first, second, max_steps=6)
    states = state_of(first.best_model_path)["callbacks"]
    assert {first.state_key, second.state_key} <= set(states)
    assert states[first.state_key]["best_model_path"] == first.best_model_path


class Listens(CSVLogger):
    """Notes which checkpoints are complete whenever it is told of one, and in which thread."""

    def __init__(self, folder: Path, checkpoints: Path) -> None:
        super().__init__(str(folder))
        self.checkpoints = checkpoints
        self.told: list[int] = []
        self.threads: set[str] = set()

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        self.told.append(sum(is_checkpoint(str(path)) for path in self.checkpoints.iterdir()))
        self.threads.add(threading.current_thread().name)


@pytest.mark.parametrize("ends", ["well", "badly"])
def test_loggers_are_told_of_each_checkpoint_once_it_is_durable(tmp_path: Path, ends: str) -> None:
    logger = Listens(tmp_path / "logs", tmp_path / "c")
    keep = OverlappedCheckpoint(dirpath=tmp_path / "c", every_n_train_steps=3, save_top_k=-1)
    if ends == "well":
        fit(keep, logger=logger, max_steps=9)
    else:
        with pytest.raises(RuntimeError, match="stopped by the test"):
            fit(keep, Stop(10), logger=logger)
    assert len(logger.told) == 3
    assert all(complete >= number for number, complete in enumerate(logger.told, 1))
    assert logger.threads == {threading.main_thread().name}
