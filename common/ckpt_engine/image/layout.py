"""Where every tensor lies in an image, which is one safetensors file.

The header is padded so that data starts at a multiple of 4096 and can be written with direct I/O straight from host
memory. Tensors are sorted by item size, largest first, so that each is aligned to its own items without holes, which
the format forbids.

Example:
    >>> import torch
    >>> layout = Layout.build([TensorSpec("flag", torch.bool, (3,)), TensorSpec("w", torch.float32, (2, 2))])
    >>> [spec.name for spec in layout.specs]
    ['w', 'flag']
    >>> layout.data_start, layout.total_bytes
    (4096, 4115)
    >>> memory = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    >>> layout.views(memory)["w"].shape
    torch.Size([2, 2])
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ckpt_engine.errors import ConfigError, CorruptCheckpointError
from ckpt_engine.image.dtypes import (
    RAW,
    dtype_name,
    dtype_of_code,
    dtype_of_name,
    is_quantized,
    nbytes,
    stored_as,
)

ALIGNMENT = 4096
# What the safetensors library accepts.
MAX_HEADER = 100_000_000
MAX_DIMS = 64
_DTYPE = "dtype."


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype and shape of one tensor of an image."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return nbytes(self.dtype, self.shape)


class Layout:
    """An immutable assignment of tensors to places in a file.

    Attributes:
        specs: The tensors, in file order.
        data_start: Offset in bytes of the first tensor; a multiple of 4096.
        total_bytes: Size of the file in bytes.
        header: The first ``data_start`` bytes of the file.
    """

    __slots__ = ("_places", "data_start", "header", "metadata", "specs", "total_bytes")

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        places: Mapping[str, tuple[int, int]],
        header: bytes,
        metadata: Mapping[str, str],
    ) -> None:
        self.specs = tuple(specs)
        self.header = header
        self.metadata = dict(metadata)
        self.data_start = len(header)
        self._places = dict(places)
        self.total_bytes = self.data_start + sum(size for _, size in places.values())

    @classmethod
    def build(cls, specs: Sequence[TensorSpec], metadata: Mapping[str, str] | None = None) -> Layout:
        """Lay tensors out: item size descending, then the order given.

        Args:
            specs: The tensors.
            metadata: Strings for the header's ``__metadata__``; keys that start with ``dtype.`` are taken.

        Raises:
            ConfigError: Two tensors have one name, a name or key is reserved or no text, a dtype has no plain bits, or
                there are so many tensors that no reader would take the header.
        """
        _check_specs(specs)
        _check_metadata(metadata or {})
        ordered = sorted(specs, key=lambda spec: -spec.dtype.itemsize)
        facts = {**(metadata or {})}
        rows: dict[str, Any] = {}
        places: dict[str, tuple[int, int]] = {}
        offset = 0
        for spec in ordered:
            code, shape = stored_as(spec.dtype), list(spec.shape)
            if code is None:
                facts[f"{_DTYPE}{spec.name}"] = dtype_name(spec.dtype)
                code, shape = RAW, [*shape, spec.dtype.itemsize]
            rows[spec.name] = {"dtype": code, "shape": shape, "data_offsets": [offset, offset + spec.nbytes]}
            places[spec.name] = (offset, spec.nbytes)
            offset += spec.nbytes
        header = _encode_header({"__metadata__": facts, **rows} if facts else rows)
        return cls(ordered, places, header, facts)

    @classmethod
    def parse(cls, header: bytes) -> Layout:
        """Read the header of an image.

        Args:
            header: The file's first bytes: the length field and at least as much as it declares.

        Raises:
            CorruptCheckpointError: The header is no header, or describes overlapping, missing or impossible data.
        """
        rows = _decode_header(header)
        facts = rows.pop("__metadata__", {})
        if not isinstance(facts, dict) or not all(isinstance(value, str) for value in facts.values()):
            raise CorruptCheckpointError("The header's __metadata__ is no map of strings.")
        parsed = sorted((_parse_row(name, row, facts) for name, row in rows.items()), key=lambda item: item[1:])
        places, specs, expected = {}, [], 0
        for spec, low, high in parsed:
            if low != expected or high - low != spec.nbytes:
                raise CorruptCheckpointError(
                    f"The header puts tensor {spec.name!r} at {low}:{high} where {expected}:{expected + spec.nbytes} "
                    "is expected: tensors overlap or leave holes."
                )
            places[spec.name], expected = (low, spec.nbytes), high
            specs.append(spec)
        length = 8 + int.from_bytes(header[:8], "little")
        return cls(specs, places, header[:length], facts)

    def offset(self, name: str) -> int:
        """Offset of a tensor in the file, in bytes."""
        return self.data_start + self._places[name][0]

    def nbytes(self, name: str) -> int:
        """Size of a tensor in the file, in bytes."""
        return self._places[name][1]

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """View the tensors inside a buffer that holds the file.

        Args:
            buffer: uint8, one-dimensional, contiguous, at least ``total_bytes`` long.

        Raises:
            ConfigError: The buffer is too small, not flat or of another dtype.
        """
        flat = buffer.dtype is torch.uint8 and buffer.dim() == 1 and buffer.is_contiguous()
        if not flat or buffer.numel() < self.total_bytes:
            raise ConfigError(
                f"An image of {self.total_bytes} bytes needs a flat uint8 buffer of at least that size, not "
                f"{tuple(buffer.shape)} elements of {buffer.dtype}: allocate a HostBuffer of that size."
            )
        return {spec.name: self._view(buffer, spec) for spec in self.specs}

    def _view(self, buffer: Tensor, spec: TensorSpec) -> Tensor:
        low = self.offset(spec.name)
        flat = buffer[low : low + spec.nbytes]
        if not spec.nbytes:
            return torch.empty(spec.shape, dtype=spec.dtype)
        # A file written elsewhere may start its data at an odd place: such a tensor is copied to an aligned one.
        if flat.data_ptr() % spec.dtype.itemsize or flat.storage_offset() % spec.dtype.itemsize:
            flat = flat.clone()
        return flat.view(spec.dtype).view(spec.shape)


def _check_specs(specs: Sequence[TensorSpec]) -> None:
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen or spec.name == "__metadata__":
            raise ConfigError(f"Two tensors are named {spec.name!r}, or the name is reserved: rename one.")
        seen.add(spec.name)
        if is_quantized(spec.dtype):
            raise ConfigError(f"Tensor {spec.name!r} is {spec.dtype}, which needs its scale: dequantize it first.")
        if len(spec.shape) > MAX_DIMS or any(size < 0 for size in spec.shape):
            raise ConfigError(
                f"Tensor {spec.name!r} has the impossible shape {tuple(spec.shape)}: give a tensor's own."
            )


def _check_metadata(metadata: Mapping[str, str]) -> None:
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str) or key.startswith(_DTYPE):
            raise ConfigError(
                f"Metadata {key!r}: {value!r} is refused: keys and values are strings, and keys that start with "
                f"{_DTYPE!r} are taken. Rename the key or convert the value."
            )


def _encode_header(rows: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"A tensor name or metadata value is no valid text ({error}): rename it.") from error
    total = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT
    if total - 8 > MAX_HEADER:
        raise ConfigError(
            f"{len(rows)} entries make a header of {total} bytes and readers take {MAX_HEADER}: spread them over files."
        )
    return (total - 8).to_bytes(8, "little") + text.ljust(total - 8)


def _decode_header(header: bytes) -> dict[str, Any]:
    length = int.from_bytes(header[:8], "little")
    if len(header) < 8 or length > MAX_HEADER or len(header) < 8 + length:
        raise CorruptCheckpointError(
            f"The header declares {length} bytes, of which {max(0, len(header) - 8)} are there; "
            f"{MAX_HEADER} are allowed."
        )
    try:
        rows = json.loads(header[8 : 8 + length].decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"The header is no JSON: {error}.") from error
    if not isinstance(rows, dict):
        raise CorruptCheckpointError("The header is no JSON object.")
    return rows


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands twice")
    return result


def _parse_row(name: str, row: object, facts: Mapping[str, str]) -> tuple[TensorSpec, int, int]:
    code, shape, low, high = _fields(name, row)
    real = facts.get(f"{_DTYPE}{name}")
    if real is None:
        return TensorSpec(name, dtype_of_code(code), tuple(shape)), low, high
    dtype = dtype_of_name(real)
    if is_quantized(dtype) or code != RAW or not shape or shape[-1] != dtype.itemsize:
        raise CorruptCheckpointError(f"Tensor {name!r} of dtype {real} is not stored as its bytes.")
    return TensorSpec(name, dtype, tuple(shape[:-1])), low, high


def _fields(name: str, row: object) -> tuple[str, list[int], int, int]:
    """Dtype name, shape and range of one entry, each checked: nothing in a damaged header may reach torch."""
    values = (row.get("dtype"), row.get("shape"), row.get("data_offsets")) if isinstance(row, dict) else (None,) * 3
    code, shape, span = values
    if (
        isinstance(code, str)
        and _are_counts(shape)
        and len(shape) <= MAX_DIMS + 1
        and _are_counts(span)
        and len(span) == 2
    ):
        return code, shape, span[0], span[1]
    raise CorruptCheckpointError(f"The header's entry for tensor {name!r} is malformed.")


def _are_counts(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 62 for value in values)
