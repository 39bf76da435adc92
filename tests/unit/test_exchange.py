"""A finished directory takes a name that may be taken, and the old content is never lost on the way."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ckpt_engine.storage.exchange import exchange_names, flush_directory, install, make_directories


def refuse(first: str, second: str) -> None:
    raise OSError(errno.EINVAL, "no exchange here", first, None, second)


def directory(path: Path, content: str) -> Path:
    path.mkdir()
    (path / "content").write_text(content)
    return path


def test_two_names_are_swapped(tmp_path: Path) -> None:
    first, second = directory(tmp_path / "a", "a"), tmp_path / "b"
    second.write_text("b")
    exchange_names(str(first), str(second))
    assert first.read_text() == "b"
    assert (second / "content").read_text() == "a"


def test_swapping_with_a_missing_name_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    directory(tmp_path / "a", "a")
    with pytest.raises(FileNotFoundError):
        exchange_names(str(tmp_path / "a"), str(tmp_path / "b"))
    assert (tmp_path / "a" / "content").read_text() == "a"


@pytest.mark.parametrize("exchange", [exchange_names, refuse])
def test_installing_returns_where_the_old_content_is(tmp_path: Path, exchange: object) -> None:
    staging, target, aside = directory(tmp_path / "s", "new"), directory(tmp_path / "t", "old"), tmp_path / "r"
    old = install(str(staging), str(target), str(aside), exchange)  # type: ignore[arg-type]
    assert old == str(aside if exchange is refuse else staging)
    assert (target / "content").read_text() == "new"
    assert (Path(old) / "content").read_text() == "old"


def test_installing_over_nothing_leaves_nothing_to_remove(tmp_path: Path) -> None:
    staging = directory(tmp_path / "s", "new")
    assert install(str(staging), str(tmp_path / "t"), str(tmp_path / "r")) is None
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_a_dangling_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "t").symlink_to("gone")
    old = install(str(directory(tmp_path / "s", "new")), str(tmp_path / "t"), str(tmp_path / "r"))
    assert old == str(tmp_path / "s")
    assert (tmp_path / "s").is_symlink()
    assert (tmp_path / "t" / "content").read_text() == "new"


def test_if_the_new_one_cannot_follow_the_old_one_comes_back(tmp_path: Path) -> None:
    target = directory(tmp_path / "t", "old")
    with pytest.raises(FileNotFoundError):
        install(str(tmp_path / "missing"), str(target), str(tmp_path / "r"), refuse)
    assert (target / "content").read_text() == "old"


def test_directories_are_made_with_their_parents_and_made_again_without_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        make_directories(str(tmp_path / "a" / "b" / "c"))
        flush_directory(str(tmp_path / "a" / "b" / "c"))
    monkeypatch.chdir(tmp_path)
    make_directories(os.path.join("relative", "d"))
    assert (tmp_path / "relative" / "d").is_dir()


def test_a_file_in_the_way_of_a_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("file")
    with pytest.raises(OSError):
        make_directories(str(tmp_path / "a" / "b"))
