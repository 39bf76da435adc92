"""The files of a checkpoint are compared with its manifest, byte for byte."""

from __future__ import annotations

import os
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.errors import CorruptCheckpointError, NoCheckpointError
from ckpt_engine.image.manifest import FileRecord, Manifest
from ckpt_engine.restore.integrity import check_chunks, check_files, chunks_of, read_manifest, resolve, verify
from ckpt_engine.storage.transaction import Transaction

NAME = "rank-00000.safetensors"


def save(path: Path, data: bytes, chunk_bytes: int = 4096) -> Manifest:
    with Transaction(str(path), save_id=uuid.uuid4().hex) as transaction:
        record = transaction.write_image(NAME, memoryview(data), chunk_bytes=chunk_bytes)
        manifest = Manifest(save_id="s", step=1, created=0.0, world_size=1, files=(record,), tensors=())
        transaction.commit(manifest)
    return manifest


@given(st.integers(0, 10_000), st.integers(1, 4000))
def test_chunks_cover_every_byte_once(size: int, chunk_bytes: int) -> None:
    count = -(-size // chunk_bytes)
    record = FileRecord(name="a", size=size, chunk_bytes=chunk_bytes, digests=("0" * 16,) * count)
    covered = [place for chunk in chunks_of(record) for place in range(chunk.offset, chunk.offset + chunk.nbytes)]
    assert covered == list(range(size))


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 3_000_000])
def test_a_whole_checkpoint_has_no_problems(tmp_path: Path, size: int) -> None:
    save(tmp_path / "a.ckpt", os.urandom(size))
    assert verify(str(tmp_path / "a.ckpt")) == []


@pytest.mark.parametrize("chunk_bytes", [4096, 1 << 24])
def test_all_damaged_chunks_are_named_in_order(tmp_path: Path, chunk_bytes: int) -> None:
    data = bytearray(os.urandom(3_000_000))
    manifest = save(tmp_path / "a.ckpt", bytes(data), chunk_bytes)
    places = [5, 4096 * 17 + 1, 2_999_999]
    for place in places:
        data[place] ^= 128
    (tmp_path / "a.ckpt" / NAME).write_bytes(data)
    problems = check_chunks(str(tmp_path / "a.ckpt"), manifest.files)
    numbers = sorted({place // chunk_bytes for place in places})
    assert [problem.split("chunk ")[1].split()[0] for problem in problems] == [str(n) for n in numbers]


def test_a_file_that_shrinks_while_it_is_checked_is_a_problem_and_no_crash(tmp_path: Path) -> None:
    manifest = save(tmp_path / "a.ckpt", os.urandom(10_000))
    os.truncate(tmp_path / "a.ckpt" / NAME, 9000)
    (problem,) = check_chunks(str(tmp_path / "a.ckpt"), manifest.files)
    assert "chunk 2" in problem
    assert "cannot be read" in problem


def test_a_size_is_compared_before_anything_is_read(tmp_path: Path) -> None:
    manifest = save(tmp_path / "a.ckpt", b"x" * 100)
    huge = replace(manifest.files[0], size=1 << 60, chunk_bytes=1 << 60)
    (problem,) = check_files(str(tmp_path / "a.ckpt"), replace(manifest, files=(huge,)))
    assert "has 100 bytes instead of" in problem


def test_the_manifest_is_needed_and_must_be_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save(path, b"x")
    (path / "manifest.json").write_bytes(b"{}")
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.json is damaged"):
        read_manifest(str(path))
    (path / "manifest.json").unlink()
    with pytest.raises(NoCheckpointError):
        read_manifest(str(path))


def test_a_checkpoint_put_aside_is_found_under_its_name(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", b"x")
    assert resolve(str(tmp_path / "a.ckpt")) == str(tmp_path / "a.ckpt")
    aside = (tmp_path / "a.ckpt").rename(tmp_path / ".a.ckpt.replaced-7")
    assert resolve(str(tmp_path / "a.ckpt")) == str(aside)
    assert verify(str(tmp_path / "a.ckpt")) == []
    assert resolve(str(tmp_path / "b.ckpt")) == str(tmp_path / "b.ckpt")
