from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ckpt_engine.capture.shadow import (
    CACHE_ELEMENTS,
    Captured,
    LogEntry,
    ShadowOptimizer,
    dense_like,
    hyper_of,
    working_copy,
)
from ckpt_engine.capture.traits import traits_of
from ckpt_engine.capture.units import Block, Unit
from ckpt_engine.errors import ConfigError


class Pair:
    """A live optimizer with one parameter, and a shadow that holds a copy of it."""

    def __init__(self, optimizer: Any, weight: nn.Parameter, *, steps: int = 2, flat: bool = True) -> None:
        self.optimizer, self.weight = optimizer, weight
        for seed in range(steps):
            self.live(seed)
        self.shadow = ShadowOptimizer(optimizer, traits_of(optimizer))
        state = optimizer.state.get(weight) or {}
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        self.held = Captured(
            block=Block(unit=Unit(fqn="w", tensor=weight, optimizer=0, group=0), low=0, high=weight.numel(), nbytes=0),
            parameter=_copy(weight, flat),
            state={key: _copy(value, flat) for key, value in tensors.items()},
            values={key: value for key, value in state.items() if key not in tensors},
        )
        self.shadow.add(self.held, 0)

    def live(self, seed: int) -> LogEntry:
        grad = torch.randn(self.weight.shape, generator=torch.Generator().manual_seed(seed)).to(self.weight.dtype)
        self.weight.grad = grad
        hyper = hyper_of(self.optimizer)
        self.optimizer.step()
        held = getattr(self, "held", None)
        flat = grad.view(-1) if held is not None and held.parameter.dim() == 1 else grad
        return LogEntry(hyper=hyper, grads=[(held, flat.clone())] if held is not None else [])

    def check(self) -> None:
        self.shadow.settle(self.held)
        state = self.optimizer.state[self.weight]
        for copied, live in [(self.held.parameter, self.weight), *((v, state[k]) for k, v in self.held.state.items())]:
            assert torch.equal(copied.reshape(-1), live.detach().reshape(-1))


def _copy(tensor: Tensor, flat: bool) -> Tensor:
    copied = tensor.detach().clone()
    return copied.view(-1) if flat and copied.dim() > 0 else copied


OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.RAdam, {}),
    (torch.optim.AdamW, {"fused": True}),
]


@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS)
@pytest.mark.parametrize("numel", [1, 63, CACHE_ELEMENTS + 100])
def test_replay_gives_the_bits_of_the_live_update(cls: Any, options: dict[str, Any], numel: int) -> None:
    weight = nn.Parameter(torch.randn(numel))
    pair = Pair(cls([weight], lr=0.05, **options), weight)
    for seed in range(5, 9):
        pair.optimizer.param_groups[0]["lr"] *= 0.9
        pair.shadow.replay(pair.live(seed))
    pair.check()


def test_a_step_without_a_gradient_or_skipped_by_the_scaler_changes_nothing() -> None:
    weight = nn.Parameter(torch.randn(200))
    pair = Pair(torch.optim.AdamW([weight], lr=0.05), weight)
    hyper = hyper_of(pair.optimizer)
    pair.shadow.replay(LogEntry(hyper=hyper, grads=[(pair.held, None)]))
    pair.shadow.replay(LogEntry(hyper=hyper, grads=[(pair.held, torch.ones(200))], found_inf=torch.tensor(1.0)))
    pair.check()


def test_replay_does_not_fire_hooks_of_the_user() -> None:
    weight = nn.Parameter(torch.randn(100))
    optimizer = torch.optim.AdamW([weight], lr=0.05)
    fired: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: fired.append("global pre")),
        register_optimizer_step_post_hook(lambda *_: fired.append("global post")),
    ]
    optimizer.register_step_pre_hook(lambda *_: fired.append("pre"))
    optimizer.register_step_post_hook(lambda *_: fired.append("post"))
    try:
        pair = Pair(optimizer, weight)
        entry = pair.live(7)
        fired.clear()
        pair.shadow.replay(entry)
    finally:
        for handle in handles:
            handle.remove()
    assert fired == []
    pair.check()


def test_a_step_patched_by_a_scheduler_is_not_called() -> None:
    weight = nn.Parameter(torch.randn(100))
    optimizer = torch.optim.AdamW([weight], lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (t + 1))
    assert "step" in vars(optimizer)
    pair = Pair(optimizer, weight)
    entry = pair.live(7)
    scheduler.step()
    before = weight.detach().clone()
    pair.shadow.replay(entry)
    assert torch.equal(weight.detach(), before)
    pair.check()


def test_hyper_parameters_are_copies_tensors_included() -> None:
    weight = nn.Parameter(torch.randn(10))
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam([weight], lr=rate, betas=(0.8, 0.9))
    (hyper,) = hyper_of(optimizer)
    rate.fill_(5.0)
    assert "params" not in hyper
    assert float(hyper["lr"]) == pytest.approx(0.1)
    assert hyper["betas"] == (0.8, 0.9)


