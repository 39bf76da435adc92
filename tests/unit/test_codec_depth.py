"""How deep a state may be nested, on both sides of the limit."""

from __future__ import annotations

import argparse
import json
from collections import OrderedDict, defaultdict
from typing import Any

import pytest
from torch import Tensor

from ckpt_engine.errors import ConfigError, CorruptCheckpointError
from ckpt_engine.image.codec import MAX_DEPTH, decode, encode


def by_path(tensor: Tensor, path: str) -> str:
    return path


def _nested(levels: int, wrap: Any) -> object:
    value: object = 1
    for _ in range(levels):
        value = wrap(value)
    return value


WRAPS = {
    "list": lambda v: [v],
    "tuple": lambda v: (v,),
    "dict": lambda v: {"k": v},
    "keys": lambda v: {1: v},
    "ordered": lambda v: OrderedDict(k=v),
    "default": lambda v: defaultdict(list, k=v),
    "namespace": lambda v: argparse.Namespace(k=v),
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS.keys())
def test_the_deepest_state_that_is_taken_can_be_read(wrap: Any) -> None:
    state = _nested(MAX_DEPTH, wrap)
    assert decode(json.loads(json.dumps(encode(state, by_path).tree)), {}) == state


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS.keys())
def test_a_state_that_is_too_deep_is_refused(wrap: Any) -> None:
    with pytest.raises(ConfigError, match="levels deep"):
        encode(_nested(MAX_DEPTH + 1, wrap), by_path)


def test_a_state_that_holds_itself_is_refused() -> None:
    state: list[object] = [1]
    state += [state, state]
    with pytest.raises(ConfigError, match="does it hold itself"):
        encode({"s": state}, by_path)


def test_a_tree_that_is_too_deep_is_refused() -> None:
    for tree in (_nested(MAX_DEPTH + 1, lambda v: [v]), _nested(900, lambda v: {"$tuple": [v]})):
        with pytest.raises(CorruptCheckpointError, match="too deep"):
            decode(tree, {})
