"""A rehearsal: replay one live update on a small part of the state, and see whether the bits agree.

It runs once per optimizer, at the first update after its state exists and before any window opens, so that a class
whose update is no function of parameter, state and gradient is found before a checkpoint depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from ckpt_engine.capture.audit import AuditResult, Sample, compare
from ckpt_engine.capture.rng import rng_state, same_streams, set_rng_state
from ckpt_engine.capture.shadow import Captured, LogEntry, ShadowOptimizer, autocast_of, dense_like, hyper_of
from ckpt_engine.capture.traits import Traits
from ckpt_engine.capture.units import CUT, Block, Unit, state_tensors
from ckpt_engine.errors import SaveFailedError

MAX_ELEMENTS = 64 * 1024
UNITS_PER_GROUP = 2


@dataclass(kw_only=True, eq=False, slots=True)
class Rehearsal:
    """A small copy of state and gradients taken right before an update, ready to be replayed.

    Args:
        entry: The logged update.
        shadow: A shadow that holds the copies.
    """

    unit_blocks: list[Captured]
    entry: LogEntry
    shadow: ShadowOptimizer


def begin_rehearsal(
    optimizer: Optimizer, traits: Traits, units: Sequence[Unit], *, found_inf: Tensor | None, scale: Tensor | None
) -> Rehearsal | None:
    """Copy a few units' state and gradients; None when no unit has a state and a gradient yet."""
    chosen = _choose(optimizer, traits, units)
    if not chosen:
        return None
    shadow = ShadowOptimizer(optimizer, traits)
    captured = [_copy(unit, optimizer, traits) for unit in chosen]
    entry = LogEntry(
        hyper=hyper_of(optimizer), grads=[], found_inf=found_inf, grad_scale=scale, autocast=autocast_of(optimizer)
    )
    for one in captured:
        shadow.add(one, one.block.unit.group)
        entry.grads.append((one, _clone(_grad(one.block.unit), one.block)))
    return Rehearsal(unit_blocks=captured, entry=entry, shadow=shadow)


def end_rehearsal(rehearsal: Rehearsal, optimizer: Optimizer, *, rtol: float) -> AuditResult:
    """Replay the copies and compare them with the tensors that the live update has just written.

    Raises:
        Exception: What the replay raised; an update that draws random numbers raises SaveFailedError.
    """
    _replay_without_dice(rehearsal)
    samples, image = [], {}
    for captured in rehearsal.unit_blocks:
        rehearsal.shadow.settle(captured)
        unit, block = captured.block.unit, captured.block
        live = {unit.name(): unit.tensor} | {
            unit.name(key): value for key, value in state_tensors(optimizer, unit.tensor).items()
        }
        copies = {unit.name(): captured.parameter} | {unit.name(key): value for key, value in captured.state.items()}
        for name in live.keys() & copies.keys():
            part = _slice(live[name].detach(), block)
            exact = part.device.type == "cpu"
            samples.append(Sample(name=name, low=0, values=part.to("cpu", copy=True).reshape(-1), exact=exact))
            image[name] = copies[name].reshape(-1)
    return compare(samples, image, kind="rehearsal", rtol=rtol)


def _replay_without_dice(rehearsal: Rehearsal) -> None:
    # A replay that drew from the global streams would change the training that it follows.
    streams = rng_state()
    try:
        rehearsal.shadow.replay(rehearsal.entry)
        drawn = not same_streams(streams, rng_state())
    finally:
        set_rng_state(streams)
    if drawn:
        raise SaveFailedError("it draws random numbers")


def _grad(unit: Unit) -> Tensor:
    grad = unit.tensor.grad
    assert grad is not None
    return grad


def _choose(optimizer: Optimizer, traits: Traits, units: Sequence[Unit]) -> list[Unit]:
    chosen: list[Unit] = []
    ready = [
        unit
        for unit in units
        if not unit.direct
        and unit.tensor.grad is not None
        and unit.tensor.grad.layout is torch.strided
        and unit.tensor.numel() > 0
        and (optimizer.state.get(unit.tensor) or not _is_stateful(optimizer))
    ]
    for group in range(len(optimizer.param_groups)):
        mine = sorted((u for u in ready if u.group == group), key=lambda u: u.tensor.numel())
        small = [u for u in mine if u.tensor.numel() <= MAX_ELEMENTS or (traits.grain == "slice" and u.flat)]
        # The smallest and the largest: tails and vector bodies are both seen.
        chosen += (small or mine[:1])[:1] + (small[-1:] if len(small) > 1 else [])
    return chosen


def _is_stateful(optimizer: Optimizer) -> bool:
    return any(bool(entry) for entry in optimizer.state.values())


def _copy(unit: Unit, optimizer: Optimizer, traits: Traits) -> Captured:
    numel = unit.tensor.numel()
    high = numel if numel <= MAX_ELEMENTS or traits.grain != "slice" or not unit.flat else MAX_ELEMENTS // CUT * CUT
    block = Block(unit=unit, low=0, high=high, nbytes=0)
    entry = optimizer.state.get(unit.tensor) or {}
    state = state_tensors(optimizer, unit.tensor)
    return Captured(
        block=block,
        parameter=_clone(unit.tensor.detach(), block),
        state={key: _clone(value, block) for key, value in state.items()},
        values={key: value for key, value in entry.items() if key not in state},
    )


def _clone(tensor: Tensor, block: Block) -> Tensor:
    part = _slice(tensor, block)
    if part.is_contiguous():
        return part.to("cpu", copy=True)
    return dense_like(torch.empty(part.nbytes, dtype=torch.uint8), part).copy_(part)


def _slice(tensor: Tensor, block: Block) -> Tensor:
    """The block's part of a tensor of the unit's shape; any other tensor whole."""
    if block.is_whole or tensor.dim() == 0 or tensor.shape != block.unit.tensor.shape:
        return tensor
    return tensor.reshape(-1)[block.low : block.high]
