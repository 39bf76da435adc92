"""OverlappedCheckpoint beside the real ModelCheckpoint: the same names, the same ranking, the same content.

Both callbacks see the same run, stopped after different numbers of steps. Our checkpoints are directories where
Lightning's are files, so names are compared, then what is inside.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from ckpt_engine.restore.catalog import is_checkpoint
from lightning_ckpt import OverlappedCheckpoint
from tests.equivalence.harness import differences
from tests.lightning_runs import Stop, fit, names, state_of

# At the end of the first epoch, and within the third.
STOPS = (6, 14)

# name: (options of the callback, options of the Trainer)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "every 2 steps, all kept": ({"every_n_train_steps": 2, "save_top_k": -1}, {}),
    "every 2 steps, newest kept": ({"every_n_train_steps": 2, "save_top_k": 1}, {}),
    "training metric, two smallest": (
        {"every_n_train_steps": 1, "monitor": "wave", "save_top_k": 2, "filename": "{step}-{wave:.0f}"},
        {},
    ),
    "training metric, two largest, own last": (
        {"every_n_train_steps": 1, "monitor": "wave", "mode": "max", "save_top_k": 2, "save_last": True},
        {},
    ),
    "validation metric within epochs": (
        {"monitor": "val_wave", "save_top_k": 2, "filename": "{epoch}-{step}-{val_wave:.1f}"},
        {"val_check_interval": 0.5},
    ),
    "validation metric by steps is deferred": (
        {"every_n_train_steps": 2, "monitor": "val_wave", "save_top_k": 2, "save_on_train_epoch_end": False},
        {"val_check_interval": 0.5},
    ),
    "last as link": ({"every_n_train_steps": 2, "save_top_k": 1, "save_last": "link"}, {}),
    "last alone": ({"every_n_train_steps": 2, "save_top_k": 0, "save_last": True}, {}),
    "last as link of all": ({"every_n_train_steps": 3, "save_top_k": -1, "save_last": "link"}, {}),
    "defaults": ({}, {}),
    "every 2 epochs, own last": ({"every_n_epochs": 2, "save_last": True}, {}),
    "every epoch, all, at its end": ({"every_n_epochs": 1, "save_top_k": -1, "save_on_train_epoch_end": True}, {}),
    "every epoch, all, after validation": (
        {"every_n_epochs": 1, "save_top_k": -1, "save_on_train_epoch_end": False},
        {},
    ),
    "one name, versions counted": (
        {"every_n_train_steps": 1, "monitor": "wave", "save_top_k": 3, "filename": "same"},
        {},
    ),
    "one name, all kept": ({"every_n_train_steps": 2, "save_top_k": -1, "filename": "same"}, {}),
    "one name, overwritten": (
        {"every_n_train_steps": 2, "save_top_k": -1, "filename": "same", "enable_version_counter": False},
        {},
    ),
    "names without metric names": (
        {
            "every_n_train_steps": 2,
            "save_top_k": -1,
            "filename": "e{epoch}-s{step:03d}-w{wave:.0f}",
            "auto_insert_metric_name": False,
        },
        {},
    ),
    "no time at all between saves": ({"train_time_interval": timedelta(0), "save_top_k": -1, "save_last": True}, {}),
    "weights only": ({"every_n_train_steps": 2, "save_top_k": -1, "save_weights_only": True}, {}),
    "accumulation": ({"every_n_train_steps": 2, "save_top_k": -1}, {"accumulate_grad_batches": 4, "max_epochs": 9}),
    "accumulation, every epoch": ({"save_top_k": -1}, {"accumulate_grad_batches": 3, "max_epochs": 9}),
}


def observed(callback: ModelCheckpoint, folder: Path) -> dict[str, Any]:
    """What can be seen from outside, with the run's own directory taken out."""

    def short(path: str) -> str:
        return os.path.relpath(path, folder) if path else ""

    return {
        "names": names(folder),
        "links": {name: os.readlink(folder / name) for name in names(folder) if (folder / name).is_symlink()},
        "best_model_path": short(callback.best_model_path),
        "last_model_path": short(callback.last_model_path),
        "kth_best_model_path": short(callback.kth_best_model_path),
        "best_k_models": {short(path): float(score) for path, score in callback.best_k_models.items()},
        "kth_value": float(callback.kth_value),
        "best_model_score": None if callback.best_model_score is None else float(callback.best_model_score),
        "current_score": None if callback.current_score is None else float(callback.current_score),
    }


