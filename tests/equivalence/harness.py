"""A small, awkward training run, and the means to compare two of them bit for bit.

The model has what real ones have: an embedding, tied weights, batch norm, dropout, a frozen tensor, a parameter that
never gets a gradient, a 0-dim one, an empty one, and one whose memory is not contiguous.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ckpt_engine.capture.rng import rng_state, set_rng_state
from ckpt_engine.config import CheckpointConfig
from ckpt_engine.engine import Engine
from ckpt_engine.restore.optimizer import load_optimizer
from ckpt_engine.restore.reader import load

WIDTH = 40


class Awkward(nn.Module):
    """Every kind of tensor that has broken a checkpointer."""

    def __init__(self, *, matrix_only: bool = False, row_major: bool = False) -> None:
        super().__init__()
        self.matrix_only = matrix_only
        self.emb = nn.Embedding(61, WIDTH)
        self.a = nn.Linear(WIDTH, 331, bias=not matrix_only)
        self.b = nn.Linear(331, WIDTH, bias=not matrix_only)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, 61, bias=False)
        self.head.weight = self.emb.weight
        turned = torch.randn(WIDTH, 72).t()
        self.turned = nn.Parameter(turned.contiguous() if row_major else turned)
        if not matrix_only:
            self.norm = nn.BatchNorm1d(331)
            self.frozen = nn.Parameter(torch.randn(9, 5), requires_grad=False)
            self.unused = nn.Parameter(torch.randn(7))
            self.scalar = nn.Parameter(torch.tensor(1.5))
            self.empty = nn.Parameter(torch.empty(0, 3))
            self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens).flatten(0, 1)
        x = self.a(x)
        if not self.matrix_only:
            x = self.norm(x.to(self.norm.weight.dtype)).to(x.dtype)
        x = self.drop(torch.nn.functional.gelu(self.b(x)))
        x = x + (x @ self.turned.t().to(x.dtype)[:, :WIDTH] if self.turned.shape[0] >= WIDTH else 0.0)
        if not self.matrix_only:
            x = x * self.scalar.to(x.dtype) + self.empty.sum().to(x.dtype)
            with torch.no_grad():
                self.average.mul_(0.9).add_(x.detach().float().mean(0), alpha=0.1)
        return self.head(x)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One way to train."""

    optimizer: str = "AdamW"
    options: dict[str, Any] = field(default_factory=dict)
    precision: str = "fp32"
    clip: str = "none"
    accumulate: int = 1
    optimizers: int = 1
    zero_in_place: bool = False
    hook: str = ""

    @property
    def title(self) -> str:
        flags = ",".join(f"{k}={v}" for k, v in self.options.items())
        extra = "-inplace" if self.zero_in_place else ""
        return (
            f"{self.optimizer}({flags})-{self.precision}-{self.clip}-acc{self.accumulate}-opt{self.optimizers}"
            f"{extra}{'-' + self.hook if self.hook else ''}"
        )


