"""What is at the destination stays usable while its successor gathers, locally and in an object store."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import pytest

from ckpt_engine.errors import SaveFailedError
from ckpt_engine.image.manifest import Manifest
from ckpt_engine.storage.backend import backend_for, join
from ckpt_engine.storage.exchange import exchange_names
from ckpt_engine.storage.owner import Owner
from ckpt_engine.storage.stage import LocalStage, ObjectStage, Stage


def manifest(step: int) -> bytes:
    return Manifest(save_id=f"s{step}", step=step, created=0.0, world_size=1, files=(), tensors=()).to_bytes()


def put(stage: Stage, step: int) -> None:
    stage.begin()
    backend_for(stage.directory).write_bytes(join(stage.directory, "data"), str(step).encode())
    stage.publish(manifest(step))


def test_a_local_stage_is_hidden_owned_by_this_process_and_gone_after_publishing(tmp_path: Path) -> None:
    stage = LocalStage(str(tmp_path / "a.ckpt"), "x", exchange_names)
    stage.begin()
    assert os.listdir(tmp_path) == [".a.ckpt.incomplete-x"]
    record = Owner.from_bytes((Path(stage.directory) / "owner.json").read_bytes())
    assert record == Owner.current()
    stage.publish(manifest(1))
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert os.listdir(tmp_path / "a.ckpt") == ["manifest.json"]
    stage.discard()
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_a_stage_that_never_began_discards_nothing_of_another(tmp_path: Path) -> None:
    first, second = (LocalStage(str(tmp_path / "a.ckpt"), "x", exchange_names) for _ in range(2))
    first.begin()
    with pytest.raises(SaveFailedError):
        second.begin()
    second.discard()
    assert (Path(first.directory) / "owner.json").exists()


def test_an_object_store_keeps_the_old_checkpoint_aside_until_the_new_manifest(tmp_path: Path) -> None:
    root = f"memory://{uuid.uuid4().hex}"
    backend, destination = backend_for(root), join(root, "a.ckpt")
    put(ObjectStage(destination, "x1"), 1)
    stage = ObjectStage(destination, "x2")
    stage.begin()
    assert backend.listdir(root) == [".a.ckpt.replaced-x2", "a.ckpt"]
    assert backend.listdir(destination) == []
    assert backend.listdir(join(root, ".a.ckpt.replaced-x2")) == ["data", "manifest.json"]
    stage.discard()
    assert backend.listdir(root) == ["a.ckpt"]
    assert backend.read_bytes(join(destination, "manifest.json")) == manifest(1)
    put(ObjectStage(destination, "x3"), 3)
    assert backend.listdir(root) == ["a.ckpt"]
    assert backend.read_bytes(join(destination, "data")) == b"3"


def test_remains_of_an_unfinished_upload_are_cleared_before_the_next(tmp_path: Path) -> None:
    root = f"memory://{uuid.uuid4().hex}"
    backend, destination = backend_for(root), join(root, "a.ckpt")
    backend.write_bytes(join(destination, "rank-00007.json"), b"stale")
    put(ObjectStage(destination, "x"), 1)
    assert backend.listdir(destination) == ["data", "manifest.json"]
