"""A nested state comes back as it was: types, order, bits, ties; and nothing in a file runs code."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import pathlib
import pickle
import random
import struct
from collections import Counter, OrderedDict, defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ckpt_engine.errors import CheckpointError, ConfigError, CorruptCheckpointError
from ckpt_engine.image.codec import Encoded, decode, encode
from ckpt_engine.image.layout import Layout, TensorSpec

EVIL: list[str] = []


class Custom:
    """A class of the user's own."""

    def __init__(self, value: int) -> None:
        self.value = value


def _run() -> None:
    EVIL.append("ran")


class Evil:
    """Runs code when unpickled."""

    def __reduce__(self) -> Any:
        return _run, ()


def by_path(tensor: Tensor, path: str) -> str:
    return path or "root"


def stored(encoded: Encoded) -> tuple[Any, dict[str, Tensor]]:
    """Tree and tensors after a way through files: JSON text, and an image of contiguous bytes."""
    tree = json.loads(json.dumps(encoded.tree, allow_nan=False))
    layout = Layout.build([TensorSpec(n, t.dtype, tuple(t.shape)) for n, t in encoded.tensors.items()])
    views = layout.views(torch.zeros(layout.total_bytes, dtype=torch.uint8))
    for name, view in views.items():
        view.copy_(encoded.tensors[name])
    return tree, views


def there_and_back(value: object, **options: Any) -> Any:
    return decode(*stored(encode(value, by_path)), **options)


def bits_of(value: float) -> bytes:
    return struct.pack(">d", value)


