"""A manifest comes back as it was written, or not at all."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.errors import ConfigError, CorruptCheckpointError
from ckpt_engine.image.checksum import digest
from ckpt_engine.image.manifest import FORMAT_VERSION, FileRecord, Manifest, TensorRecord

counts = st.integers(0, (1 << 62) - 1)
hexadecimal = st.integers(0, (1 << 64) - 1).map(lambda n: f"{n:016x}")
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
facts = st.dictionaries(st.text(), json_values, max_size=3)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    file = draw(file_records())
    shape = draw(st.lists(st.integers(0, 9), max_size=3).map(tuple))
    low = tuple(draw(st.integers(0, 5)) for _ in shape)
    record = TensorRecord(
        name=draw(st.text()),
        dtype="float32",
        shape=shape,
        file=file.name,
        offset=draw(st.integers(0, file.size)),
        nbytes=0,
        global_shape=tuple(size + start for size, start in zip(shape, low, strict=True)),
        box_offset=low,
    )
    return Manifest(
        save_id=draw(st.text(min_size=1)),
        step=draw(counts),
        created=draw(st.floats(allow_nan=False)),
        world_size=draw(st.integers(1, 99)),
        files=(file,),
        tensors=(record,),
        window=draw(facts),
        audit=draw(facts),
        meta=draw(facts),
    )


@st.composite
def file_records(draw: st.DrawFn) -> FileRecord:
    chunk, marks = draw(st.integers(1, 1 << 24)), draw(st.lists(hexadecimal, max_size=3))
    size = draw(st.integers((len(marks) - 1) * chunk + 1, len(marks) * chunk)) if marks else 0
    name = draw(st.from_regex(r"\A[a-z0-9][a-z0-9_-]{0,8}(\.[a-z]{1,5})?\Z"))
    return FileRecord(name=name, size=size, chunk_bytes=chunk, digests=tuple(marks))


def _file(**changes: Any) -> FileRecord:
    values = {"name": "a.safetensors", "size": 10, "chunk_bytes": 8, "digests": ("0" * 16, "f" * 16)}
    return FileRecord(**{**values, **changes})


def _tensor(**changes: Any) -> TensorRecord:
    values = {"name": "w", "dtype": "float32", "shape": (2,), "file": "a.safetensors", "offset": 2, "nbytes": 8}
    return TensorRecord(**{**values, "global_shape": (4,), "box_offset": (2,), **changes})


def _manifest(**changes: Any) -> Manifest:
    values = {"save_id": "a1", "step": 3, "created": 1.5, "world_size": 1, "files": (_file(),), "tensors": (_tensor(),)}
    return Manifest(**{**values, "meta": {"epoch": 1, "note": "é"}, **changes})


def _sealed(payload: dict[str, Any]) -> bytes:
    """Bytes whose digest is right, whatever they say."""

    def canonical(value: Any) -> bytes:
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()

    return canonical({**payload, "xxh3": digest(memoryview(canonical(payload)))})


def _payload() -> dict[str, Any]:
    payload: dict[str, Any] = json.loads(_manifest().to_bytes())
    del payload["xxh3"]
    return payload


@given(manifests())
def test_a_manifest_comes_back_as_it_was(manifest: Manifest) -> None:
    data = manifest.to_bytes()
    read = Manifest.from_bytes(data)
    assert read == manifest
    assert read.to_bytes() == data
    assert json.loads(data)["step"] == manifest.step


def test_every_changed_byte_is_found() -> None:
    data = _manifest().to_bytes()
    for place in range(len(data)):
        for flip in (1 << bit for bit in range(8)):
            damaged = bytearray(data)
            damaged[place] ^= flip
            with pytest.raises(CorruptCheckpointError):
                Manifest.from_bytes(bytes(damaged))


def test_every_byte_value_in_every_place_of_a_record_is_found() -> None:
    data = _manifest().to_bytes()
    start = data.index(b'"files"')
    for place in range(start, start + 60):
        for value in set(range(256)) - {data[place]}:
            with pytest.raises(CorruptCheckpointError):
                Manifest.from_bytes(data[:place] + bytes([value]) + data[place + 1 :])


def test_every_cut_and_every_addition_is_found() -> None:
    data = _manifest().to_bytes()
    changed = [data[:length] for length in range(len(data))]
    changed += [data + b" ", b" " + data, data + b"\n", data + data, data.replace(b",", b", ", 1)]
    for damaged in changed:
        with pytest.raises(CorruptCheckpointError):
            Manifest.from_bytes(damaged)


def test_keys_and_tuples_become_what_json_has_and_the_manifest_can_be_read() -> None:
    read = Manifest.from_bytes(_manifest(meta={10: (1, 2), 2: "b", True: None}).to_bytes())
    assert read.meta == {"10": [1, 2], "2": "b", "true": None}


@pytest.mark.parametrize("value", [object(), {1, 2}, b"x", {("a",): 1}, 10**5000], ids=lambda v: type(v).__name__)
def test_facts_that_json_cannot_say_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="meta"):
        _manifest(meta={"a": value}).to_bytes()


BAD_NAMES = ["", ".", "..", "a/b", "/a", "a\\b", "..a", "a..b", ".hidden", "a\0", "a\n", "ä", "a b", "x" * 256, 7, None]


@pytest.mark.parametrize("name", BAD_NAMES, ids=repr)
def test_file_names_that_lead_elsewhere_are_refused(name: Any) -> None:
    with pytest.raises(CorruptCheckpointError, match="plain name"):
        _file(name=name)


@pytest.mark.parametrize(
    "changes",
    [
        {"size": -1},
        {"size": 10.0},
        {"size": True},
        {"size": 1 << 62},
        {"size": 17},
        {"size": 8},
        {"chunk_bytes": 0},
        {"digests": ("0" * 16, "F" * 16)},
        {"digests": ("0" * 16, "0" * 15)},
        {"digests": ("0" * 16, 5)},
    ],
    ids=str,
)
def test_impossible_files_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpointError, match="file"):
        _file(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": (3,)},
        {"shape": (-1,)},
        {"shape": (2, 1)},
        {"box_offset": ()},
        {"box_offset": (3,)},
        {"offset": -1},
        {"nbytes": 1.5},
        {"name": 5},
        {"file": None},
        {"dtype": None},
    ],
    ids=str,
)
def test_impossible_tensors_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpointError, match="tensor"):
        _tensor(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"files": (_file(), _file())},
        {"tensors": (_tensor(file="b.safetensors"),)},
        {"tensors": (_tensor(offset=3),)},
        {"step": -1},
        {"step": 1.0},
        {"world_size": 0},
        {"save_id": ""},
        {"created": "now"},
    ],
    ids=str,
)
def test_manifests_that_contradict_themselves_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpointError):
        _manifest(**changes)


def test_another_version_is_refused_by_number() -> None:
    data = replace(_manifest(), version=FORMAT_VERSION + 1).to_bytes()
    with pytest.raises(CorruptCheckpointError, match=f"version {FORMAT_VERSION + 1}"):
        Manifest.from_bytes(data)


@pytest.mark.parametrize(
    "changes",
    [
        {"surprise": 1},
        {"files": None},
        {"files": 5},
        {"files": [5]},
        {"files": [{"name": "a", "surprise": 1}]},
        {"files": [{"name": "a"}]},
        {"tensors": [{**_payload()["tensors"][0], "shape": None}]},
        {"tensors": [{**_payload()["tensors"][0], "file": ["a"]}]},
    ],
    ids=str,
)
def test_other_content_under_a_right_digest_is_refused_too(changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpointError):
        Manifest.from_bytes(_sealed({**_payload(), **changes}))


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b"9" * 5000, b'{"xxh3":1}'])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError):
        Manifest.from_bytes(data)
