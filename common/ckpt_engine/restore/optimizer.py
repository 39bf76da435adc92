"""Load optimizer state without the casts that torch makes on the way, and into memory of its own.

``Optimizer.load_state_dict`` converts every state tensor to its parameter's dtype, except ``step``. Where training
keeps another one (``mu_product`` of NAdam, ``eta`` of ASGD under 16-bit or 64-bit parameters) the resumed run would
differ.

Where nothing has to be converted it takes the given tensors themselves, which lie packed in the image that was read:
they would keep all of it in memory, and at an odd address a dot product (LBFGS) sums in another order than in memory
that was allocated for it.

Example:
    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    >>> optimizer = torch.optim.NAdam([weight])
    >>> weight.grad = torch.ones_like(weight)
    >>> optimizer.step()
    >>> saved = optimizer.state_dict()
    >>> load_optimizer(optimizer, saved)
    >>> optimizer.state[weight]["mu_product"].dtype
    torch.float32
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load ``state`` into ``optimizer`` and give every tensor back its saved dtype.

    Args:
        optimizer: A torch optimizer.
        state: What its ``state_dict()`` returned when it was saved.
    """
    optimizer.load_state_dict(dict(state))
    restore_dtypes(optimizer, state)


def restore_dtypes(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Undo the casts of a ``load_state_dict`` that somebody else has called with ``state``, and the sharing with it."""
    ids = [index for group in state["param_groups"] for index in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in zip(ids, parameters, strict=True):
        live: dict[str, Any] = optimizer.state.get(parameter) or {}
        for key, saved in state["state"].get(index, {}).items():
            if key in live:
                live[key] = _own(live[key], saved)


def _own(current: Any, saved: Any) -> Any:
    """``current`` with the dtype of ``saved`` and none of its memory; lists (LBFGS keeps some) by their items."""
    if isinstance(current, list) and isinstance(saved, list) and len(current) == len(saved):
        return [_own(*pair) for pair in zip(current, saved, strict=True)]
    if not isinstance(current, Tensor) or not isinstance(saved, Tensor):
        return current
    if current.dtype == saved.dtype and current.data_ptr() != saved.data_ptr():
        return current
    return saved.detach().to(device=current.device, copy=True)
