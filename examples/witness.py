"""Run `lightning_gpt.py` with a witness: one JSON line per step that says what the checkpoint engine is doing.

    python examples/witness.py runs/gpt/steps.jsonl --dir runs/gpt --max-steps 40

The demo watches this file to find a moment in the middle of a window.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_gpt import parse, train

from ckpt_engine.engine import Engine
from lightning_ckpt import OverlappedCheckpoint


class Witness(Callback):
    """Appends what happens to a file of JSON lines, each in one write, so that a reader sees whole lines or none.

    Args:
        path: The file; what an earlier run wrote is kept.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.engine: Engine | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.note(event="start", step=trainer.global_step)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Inside a step: its gradients are there, its part of the window is being copied, its update is to come."""
        self.engine = engine_of(trainer) or self.engine
        window = self.engine.window if self.engine is not None else None
        self.note(
            event="backward",
            step=trainer.global_step + 1,
            window=None if window is None else {"target": window.target, "steps": window.plan.steps},
        )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        memory = self.engine.memory if self.engine is not None else {}
        self.note(event="end", step=trainer.global_step, memory=memory)

    def note(self, **facts: Any) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")


def engine_of(trainer: Trainer) -> Engine | None:
    """The engine behind the trainer's checkpoint callback."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, OverlappedCheckpoint):
            return callback.engine
    return None


if __name__ == "__main__":
    train(parse(sys.argv[2:]), [Witness(sys.argv[1])])
