"""Watches the optimizers of one training process: taps them, and rehearses each one's replay before relying on it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from ckpt_engine.capture.context import Context
from ckpt_engine.capture.meter import Meter
from ckpt_engine.capture.rehearsal import Rehearsal, begin_rehearsal, end_rehearsal
from ckpt_engine.capture.tap import OptimizerTap
from ckpt_engine.opener import Opener

Before = Callable[[int, "Tensor | None", "Tensor | None"], None]
"""Called with the optimizer's index, the scaler's ``found_inf`` and its ``grad_scale``."""
Mark = tuple[int, int]
"""Memory and version of a parameter."""
_LOOKS = 3
"""Rounds in which the forward pass is watched for writes to parameters; windows watch their own rounds."""


class Watcher:
    """Taps on every optimizer of a context.

    Args:
        context: The optimizers and what is known about them.
        opener: Learns which optimizers passed their rehearsal.
        meter: Learns when updates begin and end.
        before: Called when gradients are final.
        after: Called when the update was applied.
    """

    def __init__(
        self, context: Context, opener: Opener, meter: Meter, before: Before, after: Callable[[int], None]
    ) -> None:
        self._context = context
        self._opener = opener
        self._meter = meter
        self._notify_before = before
        self._notify_after = after
        self._rehearsals: dict[int, Rehearsal] = {}
        self._stepped: set[int] = set()
        self._looks = _LOOKS
        self._marks: dict[int, dict[int, Mark]] = {}
        self._taps = [
            OptimizerTap(optimizer, self._before(index), self._after(index))
            for index, optimizer in enumerate(context.optimizers)
        ]

    def round_begins(self) -> None:
        """Forget a step that raised between its two moments; look for parameters that the forward pass writes."""
        self._rehearsals.clear()
        self._marks = {}
        for tap in self._taps:
            tap.abandon()
        if self._looks > 0:
            self._looks -= 1
            self._marks = {i: _marks(optimizer) for i, optimizer in enumerate(self._context.optimizers)}

    @property
    def updating(self) -> bool:
        """Whether some optimizer has announced an update and not finished it."""
        return any(tap.updating for tap in self._taps)

    def remove(self) -> None:
        """Take all hooks off."""
        for tap in self._taps:
            tap.remove()

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Report nothing inside."""
        for tap in self._taps:
            tap.muted = True
        try:
            yield
        finally:
            for tap in self._taps:
                tap.muted = False

    def _before(self, index: int) -> Callable[[OptimizerTap], None]:
        def before(tap: OptimizerTap) -> None:
            self._meter.before_update()
            found_inf = _tensor(getattr(tap.optimizer, "found_inf", None))
            scale = _tensor(getattr(tap.optimizer, "grad_scale", None))
            with torch.no_grad():
                self._look(index)
                self._rehearse(index, found_inf, scale)
                self._notify_before(index, found_inf, scale)

        return before

    def _after(self, index: int) -> Callable[[OptimizerTap], None]:
        def after(_: OptimizerTap) -> None:
            self._meter.after_update()
            rehearsal = self._rehearsals.pop(index, None)
            with torch.no_grad():
                if rehearsal is not None:
                    self._judge(index, rehearsal)
                self._notify_after(index)

        return after

    def _look(self, index: int) -> None:
        then = self._marks.pop(index, {})
        now = _marks(self._context.optimizers[index]) if then else {}
        self._opener.early |= {key for key in then.keys() & now.keys() if then[key] != now[key]}
        # The update that comes now writes what several optimizers share.
        for key in now:
            for others in self._marks.values():
                others.pop(key, None)

    def _rehearse(self, index: int, found_inf: Tensor | None, scale: Tensor | None) -> None:
        skipped = found_inf is not None and bool(found_inf.item()) if index not in self._opener.proven else True
        if skipped or index in self._rehearsals:
            return
        optimizer, traits = self._context.optimizers[index], self._context.traits[index]
        if not optimizer.state and index not in self._stepped:
            # State is born in the first update: the second shows what there is to replay.
            self._stepped.add(index)
            return
        units = [unit for unit in self._opener.units() if unit.optimizer == index]
        try:
            rehearsal = begin_rehearsal(optimizer, traits, units, found_inf=found_inf, scale=scale)
        except Exception as error:
            self._give_up_replay(index, f"its update cannot be replayed ({error})")
            return
        if rehearsal is not None:
            self._rehearsals[index] = rehearsal

    def _judge(self, index: int, rehearsal: Rehearsal) -> None:
        optimizer = self._context.optimizers[index]
        try:
            audit = end_rehearsal(rehearsal, optimizer, rtol=self._context.config.audit_rtol)
            problem = "" if audit.passed else f"a replay of its update differs by up to {audit.max_error:.3g}"
        except Exception as error:
            problem = f"its update cannot be replayed ({error})"
        self._opener.proven.add(index)
        if problem:
            self._give_up_replay(index, problem)

    def _give_up_replay(self, index: int, problem: str) -> None:
        self._opener.proven.add(index)
        self._opener.unreplayable.add(index)
        if self._context.config.mode in ("auto", "multi_step"):
            warnings.warn(
                f"{type(self._context.optimizers[index]).__name__} is checkpointed by copying its state during the "
                f"one step after the target: {problem}.",
                stacklevel=2,
            )


def _marks(optimizer: Optimizer) -> dict[int, Mark]:
    return {id(p): (p.data_ptr(), p._version) for group in optimizer.param_groups for p in group["params"]}


def _tensor(value: object) -> Tensor | None:
    return value if isinstance(value, Tensor) else None
