from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ckpt_engine.capture.tap import OptimizerTap, unwrap
from ckpt_engine.errors import ConfigError


class Log:
    """What a tap reported, and the weight at that moment."""

    def __init__(self, optimizer: Any, weight: nn.Parameter) -> None:
        self.events: list[tuple[str, float]] = []
        self.tap = OptimizerTap(
            optimizer,
            lambda _: self.events.append(("before", float(weight.detach()[0]))),
            lambda _: self.events.append(("after", float(weight.detach()[0]))),
        )

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.events]


def _weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(1))


def _backward(weight: nn.Parameter) -> torch.Tensor:
    weight.grad = None
    loss = (weight * 2).sum()
    loss.backward()
    return loss


def test_plain_step_reports_old_then_new_parameters() -> None:
    weight = _weight()
    optimizer = torch.optim.SGD([weight], lr=0.25)
    log = Log(optimizer, weight)
    _backward(weight)
    optimizer.step()
    assert log.events == [("before", 1.0), ("after", 0.5)]


def test_gradients_are_final_when_a_closure_makes_them() -> None:
    weight = _weight()
    optimizer = torch.optim.SGD([weight], lr=0.25)
    seen: list[Any] = []
    OptimizerTap(optimizer, lambda _: seen.append(weight.grad.clone()), lambda _: None)  # type: ignore[union-attr]

    def closure() -> torch.Tensor:
        loss = _backward(weight)
        weight.grad.mul_(3)  # type: ignore[union-attr]
        return loss

    optimizer.step(closure)
    assert [float(grad) for grad in seen] == [6.0]


@pytest.mark.parametrize("as_keyword", [True, False])
def test_closure_result_is_returned_and_grad_mode_kept(as_keyword: bool) -> None:
    weight = _weight()
    optimizer = torch.optim.SGD([weight], lr=0.25)
    log = Log(optimizer, weight)
    closure = lambda: _backward(weight)  # noqa: E731
    loss = optimizer.step(closure=closure) if as_keyword else optimizer.step(closure)
    assert float(loss) == 2.0
    assert log.names == ["before", "after"]


def test_a_subclass_that_calls_super_step_counts_once() -> None:
    class Doubled(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    weight = _weight()
    optimizer = Doubled([weight], lr=0.25)
    log = Log(optimizer, weight)
    for _ in range(3):
        _backward(weight)
        optimizer.step()
    assert log.names == ["before", "after"] * 3


def test_lbfgs_is_seen_to_call_its_closure_more_than_once() -> None:
    weight = nn.Parameter(torch.tensor([3.0, -2.0]))
    optimizer = torch.optim.LBFGS([weight], max_iter=4)
    tap = OptimizerTap(optimizer, lambda _: None, lambda _: None)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight**4).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert tap.closure_calls > 1


def test_a_step_skipped_by_the_scaler_is_silent() -> None:
    weight = _weight()
    optimizer = torch.optim.SGD([weight], lr=0.25)
    log = Log(optimizer, weight)
    scaler = torch.amp.GradScaler("cpu")
    weight.grad = torch.tensor([float("inf")])
    scaler.scale(torch.ones(1))
    scaler.step(optimizer)
    assert log.names == []


def test_a_fused_step_under_a_scaler_reports_found_inf() -> None:
    weight = _weight()
    optimizer = torch.optim.AdamW([weight], lr=0.25, fused=True)
    flags: list[float] = []
    OptimizerTap(
        optimizer, lambda t: flags.append(float(t.optimizer.found_inf)), lambda _: None  # type: ignore[attr-defined]
    )
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    weight.grad = torch.tensor([float("inf")])
    scaler.step(optimizer)
    assert flags == [1.0]
    assert float(weight) == 1.0


def test_an_exception_in_the_closure_does_not_deafen_the_tap() -> None:
    weight = _weight()
    optimizer = torch.optim.SGD([weight], lr=0.25)
    log = Log(optimizer, weight)

    def bad() -> torch.Tensor:
        raise ValueError("no data")

    with pytest.raises(ValueError, match="no data"):
        optimizer.step(bad)
    _backward(weight)
    optimizer.step()
    assert log.names == ["before", "after"]


def test_an_exception_inside_the_update_is_forgotten_after_abandon() -> None:
    class Failing(torch.optim.SGD):
        fail = True

        def step(self, closure: Any = None) -> Any:
            if self.fail:
                raise RuntimeError("kernel failed")
            return super().step(closure)

    weight = _weight()
    optimizer = Failing([weight], lr=0.25)
    log = Log(optimizer, weight)
    _backward(weight)
    with pytest.raises(RuntimeError, match="kernel failed"):
        optimizer.step()
    optimizer.fail = False
    log.tap.abandon()
    optimizer.step()
    assert log.names == ["before", "before", "after"]


def test_a_muted_tap_reports_nothing() -> None:
    weight = _weight()
    optimizer = torch.optim.SGD([weight], lr=0.25)
    log = Log(optimizer, weight)
    log.tap.muted = True
    _backward(weight)
    optimizer.step()
    log.tap.muted = False
    optimizer.step()
    assert log.names == ["before", "after"]


def test_removed_hooks_stay_removed() -> None:
    weight = _weight()
    optimizer = torch.optim.SGD([weight], lr=0.25)
    log = Log(optimizer, weight)
    log.tap.remove()
    _backward(weight)
    optimizer.step()
    assert log.names == []


def test_wrappers_are_unwrapped_and_real_optimizers_that_hold_others_are_not() -> None:
    weight = _weight()
    inner = torch.optim.SGD([weight], lr=0.25)

    class Wrapper:
        def __init__(self) -> None:
            self._optimizer = inner

    class Lookahead(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__([weight], {})
            self.optimizer = inner

    outer = Lookahead()
    assert unwrap(Wrapper()) is inner
    assert unwrap(outer) is outer


def test_what_is_no_optimizer_is_refused_with_advice() -> None:
    with pytest.raises(ConfigError, match="pass the inner optimizer"):
        unwrap(object())
