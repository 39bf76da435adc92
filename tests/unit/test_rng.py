from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from ckpt_engine.capture.rng import forked_rng, rng_state, set_rng_state
from ckpt_engine.errors import StateMismatchError


def _draw() -> tuple[float, float, float, float]:
    return random.random(), random.gauss(0, 1), float(np.random.standard_normal()), float(torch.rand(()))


def test_every_stream_repeats_after_a_restore() -> None:
    random.gauss(0, 1)
    np.random.standard_normal()
    state = rng_state()
    first = _draw(), _draw()
    set_rng_state(state)
    assert (_draw(), _draw()) == first


def test_a_fork_leaves_no_trace() -> None:
    state = rng_state()
    with forked_rng():
        _draw()
    after = _draw()
    set_rng_state(state)
    assert _draw() == after


def test_a_recorded_state_does_not_move_with_the_stream() -> None:
    state = rng_state()
    words = state["torch"].clone()  # type: ignore[attr-defined]
    torch.rand(1000)
    assert torch.equal(state["torch"], words)  # type: ignore[arg-type]


def test_a_missing_stream_is_named() -> None:
    state = rng_state()
    del state["numpy"]
    with pytest.raises(StateMismatchError, match="numpy"):
        set_rng_state(state)


def test_states_of_absent_accelerators_are_ignored() -> None:
    state = rng_state()
    if not torch.cuda.is_available():
        state["cuda"] = [torch.zeros(16, dtype=torch.uint8)]
    expected = _draw()
    set_rng_state(state)
    assert _draw() == expected
