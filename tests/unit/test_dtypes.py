"""Every dtype of torch has a place in an image, and its name leads back to it."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch

from ckpt_engine.errors import CorruptCheckpointError
from ckpt_engine.image.dtypes import (
    dtype_name,
    dtype_of_code,
    dtype_of_name,
    is_packed,
    is_quantized,
    nbytes,
    stored_as,
)

EVERY = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


@pytest.mark.parametrize("dtype", EVERY, ids=str)
def test_a_name_leads_back_to_its_dtype(dtype: torch.dtype) -> None:
    assert dtype_of_name(dtype_name(dtype)) is dtype


@pytest.mark.parametrize("dtype", [d for d in EVERY if stored_as(d)], ids=str)
def test_a_stored_code_is_the_one_safetensors_writes(dtype: torch.dtype) -> None:
    code = stored_as(dtype)
    assert code is not None
    assert dtype_of_code(code) is dtype
    written = safetensors.torch.save({"x": torch.zeros(2, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype)})
    assert f'"dtype":"{code}"'.encode() in written


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex32, torch.float8_e4m3fnuz, torch.uint4], ids=str)
def test_what_older_readers_do_not_know_is_stored_as_bytes(dtype: torch.dtype) -> None:
    assert stored_as(dtype) is None


@pytest.mark.parametrize("dtype", [d for d in EVERY if not is_quantized(d)], ids=str)
def test_a_dtype_is_packed_exactly_when_torch_cannot_copy_it(dtype: torch.dtype) -> None:
    source = torch.zeros(16, dtype=torch.uint8).view(dtype)
    try:
        torch.empty_like(source).copy_(source)
        copied = True
    except (NotImplementedError, RuntimeError):
        copied = False
    assert is_packed(dtype) is not copied


@pytest.mark.parametrize(
    "name", ["float33", "nn", "Tensor", "", "__class__", "float32\n", "os.system", "torch.float32"]
)
def test_a_name_that_is_no_dtype_is_refused(name: str) -> None:
    with pytest.raises(CorruptCheckpointError, match="no torch dtype"):
        dtype_of_name(name)


def test_an_unknown_code_is_refused_by_name() -> None:
    with pytest.raises(CorruptCheckpointError, match="'F128'"):
        dtype_of_code("F128")


@pytest.mark.parametrize(("shape", "expected"), [((), 8), ((0,), 0), ((3, 0, 2), 0), ((2, 3), 48)])
def test_sizes_include_scalars_and_empty_tensors(shape: tuple[int, ...], expected: int) -> None:
    assert nbytes(torch.float64, shape) == expected
