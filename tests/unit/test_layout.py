"""An image is a safetensors file: whatever the tensors, both readers see the same bits at the same places."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ckpt_engine.errors import ConfigError, CorruptCheckpointError
from ckpt_engine.image.arena import HostBuffer
from ckpt_engine.image.codec import encode
from ckpt_engine.image.dtypes import is_quantized, stored_as
from ckpt_engine.image.layout import ALIGNMENT, MAX_DIMS, MAX_HEADER, Layout, TensorSpec

DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype) and not is_quantized(value)}, key=str
)
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
names = st.text(min_size=1, max_size=12).filter(lambda name: _is_text(name) and name != "__metadata__")
rows = st.lists(st.tuples(names, st.sampled_from(DTYPES), shapes), max_size=12, unique_by=lambda row: row[0])
specs_of_all_kinds = rows.map(lambda drawn: [TensorSpec(*row) for row in drawn])


def _is_text(name: str) -> bool:
    return not any(0xD800 <= ord(letter) < 0xE000 for letter in name)


def _image(layout: Layout, seed: int = 0) -> Tensor:
    """A whole file, its data random bits."""
    generator = torch.Generator().manual_seed(seed)
    memory = torch.randint(0, 256, (layout.total_bytes,), dtype=torch.uint8, generator=generator)
    memory[: layout.data_start] = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
    return memory


def _bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _header(rows: Any) -> bytes:
    text = rows if isinstance(rows, bytes) else json.dumps(rows).encode()
    return len(text).to_bytes(8, "little") + text


def _row(**changes: Any) -> dict[str, Any]:
    return {"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4], **changes}}


@given(specs_of_all_kinds)
def test_tensors_fill_the_file_without_holes_each_aligned_to_its_items(specs: list[TensorSpec]) -> None:
    layout = Layout.build(specs)
    assert layout.data_start % ALIGNMENT == 0
    assert layout.data_start == len(layout.header)
    place = layout.data_start
    for spec in layout.specs:
        assert (layout.offset(spec.name), layout.nbytes(spec.name)) == (place, spec.nbytes)
        assert place % spec.dtype.itemsize == 0
        place += spec.nbytes
    assert place == layout.total_bytes


@given(specs_of_all_kinds)
def test_larger_items_come_first_and_equal_ones_as_given(specs: list[TensorSpec]) -> None:
    assert list(Layout.build(specs).specs) == sorted(specs, key=lambda spec: -spec.dtype.itemsize)


@given(specs_of_all_kinds, st.dictionaries(names.filter(lambda n: not n.startswith("dtype.")), names, max_size=3))
def test_reading_a_header_gives_the_layout_that_wrote_it(specs: list[TensorSpec], metadata: dict[str, str]) -> None:
    built = Layout.build(specs, metadata)
    read = Layout.parse(built.header + b"data follows")
    assert (read.specs, read.header, read.metadata) == (built.specs, built.header, built.metadata)
    assert (read.data_start, read.total_bytes) == (built.data_start, built.total_bytes)
    assert all(read.offset(s.name) == built.offset(s.name) for s in specs)


@given(specs_of_all_kinds, st.integers(0, 1000))
def test_the_safetensors_library_reads_the_same_bits(specs: list[TensorSpec], seed: int) -> None:
    layout = Layout.build(specs)
    memory = _image(layout, seed)
    views = layout.views(memory)
    theirs = safetensors.torch.load(memory.numpy().tobytes())
    assert theirs.keys() == views.keys()
    for spec in specs:
        ours, found = views[spec.name], theirs[spec.name]
        assert (ours.dtype, tuple(ours.shape)) == (spec.dtype, spec.shape)
        raw = stored_as(spec.dtype) is None
        assert found.dtype is (torch.uint8 if raw else spec.dtype)
        assert tuple(found.shape) == ((*spec.shape, spec.dtype.itemsize) if raw else spec.shape)
        assert _bits(found) == _bits(ours)


@given(rows)
def test_an_image_of_what_safetensors_knows_equals_its_own_tensors(drawn: list[Any]) -> None:
    known = {name: torch.zeros(shape, dtype=dtype) for name, dtype, shape in drawn if stored_as(dtype)}
    layout = Layout.build([TensorSpec(n, t.dtype, tuple(t.shape)) for n, t in known.items()])
    theirs = safetensors.torch.save(known)
    ours = Layout.parse(theirs)
    assert {(s.name, s.dtype, s.shape) for s in ours.specs} == {(s.name, s.dtype, s.shape) for s in layout.specs}


def test_views_show_the_memory_of_the_file() -> None:
    layout = Layout.build([TensorSpec("w", torch.float32, (2, 2)), TensorSpec("s", torch.int16, ())])
    buffer = HostBuffer(layout.total_bytes)
    views = layout.views(buffer.tensor)
    views["w"].fill_(1.0)
    views["s"].fill_(-2)
    low = layout.offset("w")
    assert bytes(buffer.memory[low : low + 4]) == b"\x00\x00\x80\x3f"
    low = layout.offset("s")
    assert bytes(buffer.memory[low : low + 2]) == b"\xfe\xff"
    buffer.close()


def test_tied_tensors_lie_in_the_file_once_and_are_tied_again() -> None:
    shared = torch.arange(6, dtype=torch.float32)
    encoded = encode({"a": shared, "b": shared[:], "c": shared[2:]}, lambda tensor, path: path)
    layout = Layout.build([TensorSpec(n, t.dtype, tuple(t.shape)) for n, t in encoded.tensors.items()])
    assert [spec.name for spec in layout.specs] == ["a", "c"]
    assert layout.total_bytes - layout.data_start == shared.nbytes + shared[2:].nbytes


def test_a_file_written_elsewhere_is_read_from_odd_places() -> None:
    tensors = {"x": torch.arange(3, dtype=torch.float64), "y": torch.tensor([True]), "z": torch.ones(2)}
    data = safetensors.torch.save(tensors, {"k": "v"})
    odd = b" " * 3
    length = int.from_bytes(data[:8], "little")
    data = (length + len(odd)).to_bytes(8, "little") + data[8 : 8 + length] + odd + data[8 + length :]
    layout = Layout.parse(data)
    views = layout.views(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    assert layout.data_start % 2 == 1
    assert layout.metadata == {"k": "v"}
    assert all(torch.equal(views[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    "buffer",
    [
        torch.zeros(4099, dtype=torch.uint8),
        torch.zeros(5000, dtype=torch.int8),
        torch.zeros((1, 5000), dtype=torch.uint8),
        torch.zeros(10000, dtype=torch.uint8)[::2],
    ],
    ids=["too small", "wrong dtype", "not flat", "with gaps"],
)
def test_a_buffer_that_cannot_hold_the_file_is_refused(buffer: Tensor) -> None:
    with pytest.raises(ConfigError, match="flat uint8"):
        Layout.build([TensorSpec("w", torch.float32, ())]).views(buffer)


@pytest.mark.parametrize(
    "specs",
    [
        [TensorSpec("w", torch.float32, ()), TensorSpec("w", torch.int8, (1,))],
        [TensorSpec("__metadata__", torch.float32, ())],
        [TensorSpec("w", torch.qint8, (3,))],
        [TensorSpec("w", torch.float32, (-1,))],
        [TensorSpec("w", torch.float32, (1,) * (MAX_DIMS + 1))],
        [TensorSpec("\ud800", torch.float32, ())],
    ],
    ids=["duplicate", "reserved", "quantized", "negative", "dimensions", "no text"],
)
def test_tensors_that_no_file_can_hold_are_refused(specs: list[TensorSpec]) -> None:
    with pytest.raises(ConfigError):
        Layout.build(specs)


@pytest.mark.parametrize("metadata", [{"dtype.w": "int8"}, {"a": 1}, {1: "a"}, {"a": "\ud800"}], ids=repr)
def test_metadata_that_would_be_misread_is_refused(metadata: Any) -> None:
    with pytest.raises(ConfigError):
        Layout.build([TensorSpec("w", torch.float32, ())], metadata)


def test_a_header_that_no_reader_would_take_is_refused_when_written() -> None:
    with pytest.raises(ConfigError, match="spread them"):
        Layout.build([TensorSpec("w" * MAX_HEADER, torch.float32, ())])


BAD_HEADERS = {
    "nothing": b"",
    "short length": b"\x01\x00",
    "cut off": _header(_row())[:-1],
    "huge length": (1 << 62).to_bytes(8, "little") + b"{}",
    "over the limit": (MAX_HEADER + 1).to_bytes(8, "little") + b"{}",
    "no JSON": _header(b"{"),
    "no UTF-8": _header(b'{"\xff": 1}'),
    "UTF-16": _header("{}".encode("utf-16")),
    "deep JSON": _header(b"[" * 100_000),
    "long number": _header(b'{"w":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}'),
    "no object": _header([]),
    "key twice": _header(b'{"a":1,"a":2}'),
    "metadata of numbers": _header({"__metadata__": {"a": 1}}),
    "metadata a list": _header({"__metadata__": []}),
    "entry a list": _header({"w": []}),
    "no dtype": _header({"w": {"shape": [4], "data_offsets": [0, 4]}}),
    "unknown dtype": _header(_row(dtype="F4")),
    "dtype a number": _header(_row(dtype=1)),
    "shape text": _header(_row(shape="", data_offsets=[0, 1])),
    "shape missing": _header(_row(shape=None)),
    "negative size": _header(_row(shape=[-4])),
    "negative pair": _header(_row(shape=[-2, -2])),
    "fraction": _header(_row(shape=[4.0])),
    "truth value": _header(_row(shape=[True], data_offsets=[0, 1])),
    "huge size": _header(_row(shape=[1 << 62])),
    "product past 64 bits": _header(_row(shape=[1 << 40] * 8)),
    "too many dimensions": _header(_row(shape=[1] * 1000, data_offsets=[0, 1])),
    "offsets of one": _header(_row(data_offsets=[4])),
    "offsets of three": _header(_row(data_offsets=[0, 4, 4])),
    "backwards": _header(_row(data_offsets=[4, 0])),
    "hole at the start": _header(_row(data_offsets=[1, 5])),
    "size and shape differ": _header(_row(data_offsets=[0, 5])),
    "overlap": _header({**_row(), "v": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]}}),
    "same place": _header({**_row(), "v": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}),
    "hole": _header({**_row(), "v": {"dtype": "U8", "shape": [4], "data_offsets": [5, 9]}}),
    "unknown real dtype": _header({"__metadata__": {"dtype.w": "float33"}, **_row()}),
    "real dtype of other size": _header({"__metadata__": {"dtype.w": "complex128"}, **_row()}),
    "real dtype without bytes": _header({"__metadata__": {"dtype.w": "complex32"}, **_row(dtype="F32", shape=[1])}),
    "quantized": _header({"__metadata__": {"dtype.w": "qint8"}, **_row(shape=[4, 1])}),
}


@pytest.mark.parametrize("header", BAD_HEADERS.values(), ids=BAD_HEADERS.keys())
def test_a_damaged_header_is_refused(header: bytes) -> None:
    with pytest.raises(CorruptCheckpointError):
        Layout.parse(header)


def test_a_damaged_header_is_refused_when_python_drops_assertions() -> None:
    code = (
        "import sys\nfrom ckpt_engine.errors import CorruptCheckpointError\n"
        "from ckpt_engine.image.layout import Layout\n"
        "try:\n    Layout.parse(bytes.fromhex(sys.argv[1]))\n"
        "except CorruptCheckpointError:\n    print('refused')\n"
    )
    command = [sys.executable, "-O", "-c", code, BAD_HEADERS["negative pair"].hex()]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.strip() == "refused"


@given(specs_of_all_kinds, st.data())
def test_a_header_with_a_changed_byte_is_read_or_refused_but_never_believed_beyond_its_file(
    specs: list[TensorSpec], draw: st.DataObject
) -> None:
    layout = Layout.build(specs)
    damaged = bytearray(layout.header)
    text_end = len(layout.header.rstrip())
    damaged[draw.draw(st.integers(0, text_end - 1))] = draw.draw(st.integers(0, 255))
    try:
        read = Layout.parse(bytes(damaged))
    except CorruptCheckpointError:
        return
    assert read.total_bytes == read.data_start + sum(spec.nbytes for spec in read.specs)
    assert all(read.offset(s.name) + s.nbytes <= read.total_bytes for s in read.specs)
