"""Where each tensor of a block is copied to: straight into the image wherever its memory order allows.

Used by windows for blocks, and for nothing else: the copies themselves run on a :class:`DeviceLink`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ckpt_engine.capture.link import Copy
from ckpt_engine.capture.shadow import Captured, dense_like, working_copy
from ckpt_engine.capture.units import Block, Unit, is_sliced, state_tensors


class BlockCopier:
    """Plans the copies of a block into an image.

    Args:
        views: Image tensors by name.
        optimizers: The live optimizers.
    """

    def __init__(self, views: Mapping[str, Tensor], optimizers: Sequence[Optimizer]) -> None:
        self._views = views
        self._optimizers = optimizers
        self.scratch_bytes = 0

    def plan(self, block: Block) -> tuple[Captured, list[Copy]]:
        """Return the host copy of ``block`` (memory not filled yet) and the copies that fill it."""
        unit = block.unit
        copies: list[Copy] = []
        parameter = self._target(block, unit.name(), unit.tensor.detach(), copies)
        state: dict[str, Tensor] = {}
        values: dict[str, object] = {}
        if not unit.is_static:
            entry = self._optimizers[unit.optimizer].state.get(unit.tensor) or {}
            tensors = state_tensors(self._optimizers[unit.optimizer], unit.tensor)
            values = {key: value for key, value in entry.items() if key not in tensors}
            for key, value in tensors.items():
                if self._keeps(unit, key, value):
                    state[key] = self._target(block, unit.name(key), value.detach(), copies)
                elif not unit.direct:
                    state[key] = self._private(block, value.detach(), copies)
        return Captured(block=block, parameter=parameter, state=state, values=values), copies

    def publish(self, captured: Captured) -> None:
        """Bring what was replayed outside the image (another memory order) into it."""
        unit = captured.block.unit
        if not captured.block.is_first:
            return
        self._publish(unit.name(), captured.parameter)
        for key, value in captured.state.items():
            if key in unit.state_keys:
                self._publish(unit.name(key), value)

    def pairs(self, held: Captured) -> list[tuple[Tensor, Tensor]]:
        """Host copy and live tensor of everything that a block brings into the image, for comparison."""
        unit, block = held.block.unit, held.block
        hosts = {unit.name(): held.parameter} | {unit.name(key): value for key, value in held.state.items()}
        result = []
        for name, live in self.owned(unit).items():
            if unit.flat and is_sliced(unit, live):
                result.append((hosts[name], live.detach().view(-1)[block.low : block.high]))
            elif block.is_first and name in hosts:
                result.append((hosts[name], live.detach()))
        return result

    def owned(self, unit: Unit) -> dict[str, Tensor]:
        """The live tensors of a unit that its image entries stand for, by image name."""
        result = {unit.name(): unit.tensor}
        if not unit.is_static:
            tensors = state_tensors(self._optimizers[unit.optimizer], unit.tensor)
            result |= {unit.name(k): v for k, v in tensors.items() if self._keeps(unit, k, v)}
        return result

    def _keeps(self, unit: Unit, key: str, value: Tensor) -> bool:
        if key not in unit.state_keys:
            return False
        view = self._views[unit.name(key)]
        return view.shape == value.shape and view.dtype == value.dtype

    def _target(self, block: Block, name: str, live: Tensor, copies: list[Copy]) -> Tensor:
        view, unit = self._views[name], block.unit
        if unit.flat and is_sliced(unit, live):
            target, source = view.view(-1)[block.low : block.high], live.view(-1)[block.low : block.high]
        elif not block.is_first:
            # Only the first block's copy of an entry that is not cut goes into the image.
            return self._private(block, live, copies)
        else:
            target, source = working_copy(view, live), live
            self.scratch_bytes += 0 if target is view else target.nbytes
        if source.numel():
            copies.append(Copy(target, source))
        return target

    def _private(self, block: Block, live: Tensor, copies: list[Copy]) -> Tensor:
        """Host memory outside the image: state born after the window opened, a later block's step counter."""
        if block.unit.flat and is_sliced(block.unit, live) and live.is_contiguous():
            live = live.view(-1)[block.low : block.high]
        target = dense_like(torch.empty(live.nbytes, dtype=torch.uint8), live)
        self.scratch_bytes += target.nbytes
        if live.numel():
            copies.append(Copy(target, live))
        return target

    def _publish(self, name: str, value: Tensor) -> None:
        view = self._views[name]
        if value.numel() == view.numel() and value.data_ptr() != view.data_ptr():
            view.copy_(value.view(view.shape) if value.is_contiguous() else value)
