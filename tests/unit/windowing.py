"""What the tests of windows share: a small model with a real context, driven by hand."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from ckpt_engine.capture.context import Context
from ckpt_engine.capture.link import link_for
from ckpt_engine.capture.meter import Meter
from ckpt_engine.capture.traits import traits_of
from ckpt_engine.capture.worker import Worker
from ckpt_engine.config import CheckpointConfig
from ckpt_engine.image.arena import ArenaPool, StagingPool
from ckpt_engine.observe.timeline import Timeline
from ckpt_engine.opener import Opener


class Bench:
    """A model with optimizers whose state exists, and all that windows need."""

    def __init__(
        self,
        *,
        cls: Any = torch.optim.AdamW,
        warm: int = 1,
        weights_only: bool = False,
        fenced: bool = True,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 8))
        self.base = nn.Parameter(torch.randn(3000), requires_grad=False)
        self.optimizer = cls(self.model.parameters(), lr=0.01)
        config = {"mode": "multi_step", "window_steps": 3, "block_bytes": 4096, "audit": "full", "save_timeout_s": 20}
        self.config = CheckpointConfig(**{**config, **options})
        self.replay, self.persist = Worker("replay"), Worker("persist")
        self.staging, self.pool = StagingPool(), ArenaPool(self.config.max_images)
        self.context = Context(
            config=self.config,
            link=link_for(torch.device("cpu")),
            replay=self.replay,
            staging=self.staging,
            timeline=Timeline(),
            clock=time.perf_counter,
            optimizers=[self.optimizer],
            traits=[traits_of(self.optimizer)],
            fenced=fenced,
        )
        self.meter = Meter(time.perf_counter)
        tensors: dict[str, Tensor] = {**dict(self.model.named_parameters()), "base": self.base}
        self.opener = Opener(self.context, self.meter, self.pool, tensors, params_only=weights_only)
        self.opener.proven.add(0)
        self.step = 0
        for _ in range(warm):
            self.gradients()
            self.update()

    def gradients(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.full((2, 8), float(self.step + 1))).pow(2).mean().backward()

    def update(self) -> None:
        self.optimizer.step()
        self.step += 1

    def window(self, *, steps: int = 3, target: int = 4) -> Any:
        units = self.opener.units()
        opened = self.opener.open(units, self.opener.plan(units, limit=steps), target, timeout=5)
        assert opened is not None
        return opened[0]

    def round(self, window: Any, *, fence: bool = True) -> None:
        """One round as the engine drives it."""
        window.begin_step()
        if fence:
            window.fence()
        self.gradients()
        window.before_update(0, found_inf=None, scale=None)
        self.update()
        window.after_update(0)

    def truth(self) -> dict[str, Tensor]:
        names = {f"model.{name}": p.detach().clone() for name, p in self.model.named_parameters()}
        names["model.base"] = self.base.detach().clone()
        for name, p in self.model.named_parameters():
            names |= {f"optim.{name}.{key}": v.clone() for key, v in self.optimizer.state.get(p, {}).items()}
        return names

    def image(self, window: Any) -> dict[str, Tensor]:
        self.replay.drain(20)
        views: dict[str, Tensor] = window.layout.views(window.arena.tensor)
        return views

    def same(self, window: Any, truth: dict[str, Tensor]) -> bool:
        image = self.image(window)
        return image.keys() == truth.keys() and all(torch.equal(image[name], truth[name]) for name in truth)
