"""The next save is foreseen, so that its window opens in time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from lightning_ckpt import OverlappedCheckpoint
from lightning_ckpt.schedule import next_target, rounds_until_step
from tests.lightning_runs import BATCHES, Rows, fit


class Stream(IterableDataset[torch.Tensor]):
    """Without a length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (Rows()[index] for index in range(4 * BATCHES))


class Foresight(OverlappedCheckpoint):
    """Notes what was foreseen at each boundary, and at which rounds something was saved."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.foreseen: dict[int, int | None] = {}
        self.saved: list[int] = []

    def _plan(self, trainer: Any) -> None:
        super()._plan(trainer)
        self.foreseen[self._round] = next_target(self, trainer, rounds=self._round, stride=self._stride)

    def _save_now(self, trainer: Any, filepath: str, **options: Any) -> None:
        self.saved.append(self._round)
        super()._save_now(trainer, filepath, **options)


@given(every=st.integers(1, 60), step=st.integers(0, 500), stride=st.integers(1, 7))
def test_the_rounds_until_a_multiple_are_the_fewest_that_reach_one(every: int, step: int, stride: int) -> None:
    ahead = rounds_until_step(every, step, stride)
    reached = [n for n in range(1, every * stride + 1) if (step + n * stride) % every == 0]
    assert ahead == (reached[0] if reached else None)
    if stride == 1:
        assert ahead is not None


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "steps": ({"every_n_train_steps": 4}, {}),
    "epochs": ({}, {}),
    "every second epoch": ({"every_n_epochs": 2}, {"max_epochs": 4}),
    "after validation": ({"save_on_train_epoch_end": False}, {}),
    "validations within epochs": ({}, {"val_check_interval": 0.5}),
    "accumulation": ({"every_n_train_steps": 2}, {"accumulate_grad_batches": 4, "max_epochs": 4}),
    "accumulation over epochs": ({}, {"accumulate_grad_batches": 4}),
    "validations by batch across epochs": ({}, {"val_check_interval": 4, "check_val_every_n_epoch": None}),
}


@pytest.mark.parametrize("case", CASES)
def test_each_save_was_foreseen_at_the_boundary_before_it(tmp_path: Path, case: str) -> None:
    options, run = CASES[case]
    callback = Foresight(dirpath=tmp_path, save_top_k=-1, **options)
    fit(callback, **run)
    assert callback.saved
    for saved in callback.saved:
        assert callback.foreseen[saved - 1] == saved, f"the save after round {saved} came as a surprise"


def test_a_window_lands_on_the_step_asked_for(tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    callback = OverlappedCheckpoint(
        dirpath=tmp_path / "c",
        every_n_train_steps=5,
        save_top_k=-1,
        capture="multi_step",
        window_steps=3,
        metrics_path=str(records),
    )
    fit(callback, max_steps=2 * BATCHES)
    saves = [json.loads(line) for line in records.read_text().splitlines()]
    assert [(save["step"], save["window_steps"]) for save in saves] == [(5, 3), (10, 3)]


def test_a_save_that_follows_time_is_not_foreseen(tmp_path: Path) -> None:
    callback = Foresight(dirpath=tmp_path, train_time_interval=timedelta(days=1))
    fit(callback, max_steps=3)
    assert set(callback.foreseen.values()) == {None}


def test_an_endless_loader_has_no_epoch_to_foresee(tmp_path: Path) -> None:
    callback = Foresight(dirpath=tmp_path)
    fit(callback, loader=DataLoader(Stream(), batch_size=4), validate=False, max_epochs=1)
    assert callback.foreseen[1] is None
    assert callback.saved == [BATCHES]
