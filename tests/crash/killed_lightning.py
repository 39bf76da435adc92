"""A Lightning run that is killed at any moment and started again with ``ckpt_path="last"`` until its end has come."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch

from ckpt_engine.restore.reader import load_newest
from lightning_ckpt import OverlappedCheckpoint
from tests.crash.killed_run import fingerprint
from tests.equivalence.lightning_runs import Case, Outcome, content, run, saved, saver

CASE = Case(options={"weight_decay": 0.1}, precision="16-mixed", clip="norm", scheduler="plateau-val")
EPOCHS = 12
OPTIONS: dict[str, Any] = {"max_epochs": EPOCHS, "val_check_interval": 0.5}
EVERY = 3


def train(callback: OverlappedCheckpoint, ckpt_path: str | None = None) -> Outcome:
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run(CASE, callback, ckpt_path=ckpt_path, **OPTIONS)


def main(folder: str, started: str) -> None:
    """What a killed process runs: only the newest checkpoint is kept, and ``last.ckpt``."""
    Path(started).write_text("started")
    callback = saver(Path(folder), every_n_train_steps=EVERY, save_top_k=1, save_last=True)
    outcome = train(callback, ckpt_path="last")
    Path(f"{folder}-end.json").write_text(json.dumps(of_end(outcome)))


def reference(folder: str, report: str) -> None:
    """Fingerprints of the run that nobody kills: of every checkpoint by its step, and of the end (step -1)."""
    outcome = train(saver(Path(folder), "sync", every_n_train_steps=EVERY))
    prints = {step: of_checkpoint(content(path)) for step, path in saved(Path(folder)).items()}
    Path(report).write_text(json.dumps(prints | {-1: of_end(outcome)}))


def of_end(outcome: Outcome) -> str:
    """A digest of the end; a run that is started behind its end draws no random numbers and logs no metrics."""
    return fingerprint({key: value for key, value in outcome.state.items() if key not in ("rng", "metrics")})


def of_checkpoint(state: dict[str, Any]) -> str:
    """A digest of what training is made of; progress counters differ in how often a run was started."""
    return fingerprint(
        {key: state[key] for key in ("state_dict", "optimizer_states", "lr_schedulers", "MixedPrecision")}
    )


def newest(folder: str) -> tuple[int, str, list[str]]:
    """Step and fingerprint of the newest complete checkpoint, and what was said about others."""
    problems: list[str] = []
    _, loaded = load_newest(folder, on_problem=problems.append)
    state: Any = loaded.state
    return int(state["global_step"]), of_checkpoint(state), problems
