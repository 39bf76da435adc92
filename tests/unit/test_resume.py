"""Resuming: nothing is lost, nothing is done twice."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

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