def same(a: Any, b: Any) -> bool:
    """Equal in type, order and bits, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return bits_of(a) == bits_of(b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


doubles = st.floats() | st.binary(min_size=8, max_size=8).map(lambda raw: struct.unpack(">d", raw)[0])
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | doubles
    | st.builds(complex, doubles, doubles)
    | st.text()
    | st.binary()
    | st.timedeltas()
    | st.datetimes()
    | st.datetimes(timezones=st.just(datetime.timezone.utc))
    | st.dates()
    | st.sampled_from([torch.float32, torch.device("cpu"), torch.device("cuda:1"), torch.Size([2, 0])])
)
keys = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
any_keys = keys | st.tuples(keys, keys) | st.frozensets(st.integers(), max_size=2)
dollars = st.sampled_from(["$tensor", "$dict", "$", "$blob", "a.b"]) | st.text()
states = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(dollars, inner, max_size=4)
        | st.dictionaries(any_keys, inner, max_size=4)
        | st.dictionaries(any_keys, inner, max_size=4).map(OrderedDict)
        | st.dictionaries(st.text(), inner, max_size=3).map(lambda d: defaultdict(list, d))
        | st.sets(keys, max_size=4)
        | st.frozensets(keys, max_size=4)
    ),
    max_leaves=20,
)


@given(states)
def test_a_state_without_tensors_comes_back_exactly(state: object) -> None:
    encoded = encode(state, by_path)
    assert encoded.tensors == {}
    assert same(there_and_back(state), state)


@given(states)
def test_encoding_does_not_change_the_state(state: object) -> None:
    before = pickle.dumps(state)
    encode(state, by_path)
    assert pickle.dumps(state) == before


@pytest.mark.parametrize(
    "value",
    [0.1, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan, -math.nan, 10**5000, -(2**64), 2**63]
    + [struct.unpack(">d", bytes.fromhex(text))[0] for text in ("7ff8000000000123", "fff8000000000001")],
    ids=lambda value: repr(value)[:24] if isinstance(value, float) else "integer",
)
def test_numbers_are_exact(value: float) -> None:
    assert same(there_and_back({"x": value})["x"], value)


def test_the_state_of_python_and_numpy_generators_resumes_their_stream() -> None:
    source, legacy, modern = random.Random(3), np.random.RandomState(3), np.random.default_rng(3)
    state = {"python": source.getstate(), "legacy": legacy.get_state(), "modern": modern.bit_generator.state}
    expected = source.random(), legacy.rand(), modern.random()
    back = there_and_back(state)
    source.setstate(back["python"])
    legacy.set_state(back["legacy"])
    modern.bit_generator.state = back["modern"]
    assert (source.random(), legacy.rand(), modern.random()) == expected


@pytest.mark.parametrize("factory", [None, bool, dict, float, int, list, set, str, tuple], ids=str)
def test_a_defaultdict_keeps_its_factory(factory: Any) -> None:
    back = there_and_back(defaultdict(factory, {1: "a"}))
    assert type(back) is defaultdict
    assert back.default_factory is factory


def test_a_state_dict_keeps_its_metadata_and_its_order() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    state = module.state_dict()
    back = there_and_back({"state_dict": state})["state_dict"]
    assert type(back) is OrderedDict
    assert list(back) == list(state)
    assert back._metadata == state._metadata  # type: ignore[attr-defined]
    assert type(back._metadata) is OrderedDict
    module.load_state_dict(back)


def test_an_ordered_dict_without_metadata_gets_none() -> None:
    assert not hasattr(there_and_back(OrderedDict(a=1)), "_metadata")


def test_an_optimizer_goes_on_as_if_it_had_not_been_saved() -> None:
    parameter = torch.nn.Parameter(torch.arange(3.0))
    optimizer = torch.optim.AdamW([{"params": [parameter], "lr": 0.1}], betas=(0.8, 0.9))
    parameter.grad = torch.ones(3)
    optimizer.step()
    back = there_and_back(optimizer.state_dict())
    assert back["param_groups"] == optimizer.state_dict()["param_groups"]
    assert list(back["state"]) == [0]
    other = torch.nn.Parameter(parameter.detach().clone())
    resumed = torch.optim.AdamW([other], lr=9.0)
    resumed.load_state_dict(back)
    other.grad = torch.ones(3)
    optimizer.step()
    resumed.step()
    assert torch.equal(parameter, other)


def test_tied_tensors_are_stored_once_and_come_back_tied() -> None:
    weight = torch.nn.Parameter(torch.randn(2, 3))
    encoded = encode({"a": weight, "b": weight, "c": weight.data, "d": [weight.view(2, 3)]}, by_path)
    assert list(encoded.tensors) == ["a"]
    back = decode(*stored(encoded))
    assert back["a"] is back["b"]
    with torch.no_grad():
        back["a"].fill_(7.0)
    assert torch.equal(back["c"], torch.full((2, 3), 7.0))
    assert torch.equal(back["d"][0], torch.full((2, 3), 7.0))


def test_other_views_of_the_same_memory_are_tensors_of_their_own() -> None:
    base = torch.arange(6.0)
    views = {"base": base, "part": base[1:], "shape": base.view(2, 3), "turned": base.view(2, 3).t()}
    views["bits"] = base.view(torch.int32)
    encoded = encode(views, by_path)
    assert len(encoded.tensors) == 5
    back = decode(*stored(encoded))
    assert all(torch.equal(back[name], tensor) for name, tensor in views.items())


def test_empty_tensors_at_the_same_address_are_not_tied() -> None:
    encoded = encode([torch.empty(0), torch.empty(0), torch.empty(0, 3)], by_path)
    assert len(encoded.tensors) == 3
    assert [tuple(t.shape) for t in decode(*stored(encoded))] == [(0,), (0,), (0, 3)]


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_stays_a_parameter(requires_grad: bool) -> None:
    back = there_and_back(torch.nn.Parameter(torch.ones(2), requires_grad=requires_grad))
    assert type(back) is torch.nn.Parameter
    assert back.requires_grad is requires_grad


def test_two_parameters_over_one_memory_may_differ_in_requires_grad() -> None:
    data = torch.ones(2)
    frozen, free = torch.nn.Parameter(data, requires_grad=False), torch.nn.Parameter(data)
    back = there_and_back([frozen, free])
    assert [p.requires_grad for p in back] == [False, True]
    assert back[0].data_ptr() == back[1].data_ptr()


def test_tensors_in_the_result_are_detached_aliases_of_live_memory() -> None:
    live = torch.nn.Parameter(torch.ones(2))
    tensor = encode(live, by_path).tensors["root"]
    assert tensor.data_ptr() == live.data_ptr()
    assert not tensor.requires_grad


@pytest.mark.parametrize("order", [torch.channels_last, torch.contiguous_format], ids=str)
@pytest.mark.parametrize("parameter", [True, False])
def test_the_order_in_memory_is_kept(order: torch.memory_format, parameter: bool) -> None:
    tensor = torch.randn(2, 3, 4, 5).to(memory_format=order)
    value = torch.nn.Parameter(tensor) if parameter else tensor
    back = there_and_back([value, value])
    assert back[0].stride() == value.stride()
    assert torch.equal(back[0], value)
    assert back[0] is back[1]
    assert type(back[0]) is type(value)


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(1).expand(3, 4), torch.arange(12.0)[::3], torch.arange(8.0).as_strided((3, 2), (1, 1))],
    ids=["expanded", "with gaps", "overlapping"],
)
def test_tensors_that_are_not_dense_come_back_dense(tensor: Tensor) -> None:
    back = there_and_back(tensor)
    assert torch.equal(back, tensor)
    assert back.is_contiguous()


@pytest.mark.parametrize(
    "stride", [[1, 1], [0, 1], [3, 2], [-3, 1], [1 << 60, 1], [3], [3, 1, 1], ["a", 1], None, 5], ids=str
)
def test_damaged_strides_are_refused(stride: Any) -> None:
    with pytest.raises(CorruptCheckpointError):
        decode({"$strided": ["w", stride, None]}, {"w": torch.ones(2, 3)})


DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype) and "q" not in str(v)}, key=str)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_with_the_same_bits(dtype: torch.dtype) -> None:
    raw = torch.arange(48, dtype=torch.uint8)
    if dtype is torch.bool:  # other bytes than 0 and 1 are no truth values, and copies change them
        raw = raw % 2
    back = there_and_back({"t": raw.view(dtype)})["t"]
    assert back.dtype is dtype
    assert torch.equal(back.view(torch.uint8), raw)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(),
        torch.eye(3).to_sparse_csr(),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
    ],
    ids=["sparse", "sparse csr", "quantized", "conjugate", "negative"],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_unusual_tensors_come_back_by_way_of_torch(tensor: Tensor) -> None:
    encoded = encode({"t": tensor}, by_path)
    assert set(encoded.tree["t"]) == {"$blob"}  # type: ignore[index]
    back = decode(*stored(encoded))["t"]
    assert (back.layout, back.dtype) == (tensor.layout, tensor.dtype)
    dense = (tensor.dequantize(), back.dequantize()) if tensor.is_quantized else (tensor.to_dense(), back.to_dense())
    assert torch.equal(*dense)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(3.5),
        np.zeros((0, 3)),
        np.array(["a", "bcd"]),
        np.array([b"a", b"bcd"]),
        np.array(["2020-01-01", "NaT"], dtype="datetime64[ms]"),
        np.array([True, False]),
        np.array([1 + 2j], dtype=np.complex64),
        np.float16([1.5, np.inf]),
    ],
    ids=lambda array: str(array.dtype),
)
def test_arrays_come_back_with_the_same_bits(array: Any) -> None:
    back = there_and_back({"a": array})["a"]
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert back.tobytes() == array.tobytes()
    assert back.flags.writeable


@pytest.mark.parametrize(
    "scalar",
    [
        np.float64(0.1),
        np.float32("nan"),
        np.int8(-3),
        np.uint64(2**64 - 1),
        np.bool_(True),
        np.str_("é"),
        np.str_(""),
        np.bytes_(b""),
        np.datetime64("2020-01-01T00:00:00.123", "ms"),
        np.timedelta64(3, "D"),
        np.complex128(1j),
    ],
    ids=repr,
)
def test_scalars_of_numpy_keep_their_type_and_bits(scalar: Any) -> None:
    back = there_and_back(scalar)
    assert type(back) is type(scalar)
    assert back.dtype == scalar.dtype
    assert back.tobytes() == scalar.tobytes()


def test_arrays_of_objects_need_trust() -> None:
    value = {"a": np.array([Custom(1)], dtype=object)}
    with pytest.raises(ConfigError, match="weights_only=False"):
        there_and_back(value)
    assert there_and_back(value, weights_only=False)["a"][0].value == 1


@pytest.mark.parametrize("kind", [argparse.Namespace, SimpleNamespace])
def test_namespaces_come_back_whatever_their_names(kind: Any) -> None:
    value = kind(lr=0.1, layers=[1, (2,)])
    vars(value)["self"] = "a name that a constructor would trip over"
    back = there_and_back(value)
    assert type(back) is kind
    assert vars(back) == vars(value)


@pytest.mark.parametrize("path", [pathlib.Path("/a/b"), pathlib.PurePosixPath("c.d"), pathlib.Path(".")], ids=str)
def test_paths_come_back_as_paths(path: pathlib.PurePath) -> None:
    assert there_and_back({"p": path})["p"] == path


def test_a_class_of_the_users_own_needs_trust_and_the_message_says_so() -> None:
    stored_state = stored(encode({"callbacks": {"mine": [Custom(5)]}}, by_path))
    with pytest.raises(ConfigError, match=r"'callbacks\.mine\.0'.*Custom.*weights_only=False"):
        decode(*stored_state)
    assert decode(*stored_state, weights_only=False)["callbacks"]["mine"][0].value == 5


def test_decoding_runs_no_code_unless_it_is_trusted() -> None:
    stored_state = stored(encode({"x": Evil()}, by_path))
    EVIL.clear()
    with pytest.raises(ConfigError):
        decode(*stored_state)
    assert EVIL == []
    decode(*stored_state, weights_only=False)
    assert EVIL == ["ran"]


def test_what_torch_trusts_comes_back_without_opting_in() -> None:
    assert there_and_back({"c": Counter("aab")})["c"] == Counter("aab")


@pytest.mark.parametrize(
    "value", [lambda: 1, defaultdict(lambda: 1), (n for n in ())], ids=["lambda", "factory", "gen"]
)
def test_what_cannot_be_saved_is_refused_with_its_place_and_class(value: object) -> None:
    with pytest.raises(ConfigError, match=r"'a\.b\.0' of class .* cannot be saved"):
        encode({"a": {"b": [value]}}, by_path)


def test_paths_are_readable_and_names_are_asked_for_once() -> None:
    asked: list[str] = []

    def name_of(tensor: Tensor, path: str) -> str:
        asked.append(path)
        return f"t{len(asked)}"

    shared = torch.ones(1)
    state = {"model": {"a.b": shared}, "list": [{3: torch.zeros(1)}, (shared,)], "blob": Custom(1), "np": np.ones(1)}
    encoded = encode(state, name_of)
    assert asked == ["model.a.b", "list.0.3", "blob", "np"]
    assert list(encoded.tensors) == ["t1", "t2", "t3", "t4"]


def test_two_tensors_under_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="'w'"):
        encode([torch.ones(1), torch.ones(1)], lambda tensor, path: "w")


MALFORMED: list[Any] = [
    {"$unknown": 1},
    {"$tensor": "missing"},
    {"$tensor": []},
    {"$parameter": ["w"]},
    {"$parameter": ["i", True]},
    {"$bits": ["w", "nn"]},
    {"$float": 3},
    {"$float": "nan:00"},
    {"$float": "nan:xx"},
    {"$int": 5},
    {"$int": "five"},
    {"$complex": ["1"]},
    {"$bytes": 5},
    {"$size": ["a"]},
    {"$set": [[1]]},
    {"$dict": [[[1], 2]]},
    {"$dict": [[1]]},
    {"$dict": 3},
    {"$ordered": [1]},
    {"$defaultdict": ["eval", []]},
    {"$dtype": "os"},
    {"$dtype": 3},
    {"$device": "disk"},
    {"$timedelta": [10**30]},
    {"$datetime": "yesterday"},
    {"$date": None},
    {"$path": 3},
    {"$namespace": [[[1], 2]]},
    {"$ndarray": ["i", "O", [1]]},
    {"$ndarray": ["i", "<f8", [99]]},
    {"$ndarray": ["i", "<f8", [-1]]},
    {"$ndarray": ["empty", "<f8", [1 << 50]]},
    {"$ndarray": ["w", "no such type", [2]]},
    {"$npscalar": ["O", "AAAAAAAAAAA="]},
    {"$npscalar": ["<f8", "AAAA"]},
    {"$blob": ["missing", "x"]},
    {"$blob": "w"},
]


@pytest.mark.parametrize("tree", MALFORMED, ids=json.dumps)
def test_a_malformed_tree_is_refused(tree: Any) -> None:
    tensors = {"w": torch.ones(2), "i": torch.ones(8, dtype=torch.uint8), "empty": torch.zeros(0, dtype=torch.uint8)}
    with pytest.raises(CorruptCheckpointError):
        decode({"x": [tree]}, tensors)


@given(states, st.data())
def test_a_tree_with_a_changed_letter_is_refused_or_gives_a_state_that_can_be_saved(
    state: object, draw: st.DataObject
) -> None:
    text = json.dumps(encode(state, by_path).tree)
    place = draw.draw(st.integers(0, len(text) - 1))
    letter = draw.draw(st.sampled_from('$"{}[]:,0a'))
    try:
        read = decode(json.loads(text[:place] + letter + text[place + 1 :]), {})
    except (ValueError, CheckpointError):  # no JSON, or refused in words; any other error fails the test
        return
    assert same(there_and_back(read), read)