def both(folder: Path, stop: int, callback: dict[str, Any], run: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """The same run under each callback; what each left behind."""
    left = []
    for kind, extra in ((OverlappedCheckpoint, {"capture": "multi_step", "window_steps": 2}), (ModelCheckpoint, {})):
        target = folder / f"{kind.__name__}-{stop}"
        it = kind(dirpath=target, **callback, **extra)
        fit(it, max_steps=stop, **run)
        left.append(observed(it, target.resolve()))
    return tuple(left)


@pytest.mark.parametrize("case", CASES)
def test_the_same_checkpoints_exist_and_rank_the_same_whenever_training_stops(tmp_path: Path, case: str) -> None:
    callback, run = CASES[case]
    for stop in STOPS:
        ours, theirs = both(tmp_path, stop, callback, run)
        assert ours == theirs, f"{case}, stopped after step {stop}"
    assert theirs["names"], "the case saves nothing: it shows nothing"


@pytest.mark.parametrize(
    "case",
    [
        "every 2 steps, all kept",
        "training metric, two largest, own last",
        "last as link of all",
        "one name, versions counted",
        "weights only",
        "accumulation",
    ],
)
def test_each_checkpoint_holds_the_same_weights_optimizer_and_schedule(tmp_path: Path, case: str) -> None:
    callback, run = CASES[case]
    both(tmp_path, 11, callback, run)
    kept = names(tmp_path / "ModelCheckpoint-11")
    assert kept
    for name in kept:
        ours = state_of(tmp_path / "OverlappedCheckpoint-11" / name)
        theirs = torch.load(tmp_path / "ModelCheckpoint-11" / name, weights_only=False)
        assert set(theirs) <= set(ours)
        # Progress counters differ on purpose: theirs are those of a batch that is not quite over.
        for key in ("state_dict", "optimizer_states", "lr_schedulers", "hyper_parameters", "global_step"):
            assert (key in ours) == (key in theirs)
            assert differences(ours.get(key), theirs.get(key)) == [], f"{name}: {key}"


def test_an_exception_leaves_the_same_checkpoints(tmp_path: Path) -> None:
    left = []
    for kind in (OverlappedCheckpoint, ModelCheckpoint):
        folder = tmp_path / kind.__name__
        callback = kind(dirpath=folder, save_on_exception=True, save_last=True, every_n_train_steps=4, save_top_k=-1)
        with pytest.raises(RuntimeError, match="stopped by the test"):
            fit(callback, Stop(7), default_root_dir=folder)
        left.append(observed(callback, folder.resolve()))
    assert left[0] == left[1]
    assert is_checkpoint(str(tmp_path / "OverlappedCheckpoint" / "last.ckpt"))


def test_a_second_run_into_the_same_directory_counts_versions_alike(tmp_path: Path) -> None:
    left = []
    for kind in (OverlappedCheckpoint, ModelCheckpoint):
        folder = tmp_path / kind.__name__
        for _ in range(2):
            callback = kind(dirpath=folder, every_n_train_steps=3, save_top_k=-1, save_last=True)
            fit(callback, max_steps=6)
        left.append(observed(callback, folder.resolve()))
    assert left[0] == left[1]
    assert "last-v1.ckpt" in left[0]["names"]


def test_a_resumed_run_goes_on_ranking_alike(tmp_path: Path) -> None:
    left = []
    for kind in (OverlappedCheckpoint, ModelCheckpoint):
        folder = tmp_path / kind.__name__
        options: dict[str, Any] = {"monitor": "wave", "save_top_k": 2, "every_n_train_steps": 2, "save_last": True}
        fit(kind(dirpath=folder, **options), max_steps=4)
        callback = kind(dirpath=folder, **options)
        fit(callback, max_steps=10, ckpt_path=str(folder / "last.ckpt"), fit_options={"weights_only": False})
        left.append(observed(callback, folder.resolve()))
    assert left[0] == left[1]
