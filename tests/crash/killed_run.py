"""A training process that is killed at any moment, started again and again until its last step is done."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from ckpt_engine.config import CheckpointConfig
from ckpt_engine.engine import Engine
from ckpt_engine.errors import NoCheckpointError
from ckpt_engine.restore.reader import load_newest
from ckpt_engine.storage.cleanup import remove_checkpoint, sweep_incomplete
from tests.equivalence.harness import Recipe, Run, bits

STEPS = 120
EVERY = 4
RECIPE = Recipe(options={"weight_decay": 0.1}, clip="norm", precision="16-mixed")
CONFIG = CheckpointConfig(mode="multi_step", window_steps=3, block_bytes=4096)


def fingerprint(state: Any) -> str:
    """A digest of a nested state, tensors by their bits."""
    digest = hashlib.sha256()

    def feed(value: Any, path: str) -> None:
        if isinstance(value, torch.Tensor):
            digest.update(f"{path}:{value.dtype}:{tuple(value.shape)}".encode() + bits(value).numpy().tobytes())
        elif isinstance(value, dict):
            for key, item in value.items():
                feed(item, f"{path}.{key}")
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                feed(item, f"{path}.{index}")
        else:
            digest.update(f"{path}={value!r}".encode())

    feed(state, "")
    return digest.hexdigest()


def newest(folder: str) -> tuple[dict[str, Any], list[str]]:
    """The newest complete state, and what was said about others."""
    problems: list[str] = []
    _, loaded = load_newest(folder, on_problem=problems.append)
    state = loaded.state
    assert isinstance(state, dict)
    return state, problems


def train(folder: str, *, steps: int = STEPS) -> Run:
    """Resume from the newest checkpoint, train on, save every few steps and keep the last two."""
    torch.set_num_threads(1)
    run = Run(RECIPE)
    Path(folder).mkdir(exist_ok=True)
    sweep_incomplete(folder)
    try:
        state, _ = newest(folder)
        run.restore(state)
    except NoCheckpointError:
        pass
    engine = Engine(CONFIG)
    engine.attach(run.optimizers, run.tensors(), step=run.step, fenced=True)
    while run.step < steps:
        engine.expect((run.step // EVERY + 1) * EVERY)
        run.one_round(engine)
        if run.step % EVERY == 0:
            name = f"{folder}/step-{run.step:05d}"
            engine.save(name, run.state(), step=run.step)
            engine.save(f"{folder}/last", run.state(), step=run.step)
            engine.after_saves(lambda: prune(folder))
    assert engine.close(60) == []
    return run


def prune(folder: str) -> None:
    """Keep the two newest steps."""
    for name in sorted(name for name in os.listdir(folder) if name.startswith("step-"))[:-2]:
        remove_checkpoint(f"{folder}/{name}")


def main(folder: str, started: str) -> None:
    """What a killed process runs; it says when training begins and when it has come to the end."""
    Path(started).write_text("started")
    run = train(folder)
    Path(f"{folder}/end.json").write_text(json.dumps({"fingerprint": fingerprint(run.state())}))


def reference() -> dict[int, str]:
    """Fingerprint of the state after every step of the run that nobody kills."""
    torch.set_num_threads(1)
    run, prints = Run(RECIPE), {}
    while run.step < STEPS:
        run.one_round(None)
        prints[run.step] = fingerprint(run.state())
    return prints
