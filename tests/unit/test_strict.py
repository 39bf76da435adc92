"""Differences between a model and a checkpoint are reported all at once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.errors import StateMismatchError
from ckpt_engine.restore.strict import Signature, check_tensors

F32 = torch.float32
signatures = st.dictionaries(
    st.text("abc.", min_size=1, max_size=4),
    st.tuples(st.lists(st.integers(0, 3), max_size=2).map(tuple), st.sampled_from([torch.float32, torch.int64])),
    max_size=6,
)


def test_equal_sets_pass_whatever_sequence_the_shape_is() -> None:
    check_tensors({"a": ((2, 3), F32)}, {"a": (torch.Size([2, 3]), F32)})
    check_tensors({"a": ([2, 3], F32)}, {"a": ((2, 3), F32)})
    check_tensors({}, {})


def test_all_differences_are_listed_in_full_and_sorted() -> None:
    expected: dict[str, Signature] = {f"m{i:03d}": ((i,), F32) for i in range(150)}
    expected |= {"same": ((), F32), "shape": ((2, 3), F32), "kind": ((1,), F32)}
    found: dict[str, Signature] = {"same": ((), F32), "shape": ((3, 2), F32), "kind": ((1,), torch.bfloat16)}
    found |= {"y": ((0,), F32), "x": ((1,), F32)}
    with pytest.raises(StateMismatchError) as caught:
        check_tensors(expected, found)
    lines = str(caught.value).splitlines()
    assert "150 missing, 2 unexpected, 2 of another shape or dtype" in lines[0]
    listed = [line.strip() for line in lines if line.startswith("  ")]
    assert listed[:150] == [f"m{i:03d}: ({i},) float32" for i in range(150)]
    assert listed[150:] == [
        "x: (1,) float32",
        "y: (0,) float32",
        "kind: expected (1,) float32, found (1,) bfloat16",
        "shape: expected (2, 3) float32, found (3, 2) float32",
    ]


@given(signatures, signatures)
def test_it_raises_exactly_where_the_sets_differ(expected: dict[str, Signature], found: dict[str, Signature]) -> None:
    if expected == found:
        check_tensors(expected, found)
        return
    with pytest.raises(StateMismatchError) as caught:
        check_tensors(expected, found)
    differing = {n for n in expected.keys() | found.keys() if expected.get(n) != found.get(n)}
    named = {line.split(":")[0].strip() for line in str(caught.value).splitlines() if line.startswith("  ")}
    assert named == differing
