"""Decides when a window opens, with how many steps, and into which arena."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

from ckpt_engine.capture.context import Context
from ckpt_engine.capture.guard import Stamp
from ckpt_engine.capture.link import PIECE_BYTES, Copy
from ckpt_engine.capture.meter import Meter
from ckpt_engine.capture.plan import Measurements, WindowPlan, plan_window
from ckpt_engine.capture.units import Unit, ViewKey, build_units, image_specs, is_plain, view_key
from ckpt_engine.capture.window import Window
from ckpt_engine.config import Mode
from ckpt_engine.image.arena import ArenaPool, HostBuffer
from ckpt_engine.image.layout import Layout

logger = logging.getLogger("ckpt_engine")

_CALIBRATION_BYTES = 64 * 1024 * 1024


class Opener:
    """Builds windows for one attached training process.

    Args:
        context: What windows share.
        meter: Step times.
        pool: Host memory for images.
        tensors: FQN to live parameter or buffer.
        params_only: Weights-only checkpoints.
    """

    def __init__(
        self,
        context: Context,
        meter: Meter,
        pool: ArenaPool,
        tensors: dict[str, Tensor],
        *,
        params_only: bool,
    ) -> None:
        self.direct: set[int] = set()
        self.early: set[int] = set()
        self.unreplayable: set[int] = set()
        self.proven: set[int] = {i for i, traits in enumerate(context.traits) if traits.grain == "never"}
        self.verified = False
        self._context = context
        self._meter = meter
        self._pool = pool
        self._tensors = tensors
        self._params_only = params_only
        self._unjudged: list[Window] = []
        self._signature: tuple[int, ...] = ()
        self._recent: list[Unit] = []
        self._resident: dict[int, tuple[bytes, dict[str, Stamp]]] = {}
        self._last_plan = ""

    def units(self) -> list[Unit]:
        """The units as they are now; units once found unreplayable stay direct."""
        self._heed_audits()
        units = build_units(
            self._context.optimizers,
            self._context.traits,
            self._tensors,
            block_bytes=self._context.config.block_bytes,
            params_only=self._params_only,
        )
        for unit in units:
            unit.early = not unit.is_static and id(unit.tensor) in self.early
            known = id(unit.tensor) in self.direct or unit.optimizer in self.unreplayable
            unit.direct = unit.direct or unit.early or known
        return units

    def shape(self) -> list[object]:
        """What a layout depends on: the parameters of every group, their types and how they lie in memory."""
        return [
            [
                [(id(p), p.dtype, tuple(p.shape), _stride(p), p.requires_grad) for p in group["params"]]
                for group in optimizer.param_groups
            ]
            for optimizer in self._context.optimizers
        ]

    def disown(self, names: Sequence[str]) -> None:
        """The model shows other tensors under these image names than those that were attached: let them go."""
        for name in names:
            self._tensors.pop(name.removeprefix("model."), None)
        self._signature = ()

    def plan(self, units: Sequence[Unit], *, limit: int) -> WindowPlan:
        """Choose mode and steps; at most ``limit`` steps are left before the target."""
        config = self._context.config
        mode: Mode = config.mode
        replayable = [u for u in units if not u.is_static and not u.direct]
        if self._params_only or not replayable or not self._ready():
            mode = "one_step"
        steps = config.window_steps if mode in ("multi_step", "auto") else 1
        return plan_window(
            self.measure(units),
            mode=mode,
            steps=None if steps is None else min(steps, limit),
            max_steps=max(1, min(limit, config.max_window_steps)),
        )

    def names(self) -> dict[ViewKey, str]:
        """Names of all tensors of the model and of the optimizers, by the memory that they show."""
        names = {view_key(t): f"model.{fqn}" for fqn, t in reversed(self._tensors.items()) if is_plain(t)}
        for unit in self.units():
            entry = {} if unit.is_static else self._context.optimizers[unit.optimizer].state.get(unit.tensor, {})
            names |= {view_key(v): unit.name(str(key)) for key, v in entry.items() if is_plain(v)}
        return names

    def measure(self, units: Sequence[Unit]) -> Measurements | None:
        """What the planner needs to know, once it has been measured."""
        bandwidth = self._context.link.bandwidth
        if bandwidth is None or not self._meter.ready:
            return None
        replayable = [u for u in units if not u.is_static and not u.direct]
        return Measurements(
            bandwidth=bandwidth,
            step_s=self._meter.step_s,
            hidden_s=self._meter.hidden_s,
            state_bytes=sum(block.nbytes for unit in units for block in unit.blocks),
            grad_bytes=sum(unit.tensor.nbytes for unit in replayable),
            direct_bytes=sum(b.nbytes for u in units if not u.is_static and u.direct for b in u.blocks),
        )

    def recent_units(self) -> list[Unit]:
        """Units good enough to plan with, listed again only when optimizers have gained parameters or state."""
        groups = [group["params"] for o in self._context.optimizers for group in o.param_groups]
        sizes = [len(o.state) for o in self._context.optimizers]
        sizes += [len(group) + sum(p.requires_grad for p in group) for group in groups]
        found = (len(self.direct), len(self.early), len(self.unreplayable))
        signature = (*sizes, *found, sum(window.failed for window in self._unjudged))
        if signature != self._signature:
            self._signature, self._recent = signature, self.units()
        return self._recent

    def image_bytes(self) -> int:
        """Size of the next image; 0 while optimizers have no state yet."""
        if not self._ready():
            return 0
        return Layout.build(image_specs(self.recent_units(), self._context.optimizers)).total_bytes

    def calibrate(self, arena: HostBuffer) -> None:
        """Copy a little, to learn the link's bandwidth before the first window is planned; it is not kept."""
        self.forget(arena)
        self._context.link.pin(arena.tensor)
        copies, used = [], 0
        for unit in self._recent:
            if used >= _CALIBRATION_BYTES or not unit.flat or unit.tensor.nbytes < PIECE_BYTES:
                continue
            size = min(unit.tensor.numel(), PIECE_BYTES // unit.tensor.element_size())
            target = arena.tensor[used : used + size * unit.tensor.element_size()].view(unit.tensor.dtype)
            copies.append(Copy(target, unit.tensor.detach().view(-1)[:size]))
            used += target.nbytes
        if copies:
            self._context.link.submit(copies).wait(self._context.config.save_timeout_s)

    def open(
        self, units: Sequence[Unit], plan: WindowPlan, target: int, *, timeout: float
    ) -> tuple[Window, HostBuffer] | None:
        """Open a window; None when no arena was free within ``timeout`` seconds."""
        self._say(plan)
        layout = Layout.build(image_specs(units, self._context.optimizers))
        arena = self._pool.acquire(layout.total_bytes, timeout)
        if arena is None:
            return None
        self._context.link.pin(arena.tensor)
        header, resident = self._resident.get(id(arena), (b"", {}))
        if header != layout.header:
            resident = {}
        self._resident[id(arena)] = (layout.header, resident)
        try:
            window = Window(
                self._context,
                plan=plan,
                target=target,
                units=units,
                layout=layout,
                arena=arena,
                resident=resident,
                verify=not self.verified and plan.steps > 1,
            )
        except BaseException:
            self._pool.release(arena)
            raise
        return window, arena

    def forget(self, arena: HostBuffer) -> None:
        """The arena was used for something else: what it held of static tensors is gone."""
        self._resident.pop(id(arena), None)

    def learn(self, window: Window) -> None:
        """Keep what a window found out about its units."""
        self.direct |= window.spoiled
        self.early |= {id(unit.tensor) for unit in window.units if unit.early}
        self._unjudged.append(window)
        self.verified = self.verified or (window.plan.steps > 1 and window.captured)

    def _heed_audits(self) -> None:
        """After a failed audit nothing of that window's state is replayed again."""
        for window in self._unjudged:
            if window.failed:
                self.direct |= {id(unit.tensor) for unit in window.units if not unit.is_static}
        self._unjudged = [window for window in self._unjudged[-2:] if not window.failed]

    def _ready(self) -> bool:
        return len(self.proven) == len(self._context.optimizers)

    def _say(self, plan: WindowPlan) -> None:
        text = f"{plan.mode}, {plan.steps} step(s): {plan.reason}"
        if text != self._last_plan:
            self._last_plan = text
            logger.info("checkpoint window: %s", text)


def _stride(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.stride()) if is_plain(tensor) else ()
