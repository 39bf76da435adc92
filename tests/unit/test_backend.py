"""The same promises from a local directory and from an fsspec store."""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.errors import ConfigError
from ckpt_engine.storage.backend import (
    Backend,
    FsspecBackend,
    LocalBackend,
    backend_for,
    basename,
    file_chunks,
    join,
    local_path,
    parent,
)


@pytest.fixture(params=["plain", "file", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    url = {
        "plain": str(tmp_path / "run"),
        "file": f"file://{tmp_path}/run",
        "memory": f"memory://{uuid.uuid4().hex}/run",
    }[request.param]
    backend_for(url).makedirs(url)
    yield url
    backend_for(url).remove_tree(url)


@pytest.fixture
def backend(root: str) -> Backend:
    return backend_for(root)


def test_what_is_written_is_read_back(root: str, backend: Backend) -> None:
    backend.write_bytes(join(root, "a"), b"0123456789")
    assert backend.read_bytes(join(root, "a")) == b"0123456789"
    assert backend.size(join(root, "a")) == 10
    assert backend.listdir(root) == ["a"]
    assert backend.isfile(join(root, "a"))
    assert not backend.isdir(join(root, "a"))
    assert backend.isdir(root)


def test_a_part_of_a_file_is_read_into_memory_that_exists(root: str, backend: Backend) -> None:
    backend.write_bytes(join(root, "a"), bytes(range(200)))
    memory = memoryview(bytearray(50))
    backend.read_into(join(root, "a"), 100, memory)
    assert bytes(memory) == bytes(range(100, 150))


def test_reading_past_the_end_is_an_error_and_not_zeros(root: str, backend: Backend) -> None:
    backend.write_bytes(join(root, "a"), b"0123456789")
    with pytest.raises(EOFError, match="ends at byte 10"):
        backend.read_into(join(root, "a"), 5, memoryview(bytearray(6)))


def test_a_missing_file_is_file_not_found(root: str, backend: Backend) -> None:
    missing = join(root, "missing")
    assert not backend.exists(missing)
    for call in (backend.size, backend.read_bytes, backend.listdir):
        with pytest.raises(FileNotFoundError):
            call(missing)


def test_the_size_of_a_directory_is_refused(root: str, backend: Backend) -> None:
    with pytest.raises(OSError):
        backend.size(root)


def test_removing_twice_is_no_error(root: str, backend: Backend) -> None:
    backend.makedirs(join(root, "d"))
    backend.write_bytes(join(join(root, "d"), "a"), b"x")
    backend.write_bytes(join(root, "b"), b"x")
    for _ in range(2):
        backend.remove_tree(join(root, "d"))
        backend.remove_file(join(root, "b"))
    assert backend.listdir(root) == []


def test_a_copy_has_the_same_bytes(root: str, backend: Backend) -> None:
    backend.write_bytes(join(root, "a"), os.urandom(100_000))
    backend.copy_file(join(root, "a"), join(root, "b"))
    assert backend.read_bytes(join(root, "a")) == backend.read_bytes(join(root, "b"))


def test_a_file_is_read_in_chunks_without_holding_all_of_it(root: str, backend: Backend) -> None:
    data = os.urandom(10_001)
    backend.write_bytes(join(root, "a"), data)
    chunks = [bytes(chunk) for chunk in file_chunks(backend, join(root, "a"), 4096)]
    assert [len(chunk) for chunk in chunks] == [4096, 4096, 1809]
    assert b"".join(chunks) == data


def test_an_error_half_way_leaves_no_local_file(tmp_path: Path) -> None:
    def broken() -> Iterator[memoryview]:
        yield memoryview(b"half")
        raise RuntimeError("cut off")

    with pytest.raises(RuntimeError, match="cut off"):
        LocalBackend().write_chunks(str(tmp_path / "a"), broken())
    assert list(tmp_path.iterdir()) == []


def test_an_existing_local_file_is_never_written_into(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        LocalBackend().write_bytes(str(tmp_path / "a"), b"new")
    assert (tmp_path / "a").read_bytes() == b"old"


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077])
def test_local_files_and_directories_obey_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        LocalBackend().makedirs(str(tmp_path / "d"))
        LocalBackend().write_bytes(str(tmp_path / "d" / "a"), b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "d").stat().st_mode) == 0o777 & ~mask
    assert stat.S_IMODE((tmp_path / "d" / "a").stat().st_mode) == 0o666 & ~mask


def test_a_symbolic_link_is_not_followed_when_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    for call in (LocalBackend().size, LocalBackend().read_bytes):
        with pytest.raises(OSError):
            call(str(tmp_path / "link"))


def test_a_named_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for call in (LocalBackend().size, LocalBackend().read_bytes):
        with pytest.raises(OSError, match="regular"):
            call(str(tmp_path / "pipe"))


def test_removing_a_link_keeps_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"x")
    (tmp_path / "link").symlink_to("data")
    LocalBackend().remove_file(str(tmp_path / "link"))
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_url_without_driver_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="driver"):
        FsspecBackend().exists("nosuchscheme://bucket/x")


@given(st.lists(st.text("ab.-=_", min_size=1).filter(lambda s: s.strip(".")), min_size=2, max_size=4))
def test_parent_and_basename_undo_join(parts: list[str]) -> None:
    for start in ("s3://bucket", "/data", "runs"):
        path = start
        for part in parts:
            joined = join(path, part)
            assert (parent(joined), basename(joined)) == (path, part)
            path = joined


def test_a_file_url_and_a_plain_path_are_the_same_place() -> None:
    assert local_path("file:///data/a.ckpt/") == local_path("/data/a.ckpt") == "/data/a.ckpt"
