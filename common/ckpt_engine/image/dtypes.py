"""Every torch dtype and how an image stores it.

safetensors knows most dtypes by name. The others are stored as their bytes (``U8`` with a trailing axis of the item
size); the real dtype is then in the file's metadata under ``dtype.<name>``, so nothing is lost and every reader of the
format still opens the file. (Newer releases of the format have names for some of these, older readers do not.)

Example:
    >>> import torch
    >>> stored_as(torch.bfloat16)
    'BF16'
    >>> stored_as(torch.complex128) is None
    True
    >>> nbytes(torch.float32, (2, 3))
    24
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ckpt_engine.errors import CorruptCheckpointError

_NAMED: dict[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}
_STORED: dict[torch.dtype, str] = {getattr(torch, name): code for name, code in _NAMED.items() if hasattr(torch, name)}
_BY_CODE = {code: dtype for dtype, code in _STORED.items()}
_QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})
_PACKED = frozenset(
    getattr(torch, f"{sign}int{bits}")
    for sign in ("", "u")
    for bits in range(1, 8)
    if hasattr(torch, f"{sign}int{bits}")
)
RAW = "U8"


def stored_as(dtype: torch.dtype) -> str | None:
    """The safetensors name of a dtype; None for one that is stored as bytes."""
    return _STORED.get(dtype)


def is_quantized(dtype: torch.dtype) -> bool:
    """Whether the elements mean nothing without a scale, which an image has no place for."""
    return dtype in _QUANTIZED


def is_packed(dtype: torch.dtype) -> bool:
    """Whether torch has no kernel that copies this dtype (integers of 1 to 7 bits): copy its bytes instead.

    Example:
        >>> is_packed(torch.uint4), is_packed(torch.uint8)
        (True, False)
    """
    return dtype in _PACKED


def dtype_of_code(code: str) -> torch.dtype:
    """The torch dtype of a safetensors name.

    Raises:
        CorruptCheckpointError: The name is not known.
    """
    if code not in _BY_CODE:
        raise CorruptCheckpointError(f"{code!r} is no dtype that this version reads: the header is damaged or newer.")
    return _BY_CODE[code]


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without its module, as written to metadata and manifests."""
    return str(dtype).removeprefix("torch.")


def dtype_of_name(name: str) -> torch.dtype:
    """The inverse of :func:`dtype_name`.

    Raises:
        CorruptCheckpointError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise CorruptCheckpointError(f"{name!r} is no torch dtype: the record is damaged or needs a newer torch.")
    return dtype


def nbytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Bytes of a dense tensor."""
    return dtype.itemsize * math.prod(shape)
