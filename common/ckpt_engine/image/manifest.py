"""The manifest: the record that makes a directory of files a checkpoint.

It is canonical JSON with a digest of itself: parsing it and writing it again gives the same bytes, or it is damaged. So
any changed byte is found, also one that JSON would overlook.

Example:
    >>> manifest = Manifest(save_id="a1", step=3, created=0.0, world_size=1, files=(), tensors=())
    >>> Manifest.from_bytes(manifest.to_bytes()) == manifest
    True
    >>> Manifest.from_bytes(manifest.to_bytes().replace(b"3", b"4"))
    Traceback (most recent call last):
        ...
    ckpt_engine.errors.CorruptCheckpointError: The manifest does not match its own digest: it is damaged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from ckpt_engine.errors import ConfigError, CorruptCheckpointError
from ckpt_engine.image.checksum import digest

FORMAT_VERSION = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_DIGEST = re.compile(r"[0-9a-f]{16}")
_Record = TypeVar("_Record")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """One file of a checkpoint.

    Args:
        name: Plain file name inside the checkpoint's directory.
        size: Bytes.
        chunk_bytes: Bytes that each digest covers; the last may cover fewer.
        digests: xxh3_64 of each chunk, in order.
    """

    name: str
    size: int
    chunk_bytes: int
    digests: tuple[str, ...]

    def __post_init__(self) -> None:
        _require(
            isinstance(self.name, str) and _NAME.fullmatch(self.name) is not None and ".." not in self.name,
            f"file name {self.name!r} is not a plain name inside the checkpoint",
        )
        _require(_is_count(self.size), f"file {self.name} has an impossible size {self.size!r}")
        _require(_is_count(self.chunk_bytes) and self.chunk_bytes > 0, f"file {self.name} has no chunk size")
        expected = -(-self.size // self.chunk_bytes)
        _require(len(self.digests) == expected, f"file {self.name} needs {expected} digests")
        good = all(isinstance(d, str) and _DIGEST.fullmatch(d) for d in self.digests)
        _require(good, f"file {self.name} has a malformed digest")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRecord:
    """Where (a box of) a tensor lies.

    Args:
        name: Name in the checkpoint.
        dtype: torch dtype, without its module.
        shape: Shape of the stored box.
        file: File that holds it.
        offset: First byte in that file.
        nbytes: Bytes.
        global_shape: Shape of the whole tensor.
        box_offset: Place of the box in the whole tensor, per dimension.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int
    global_shape: tuple[int, ...]
    box_offset: tuple[int, ...]

    def __post_init__(self) -> None:
        numbers = (*self.shape, *self.global_shape, *self.box_offset, self.offset, self.nbytes)
        _require(all(_is_count(number) for number in numbers), f"tensor {self.name!r} has an impossible place")
        named = isinstance(self.name, str) and isinstance(self.dtype, str) and isinstance(self.file, str)
        _require(named, f"tensor {self.name!r} lacks a name, a dtype or a file")
        same = len(self.shape) == len(self.global_shape) == len(self.box_offset)
        inside = same and all(
            low + size <= whole for low, size, whole in zip(self.box_offset, self.shape, self.global_shape, strict=True)
        )
        _require(inside, f"tensor {self.name!r} has a box outside its global shape")


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A whole checkpoint.

    Args:
        version: Format version.
        save_id: Identifies the save; every file of it was written by that save.
        step: The state is the one after this step.
        created: Unix time in seconds.
        world_size: Ranks that wrote it.
        files: Its files.
        tensors: Its tensors.
        window: How it was captured.
        audit: How the image was compared with live state.
        meta: Free-form facts.
    """

    version: int = FORMAT_VERSION
    save_id: str
    step: int
    created: float
    world_size: int
    files: tuple[FileRecord, ...]
    tensors: tuple[TensorRecord, ...]
    window: dict[str, Any] = field(default_factory=dict)
    audit: dict[str, Any] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        whole = _is_count(self.step) and _is_count(self.world_size) and self.world_size > 0
        _require(whole, f"step {self.step!r} or world size {self.world_size!r} is impossible")
        _require(isinstance(self.save_id, str) and self.save_id != "", "it has no save_id")
        _require(type(self.created) in (int, float), f"its time {self.created!r} is no number")
        names = [record.name for record in self.files]
        _require(len(set(names)) == len(names), "two files have one name")
        sizes = {record.name: record.size for record in self.files}
        for tensor in self.tensors:
            inside = tensor.file in sizes and tensor.offset + tensor.nbytes <= sizes[tensor.file]
            _require(inside, f"tensor {tensor.name!r} lies outside file {tensor.file!r}")

    def to_bytes(self) -> bytes:
        """Canonical JSON with the digest of itself.

        In ``window``, ``audit`` and ``meta`` tuples become lists and keys that are no strings become strings.

        Raises:
            ConfigError: One of these holds what JSON cannot say.
        """
        payload = _facts(self)
        payload["files"] = [_facts(record) for record in self.files]
        payload["tensors"] = [_facts(record) for record in self.tensors]
        try:
            # Once through JSON: only then are keys strings, and sorted as they will be when this is read.
            payload = json.loads(json.dumps(payload))
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"The facts for the manifest are no JSON ({error}): give meta only strings, numbers, lists and dicts."
            ) from error
        return _canonical({**payload, "xxh3": digest(memoryview(_canonical(payload)))})

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Read a manifest.

        Raises:
            CorruptCheckpointError: It is damaged, or of a version that this release does not read.
        """
        payload = _parse(data)
        known = payload.pop("xxh3", None)
        if known != digest(memoryview(_canonical(payload))) or _canonical({**payload, "xxh3": known}) != data:
            raise CorruptCheckpointError("The manifest does not match its own digest: it is damaged.")
        if payload.get("version") != FORMAT_VERSION:
            raise CorruptCheckpointError(
                f"The manifest has format version {payload.get('version')!r} and this release reads {FORMAT_VERSION}: "
                "use the release that wrote it."
            )
        try:
            payload["files"] = tuple(_record(FileRecord, row) for row in payload["files"])
            payload["tensors"] = tuple(_record(TensorRecord, row) for row in payload["tensors"])
            return cls(**payload)
        except (AttributeError, KeyError, TypeError) as error:
            raise CorruptCheckpointError(f"The manifest lacks a field or has one too many: {error}.") from error


def _record(kind: type[_Record], row: Mapping[str, Any]) -> _Record:
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    unknown = values.keys() - {f.name for f in fields(kind)}  # type: ignore[arg-type]
    _require(not unknown, f"a record has unknown fields {sorted(unknown)}")
    return kind(**values)


def _facts(record: object) -> dict[str, Any]:
    return {name: getattr(record, name) for name in type(record).__slots__}  # type: ignore[attr-defined]


def _canonical(payload: Mapping[str, Any]) -> bytes:
    return json.dumps(payload, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _parse(data: bytes) -> dict[str, Any]:
    try:
        payload = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"The manifest is no JSON: {error}.") from error
    if not isinstance(payload, dict):
        raise CorruptCheckpointError("The manifest is no JSON object.")
    return payload


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise CorruptCheckpointError(f"The manifest is invalid: {problem}.")
