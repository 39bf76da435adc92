"""What Lightning's own checkpoint does not hold is collected at the boundary and put back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_ckpt import OverlappedCheckpoint
from lightning_ckpt.carried import KEY, collect, mid_accumulation, moment, restore_gradients
from tests.equivalence.harness import differences
from tests.lightning_runs import BATCHES, Tiny, fit, state_of


class Averages(Tiny):
    """Logs values that are reduced over the epoch in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[dict[str, float]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        for reduce in ("mean", "sum", "min", "max"):
            self.log(reduce, loss.detach(), on_step=False, on_epoch=True, reduce_fx=reduce, batch_size=batch_idx + 1)
        return loss

    def on_train_epoch_end(self) -> None:
        metrics = self.trainer.callback_metrics
        self.epochs.append({name: float(metrics[name]) for name in ("mean", "sum", "min", "max")})


class Look(Callback):
    """Collects at each hook of a micro-batch."""

    def __init__(self) -> None:
        self.waiting: list[bool] = []
        self.gradients: list[int] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.waiting.append(mid_accumulation(trainer))
        self.gradients.append(len(collect(trainer)["gradients"]))


def keep_all(folder: Path, **options: Any) -> OverlappedCheckpoint:
    return OverlappedCheckpoint(
        dirpath=folder, every_n_train_steps=1, save_top_k=-1, filename="{step}", **{"capture": "sync"} | options
    )


def test_a_checkpoint_says_whether_it_lies_within_an_epoch_or_between_two(tmp_path: Path) -> None:
    fit(keep_all(tmp_path), max_epochs=2)
    moments = [state_of(tmp_path / f"step={step}.ckpt")[KEY]["moment"] for step in range(1, 2 * BATCHES + 1)]
    assert moments == (["batch"] * (BATCHES - 1) + ["epoch"]) * 2


def test_before_training_the_moment_is_that_between_two_epochs() -> None:
    run = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    assert moment(run) == "epoch"


@pytest.mark.parametrize("step", [1, 4, BATCHES, BATCHES + 2])
def test_means_sums_and_extremes_of_the_epoch_under_way_are_those_of_a_whole_epoch(tmp_path: Path, step: int) -> None:
    whole, _ = fit(keep_all(tmp_path), module=Averages(), max_epochs=2)
    resumed, _ = fit(
        keep_all(tmp_path / "b"), module=Averages(), max_epochs=2, ckpt_path=str(tmp_path / f"step={step}.ckpt")
    )
    assert resumed.epochs == whole.epochs[-len(resumed.epochs) :]
    assert len(resumed.epochs) == (2 if step < BATCHES else 1)


def test_gradients_are_carried_only_while_an_accumulation_is_under_way(tmp_path: Path) -> None:
    look = Look()
    fit(look, max_epochs=1, accumulate_grad_batches=4, enable_checkpointing=False)
    # Of six micro-batches the fourth and the last end in an optimizer step.
    assert look.waiting == [True, True, True, False, True, False]
    assert [count > 0 for count in look.gradients] == look.waiting


def test_accumulated_gradients_are_put_back_as_copies() -> None:
    module = Tiny()
    run = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    run.strategy.connect(module)
    carried = {"net.0.weight": torch.ones(8, 4), "gone": torch.ones(1)}
    restore_gradients(run, carried)
    gradient = module.net[0].weight.grad
    assert gradient is not None
    assert torch.equal(gradient, torch.ones(8, 4))
    gradient.zero_()
    assert carried["net.0.weight"].sum() == 32


def test_metrics_that_callbacks_read_are_there_again(tmp_path: Path) -> None:
    _, run = fit(keep_all(tmp_path), max_epochs=1)
    expected = {name: value.clone() for name, value in run.callback_metrics.items()}

    class First(Callback):
        seen: dict[str, torch.Tensor]

        def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
            self.seen = dict(trainer.callback_metrics)

    first = First()
    fit(keep_all(tmp_path / "b"), first, max_epochs=2, ckpt_path=str(tmp_path / f"step={BATCHES}.ckpt"))
    assert set(expected) >= {"train_loss", "val_loss"}
    assert differences({name: first.seen[name] for name in expected}, expected) == []
