"""Chunk checksums: one for each chunk, of its bytes and of nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.errors import ConfigError
from ckpt_engine.image.checksum import CHUNK_BYTES, digest, digests


@given(st.binary(max_size=300), st.integers(1, 64))
def test_digests_are_those_of_the_chunks(data: bytes, chunk: int) -> None:
    expected = [xxhash.xxh3_64(data[low : low + chunk]).hexdigest() for low in range(0, len(data), chunk)]
    assert list(digests(memoryview(data), chunk)) == expected


@given(st.binary(min_size=1, max_size=300), st.integers(1, 64), st.data())
def test_a_flipped_bit_changes_the_digest_of_its_chunk_only(data: bytes, chunk: int, draw: st.DataObject) -> None:
    place, bit = draw.draw(st.integers(0, len(data) - 1)), draw.draw(st.integers(0, 7))
    damaged = bytearray(data)
    damaged[place] ^= 1 << bit
    before, after = digests(memoryview(data), chunk), digests(memoryview(damaged), chunk)
    assert [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b] == [place // chunk]


def test_chunks_are_counted_in_bytes_whatever_the_items() -> None:
    values = np.arange(5, dtype=np.float64)
    assert digests(memoryview(values), 16) == digests(memoryview(values.tobytes()), 16)
    assert digests(memoryview(np.zeros((0, 3)))) == ()


def test_a_digest_is_sixteen_lower_case_digits_as_the_manifest_wants() -> None:
    assert digest(memoryview(b"")) == "2d06800538d394c2"
    assert CHUNK_BYTES == 16 * 1024 * 1024


@pytest.mark.parametrize("chunk", [0, -1])
def test_a_chunk_of_no_bytes_is_refused(chunk: int) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        digests(memoryview(b"abc"), chunk)