@pytest.mark.parametrize("options", [{"lr": torch.tensor(0.05)}, {"lr": 0.05, "foreach": True}])
def test_tensor_learning_rates_and_foreach_replay_alike(options: dict[str, Any]) -> None:
    weight = nn.Parameter(torch.randn(500))
    pair = Pair(torch.optim.Adam([weight], **options), weight)
    for seed in range(3):
        entry = pair.live(seed)
        if isinstance(options["lr"], Tensor):
            options["lr"].mul_(0.5)
        pair.shadow.replay(entry)
    pair.check()


def test_a_capturable_optimizer_is_replayed_on_the_host() -> None:
    weight = nn.Parameter(torch.randn(100))
    pair = Pair(torch.optim.AdamW([weight], lr=0.05), weight)
    entry = pair.live(3)
    entry.hyper[0]["capturable"] = True
    pair.shadow.replay(entry)
    pair.check()


def test_state_born_in_a_replay_goes_on_in_the_next() -> None:
    weight = nn.Parameter(torch.randn(100))
    optimizer = torch.optim.SGD([weight], lr=0.05, momentum=0.9)
    pair = Pair(optimizer, weight, steps=0)
    for seed in range(3):
        pair.shadow.replay(pair.live(seed))
    pair.check()
    (piece, _, _) = pair.held.pieces[0]
    replayed = pair.shadow._optimizer.state[piece]["momentum_buffer"]
    assert torch.equal(replayed, optimizer.state[weight]["momentum_buffer"])


def test_state_that_is_replaced_instead_of_written_is_brought_back() -> None:
    class Replacing(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                state["mean"] = state.get("mean", torch.zeros_like(p)) * 0.9 + p.grad
                p.data.sub_(state["mean"], alpha=0.1)

    weight = nn.Parameter(torch.randn(100))
    pair = Pair(Replacing([weight]), weight)
    pair.shadow.replay(pair.live(5))
    pair.check()


def test_a_removed_block_is_left_alone() -> None:
    weight = nn.Parameter(torch.randn(100))
    pair = Pair(torch.optim.AdamW([weight], lr=0.05), weight)
    entry = pair.live(3)
    kept = pair.held.parameter.clone()
    pair.shadow.remove(pair.held)
    pair.shadow.replay(entry)
    assert torch.equal(pair.held.parameter, kept)
    assert len(pair.shadow._optimizer.state) == 0


def test_memory_of_another_order_replays_in_that_order() -> None:
    weight = nn.Parameter(torch.randn(30, 40).t())
    optimizer = torch.optim.Adafactor([weight], lr=0.05)
    pair = Pair(optimizer, weight, flat=False)
    pair.shadow.replay(pair.live(4))
    pair.check()


def test_a_twin_owns_its_attributes() -> None:
    class Remembers(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            self.history.append(1)
            self.total.add_(1)
            return super().step(closure)

    weight = nn.Parameter(torch.randn(10))
    optimizer = Remembers([weight], lr=0.1)
    optimizer.history, optimizer.total = [], torch.zeros(1)  # type: ignore[assignment]
    pair = Pair(optimizer, weight)
    before = copy.deepcopy((optimizer.history, optimizer.total))
    entry = LogEntry(hyper=hyper_of(optimizer), grads=[(pair.held, torch.ones(10))])
    pair.shadow.replay(entry)
    assert (optimizer.history, optimizer.total) == before


@pytest.mark.parametrize("attribute", ["params", "generator", "object", "inner"])
def test_what_a_twin_cannot_own_is_refused(attribute: str) -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            return super().step(closure)

    weight = nn.Parameter(torch.randn(10))
    values = {
        "params": {"all": [weight]},
        "generator": torch.Generator(),
        "object": object(),
        "inner": torch.optim.SGD([weight], lr=0.1),
    }
    optimizer = Own([weight], lr=0.1)
    optimizer.extra = values[attribute]  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"Own\.extra holds a .*, of which a replay cannot have its own copy"):
        ShadowOptimizer(optimizer, traits_of(optimizer))
    known = torch.optim.SGD([weight], lr=0.1)
    known.extra = values[attribute]  # type: ignore[attr-defined]
    ShadowOptimizer(known, traits_of(known))


def test_working_memory_has_the_strides_of_the_live_tensor() -> None:
    live = torch.randn(3, 4, 5).permute(2, 0, 1)
    assert working_copy(torch.empty(5, 3, 4), live).stride() == live.stride()
    view = torch.empty(3, 4)
    assert working_copy(view, torch.randn(3, 4)) is view
    gaps = torch.randn(8, 8)[::2]
    assert dense_like(torch.empty(gaps.nbytes, dtype=torch.uint8), gaps).shape == gaps.shape
