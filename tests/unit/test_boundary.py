"""The order of Lightning's events that the boundary between batches relies on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_ckpt import OverlappedCheckpoint
from lightning_ckpt.boundary import Boundary
from tests.lightning_runs import Stop, Tiny, fit, rows


class Journal(Callback):
    """Writes down what happens, in order; installs a boundary of its own."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.boundary: Boundary | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.boundary is None:
            self.boundary = Boundary(
                trainer,
                between=lambda: self.note("between"),
                before_epoch=lambda: self.note("before epoch"),
                before_first=lambda fetcher: self.note("first"),
                before_end=lambda: self.note("before end"),
            )

    def note(self, event: str) -> None:
        self.events.append(event)

    def on_train_epoch_start(self, *_: Any) -> None:
        self.note("epoch start")

    def on_train_batch_start(self, *_: Any) -> None:
        self.note("batch start")

    def on_train_batch_end(self, *_: Any) -> None:
        self.note("batch end")

    def on_validation_start(self, *_: Any) -> None:
        self.note("validation start")

    def on_validation_end(self, *_: Any) -> None:
        self.note("validation end")

    def on_train_epoch_end(self, *_: Any) -> None:
        self.note("epoch end")

    def on_train_end(self, *_: Any) -> None:
        self.note("train end")


class Telling(Tiny):
    """The module's own hooks and its scheduler write into the same journal."""

    def __init__(self, journal: Journal, monitor: str) -> None:
        super().__init__()
        self.journal, self.monitor = journal, monitor

    def on_train_batch_end(self, *_: Any) -> None:
        self.journal.note("module batch end")

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.journal.note("scheduler")
        super().lr_scheduler_step(scheduler, metric)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        interval = "step" if self.monitor == "train_loss" else "epoch"
        return [optimizer], [{"scheduler": plateau, "monitor": self.monitor, "interval": interval}]


def journal_of(monitor: str, **options: Any) -> list[str]:
    journal = Journal()
    fit(journal, module=Telling(journal, monitor), enable_checkpointing=False, **options)
    return journal.events


def test_between_comes_after_validation_schedulers_and_the_modules_hook_and_before_the_next_batch() -> None:
    events = journal_of("train_loss", max_epochs=1, limit_train_batches=2, val_check_interval=1)
    assert events == [
        "before epoch",
        "epoch start",
        "first",
        "batch start",
        "batch end",
        "module batch end",
        "validation start",
        "validation end",
        "scheduler",
        "between",
        "batch start",
        "batch end",
        "module batch end",
        "validation start",
        "validation end",
        "scheduler",
        "epoch end",
        "between",
        "before end",
        "train end",
    ]


def test_an_epoch_ends_with_its_scheduler_before_the_next_epoch_starts() -> None:
    events = journal_of("val_loss", max_epochs=2, limit_train_batches=1)
    turn = events.index("epoch end")
    assert events[turn - 2 : turn + 6] == [
        "validation start",
        "validation end",
        "epoch end",
        "scheduler",
        "between",
        "before epoch",
        "epoch start",
        "batch start",
    ]
    assert events.count("between") == 2, "the last batch of an epoch has its boundary where the epoch ends"
    assert events.count("first") == 1


def test_removing_puts_lightnings_methods_and_the_loader_back(tmp_path: Path) -> None:
    loader = rows()
    sampler = loader.batch_sampler
    _, run = fit(OverlappedCheckpoint(dirpath=tmp_path), loader=loader, max_steps=2)
    loop = run.fit_loop
    for owner, name in (
        (loop.epoch_loop, "advance"),
        (loop.epoch_loop, "on_advance_end"),
        (loop, "_load_combined_loader_states"),
    ):
        assert name not in vars(owner)
    assert loader.batch_sampler is sampler


def test_the_loop_is_put_back_after_an_exception_as_well(tmp_path: Path) -> None:
    loader = rows()
    sampler = loader.batch_sampler
    callback = OverlappedCheckpoint(dirpath=tmp_path)
    with pytest.raises(RuntimeError, match="stopped by the test"):
        fit(callback, Stop(3), loader=loader)
    assert loader.batch_sampler is sampler
    assert callback.engine is None
