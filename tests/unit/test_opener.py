from __future__ import annotations

import torch
from torch import nn

from ckpt_engine.capture.units import view_key
from tests.unit.windowing import Bench


def test_an_optimizer_that_was_not_rehearsed_is_captured_in_one_step() -> None:
    bench = Bench()
    assert bench.opener.plan(bench.opener.units(), limit=9).steps == 3
    bench.opener.proven.clear()
    assert bench.opener.plan(bench.opener.units(), limit=9).mode == "one_step"


def test_weights_only_is_one_step_without_optimizer_state() -> None:
    bench = Bench(weights_only=True)
    units = bench.opener.units()
    assert bench.opener.plan(units, limit=9).mode == "one_step"
    assert all(unit.state_keys == () for unit in units)


def test_no_more_steps_are_planned_than_are_left() -> None:
    bench = Bench()
    assert [bench.opener.plan(bench.opener.units(), limit=n).steps for n in (1, 2, 3, 8)] == [1, 2, 3, 3]


def test_what_is_known_about_parameters_reaches_new_units() -> None:
    bench = Bench()
    first, second, *_ = bench.model.parameters()
    bench.opener.direct.add(id(first))
    bench.opener.early.add(id(second))
    units = {unit.fqn: unit for unit in bench.opener.units()}
    assert (units["0.weight"].direct, units["0.weight"].early) == (True, False)
    assert (units["0.bias"].direct, units["0.bias"].early) == (True, True)
    assert not units["2.weight"].direct
    bench.opener.unreplayable.add(0)
    assert all(unit.direct for unit in bench.opener.units() if not unit.is_static)


def test_names_know_parameters_buffers_and_state() -> None:
    bench = Bench()
    names = bench.opener.names()
    weight = bench.model[0].weight
    assert names[view_key(weight)] == "model.0.weight"  # type: ignore[arg-type]
    assert names[view_key(bench.optimizer.state[weight]["exp_avg"])] == "optim.0.weight.exp_avg"
    assert names[view_key(bench.base)] == "model.base"


def test_disowned_tensors_are_not_captured_any_more() -> None:
    bench = Bench()
    bench.opener.disown(["model.base", "model.nothing"])
    assert "base" not in {unit.fqn for unit in bench.opener.units()}


def test_the_shape_of_a_layout_changes_with_what_it_depends_on() -> None:
    bench = Bench()
    weight, shapes = bench.model[0].weight, [bench.opener.shape()]
    assert bench.opener.shape() == shapes[0]
    bench.optimizer.param_groups.append({**bench.optimizer.param_groups[0], "params": []})
    shapes.append(bench.opener.shape())
    bench.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    shapes.append(bench.opener.shape())
    weight.data = weight.data.t().contiguous().t()  # type: ignore[union-attr,operator]
    shapes.append(bench.opener.shape())
    weight.data = weight.data.bfloat16()  # type: ignore[union-attr,operator]
    shapes.append(bench.opener.shape())
    bench.model[0].bias.requires_grad_(False)
    shapes.append(bench.opener.shape())
    assert all(a != b for i, a in enumerate(shapes) for b in shapes[i + 1 :])


def test_recent_units_are_listed_again_only_when_something_changed() -> None:
    bench = Bench()
    first = bench.opener.recent_units()
    assert bench.opener.recent_units() is first
    bench.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(bench.opener.recent_units()) == len(first) + 1


def test_no_window_opens_without_an_arena_and_a_failure_gives_it_back() -> None:
    bench = Bench(max_images=1)
    units = bench.opener.units()
    plan = bench.opener.plan(units, limit=3)
    window = bench.window()
    assert bench.opener.open(units, plan, 9, timeout=0.0) is None
    bench.pool.release(window.arena)
    assert bench.opener.open(units, plan, 9, timeout=0.0) is not None


def test_the_image_size_is_known_once_state_exists() -> None:
    bench = Bench()
    assert bench.opener.image_bytes() == bench.window().layout.total_bytes
    bench.opener.proven.clear()
    assert bench.opener.image_bytes() == 0


def test_a_failed_audit_turns_replay_off_for_its_parameters() -> None:
    bench = Bench()
    window = bench.window()
    bench.opener.learn(window)
    assert not any(unit.direct for unit in bench.opener.units())
    window.failed = True
    assert all(unit.direct for unit in bench.opener.units() if not unit.is_static)
