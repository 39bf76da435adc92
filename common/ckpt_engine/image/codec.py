"""State trees: any nested state as JSON, its tensors by name. No pickle is written where JSON can say it.

Plain JSON values stand for themselves. Everything else is an object with one key that starts with ``$``: the tag of its
kind. Only what has no tag (instances of the user's own classes, sparse or quantized tensors) becomes a ``torch.save``
blob, which is read back with ``weights_only=True`` unless the caller opts out.

Example:
    >>> import torch
    >>> encoded = encode({"w": torch.ones(2), "betas": (0.9, 0.99)}, lambda tensor, path: f"extra.{path}")
    >>> encoded.tree
    {'w': {'$tensor': 'extra.w'}, 'betas': {'$tuple': [0.9, 0.99]}}
    >>> decode(encoded.tree, encoded.tensors)["betas"]
    (0.9, 0.99)
"""

from __future__ import annotations

import base64
import datetime
import io
import math
import pathlib
import struct
from argparse import Namespace
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ckpt_engine.errors import CheckpointError, ConfigError, CorruptCheckpointError
from ckpt_engine.image.dtypes import dtype_name, dtype_of_name, is_packed

# A level costs five Python frames, and the caller's own stack is not empty.
MAX_DEPTH = 100
NameOf = Callable[[Tensor, str], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """A state taken apart.

    Args:
        tree: JSON-able.
        tensors: The tensors that the tree refers to, by name; still aliases of live memory.
    """

    tree: object
    tensors: dict[str, Tensor]


def encode(obj: object, name_of: NameOf) -> Encoded:
    """Take a nested state apart.

    Args:
        obj: Dicts, lists, scalars, tensors and so on.
        name_of: Gives a tensor its name, from the tensor and a dotted path; unique for different tensors. Tensors that
            show the same memory are asked for once and stay one tensor.

    Raises:
        ConfigError: The state is nested too deeply, refers to itself, or holds what cannot be saved.
    """
    encoder = _Encoder(name_of)
    try:
        return Encoded(tree=encoder.encode(obj, "", 0), tensors=encoder.tensors)
    except RecursionError as error:
        raise ConfigError("The state is nested too deeply for Python's stack: flatten it.") from error


def decode(tree: object, tensors: Mapping[str, Tensor], *, weights_only: bool = True) -> Any:
    """Put a state together again; the inverse of :func:`encode`.

    Args:
        tree: What :func:`encode` returned, perhaps by way of JSON.
        tensors: Tensors by name.
        weights_only: Refuse to unpickle what could run code.

    Raises:
        CorruptCheckpointError: The tree refers to what is not there, or is malformed.
        ConfigError: A part needs unpickling that ``weights_only`` refuses.
    """
    try:
        return _Decoder(tensors, weights_only).decode(tree, "", 0)
    except RecursionError as error:
        raise CorruptCheckpointError("The state tree is nested too deeply for Python's stack.") from error


class _Encoder:
    def __init__(self, name_of: NameOf) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._name_of = name_of
        self._names: dict[object, str] = {}
        # Ids are only unique while their objects live.
        self._keep: list[object] = []

    def encode(self, obj: object, path: str, depth: int) -> object:
        if depth > MAX_DEPTH:
            raise ConfigError(
                f"The state is nested more than {MAX_DEPTH} levels deep at {_shown(path)}: does it hold itself?"
            )
        writer = _WRITERS.get(type(obj)) or next((w for base, w in _FAMILIES if isinstance(obj, base)), _write_blob)
        return writer(self, obj, path, depth)

    def items(self, values: Any, path: str, depth: int) -> list[object]:
        return [self.encode(value, _join(path, i), depth + 1) for i, value in enumerate(values)]

    def pairs(self, mapping: Mapping[Any, Any], path: str, depth: int) -> list[list[object]]:
        rows = []
        for key, value in mapping.items():
            at = _join(path, key)
            rows.append([self.encode(key, f"{at}.$key", depth + 1), self.encode(value, at, depth + 1)])
        return rows

    def tensor(self, obj: Tensor, path: str) -> object:
        if not _storable(obj):
            return self.blob(obj, path)
        if is_packed(obj.dtype):
            return {"$bits": [self.place(obj.detach().view(torch.uint8), path), dtype_name(obj.dtype)]}
        name = self.place(obj, path)
        parameter = isinstance(obj, torch.nn.Parameter)
        if _has_own_order(obj):
            # Kernels walk memory, so a tensor whose memory is not row-major must come back as it was.
            return {"$strided": [name, list(obj.stride()), obj.requires_grad if parameter else None]}
        return {"$parameter": [name, obj.requires_grad]} if parameter else {"$tensor": name}

    def place(self, obj: Tensor, path: str) -> str:
        """The name under which a tensor is kept; the same for all that show the same memory."""
        key = _identity(obj)
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = self._add(obj.detach(), path, named=obj)
            self._keep.append(obj)
        return name

    def array(self, obj: np.ndarray[Any, Any], path: str) -> object:
        if not _simple(obj):
            return self.blob(obj, path)
        data = np.frombuffer(np.ascontiguousarray(obj).tobytes(), dtype=np.uint8).copy()
        name = self._add(torch.from_numpy(data), path)
        return {"$ndarray": [name, obj.dtype.str, list(obj.shape)]}

    def blob(self, obj: object, path: str) -> object:
        kind = f"{type(obj).__module__}.{type(obj).__qualname__}"
        buffer = io.BytesIO()
        try:
            torch.save(obj, buffer)
        except Exception as error:  # pickling runs methods of the user's classes, which raise anything
            raise ConfigError(
                f"The value at {_shown(path)} of class {kind} cannot be saved ({error}): take it out of the state, or "
                "replace it by plain values and tensors."
            ) from error
        data = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        return {"$blob": [self._add(data, path), kind]}

    def _add(self, data: Tensor, path: str, *, named: Tensor | None = None) -> str:
        name = self._name_of(data if named is None else named, path)
        if name in self.tensors:
            raise ConfigError(f"Two different tensors were both named {name!r}: names must be unique.")
        self.tensors[name] = data
        return name


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _shown(path: str) -> str:
    """A path for a message: the end tells where."""
    return repr(path) if len(path) <= 200 else f"...{path[-200:]!r}"


def _simple(value: Any) -> bool:
    """Whether the dtype's short name tells all of it (extension types such as bfloat16 call themselves void)."""
    return value.dtype.kind in "biufcmMSU"


def _storable(tensor: Tensor) -> bool:
    """Ordinary dense memory; other kinds of tensor (sparse, quantized, subclasses) are left to torch.save."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and tensor.device.type != "meta"
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _has_own_order(tensor: Tensor) -> bool:
    """Dense memory in another order than row-major (channels-last and other permutations)."""
    return not tensor.is_contiguous() and torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _identity(tensor: Tensor) -> object:
    if tensor.numel() == 0:
        return id(tensor)
    place = (str(tensor.device), tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return (*place, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def _write_float(_: _Encoder, obj: Any, path: str, depth: int) -> object:
    # JSON has no infinities and NaNs; Python's shortest repr brings every finite double back exactly.
    return obj if math.isfinite(obj) else {"$float": _float_text(obj)}


def _float_text(value: float) -> str:
    # A NaN carries 52 bits of its own and a sign, which repr drops.
    return f"nan:{struct.pack('>d', value).hex()}" if math.isnan(value) else repr(value)


def _write_int(_: _Encoder, obj: Any, path: str, depth: int) -> object:
    # Decimal text is limited to 4300 digits by Python and to 53 or 64 bits by other readers; hexadecimal is not.
    return obj if -(1 << 63) <= obj < 1 << 63 else {"$int": hex(obj)}


def _write_npscalar(encoder: _Encoder, obj: Any, path: str, depth: int) -> object:
    if not _simple(obj):
        return encoder.blob(obj, path)
    return {"$npscalar": [obj.dtype.str, base64.b64encode(obj.tobytes()).decode()]}


def _write_blob(encoder: _Encoder, obj: Any, path: str, depth: int) -> object:
    return encoder.blob(obj, path)


def _write_dict(encoder: _Encoder, obj: Any, path: str, depth: int) -> object:
    if all(type(key) is str for key in obj) and not any(key.startswith("$") for key in obj):
        return {key: encoder.encode(value, _join(path, key), depth + 1) for key, value in obj.items()}
    return {"$dict": encoder.pairs(obj, path, depth)}


def _write_ordered(encoder: _Encoder, obj: Any, path: str, depth: int) -> object:
    # Module.state_dict() hangs `_metadata` (module versions) on its OrderedDict.
    facts = getattr(obj, "_metadata", None)
    return {"$ordered": [encoder.pairs(obj, path, depth), encoder.encode(facts, _join(path, "_metadata"), depth + 1)]}


def _write_defaultdict(encoder: _Encoder, obj: Any, path: str, depth: int) -> object:
    factory = _FACTORY_NAMES.get(obj.default_factory)
    if factory is None:
        return encoder.blob(obj, path)
    return {"$defaultdict": [factory, encoder.pairs(obj, path, depth)]}


def _write_sorted(tag: str) -> _Writer:
    def write(encoder: _Encoder, obj: Any, path: str, depth: int) -> object:
        return {tag: encoder.items(sorted(obj, key=repr), path, depth)}

    return write


def _write_list(tag: str | None) -> _Writer:
    def write(encoder: _Encoder, obj: Any, path: str, depth: int) -> object:
        items = encoder.items(obj, path, depth)
        return items if tag is None else {tag: items}

    return write


def _write_as(tag: str, convert: Callable[[Any], object]) -> _Writer:
    return lambda encoder, obj, path, depth: {tag: convert(obj)}


_Writer = Callable[[_Encoder, Any, str, int], object]
_FACTORIES: dict[str, Callable[[], object] | None] = {
    "none": None,
    **{kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple)},
}
_FACTORY_NAMES = {factory: name for name, factory in _FACTORIES.items()}


def _same(_: _Encoder, obj: object, path: str, depth: int) -> object:
    return obj


_WRITERS: dict[type, _Writer] = {
    type(None): _same,
    bool: _same,
    int: _write_int,
    str: _same,
    float: _write_float,
    complex: _write_as("$complex", lambda z: [_float_text(z.real), _float_text(z.imag)]),
    bytes: _write_as("$bytes", lambda b: base64.b64encode(b).decode()),
    list: _write_list(None),
    tuple: _write_list("$tuple"),
    torch.Size: _write_as("$size", list),
    set: _write_sorted("$set"),
    frozenset: _write_sorted("$frozenset"),
    dict: _write_dict,
    OrderedDict: _write_ordered,
    defaultdict: _write_defaultdict,
    Tensor: lambda encoder, obj, path, depth: encoder.tensor(obj, path),
    torch.nn.Parameter: lambda encoder, obj, path, depth: encoder.tensor(obj, path),
    np.ndarray: lambda encoder, obj, path, depth: encoder.array(obj, path),
    torch.dtype: _write_as("$dtype", dtype_name),
    torch.device: _write_as("$device", str),
    datetime.timedelta: _write_as("$timedelta", lambda d: [d.days, d.seconds, d.microseconds]),
    datetime.datetime: _write_as("$datetime", lambda d: d.isoformat()),
    datetime.date: _write_as("$date", lambda d: d.isoformat()),
    Namespace: lambda encoder, obj, path, depth: {"$namespace": encoder.pairs(vars(obj), path, depth)},
    SimpleNamespace: lambda encoder, obj, path, depth: {"$simplenamespace": encoder.pairs(vars(obj), path, depth)},
}


# Of these every subclass is meant.
_FAMILIES: tuple[tuple[type, _Writer], ...] = (
    (pathlib.PurePath, _write_as("$path", str)),
    (np.generic, _write_npscalar),
)


class _Decoder:
    def __init__(self, tensors: Mapping[str, Tensor], weights_only: bool) -> None:
        self._tensors = tensors
        self._weights_only = weights_only
        self._parameters: dict[tuple[str, bool], torch.nn.Parameter] = {}
        self._strided: dict[object, Tensor] = {}

    def decode(self, node: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise CorruptCheckpointError(f"The state tree is nested too deeply at {_shown(path)}.")
        if isinstance(node, list):
            return self.items(node, path, depth + 1)
        if not isinstance(node, dict):
            return node
        tag = next(iter(node), "")
        if len(node) == 1 and tag.startswith("$"):
            return self._tagged(tag, node[tag], path, depth)
        return {key: self.decode(value, _join(path, key), depth + 1) for key, value in node.items()}

    def _tagged(self, tag: str, body: Any, path: str, depth: int) -> Any:
        reader = _READERS.get(tag)
        if reader is None:
            raise CorruptCheckpointError(
                f"The state tree has an unknown tag {tag!r} at {_shown(path)}: it is damaged or newer."
            )
        try:
            return reader(self, body, path, depth + 1)
        except (CheckpointError, RecursionError):
            raise
        except Exception as error:  # numpy, torch and struct each have their own ways to refuse a damaged value
            raise CorruptCheckpointError(f"The state tree is malformed at {_shown(path)}: {error!r}.") from error

    def items(self, body: Any, path: str, depth: int) -> list[Any]:
        return [self.decode(item, _join(path, i), depth) for i, item in enumerate(body)]

    def pairs(self, body: Any, path: str, depth: int) -> list[tuple[Any, Any]]:
        return [(self.decode(k, _join(path, "$key"), depth), self.decode(v, _join(path, k), depth)) for k, v in body]

    def tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise CorruptCheckpointError(f"The state tree refers to tensor {name!r}, which no file holds.")
        return self._tensors[name]

    def parameter(self, name: str, requires_grad: bool) -> torch.nn.Parameter:
        key = (name, bool(requires_grad))
        if key not in self._parameters:
            self._parameters[key] = torch.nn.Parameter(self.tensor(name), requires_grad=bool(requires_grad))
        return self._parameters[key]

    def bits(self, name: str, dtype: str) -> Tensor:
        return self.tensor(name).view(dtype_of_name(dtype))

    def strided(self, name: str, stride: list[int], requires_grad: bool | None) -> Tensor:
        key = (name, tuple(stride), requires_grad)
        if key not in self._strided:
            source = self.tensor(name)
            if not _is_dense(source.shape, stride):
                raise CorruptCheckpointError(f"Tensor {name!r} has strides {stride} that do not fit its shape.")
            made = torch.empty_strided(tuple(source.shape), tuple(stride), dtype=source.dtype).copy_(source)
            if requires_grad is not None:
                made = torch.nn.Parameter(made, requires_grad=bool(requires_grad))
            self._strided[key] = made
        return self._strided[key]

    def array(self, name: str, dtype: str, shape: list[int]) -> Any:
        kind = np.dtype(dtype)
        if kind.hasobject:
            raise CorruptCheckpointError(f"Array {name!r} claims to hold objects: refused.")
        return _array_of(self.tensor(name).numpy().tobytes(), kind, shape)

    def blob(self, name: str, kind: str, path: str) -> Any:
        data = io.BytesIO(self.tensor(name).numpy().tobytes())
        try:
            return torch.load(data, map_location="cpu", weights_only=self._weights_only)
        except Exception as error:  # whatever the bytes of a pickle make torch raise
            advice = "pass weights_only=False if you trust this checkpoint" if self._weights_only else "it is damaged"
            raise ConfigError(
                f"The state at {_shown(path)} is a pickled {kind} that could not be read: {advice}."
            ) from error


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether strides visit every element of a block of memory exactly once."""
    expected = 1
    for size, step in sorted((pair for pair in zip(shape, stride, strict=True) if pair[0] != 1), key=lambda p: p[1]):
        if step != expected:
            return False
        expected *= size
    return True


def _ordered(decoder: _Decoder, body: Any, path: str, depth: int) -> Any:
    pairs, facts = body
    result = OrderedDict(decoder.pairs(pairs, path, depth))
    if facts is not None:
        result._metadata = decoder.decode(facts, _join(path, "_metadata"), depth)  # type: ignore[attr-defined]
    return result


def _npscalar(_: _Decoder, body: Any, path: str, depth: int) -> Any:
    kind = np.dtype(body[0])
    if kind.hasobject:
        raise CorruptCheckpointError(f"A scalar at {path!r} claims to be an object: refused.")
    return _array_of(base64.b64decode(body[1]), kind, [])[()]


def _array_of(data: bytes, kind: np.dtype[Any], shape: list[int]) -> Any:
    # The empty string is a scalar whose items have no bytes; in an array numpy gives it one character.
    if not kind.itemsize:
        return np.ndarray((), kind, b"")
    if len(data) != kind.itemsize * math.prod(shape):
        raise ValueError(f"{len(data)} bytes for shape {shape} of {kind}")
    return np.ndarray(tuple(shape), kind, bytearray(data) if data else None)


def _float(text: str) -> float:
    if text.startswith("nan:"):
        return float(struct.unpack(">d", bytes.fromhex(text[4:]))[0])
    return float(text)


def _namespace(kind: Callable[[], Any]) -> _Reader:
    def read(decoder: _Decoder, body: Any, path: str, depth: int) -> Any:
        result = kind()
        vars(result).update(decoder.pairs(body, path, depth))
        return result

    return read


def _device(_: _Decoder, body: Any, path: str, depth: int) -> torch.device:
    try:
        return torch.device(body)
    except RuntimeError as error:
        raise CorruptCheckpointError(f"{body!r} at {path!r} is no device.") from error


_Reader = Callable[[_Decoder, Any, str, int], Any]
_READERS: dict[str, _Reader] = {
    "$int": lambda d, b, p, n: int(b, 16),
    "$float": lambda d, b, p, n: _float(b),
    "$complex": lambda d, b, p, n: complex(_float(b[0]), _float(b[1])),
    "$bytes": lambda d, b, p, n: base64.b64decode(b),
    "$tuple": lambda d, b, p, n: tuple(d.items(b, p, n)),
    "$size": lambda d, b, p, n: torch.Size(b),
    "$set": lambda d, b, p, n: set(d.items(b, p, n)),
    "$frozenset": lambda d, b, p, n: frozenset(d.items(b, p, n)),
    "$dict": lambda d, b, p, n: dict(d.pairs(b, p, n)),
    "$ordered": _ordered,
    "$defaultdict": lambda d, b, p, n: defaultdict(_FACTORIES[b[0]], d.pairs(b[1], p, n)),
    "$tensor": lambda d, b, p, n: d.tensor(b),
    "$bits": lambda d, b, p, n: d.bits(b[0], b[1]),
    "$parameter": lambda d, b, p, n: d.parameter(b[0], b[1]),
    "$strided": lambda d, b, p, n: d.strided(b[0], b[1], b[2]),
    "$ndarray": lambda d, b, p, n: d.array(b[0], b[1], b[2]),
    "$npscalar": _npscalar,
    "$dtype": lambda d, b, p, n: dtype_of_name(b),
    "$device": _device,
    "$timedelta": lambda d, b, p, n: datetime.timedelta(*b),
    "$datetime": lambda d, b, p, n: datetime.datetime.fromisoformat(b),
    "$date": lambda d, b, p, n: datetime.date.fromisoformat(b),
    "$path": lambda d, b, p, n: pathlib.Path(b),
    "$namespace": _namespace(Namespace),
    "$simplenamespace": _namespace(SimpleNamespace),
    "$blob": lambda d, b, p, n: d.blob(b[0], b[1], p),
}