class Run:
    """A training run that can be checkpointed, and continued from a checkpoint."""

    def __init__(self, recipe: Recipe) -> None:
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        self.recipe = recipe
        dtype = {"bf16-true": torch.bfloat16, "64-true": torch.float64}.get(recipe.precision, torch.float32)
        # LBFGS itself takes only row-major gradients.
        awkward = Awkward(matrix_only=recipe.optimizer == "Muon", row_major=recipe.optimizer == "LBFGS")
        self.model = awkward.to(dtype)
        self.optimizers = self._make_optimizers()
        self.schedulers = [
            torch.optim.lr_scheduler.LambdaLR(o, lambda t: min(1.0, (t + 1) / 4) * (0.6 + 0.4 * math.cos(t / 5)))
            for o in self.optimizers
        ]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
        self.step = 0

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        cls = getattr(torch.optim, self.recipe.optimizer)
        options = {"lr": 3e-3, **self.recipe.options}
        decay = options.pop("weight_decay", 0.0)
        # Muon takes matrices only, and Adafactor divides by the number of elements.
        params = [
            p
            for p in self.model.parameters()
            if (self.recipe.optimizer != "Muon" or p.ndim == 2) and (self.recipe.optimizer != "Adafactor" or p.numel())
        ]
        halves = [params] if self.recipe.optimizers == 1 else [params[::2], params[1::2]]
        made = []
        for part in halves:
            matrices = [p for p in part if p.ndim > 1]
            vectors = [p for p in part if p.ndim <= 1]
            groups = [{"params": g, "weight_decay": d} for g, d in ((matrices, decay), (vectors, 0.0)) if g]
            if self.recipe.optimizer in ("Rprop", "LBFGS", "SparseAdam"):
                groups = [{"params": part}]
            made.append(cls(groups, **options))
        return made

    def state(self) -> dict[str, Any]:
        """All that an exact resume needs, by reference."""
        return {
            "state_dict": self.model.state_dict(),
            "optimizer_states": [o.state_dict() for o in self.optimizers],
            "schedulers": [s.state_dict() for s in self.schedulers],
            "scaler": self.scaler.state_dict(),
            "rng": rng_state(),
            "step": self.step,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["state_dict"])
        for optimizer, saved in zip(self.optimizers, state["optimizer_states"], strict=True):
            load_optimizer(optimizer, saved)
        for scheduler, saved in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        self.scaler.load_state_dict(state["scaler"])
        set_rng_state(state["rng"])
        self.step = state["step"]

    def forward_backward(self, engine: Engine | None) -> Tensor:
        for micro in range(self.recipe.accumulate):
            generator = torch.Generator().manual_seed(1000 * self.step + micro)
            tokens = torch.randint(0, 61, (6, 9), generator=generator)
            with self._autocast():
                logits = self.model(tokens)
                loss = torch.nn.functional.cross_entropy(logits.float(), tokens.roll(1, 1).flatten())
            if self.recipe.precision == "16-mixed":
                if self.step in (7, 8, 12) and micro == 0:
                    loss = loss * float("inf")
                loss = self.scaler.scale(loss)
            if engine is not None:
                engine.before_backward()
            (loss / self.recipe.accumulate).backward()
        return loss.detach()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        kind = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(self.recipe.precision)
        return contextlib.nullcontext() if kind is None else torch.autocast("cpu", kind)

    def clip(self) -> None:
        if self.recipe.clip == "norm":
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
        elif self.recipe.clip == "value":
            torch.nn.utils.clip_grad_value_(self.model.parameters(), 0.01)

    def one_round(self, engine: Engine | None, *, closure: bool = False) -> None:
        """One optimizer round, with the engine told of its moments."""
        if engine is not None:
            engine.step_begin()
            engine.before_zero_grad()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=not self.recipe.zero_in_place)
        if closure:
            for optimizer in self.optimizers:
                optimizer.step(lambda: self._closure(engine))
        else:
            self.forward_backward(engine)
            self._update()
        for scheduler in self.schedulers:
            scheduler.step()
        self.step += 1
        self._after_update()
        if engine is not None:
            engine.step_end(self.step)

    def _closure(self, engine: Engine | None) -> Tensor:
        # LBFGS evaluates again and again: gradients start from nothing each time.
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=not self.recipe.zero_in_place)
        loss = self.forward_backward(engine)
        self.clip()
        return loss

    def _update(self) -> None:
        if self.recipe.precision == "16-mixed":
            if self.recipe.clip != "none":
                for optimizer in self.optimizers:
                    self.scaler.unscale_(optimizer)
                self.clip()
            for optimizer in self.optimizers:
                self.scaler.step(optimizer)
            self.scaler.update()
            return
        self.clip()
        for optimizer in self.optimizers:
            optimizer.step()

    def _after_update(self) -> None:
        if self.recipe.hook == "clamp":
            with torch.no_grad():
                self.model.a.weight.clamp_(-0.05, 0.05)
        elif self.recipe.hook == "clamp-data":
            self.model.a.weight.data.clamp_(-0.05, 0.05)

    def tensors(self) -> dict[str, Tensor]:
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}


@contextlib.contextmanager
def engine_for(run: Run, config: CheckpointConfig, *, fenced: bool = True) -> Iterator[Engine]:
    """An engine attached to a run; failures that nobody asked about fail the test."""
    engine = Engine(config)
    engine.attach(run.optimizers, run.tensors(), step=run.step, fenced=fenced)
    try:
        yield engine
    finally:
        failures = engine.close(60)
    assert not failures, failures


def run_and_save(
    recipe: Recipe,
    folder: str,
    *,
    config: CheckpointConfig,
    steps: int,
    saves: tuple[int, ...],
    fenced: bool = True,
    closure: bool = False,
    on_engine: Callable[[Engine], None] | None = None,
) -> tuple[Run, dict[int, dict[str, Any]], Engine]:
    """Train ``steps`` rounds, saving at ``saves``; also keep what each of them should hold."""
    run, truth = Run(recipe), {}
    with engine_for(run, config, fenced=fenced) as engine:
        todo = list(saves)
        engine.expect(todo[0])
        while run.step < steps:
            run.one_round(engine, closure=closure)
            if todo and run.step == todo[0]:
                truth[run.step] = copy.deepcopy(run.state())
                engine.save(f"{folder}/step-{run.step}", run.state(), step=run.step)
                todo.pop(0)
                engine.expect(todo[0] if todo else None)
        if on_engine is not None:
            on_engine(engine)
    return run, truth, engine


def differences(left: Any, right: Any, path: str = "") -> list[str]:
    """Places where two nested states differ, by bits for tensors."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        same = (
            left.shape == right.shape
            and left.dtype == right.dtype
            and torch.equal(bits(left), bits(right))
        )
        return [] if same else [f"{path}: {tuple(left.shape)} {left.dtype} against {tuple(right.shape)} {right.dtype}"]
    if isinstance(left, dict) and isinstance(right, dict):
        if list(left) != list(right):
            return [f"{path}: keys {list(left)} against {list(right)}"]
        return [d for key in left for d in differences(left[key], right[key], f"{path}.{key}")]
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        if len(left) != len(right):
            return [f"{path}: length {len(left)} against {len(right)}"]
        return [d for i, (a, b) in enumerate(zip(left, right, strict=True)) for d in differences(a, b, f"{path}.{i}")]
    return [] if left == right else [f"{path}: {left!r} against {right!r}"]


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in row-major order."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0)


def load_state(path: str) -> dict[str, Any]:
    state = load(path).state
    assert isinstance(state, dict)
    return state
