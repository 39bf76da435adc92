"""Optimizer state is loaded with the dtypes it was saved with, and into memory of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ckpt_engine.restore.optimizer import load_optimizer, restore_dtypes


def _stepped(cls: Any, dtype: torch.dtype = torch.float32, **options: Any) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(33, dtype=dtype))
    optimizer: torch.optim.Optimizer = cls([weight], **options)
    for _ in range(3):
        optimizer.step(lambda: _loss(optimizer, weight))
    return optimizer


def _loss(optimizer: torch.optim.Optimizer, weight: Tensor) -> Any:
    optimizer.zero_grad()
    loss = (weight - 1).pow(2).sum()
    loss.backward()
    return loss.item()


def _packed(state: dict[str, Any]) -> dict[str, Any]:
    """The same state with its tensors at odd places of one buffer, as they lie in an image that was read."""
    buffer, used = torch.zeros(1 << 16, dtype=torch.uint8), 4

    def move(value: Any) -> Any:
        nonlocal used
        if isinstance(value, dict):
            return {key: move(item) for key, item in value.items()}
        if isinstance(value, list):
            return [move(item) for item in value]
        if not isinstance(value, Tensor):
            return value
        view = buffer[used : used + value.nbytes].view(value.dtype).view(value.shape)
        used += value.nbytes
        return view.copy_(value)

    return {"state": move(state["state"]), "param_groups": state["param_groups"]}


def _addresses(value: Any) -> list[int]:
    if isinstance(value, Tensor):
        return [value.untyped_storage().data_ptr()]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [address for item in items for address in _addresses(item)]


def test_state_gets_memory_of_its_own_lists_of_tensors_included() -> None:
    for cls in (torch.optim.LBFGS, torch.optim.Adam):
        saved = _packed(_stepped(cls).state_dict())
        optimizer = _stepped(cls)
        load_optimizer(optimizer, saved)
        live = optimizer.state_dict()["state"]
        assert not set(_addresses(live)) & set(_addresses(saved["state"]))
        assert len(_addresses(live)) == len(_addresses(saved["state"])) > 0


def test_lbfgs_goes_on_in_the_same_bits_from_state_at_odd_addresses() -> None:
    full, resumed = _stepped(torch.optim.LBFGS, max_iter=2), _stepped(torch.optim.LBFGS, max_iter=2)
    load_optimizer(resumed, _packed(resumed.state_dict()))
    for optimizer in (full, resumed):
        weight = optimizer.param_groups[0]["params"][0]
        for _ in range(5):
            optimizer.step(lambda o=optimizer, w=weight: _loss(o, w))  # type: ignore[misc]
    assert torch.equal(full.param_groups[0]["params"][0], resumed.param_groups[0]["params"][0])


def test_casts_of_somebody_elses_load_are_undone() -> None:
    saved = _stepped(torch.optim.NAdam, torch.bfloat16).state_dict()
    optimizer = _stepped(torch.optim.NAdam, torch.bfloat16)
    optimizer.load_state_dict(saved)
    restore_dtypes(optimizer, saved)
    assert optimizer.state_dict()["state"][0]["mu_product"].dtype == torch.float32
