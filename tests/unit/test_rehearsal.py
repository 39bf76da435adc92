from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_engine.capture.rehearsal import MAX_ELEMENTS, begin_rehearsal, end_rehearsal
from ckpt_engine.capture.traits import traits_of
from ckpt_engine.capture.units import build_units
from ckpt_engine.errors import SaveFailedError


def _rehearse(optimizer: Any, *, warm: int = 1, grads: bool = True) -> Any:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    traits = traits_of(optimizer)
    for seed in range(warm + 1):
        for p in params:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)) if grads else None
        if seed < warm:
            optimizer.step()
    units = build_units([optimizer], [traits], {f"p{i}": p for i, p in enumerate(params)}, block_bytes=4096)
    rehearsal = begin_rehearsal(optimizer, traits, units, found_inf=None, scale=None)
    optimizer.step()
    return rehearsal


def _params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape)) for shape in [(3,), (70, 11), (MAX_ELEMENTS + 64,), (40, 30)]]


@pytest.mark.parametrize("name", ["SGD", "AdamW", "NAdam", "Rprop", "Adafactor"])
def test_known_optimizers_pass(name: str) -> None:
    optimizer = getattr(torch.optim, name)(_params(), lr=0.01)
    audit = end_rehearsal(_rehearse(optimizer), optimizer, rtol=0.0)
    assert audit.passed
    assert audit.elements > 0


def test_small_and_large_parameters_are_looked_at_and_no_more_than_needed() -> None:
    optimizer = torch.optim.AdamW(_params())
    rehearsal = _rehearse(optimizer)
    sizes = [held.parameter.numel() for held in rehearsal.unit_blocks]
    assert sizes == [3, MAX_ELEMENTS]


def test_there_is_nothing_to_rehearse_without_state_or_gradient() -> None:
    assert _rehearse(torch.optim.AdamW(_params()), grads=False) is None
    assert _rehearse(torch.optim.SGD(_params(), lr=0.1), warm=0) is not None


def test_an_update_of_hidden_state_fails() -> None:
    class Hidden(torch.optim.Optimizer):
        count = 0

        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            Hidden.count += 1
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad, alpha=0.1 / Hidden.count)

    optimizer = Hidden(_params())
    audit = end_rehearsal(_rehearse(optimizer), optimizer, rtol=0.0)
    assert not audit.passed
    assert audit.max_error > 0


@pytest.mark.parametrize("source", ["torch", "python"])
def test_an_update_that_draws_is_refused_and_the_streams_are_put_back(source: str) -> None:
    class Draws(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad, alpha=float(torch.rand(1)) if source == "torch" else random.random())

    optimizer = Draws(_params())
    rehearsal = _rehearse(optimizer)
    torch.manual_seed(1)
    random.seed(1)
    expected = (float(torch.rand(1)), random.random())
    torch.manual_seed(1)
    random.seed(1)
    with pytest.raises(SaveFailedError, match="draws random numbers"):
        end_rehearsal(rehearsal, optimizer, rtol=0.0)
    assert (float(torch.rand(1)), random.random()) == expected


def test_the_live_optimizer_is_not_touched() -> None:
    optimizer = torch.optim.AdamW(_params())
    rehearsal = _rehearse(optimizer)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    versions = [p._version for p in params] + [v._version for s in optimizer.state.values() for v in s.values()]
    end_rehearsal(rehearsal, optimizer, rtol=0.0)
    after = [p._version for p in params] + [v._version for s in optimizer.state.values() for v in s.values()]
    assert after == versions
