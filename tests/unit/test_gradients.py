from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ckpt_engine.capture.context import WindowStats
from ckpt_engine.capture.gradients import GradientLog
from ckpt_engine.capture.shadow import Captured
from tests.unit.windowing import Bench


def _held(bench: Bench) -> list[Captured]:
    return [
        Captured(block=block, parameter=unit.tensor.detach().view(-1)[block.low : block.high], state={}, values={})
        for unit in bench.opener.units()
        if not unit.is_static
        for block in unit.blocks
    ]


def _log(**options: Any) -> tuple[Bench, GradientLog, WindowStats]:
    bench, stats = Bench(**options), WindowStats()
    bench.gradients()
    return bench, GradientLog(bench.context, stats), stats


def test_the_log_holds_the_gradients_of_every_block_and_the_hyper_parameters() -> None:
    bench, log, stats = _log()
    held = _held(bench)
    expected = [h.block.unit.tensor.grad.view(-1)[h.block.low : h.block.high].clone() for h in held]  # type: ignore[union-attr]
    assert log.open(0, held, found_inf=None, scale=None) == []
    logged = log.close(0)
    assert logged is not None
    entry, ticket, buffers = logged
    assert ticket is not None
    ticket.wait(10)
    bench.optimizer.zero_grad(set_to_none=False)
    assert [h for h, _ in entry.grads] == held
    assert all(isinstance(g, Tensor) and torch.equal(g, e) for (_, g), e in zip(entry.grads, expected, strict=True))
    assert entry.hyper[0]["lr"] == 0.01
    assert stats.gradient_bytes == sum(e.nbytes for e in expected)
    assert len(buffers) == len(held)


def test_a_parameter_without_gradient_is_logged_as_such() -> None:
    bench, log, _ = _log()
    bench.model[0].bias.grad = None
    held = _held(bench)
    log.open(0, held, found_inf=None, scale=None)
    logged = log.close(0)
    assert logged is not None
    missing = [h.block.unit.fqn for h, grad in logged[0].grads if grad is None]
    assert missing == ["0.bias"]


def test_sparse_gradients_are_named_and_left_out() -> None:
    bench, log, _ = _log()
    bench.model[0].weight.grad = bench.model[0].weight.grad.to_sparse()  # type: ignore[union-attr,operator]
    sparse = log.open(0, _held(bench), found_inf=None, scale=None)
    assert [unit.fqn for unit in sparse] == ["0.weight"]
    logged = log.close(0)
    assert logged is not None
    assert "0.weight" not in {h.block.unit.fqn for h, _ in logged[0].grads}


def test_a_gradient_of_another_memory_order_is_logged_by_its_elements() -> None:
    bench, log, _ = _log()
    weight = bench.model[0].weight
    weight.grad = torch.randn(8, 300).t()  # type: ignore[assignment]
    log.open(0, _held(bench), found_inf=None, scale=None)
    logged = log.close(0)
    assert logged is not None
    logged[1].wait(10)  # type: ignore[union-attr]
    parts = [g for h, g in logged[0].grads if h.block.unit.fqn == "0.weight" and g is not None]
    assert torch.equal(torch.cat(parts), weight.grad.reshape(-1))  # type: ignore[union-attr,operator]


def test_discarding_and_abandoning_give_all_buffers_back() -> None:
    bench, log, _ = _log()
    log.open(0, _held(bench), found_inf=None, scale=None)
    assert log.is_pending(0)
    assert log.pending == [0]
    assert bench.staging.outstanding > 0
    log.discard(0)
    assert (log.pending, bench.staging.outstanding) == ([], 0)
    log.open(0, _held(bench), found_inf=None, scale=None)
    log.abandon()
    assert (log.pending, bench.staging.outstanding) == ([], 0)


@pytest.mark.parametrize("overwritten", [False, True])
def test_a_fence_tells_whether_a_gradient_was_overwritten_before_it(overwritten: bool) -> None:
    bench, log, _ = _log()
    log.open(0, _held(bench), found_inf=None, scale=None)
    if overwritten:
        bench.optimizer.zero_grad(set_to_none=False)
    assert log.fence() == (not overwritten)
    assert log.fence()
    log.abandon()


def test_without_fences_the_copies_are_made_before_the_update() -> None:
    bench, log, _ = _log(fenced=False)
    log.open(0, _held(bench), found_inf=None, scale=None)
    logged = log.close(0)
    assert logged is not None
    assert logged[1] is not None
    assert logged[1].done()
    bench.optimizer.zero_grad(set_to_none=False)
    assert log.fence()


def test_the_scalers_flags_are_copies() -> None:
    bench, log, _ = _log()
    flag, scale = torch.tensor(1.0), torch.tensor(64.0)
    log.open(0, _held(bench), found_inf=flag, scale=scale)
    flag.zero_()
    scale.zero_()
    logged = log.close(0)
    assert logged is not None
    assert (float(logged[0].found_inf), float(logged[0].grad_scale)) == (1.0, 64.0)  # type: ignore[arg-type]


def test_more_owed_than_allowed_waits_for_replay() -> None:
    bench, log, stats = _log(owed_bytes=1)
    done: list[int] = []
    bench.replay.submit(lambda: done.append(1))
    log.open(0, _held(bench), found_inf=None, scale=None)
    assert done == [1]
    assert stats.stall_s > 0
    log.abandon()
