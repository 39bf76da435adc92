"""The comparison that the demo relies on: it finds a single flipped bit, and nothing where there is nothing."""

from __future__ import annotations

import bitwise
import pytest
import torch


def state() -> dict[str, object]:
    return {"w": torch.arange(6.0).reshape(2, 3), "step": 3, "lr": [0.1, float("nan")], "dir": "/runs/a/checkpoints"}


def test_equal_states_are_identical_and_counted() -> None:
    outcome = bitwise.compare(state(), state())
    assert outcome.identical
    assert (outcome.tensors, outcome.bits) == (1, 0)
    assert str(outcome) == "yes (1 tensors, 0 differing bits)"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_one_flipped_bit_is_counted_in_any_dtype(dtype: torch.dtype) -> None:
    left = torch.ones(5, dtype=dtype)
    right = left.clone()
    right.view(torch.uint8)[0] ^= 1
    assert bitwise.differing_bits(left, right) == 1
    outcome = bitwise.compare({"w": left}, {"w": right})
    assert not outcome.identical
    assert outcome.differences == [".w: 1 bits differ"]


def test_the_sign_of_zero_is_a_difference_and_an_equal_nan_is_none() -> None:
    assert bitwise.differing_bits(torch.tensor(0.0), torch.tensor(-0.0)) == 1
    assert bitwise.differing_bits(torch.tensor(float("nan")), torch.tensor(float("nan"))) == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"step": 4}, ".step: 3 against 4"),
        ({"step": 3.0}, ".step: 3 against 3.0"),
        ({"w": torch.zeros(3, 2)}, ".w: torch.float32 [2, 3] against torch.float32 [3, 2]"),
        ({"w": 1}, ".w: "),
        ({"more": 1}, "is only in one of them"),
        ({"lr": (0.1, float("nan"))}, ".lr[]: list of 2 against tuple of 2"),
    ],
)
def test_every_other_difference_is_named(change: dict[str, object], said: str) -> None:
    outcome = bitwise.compare(state(), state() | change)
    assert not outcome.identical
    assert any(said in difference for difference in outcome.differences)


def test_paths_below_the_two_run_directories_are_the_same_path() -> None:
    moved = state() | {"dir": "/runs/b/checkpoints"}
    assert not bitwise.compare(state(), moved).identical
    assert bitwise.compare(state(), moved, roots=("/runs/a", "/runs/b")).identical


def test_a_comparison_of_nothing_is_not_identical() -> None:
    assert not bitwise.compare({}, {}).identical
