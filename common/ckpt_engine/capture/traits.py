"""What is known about an optimizer class: can its update be replayed on slices, on whole tensors, or not at all?

The table holds what the equivalence tests prove bit for bit. A class is recognised by its ``step`` function, so a
subclass that only changes defaults is known, and one that overrides ``step`` is not. An unknown class is replayed on
whole tensors if it passes a rehearsal against the live update (:mod:`ckpt_engine.capture.rehearsal`).

Example:
    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(3))
    >>> traits_of(torch.optim.AdamW([weight])).grain
    'slice'
    >>> traits_of(torch.optim.LBFGS([weight])).grain
    'never'
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.optim import Optimizer

Grain = Literal["slice", "whole", "never"]

_SLICE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
_WHOLE = tuple(getattr(torch.optim, name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name))
# Their for-loop and foreach kernels round alike in 32 and 64 bits; those of NAdam, RAdam and ASGD do not.
_ONE_ROUNDING = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Rprop,
)
_NEVER = (torch.optim.LBFGS, torch.optim.SparseAdam)


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """How one optimizer may be captured.

    Args:
        grain: ``slice``: elementwise, any cut at a multiple of 64 elements; ``whole``: a function of one whole tensor
            with its state and gradient; ``never``: cannot be replayed, copied only at the target.
        proven: The class is one that this package's tests replay bit for bit.
        fused: Some parameter group uses the fused kernel, which agrees only with itself.
        loops_like_foreach: The for-loop kernel gives the bits of the foreach kernel, so replay may use the former,
            which works in cache.
        keeps_grad: ``p.grad`` is not written by the update, so a held reference may be copied after it.
        reason: Why the grain is ``never``, as a sentence; empty otherwise.
    """

    grain: Grain
    proven: bool
    fused: bool
    loops_like_foreach: bool
    keeps_grad: bool
    reason: str = ""


def traits_of(optimizer: Optimizer) -> Traits:
    """Classify ``optimizer`` by its class and by the flags of its parameter groups."""
    step = type(optimizer).step
    name = type(optimizer).__name__
    groups = optimizer.param_groups
    fused = any(bool(group.get("fused")) for group in groups)
    if _owns(step, _NEVER):
        return _never(f"{name} does not update each parameter from its own state and gradient alone")
    if any(bool(group.get("differentiable")) for group in groups):
        return _never(f"{name} runs with differentiable=True, which keeps its update in the autograd graph")
    if _owns(step, _SLICE):
        return Traits(
            grain="slice",
            proven=True,
            fused=fused,
            loops_like_foreach=_owns(step, _ONE_ROUNDING) and _in_full_precision(optimizer),
            keeps_grad=_keeps_grad(optimizer),
        )
    return Traits(grain="whole", proven=_owns(step, _WHOLE), fused=fused, loops_like_foreach=False, keeps_grad=False)


def _owns(step: object, classes: tuple[type[Optimizer], ...]) -> bool:
    return any(step is cls.step for cls in classes)


def _never(reason: str) -> Traits:
    return Traits(grain="never", proven=False, fused=False, loops_like_foreach=False, keeps_grad=False, reason=reason)


def _in_full_precision(optimizer: Optimizer) -> bool:
    # In 16 bits a foreach kernel rounds between two operations where the for-loop one rounds once.
    dtypes = {parameter.dtype for group in optimizer.param_groups for parameter in group["params"]}
    return dtypes <= {torch.float32, torch.float64}


def _keeps_grad(optimizer: Optimizer) -> bool:
    # The foreach path of SGD with nesterov adds the momentum into the gradient buffers themselves.
    if type(optimizer).step is torch.optim.SGD.step:
        return not any(group.get("nesterov") for group in optimizer.param_groups)
    return True
