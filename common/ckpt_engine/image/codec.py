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
from argparse import Namespace
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ckpt_engine.errors import ConfigError, CorruptCheckpointError
from ckpt_engine.image.dtypes import dtype_name, dtype_of_name

MAX_DEPTH = 200
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
        ConfigError: The state is nested too deeply, or refers to itself.
    """
    encoder = _Encoder(name_of)
    return Encoded(tree=encoder.encode(obj, "", 0), tensors=encoder.tensors)


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
    return _Decoder(tensors, weights_only).decode(tree, "", 0)


class _Encoder:
    def __init__(self, name_of: NameOf) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._name_of = name_of
        self._names: dict[object, str] = {}
        # Ids are only unique while their objects live.
        self._keep: list[object] = []

    def encode(self, obj: object, path: str, depth: int) -> object:
        if depth > MAX_DEPTH:
            raise ConfigError(f"The state is nested more than {MAX_DEPTH} levels deep at {path!r}: does it hold itself?")
        writer = _WRITERS.get(type(obj))
        if writer is not None:
            return writer(self, obj, path, depth)
        if isinstance(obj, pathlib.PurePath):
            return {"$path": str(obj)}
        if isinstance(obj, np.generic):
            return {"$npscalar": [obj.dtype.str, base64.b64encode(obj.tobytes()).decode()]} if _simple(obj) else (
                self.blob(obj, path)
            )
        return self.blob(obj, path)

    def items(self, values: Any, path: str, depth: int) -> list[object]:
        return [self.encode(value, f"{path}.{i}" if path else str(i), depth + 1) for i, value in enumerate(values)]

    def pairs(self, mapping: Mapping[Any, Any], path: str, depth: int) -> list[list[object]]:
        rows = []
        for key, value in mapping.items():
            at = f"{path}.{key}" if path else str(key)
            rows.append([self.encode(key, at, depth + 1), self.encode(value, at, depth + 1)])
        return rows

    def tensor(self, obj: Tensor, path: str) -> object:
        if not _storable(obj):
            return self.blob(obj, path)
        key = _identity(obj)
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = self._name_of(obj, path)
            if name in self.tensors:
                raise ConfigError(f"Two different tensors were both named {name!r}: names must be unique.")
            self.tensors[name] = obj.detach()
            self._keep.append(obj)
        if isinstance(obj, torch.nn.Parameter):
            return {"$parameter": [name, obj.requires_grad]}
        return {"$tensor": name}

    def array(self, obj: np.ndarray[Any, Any], path: str) -> object:
        if not _simple(obj):
            return self.blob(obj, path)
        data = np.frombuffer(np.ascontiguousarray(obj).tobytes(), dtype=np.uint8).copy()
        name = self._add(torch.from_numpy(data), path)
        return {"$ndarray": [name, obj.dtype.str, list(obj.shape)]}

    def blob(self, obj: object, path: str) -> object:
        buffer = io.BytesIO()
        torch.save(obj, buffer)
        data = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        return {"$blob": [self._add(data, path), f"{type(obj).__module__}.{type(obj).__qualname__}"]}

    def _add(self, data: Tensor, path: str) -> str:
        name = self._name_of(data, path)
        if name in self.tensors:
            raise ConfigError(f"Two different tensors were both named {name!r}: names must be unique.")
        self.tensors[name] = data
        return name


def _simple(value: Any) -> bool:
    return not value.dtype.hasobject and value.dtype.fields is None


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


def _identity(tensor: Tensor) -> object:
    if tensor.numel() == 0:
        return id(tensor)
    place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return (*place, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def _write_float(_: _Encoder, obj: Any, path: str, depth: int) -> object:
    # JSON has no infinities and NaNs; Python's shortest repr brings every finite double back exactly.
    return obj if math.isfinite(obj) else {"$float": repr(obj)}


def _write_dict(encoder: _Encoder, obj: Any, path: str, depth: int) -> object:
    if all(type(key) is str for key in obj) and not any(key.startswith("$") for key in obj):
        return {
            key: encoder.encode(value, f"{path}.{key}" if path else key, depth + 1) for key, value in obj.items()
        }
    return {"$dict": encoder.pairs(obj, path, depth)}


def _write_ordered(encoder: _Encoder, obj: Any, path: str, depth: int) -> object:
    # Module.state_dict() hangs `_metadata` (module versions) on its OrderedDict.
    facts = getattr(obj, "_metadata", None)
    return {"$ordered": [encoder.pairs(obj, path, depth), encoder.encode(facts, f"{path}._metadata", depth + 1)]}


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
_FACTORIES: dict[str, Callable[[], object] | None] = {"dict": dict, "list": list, "int": int, "float": float, "none": None}
_FACTORY_NAMES = {factory: name for name, factory in _FACTORIES.items()}


def _same(_: _Encoder, obj: object, path: str, depth: int) -> object:
    return obj


_WRITERS: dict[type, _Writer] = {
    type(None): _same,
    bool: _same,
    int: _same,
    str: _same,
    float: _write_float,
    complex: _write_as("$complex", lambda z: [repr(z.real), repr(z.imag)]),
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


class _Decoder:
    def __init__(self, tensors: Mapping[str, Tensor], weights_only: bool) -> None:
        self._tensors = tensors
        self._weights_only = weights_only
        self._parameters: dict[str, torch.nn.Parameter] = {}

    def decode(self, node: Any, path: str, depth: int) -> Any:
        if depth > 2 * MAX_DEPTH:
            raise CorruptCheckpointError(f"The state tree is nested too deeply at {path!r}.")
        if isinstance(node, list):
            return [self.decode(item, f"{path}.{i}", depth + 1) for i, item in enumerate(node)]
        if not isinstance(node, dict):
            return node
        tag = next(iter(node), "")
        if len(node) == 1 and tag.startswith("$"):
            return self._tagged(tag, node[tag], path, depth)
        return {key: self.decode(value, f"{path}.{key}", depth + 1) for key, value in node.items()}

    def _tagged(self, tag: str, body: Any, path: str, depth: int) -> Any:
        reader = _READERS.get(tag)
        if reader is None:
            raise CorruptCheckpointError(f"The state tree has an unknown tag {tag!r} at {path!r}: it is damaged or newer.")
        try:
            return reader(self, body, path, depth + 1)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise CorruptCheckpointError(f"The state tree is malformed at {path!r}: {error!r}.") from error

    def items(self, body: Any, path: str, depth: int) -> list[Any]:
        return [self.decode(item, f"{path}.{i}", depth) for i, item in enumerate(body)]

    def pairs(self, body: Any, path: str, depth: int) -> list[tuple[Any, Any]]:
        return [(self.decode(k, path, depth), self.decode(v, f"{path}.{k}", depth)) for k, v in body]

    def tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise CorruptCheckpointError(f"The state tree refers to tensor {name!r}, which no file holds.")
        return self._tensors[name]

    def parameter(self, name: str, requires_grad: bool) -> torch.nn.Parameter:
        if name not in self._parameters:
            self._parameters[name] = torch.nn.Parameter(self.tensor(name), requires_grad=bool(requires_grad))
        return self._parameters[name]

    def array(self, name: str, dtype: str, shape: list[int]) -> Any:
        kind = np.dtype(dtype)
        if kind.hasobject:
            raise CorruptCheckpointError(f"Array {name!r} claims to hold objects: refused.")
        return np.frombuffer(self.tensor(name).numpy().tobytes(), dtype=kind).reshape(shape).copy()

    def blob(self, name: str, kind: str, path: str) -> Any:
        data = io.BytesIO(self.tensor(name).numpy().tobytes())
        try:
            return torch.load(data, map_location="cpu", weights_only=self._weights_only)
        except Exception as error:
            advice = "pass weights_only=False if you trust this checkpoint" if self._weights_only else "it is damaged"
            raise ConfigError(f"The state at {path!r} is a pickled {kind} that could not be read: {advice}.") from error


def _ordered(decoder: _Decoder, body: Any, path: str, depth: int) -> Any:
    pairs, facts = body
    result = OrderedDict(decoder.pairs(pairs, path, depth))
    if facts is not None:
        result._metadata = decoder.decode(facts, f"{path}._metadata", depth)  # type: ignore[attr-defined]
    return result


def _npscalar(_: _Decoder, body: Any, path: str, depth: int) -> Any:
    kind = np.dtype(body[0])
    if kind.hasobject:
        raise CorruptCheckpointError(f"A scalar at {path!r} claims to be an object: refused.")
    return np.frombuffer(base64.b64decode(body[1]), dtype=kind)[0]


def _device(_: _Decoder, body: Any, path: str, depth: int) -> torch.device:
    try:
        return torch.device(body)
    except RuntimeError as error:
        raise CorruptCheckpointError(f"{body!r} at {path!r} is no device.") from error


_Reader = Callable[[_Decoder, Any, str, int], Any]
_READERS: dict[str, _Reader] = {
    "$float": lambda d, b, p, n: float(b),
    "$complex": lambda d, b, p, n: complex(float(b[0]), float(b[1])),
    "$bytes": lambda d, b, p, n: base64.b64decode(b),
    "$tuple": lambda d, b, p, n: tuple(d.items(b, p, n)),
    "$size": lambda d, b, p, n: torch.Size(b),
    "$set": lambda d, b, p, n: set(d.items(b, p, n)),
    "$frozenset": lambda d, b, p, n: frozenset(d.items(b, p, n)),
    "$dict": lambda d, b, p, n: dict(d.pairs(b, p, n)),
    "$ordered": _ordered,
    "$defaultdict": lambda d, b, p, n: defaultdict(_FACTORIES[b[0]], d.pairs(b[1], p, n)),
    "$tensor": lambda d, b, p, n: d.tensor(b),
    "$parameter": lambda d, b, p, n: d.parameter(b[0], b[1]),
    "$ndarray": lambda d, b, p, n: d.array(b[0], b[1], b[2]),
    "$npscalar": _npscalar,
    "$dtype": lambda d, b, p, n: dtype_of_name(b),
    "$device": _device,
    "$timedelta": lambda d, b, p, n: datetime.timedelta(*b),
    "$datetime": lambda d, b, p, n: datetime.datetime.fromisoformat(b),
    "$date": lambda d, b, p, n: datetime.date.fromisoformat(b),
    "$path": lambda d, b, p, n: pathlib.Path(b),
    "$namespace": lambda d, b, p, n: Namespace(**dict(d.pairs(b, p, n))),
    "$simplenamespace": lambda d, b, p, n: SimpleNamespace(**dict(d.pairs(b, p, n))),
    "$blob": lambda d, b, p, n: d.blob(b[0], b[1], p),
}
