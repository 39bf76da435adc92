"""Resuming: nothing is lost, nothing is done twice."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint

from lightning_ckpt import OverlappedCheckpoint
from tests.equivalence.harness import differences
from tests.lightning_runs import BATCHES, Tiny, final, fit


class Plateau(Tiny):
    """A scheduler that follows a metric at each epoch's end."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=10.0)
        return [optimizer], [{"scheduler": plateau, "monitor": "val_loss"}]


class Manual(Tiny):
    """Two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net[0].parameters()), torch.optim.SGD(self.net[3].parameters(), lr=0.1)


def keep_all(folder: Path, **options: Any) -> OverlappedCheckpoint:
    return OverlappedCheckpoint(
        dirpath=folder,
        save_top_k=-1,
        filename="{step}",
        **{"every_n_train_steps": 1, "capture": "multi_step", "window_steps": 2} | options,
    )


def resumed_from(tmp_path: Path, step: int, module: type[Tiny], **options: Any) -> tuple[Any, Any]:
    whole = fit(keep_all(tmp_path), module=module(), **options)
    path = str(tmp_path / f"step={step}.ckpt")
    resumed = fit(keep_all(tmp_path / "b"), module=module(), ckpt_path=path, seed=77, **options)
    return whole, resumed


@pytest.mark.parametrize("module", [Tiny, Plateau])
@pytest.mark.parametrize("step", [2, BATCHES, BATCHES + 1])
def test_a_resumed_run_ends_in_the_same_bits(tmp_path: Path, module: type[Tiny], step: int) -> None:
    whole, resumed = resumed_from(tmp_path, step, module)
    assert differences(final(*resumed), final(*whole)) == []


def test_the_scheduler_step_at_an_epochs_end_is_neither_lost_nor_repeated(tmp_path: Path) -> None:
    whole, resumed = resumed_from(tmp_path, BATCHES, Plateau)
    assert whole[1].optimizers[0].param_groups[0]["lr"] < 1e-2, "the schedule does nothing: this shows nothing"
    assert resumed[1].optimizers[0].param_groups[0]["lr"] == whole[1].optimizers[0].param_groups[0]["lr"]


def test_manual_optimization_with_two_optimizers_resumes_exactly(tmp_path: Path) -> None:
    # Each round counts as two global steps.
    whole, resumed = resumed_from(tmp_path, 2 * (BATCHES + 2), Manual)
    assert differences(final(*resumed), final(*whole)) == []


@pytest.mark.parametrize("step", [1, 2, 3])
def test_the_last_small_group_of_an_accumulation_resumes_exactly(tmp_path: Path, step: int) -> None:
    whole, resumed = resumed_from(tmp_path, step, Tiny, accumulate_grad_batches=4)
    assert differences(final(*resumed), final(*whole)) == []


@pytest.mark.parametrize("step", [2, 3, BATCHES, BATCHES + 3])
def test_validation_within_epochs_happens_as_often_as_it_would_have(tmp_path: Path, step: int) -> None:
    whole, resumed = resumed_from(tmp_path, step, Tiny, val_check_interval=0.5)
    assert resumed[0].validations == whole[0].validations - step // 3
    assert differences(final(*resumed), final(*whole)) == []


def test_a_run_resumed_twice_is_still_exact(tmp_path: Path) -> None:
    whole = fit(keep_all(tmp_path / "a"))
    fit(keep_all(tmp_path / "b"), max_steps=2)
    fit(keep_all(tmp_path / "c"), max_steps=4, ckpt_path=str(tmp_path / "b" / "step=2.ckpt"), seed=8)
    last = fit(keep_all(tmp_path / "d"), ckpt_path=str(tmp_path / "c" / "step=4.ckpt"), seed=9)
    assert differences(final(*last), final(*whole)) == []


def test_early_stopping_counts_on(tmp_path: Path) -> None:
    def patience() -> EarlyStopping:
        return EarlyStopping("val_wave", mode="max", patience=2)

    whole = fit(keep_all(tmp_path), patience(), max_epochs=9)
    path = str(tmp_path / f"step={BATCHES + 1}.ckpt")
    resumed = fit(keep_all(tmp_path / "b"), patience(), max_epochs=9, ckpt_path=path)
    assert 2 < whole[1].current_epoch < 9
    assert differences(final(*resumed), final(*whole)) == []


def test_training_can_be_extended_after_it_has_ended(tmp_path: Path) -> None:
    whole = fit(keep_all(tmp_path), max_epochs=3)
    path = str(tmp_path / f"step={2 * BATCHES}.ckpt")
    fit(keep_all(tmp_path / "b"), max_epochs=2)
    resumed = fit(keep_all(tmp_path / "c"), max_epochs=3, ckpt_path=path.replace(str(tmp_path), str(tmp_path / "b")))
    assert differences(final(*resumed), final(*whole)) == []


def test_fitting_on_with_the_same_trainer_saves_on(tmp_path: Path) -> None:
    callback = keep_all(tmp_path)
    module, run = fit(callback, max_epochs=1)
    run.fit_loop.max_epochs = 2
    run.fit(module, run.train_dataloader)
    assert (tmp_path / f"step={2 * BATCHES}.ckpt" / "manifest.json").is_file()


def test_a_vanilla_file_resumes_under_our_callback(tmp_path: Path) -> None:
    plain: Any = {"monitor": "wave", "save_top_k": 2, "every_n_train_steps": BATCHES, "save_last": True}
    fit(ModelCheckpoint(dirpath=tmp_path, **plain), max_epochs=1)
    callback = OverlappedCheckpoint(dirpath=tmp_path, **plain)
    _, run = fit(callback, max_epochs=2, ckpt_path=str(tmp_path / "last.ckpt"), fit_options={"weights_only": False})
    assert run.global_step == 2 * BATCHES
    assert len(callback.best_k_models) == 2, "the ranking of the plain callback was not taken over"
    assert (tmp_path / "last.ckpt").is_dir(), "the file of that name was to be replaced by one of ours"


def test_an_exact_resume_does_not_warn_that_it_is_inexact(tmp_path: Path) -> None:
    fit(keep_all(tmp_path), max_steps=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(keep_all(tmp_path / "b"), max_steps=3, ckpt_path=str(tmp_path / "step=2.ckpt"))
    assert not [str(w.message) for w in caught if "not resumable" in str(w.message)]


class Breaks(Tiny):
    """Raises in the training step of one batch, or after it was trained."""

    def __init__(self, at: int = -1, hook: str = "") -> None:
        super().__init__()
        self.at, self.hook = at, hook

    def _maybe_raise(self, hook: str) -> None:
        if hook == self.hook and self.trainer.fit_loop.epoch_loop.total_batch_idx == self.at:
            raise RuntimeError("broken by the test")

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self._maybe_raise("training_step")
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self._maybe_raise("on_train_batch_end")


@pytest.mark.parametrize("hook", ["training_step", "on_train_batch_end"])
@pytest.mark.parametrize("at", [2, BATCHES + 1])
def test_a_checkpoint_of_an_exception_repeats_no_batch_and_leaves_none_out(tmp_path: Path, at: int, hook: str) -> None:
    L.seed_everything(1, verbose=False)
    whole = fit(keep_all(tmp_path / "a"), module=Breaks())
    L.seed_everything(1, verbose=False)
    keep = OverlappedCheckpoint(dirpath=tmp_path / "b", every_n_train_steps=1000, save_on_exception=True)
    with pytest.raises(RuntimeError, match="broken by the test"):
        fit(keep, module=Breaks(at, hook))
    (left,) = (tmp_path / "b").iterdir()
    resumed = fit(keep_all(tmp_path / "d"), module=Breaks(), ckpt_path=str(left), seed=7)
    assert resumed[0].ids == whole[0].ids[-len(resumed[0].ids) :]
    assert differences(final(*resumed), final(*whole)) == []
    # What such a run saves is as good as any.
    path = str(tmp_path / "d" / f"step={at + 3}.ckpt")
    second = fit(keep_all(tmp_path / "e"), module=Breaks(), ckpt_path=path, seed=8)
    assert differences(final(*second), final(*whole)) == []


class SaveInHook(Callback):
    """What a user's own callback may do."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("step", [3, BATCHES + 2])
