"""Whatever happens to the bytes of a checkpoint is found, the file is named, and the previous one is used.

The checkpoint is small so that *every* byte of every file can be damaged, one at a time.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ckpt_engine.errors import CorruptCheckpointError, NoCheckpointError
from ckpt_engine.restore.catalog import newest
from ckpt_engine.restore.reader import load, load_newest, verify

PAGE = 4096
NAMES = ("manifest.json", "rank-00000.json", "rank-00000.extra.safetensors", "rank-00000.safetensors")


def state_of(step: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {"weight": torch.randn(16, 8, generator=generator), "bias": torch.randn(8, generator=generator)},
        "extra": {"rng": torch.arange(step, step + 40, dtype=torch.uint8)},
        "step": step,
        "name": "small",
    }


@pytest.fixture
def root(make_checkpoint: Callable[..., str]) -> Iterator[Path]:
    """Two checkpoints in memory-backed files, where thousands of rewrites cost little."""
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path("/tmp")
    path = base / f"corruption-{os.getpid()}"
    path.mkdir()
    try:
        make_checkpoint(str(path / "old.ckpt"), state_of(1), step=1)
        make_checkpoint(str(path / "new.ckpt"), state_of(2), step=2, chunk_bytes=PAGE)
        yield path
    finally:
        shutil.rmtree(path)


def assert_found(root: Path, name: str) -> None:
    """The damage to ``name`` of the newest checkpoint is named and the previous one chosen."""
    told: list[str] = []
    assert newest(str(root), on_problem=told.append).manifest.step == 1
    assert any(f"new.ckpt/{name}" in problem for problem in told), told


def assert_whole(root: Path) -> None:
    assert verify(str(root / "new.ckpt")) == []
    assert newest(str(root), on_problem=pytest.fail).manifest.step == 2


@pytest.mark.parametrize("name", NAMES)
def test_every_single_flipped_byte_is_found(root: Path, name: str) -> None:
    path = root / "new.ckpt" / name
    good = path.read_bytes()
    assert_whole(root)
    with path.open("r+b", buffering=0) as file:
        for position, byte in enumerate(good):
            os.pwrite(file.fileno(), bytes([byte ^ (1 << position % 8)]), position)
            assert_found(root, name)
            os.pwrite(file.fileno(), bytes([byte]), position)
    assert_whole(root)


@pytest.mark.parametrize("name", NAMES)
def test_zeroed_pages_are_found(root: Path, name: str) -> None:
    path = root / "new.ckpt" / name
    good = path.read_bytes()
    for start in range(0, len(good), PAGE):
        zeroed = bytearray(good)
        zeroed[start : start + PAGE] = bytes(len(zeroed[start : start + PAGE]))
        path.write_bytes(zeroed)
        assert_found(root, name)
    path.write_bytes(bytes(len(good)))
    assert_found(root, name)


@pytest.mark.parametrize("name", NAMES)
def test_truncation_is_found_wherever_it_happens(root: Path, name: str) -> None:
    path = root / "new.ckpt" / name
    good = path.read_bytes()
    for length in {*range(0, len(good), PAGE), 1, 7, 8, 9, len(good) // 2, len(good) - 1}:
        path.write_bytes(good[:length])
        assert_found(root, name)
    path.write_bytes(good)
    assert_whole(root)


@pytest.mark.parametrize("tail", [b"\0", b"\n", b" ", b"x", bytes(PAGE)])
@pytest.mark.parametrize("name", NAMES)
def test_appended_bytes_are_found(root: Path, name: str, tail: bytes) -> None:
    path = root / "new.ckpt" / name
    path.write_bytes(path.read_bytes() + tail)
    assert_found(root, name)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file_is_found(root: Path, name: str) -> None:
    (root / "new.ckpt" / name).unlink()
    told: list[str] = []
    assert newest(str(root), on_problem=told.append).manifest.step == 1
    assert any("new.ckpt" in problem and name in problem for problem in told)
    with pytest.raises((CorruptCheckpointError, NoCheckpointError), match=name):
        load(str(root / "new.ckpt"))


@pytest.mark.parametrize("name", ["rank-00001.safetensors", "rank-00000.extra2.safetensors", "part", "x.tmp"])
def test_an_extra_empty_file_is_found(root: Path, name: str) -> None:
    (root / "new.ckpt" / name).touch()
    assert_found(root, name)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_another_checkpoint_is_found(root: Path, name: str) -> None:
    if name == "manifest.json":  # an older manifest over newer data
        shutil.copy(root / "old.ckpt" / name, root / "new.ckpt" / name)
        problems = verify(str(root / "new.ckpt"))
        assert any("new.ckpt/rank-00000" in problem for problem in problems)
        return
    shutil.copy(root / "old.ckpt" / name, root / "new.ckpt" / name)
    assert_found(root, name)


@pytest.mark.parametrize("kind", ["link", "directory", "pipe"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_regular_file_is_refused(root: Path, name: str, kind: str) -> None:
    """A link is refused even where its bytes are right: a checkpoint is what lies in its own directory."""
    path = root / "new.ckpt" / name
    moved = path.rename(root / "moved")
    if kind == "link":
        path.symlink_to(moved)
    elif kind == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)
    assert_found(root, name)


@pytest.mark.parametrize("name", NAMES)
def test_loading_damaged_files_names_file_and_chunk_and_never_returns_them(root: Path, name: str) -> None:
    path = root / "new.ckpt" / name
    good = path.read_bytes()
    for position in range(0, len(good), 97):
        damaged = bytearray(good)
        damaged[position] ^= 0xFF
        path.write_bytes(damaged)
        with pytest.raises(CorruptCheckpointError) as caught:
            load(str(root / "new.ckpt"))
        assert name in str(caught.value)
        if name.endswith(".safetensors"):
            assert f"chunk {position // PAGE} " in str(caught.value)


def test_loading_falls_back_to_the_previous_checkpoint_and_says_so(root: Path) -> None:
    path = root / "new.ckpt" / "rank-00000.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    told: list[str] = []
    chosen, loaded = load_newest(str(root), on_problem=told.append)
    assert (chosen, loaded.manifest.step) == (str(root / "old.ckpt"), 1)
    assert isinstance(loaded.state, dict)
    wanted = state_of(1)["model"]
    assert isinstance(wanted, dict)
    assert torch.equal(loaded.state["model"]["weight"], wanted["weight"])
    assert len(told) == 1
    assert "new.ckpt/rank-00000.safetensors, chunk" in told[0]


def test_when_everything_is_damaged_nothing_is_loaded(root: Path) -> None:
    for name in ("old.ckpt", "new.ckpt"):
        (root / name / "rank-00000.json").write_bytes(b"{}")
    with pytest.raises(NoCheckpointError) as caught:
        load_newest(str(root), on_problem=lambda problem: None)
    assert "old.ckpt/rank-00000.json" in str(caught.value)
    assert "new.ckpt/rank-00000.json" in str(caught.value)
