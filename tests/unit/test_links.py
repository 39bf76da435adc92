"""``last.ckpt`` as a link."""

from __future__ import annotations

import os
from pathlib import Path

from lightning_ckpt.links import link_checkpoint
from tests.conftest import MakeCheckpoint


def test_a_link_is_relative_and_survives_a_move_of_the_directory(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "a.ckpt").mkdir(parents=True)
    link_checkpoint(str(run / "a.ckpt"), str(run / "last.ckpt"))
    run.rename(tmp_path / "moved")
    assert os.readlink(tmp_path / "moved" / "last.ckpt") == "a.ckpt"
    assert (tmp_path / "moved" / "last.ckpt").is_dir()


def test_a_link_is_switched_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    for name in ("a.ckpt", "b.ckpt"):
        (tmp_path / name).mkdir()
        link_checkpoint(str(tmp_path / name), str(tmp_path / "last.ckpt"))
    assert os.readlink(tmp_path / "last.ckpt") == "b.ckpt"
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "b.ckpt", "last.ckpt"]


def test_a_checkpoint_or_file_of_the_links_name_gives_way(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    (tmp_path / "a.ckpt").mkdir()
    make_checkpoint(str(tmp_path / "last.ckpt"), {"x": 1})
    (tmp_path / "other.ckpt").write_bytes(b"a vanilla checkpoint")
    for name in ("last.ckpt", "other.ckpt"):
        link_checkpoint(str(tmp_path / "a.ckpt"), str(tmp_path / name))
        assert os.readlink(tmp_path / name) == "a.ckpt"


def test_a_checkpoint_is_never_linked_to_itself(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    path = make_checkpoint(str(tmp_path / "last.ckpt"), {"x": 1})
    link_checkpoint(path, path)
    assert Path(path, "manifest.json").is_file()
    assert not Path(path).is_symlink()
