"""Requeue checkpoints: only complete ones bear the name that Lightning looks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest

from ckpt_engine.restore.catalog import is_checkpoint
from lightning_ckpt import OverlappedCheckpoint, OverlappedCheckpointIO
from lightning_ckpt.requeue import earlier_requeues, publish, requeue_path, writing_path
from tests.lightning_runs import fit, names


def test_versions_count_on_from_the_highest_and_other_names_do_not_matter(tmp_path: Path) -> None:
    root = str(tmp_path)
    assert requeue_path(root) == f"{root}/hpc_ckpt_1.ckpt"
    for name in (
        "hpc_ckpt_9.ckpt",
        "hpc_ckpt_2.ckpt",
        ".hpc_ckpt_10.ckpt.incomplete-77",
        "my_ckpt_old",
        "hpc_ckpt_x.ckpt",
    ):
        (tmp_path / name).mkdir()
    assert requeue_path(root) == f"{root}/hpc_ckpt_10.ckpt"
    assert requeue_path(f"{root}/not-there").endswith("/hpc_ckpt_1.ckpt")


def test_while_it_is_written_a_checkpoint_has_a_name_that_lightning_does_not_read(tmp_path: Path) -> None:
    path = requeue_path(str(tmp_path))
    written = Path(writing_path(path))
    written.mkdir()
    (tmp_path / f".{written.name}.incomplete-3fa2bc9911").mkdir()
    run = L.Trainer(logger=False, accelerator="cpu", default_root_dir=tmp_path)
    assert run._checkpoint_connector._hpc_resume_path is None
    publish(str(written), path)
    assert run._checkpoint_connector._hpc_resume_path == path
    assert not written.exists()


def test_a_store_that_cannot_rename_is_written_in_place() -> None:
    path = requeue_path("memory://requeue-test")
    assert writing_path(path) == path
    publish(path, path)


def test_earlier_ones_are_those_with_lower_numbers_newest_first(tmp_path: Path) -> None:
    for version in (1, 3, 12, 20):
        (tmp_path / f"hpc_ckpt_{version}.ckpt").mkdir()
    found = earlier_requeues(str(tmp_path / "hpc_ckpt_12.ckpt"))
    assert [Path(path).name for path in found] == ["hpc_ckpt_3.ckpt", "hpc_ckpt_1.ckpt"]
    assert earlier_requeues(str(tmp_path / "epoch=0.ckpt")) == []


def requeued(root: Path) -> None:
    """Two requeue checkpoints, of steps 2 and 4."""
    for steps in (2, 4):
        _, run = fit(OverlappedCheckpoint(dirpath=root / "c"), max_steps=steps, default_root_dir=root)
        run.save_checkpoint(requeue_path(str(root)))


def test_a_damaged_requeue_checkpoint_is_named_and_the_one_before_it_resumes(tmp_path: Path) -> None:
    requeued(tmp_path)
    image = tmp_path / "hpc_ckpt_2.ckpt" / "rank-00000.safetensors"
    data = bytearray(image.read_bytes())
    data[-1] ^= 1
    image.write_bytes(data)
    options: dict[str, Any] = {"default_root_dir": tmp_path, "max_steps": 2, "ckpt_path": "hpc"}
    with pytest.warns(UserWarning, match=r"hpc_ckpt_2\.ckpt") as caught:
        _, run = fit(OverlappedCheckpoint(dirpath=tmp_path / "d"), **options)
    assert any("hpc_ckpt_1.ckpt is used instead" in str(warning.message) for warning in caught)
    assert run.global_step == 2


def test_the_hidden_name_of_an_unfinished_save_does_not_hide_the_complete_one(tmp_path: Path) -> None:
    requeued(tmp_path)
    (tmp_path / ".hpc_ckpt_3.ckpt.incomplete-4711").mkdir()
    run = L.Trainer(logger=False, accelerator="cpu", default_root_dir=tmp_path)
    named = run._checkpoint_connector._hpc_resume_path
    assert named is not None
    assert Path(named).name not in names(tmp_path), "Lightning reads versions strictly: this guards nothing"
    with pytest.warns(UserWarning, match="is used instead"):
        state = OverlappedCheckpointIO().load_checkpoint(named)
    assert state["global_step"] == 4
    assert is_checkpoint(str(tmp_path / "hpc_ckpt_2.ckpt"))
