from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ckpt_engine.capture.guard import Guard
from ckpt_engine.capture.units import Unit


def _setting() -> tuple[nn.Parameter, torch.optim.Optimizer, Unit, Guard]:
    weight = nn.Parameter(torch.ones(8))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.grad = torch.ones(8)
    optimizer.step()
    guard = Guard([optimizer])
    unit = Unit(fqn="w", tensor=weight, optimizer=0, group=0)
    guard.note(unit)
    return weight, optimizer, unit, guard


WRITES: dict[str, Callable[[nn.Parameter, torch.optim.Optimizer], object]] = {
    "in place": lambda w, o: w.detach().add_(1),
    "one element": lambda w, o: w.detach()[3].fill_(2),
    "new memory": lambda w, o: setattr(w, "data", w.data.clone()),
    "state in place": lambda w, o: o.state[w]["exp_avg"].zero_(),
    "state replaced": lambda w, o: o.state[w].__setitem__("exp_avg", torch.zeros(8)),
    "state gone": lambda w, o: o.state.clear(),
    "optimizer loaded": lambda w, o: o.load_state_dict(copy.deepcopy(o.state_dict())),
    "an update": lambda w, o: o.step(),
}


@pytest.mark.parametrize("write", list(WRITES))
def test_every_visible_write_is_noticed(write: str) -> None:
    weight, optimizer, unit, guard = _setting()
    assert guard.changed([unit]) == []
    WRITES[write](weight, optimizer)
    assert guard.changed([unit]) == [unit]
    guard.note(unit)
    assert guard.changed([unit]) == []


def test_reading_and_gradients_are_no_writes() -> None:
    weight, optimizer, unit, guard = _setting()
    (weight * 2).sum().backward()
    optimizer.zero_grad()
    optimizer.state_dict()
    assert guard.changed([unit]) == []


def test_the_first_of_several_notes_counts() -> None:
    weight, _, unit, guard = _setting()
    with torch.no_grad():
        weight.add_(1)
    guard.note_once(unit)
    assert guard.changed([unit]) == [unit]


def test_what_was_never_noted_or_was_forgotten_is_not_reported() -> None:
    weight, _, unit, guard = _setting()
    with torch.no_grad():
        weight.add_(1)
    guard.forget(unit)
    assert guard.changed([unit, Unit(fqn="x", tensor=torch.ones(2))]) == []
