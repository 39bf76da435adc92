"""A training loop that can be taken apart, for the cases that break checkpointers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ckpt_engine.config import CheckpointConfig
from ckpt_engine.engine import Engine
from tests.equivalence.harness import differences, load_state

STEPS = 12
SAVES = (6, 10)


class Loop:
    """A training loop small enough to take apart: a model, optimizers, and what happens around each moment."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        *,
        inputs: Callable[[int], Tensor] | None = None,
        fenced: bool = True,
        **options: Any,
    ) -> None:
        self.model, self.optimizers = model, optimizers
        self.inputs = inputs or (lambda step: torch.randn(4, 8, generator=torch.Generator().manual_seed(step)))
        config = {"mode": "multi_step", "window_steps": 4, "block_bytes": 4096, "audit": "full", **options}
        self.engine = Engine(CheckpointConfig(**config))
        self.engine.attach(optimizers, self.tensors(), step=0, fenced=fenced)
        self.step = 0
        self.truth: dict[int, Any] = {}
        self.before: dict[int, Callable[[], object]] = {}
        self.inside: dict[int, Callable[[], object]] = {}
        self.after: dict[int, Callable[[], object]] = {}

    def tensors(self) -> dict[str, Tensor]:
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def state(self) -> dict[str, Any]:
        return {
            "state_dict": self.model.state_dict(),
            "optimizer_states": [o.state_dict() for o in self.optimizers],
            "step": self.step,
        }

    def round(self) -> None:
        number = self.step + 1
        self.before.get(number, _nothing)()
        self.engine.step_begin()
        self.engine.before_zero_grad()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self.model(self.inputs(number)).float().abs().pow(2).mean()
        self.engine.before_backward()
        loss.backward()
        self.inside.get(number, _nothing)()
        for optimizer in self.optimizers:
            optimizer.step()
        self.step = number
        self.after.get(number, _nothing)()
        self.engine.step_end(number)

    def save(self, folder: Path, name: str | None = None, **options: Any) -> Any:
        name = name or f"step-{self.step}"
        self.truth[name] = copy.deepcopy(self.state())  # type: ignore[index]
        return self.engine.save(f"{folder}/{name}", self.state(), step=self.step, **options)

    def run(self, folder: Path, *, steps: int = STEPS, saves: tuple[int, ...] = SAVES) -> Loop:
        todo = [step for step in saves if step > self.step]
        self.engine.expect(todo[0] if todo else None)
        while self.step < steps:
            self.round()
            if self.step in todo:
                todo.remove(self.step)
                self.save(folder)
                self.engine.expect(todo[0] if todo else None)
        return self

    def finish(self, folder: Path) -> Loop:
        """Close, then compare every checkpoint with the copy that was taken by hand."""
        failures = self.engine.close(60)
        assert failures == []
        for name, truth in self.truth.items():
            assert differences(dense(load_state(f"{folder}/{name}")), dense(truth)) == [], name
        assert self.engine.memory["images"] == 0
        assert self.engine._staging.outstanding == 0
        return self


def _nothing() -> None:
    return None


def dense(state: Any) -> Any:
    """The same state with sparse tensors made dense, for comparison."""
    if isinstance(state, dict):
        return {key: dense(value) for key, value in state.items()}
    if isinstance(state, list):
        return [dense(value) for value in state]
    return state.to_dense() if isinstance(state, Tensor) else state


def mlp(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 40), nn.Tanh(), nn.Linear(40, 8))


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, **options)
