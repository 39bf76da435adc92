from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ckpt_engine.capture.traits import traits_of


def _make(name: str, **options: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = getattr(torch.optim, name)([nn.Parameter(torch.ones(3, 3))], lr=0.1, **options)
    return made


@pytest.mark.parametrize(
    "name",
    ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop", "ASGD", "Rprop"],
)
def test_elementwise_optimizers_are_replayed_in_slices(name: str) -> None:
    traits = traits_of(_make(name))
    assert (traits.grain, traits.proven, traits.reason) == ("slice", True, "")


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_optimizers_of_whole_matrices_are_replayed_whole(name: str) -> None:
    traits = traits_of(_make(name))
    assert (traits.grain, traits.proven) == ("whole", True)


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
def test_what_cannot_be_replayed_says_why(name: str) -> None:
    traits = traits_of(_make(name))
    assert traits.grain == "never"
    assert name in traits.reason


def test_a_differentiable_optimizer_is_never_replayed() -> None:
    assert "differentiable" in traits_of(_make("Adam", differentiable=True)).reason


def test_a_subclass_with_other_defaults_is_known_and_one_with_another_step_is_not() -> None:
    class Tuned(torch.optim.AdamW):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.3)

    class Changed(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            return super().step(closure)

    weight = nn.Parameter(torch.ones(3))
    assert traits_of(Tuned([weight])).proven
    changed = traits_of(Changed([weight]))
    assert (changed.grain, changed.proven, changed.keeps_grad) == ("whole", False, False)


def test_a_fused_group_among_others_makes_the_optimizer_fused() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(2))]}, {"params": [nn.Parameter(torch.ones(2))], "fused": True}]
    assert traits_of(torch.optim.AdamW(groups, lr=0.1)).fused
    assert not traits_of(_make("AdamW")).fused


def test_only_nesterov_momentum_writes_into_gradients() -> None:
    assert not traits_of(_make("SGD", momentum=0.9, nesterov=True)).keeps_grad
    assert traits_of(_make("SGD", momentum=0.9)).keeps_grad
    assert traits_of(_make("AdamW", maximize=True)).keeps_grad


def test_loops_stand_for_foreach_only_where_both_round_alike() -> None:
    assert traits_of(_make("AdamW")).loops_like_foreach
    assert not traits_of(_make("NAdam")).loops_like_foreach
    half = torch.optim.AdamW([nn.Parameter(torch.ones(2, dtype=torch.bfloat16))])
    assert not traits_of(half).loops_like_foreach


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adam"])
def test_the_flag_that_gradients_survive_an_update_is_true(name: str) -> None:
    weight = nn.Parameter(torch.randn(100))
    for options in ({}, {"foreach": True}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "foreach": True}):
        optimizer = getattr(torch.optim, name)([weight], lr=0.1, **options)
        assert traits_of(optimizer).keeps_grad
        weight.grad = torch.randn(100)
        kept, version = weight.grad.clone(), weight.grad._version
        optimizer.step()
        assert torch.equal(weight.grad, kept)
        assert weight.grad._version == version