def test_a_checkpoint_saved_by_hand_in_a_hook_holds_the_position_too(tmp_path: Path, step: int) -> None:
    path = tmp_path / "by-hand.ckpt"
    whole = fit(keep_all(tmp_path / "a"), SaveInHook(path, step))
    resumed = fit(keep_all(tmp_path / "b"), ckpt_path=str(path), seed=7)
    assert resumed[0].ids == whole[0].ids[-len(resumed[0].ids) :]
    assert differences(final(*resumed), final(*whole)) == []


class Skips(Tiny):
    """Ends each epoch early, as the return value of a hook."""

    def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> int | None:
        return -1 if batch_idx == 4 else None


@pytest.mark.parametrize("module", [Tiny, Skips])
@pytest.mark.parametrize("step", [3, 6, 8])
def test_the_step_of_loggers_goes_on_where_it_was(tmp_path: Path, module: type[Tiny], step: int) -> None:
    whole, resumed = resumed_from(tmp_path, step, module, max_epochs=-1, max_steps=10)
    steps = [run.fit_loop.epoch_loop._batches_that_stepped for _, run in (whole, resumed)]
    assert steps[0] == steps[1]
    assert differences(final(*resumed), final(*whole)) == []


class Journal(Callback):
    """Each hook with every counter that Lightning shows at that moment."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def note(self, what: str, trainer: L.Trainer) -> None:
        loop = trainer.fit_loop.epoch_loop
        counters = (trainer.global_step, trainer.current_epoch, loop.batch_idx, loop._batches_that_stepped)
        self.events.append((what, *counters, trainer.is_last_batch))

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.note("epoch start", trainer)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.note("batch start", trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.note("batch end", trainer)

    def on_validation_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.note("validation start", trainer)

    def on_validation_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.note("validation batch", trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.note("epoch end", trainer)

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.note("train end", trainer)


@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs": 3},
        {"max_epochs": 3, "max_steps": 16},
        {"max_epochs": -1, "max_steps": 16},
        {"max_epochs": -1, "max_steps": 16, "validate": False},
        {"max_epochs": -1, "max_steps": 16, "val_check_interval": 2},
        {"max_epochs": -1, "max_steps": 16, "val_check_interval": 4, "check_val_every_n_epoch": None},
        {"max_epochs": 3, "check_val_every_n_epoch": 2},
        {"max_epochs": -1, "max_steps": 5, "accumulate_grad_batches": 4, "val_check_interval": 2},
    ],
    ids=str,
)
def test_from_any_step_the_hooks_and_counters_are_those_of_the_whole_run(tmp_path: Path, options: Any) -> None:
    journal = Journal()
    _, run = fit(keep_all(tmp_path / "a"), journal, **options)
    for step in range(1, run.global_step):
        again = Journal()
        idle = OverlappedCheckpoint(dirpath=tmp_path / "b", every_n_train_steps=1000)
        fit(idle, again, ckpt_path=str(tmp_path / "a" / f"step={step}.ckpt"), seed=7, **options)
        assert again.events == journal.events[-len(again.events) :], f"resumed from step {step}"
        assert again.events[0][:2] in (("epoch start", step), ("batch start", step))
