"""Checkpoints are found by their manifests and only whole ones are chosen."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_engine.errors import CorruptCheckpointError, NoCheckpointError
from ckpt_engine.image.manifest import FileRecord, Manifest
from ckpt_engine.restore.catalog import is_checkpoint, newest, read_manifest, scan
from ckpt_engine.storage.backend import backend_for, join
from ckpt_engine.storage.transaction import Transaction

TREE = "rank-00000.json"


def save(destination: str, step: int, created: float = 0.0) -> str:
    with Transaction(destination, save_id=uuid.uuid4().hex) as transaction:
        record = transaction.write_bytes(TREE, f"step {step}".encode())
        transaction.commit(_manifest(step, created, record))
    return destination


def _manifest(step: int, created: float, record: FileRecord) -> Manifest:
    return Manifest(
        version=1,
        save_id=uuid.uuid4().hex,
        step=step,
        created=created,
        world_size=1,
        files=(record,),
        tensors=(),
        window={},
        audit={},
        meta={},
    )


def names(root: str) -> list[str]:
    return [entry.path.rpartition("/")[2] for entry in scan(root).entries]


@pytest.fixture(params=["local", "remote"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    url = str(tmp_path / "run") if request.param == "local" else f"memory://{uuid.uuid4().hex}/run"
    backend_for(url).makedirs(url)
    yield url
    backend_for(url).remove_tree(url)


def test_checkpoints_are_listed_newest_first_by_step_and_not_by_name(root: str) -> None:
    for step in (9, 10, 2, 100):
        save(join(root, f"checkpoint-{step}.ckpt"), step)
    assert names(root) == [f"checkpoint-{step}.ckpt" for step in (100, 10, 9, 2)]
    assert newest(root).manifest.step == 100


def test_of_one_step_the_later_save_comes_first(root: str) -> None:
    save(join(root, "b.ckpt"), 5, created=1.0)
    save(join(root, "a.ckpt"), 5, created=2.0)
    save(join(root, "c.ckpt"), 4, created=3.0)
    assert names(root) == ["a.ckpt", "b.ckpt", "c.ckpt"]


def test_a_missing_or_empty_directory_holds_no_checkpoint(root: str) -> None:
    for where in (root, join(root, "missing")):
        assert (scan(where).entries, scan(where).problems) == ((), ())
        with pytest.raises(NoCheckpointError, match="No checkpoint in"):
            newest(where)
    assert not is_checkpoint(root)


def test_no_directory_is_trusted_for_its_name(root: str) -> None:
    save(join(root, "step-1.ckpt"), 1)
    backend = backend_for(root)
    backend.makedirs(join(root, "checkpoint-20"))
    backend.makedirs(join(root, "7"))
    backend.makedirs(join(root, "half.ckpt"))
    backend.write_bytes(join(join(root, "half.ckpt"), TREE), b"{}")
    told: list[str] = []
    assert newest(root, on_problem=told.append).manifest.step == 1
    assert len(told) == 1
    assert "half.ckpt" in told[0]
    assert "manifest.json" in told[0]


def test_staging_directories_are_never_checkpoints(root: str) -> None:
    save(join(root, "a.ckpt"), 1)
    save(join(root, ".b.ckpt.incomplete-x"), 2)
    assert names(root) == ["a.ckpt"]
    assert scan(root).problems == ()


def test_a_replaced_checkpoint_is_found_under_its_name_until_its_successor_is_there(tmp_path: Path) -> None:
    save(str(tmp_path / "a.ckpt"), 1)
    (tmp_path / "a.ckpt").rename(tmp_path / ".a.ckpt.replaced-x")
    assert is_checkpoint(str(tmp_path / "a.ckpt"))
    assert read_manifest(str(tmp_path / "a.ckpt")).step == 1
    assert newest(str(tmp_path)).manifest.step == 1
    (tmp_path / ".a.ckpt.replaced-x").rename(tmp_path / "a.ckpt")
    save(str(tmp_path / ".a.ckpt.replaced-x"), 0)
    assert names(str(tmp_path)) == ["a.ckpt"]


@pytest.mark.parametrize("damage", ["flipped", "short", "missing", "extra"])
def test_a_damaged_newest_is_named_and_the_previous_one_used(root: str, damage: str) -> None:
    save(join(root, "a.ckpt"), 1)
    path = join(save(join(root, "b.ckpt"), 2), TREE)
    backend = backend_for(root)
    if damage == "extra":
        backend.write_bytes(join(join(root, "b.ckpt"), "rank-00001.json"), b"")
    else:
        backend.remove_file(path)
        if damage != "missing":
            backend.write_bytes(path, b"stop 2" if damage == "flipped" else b"step")
    told: list[str] = []
    assert newest(root, on_problem=told.append).manifest.step == 1
    assert len(told) == 1
    assert join(root, "b.ckpt/rank-0000") in told[0]
    assert newest(root, verify=False, on_problem=told.append).manifest.step == (2 if damage == "flipped" else 1)


def test_when_all_are_damaged_the_error_lists_each(root: str) -> None:
    for step in (1, 2, 3):
        path = join(save(join(root, f"{step}.ckpt"), step), TREE)
        backend_for(root).remove_file(path)
        backend_for(root).write_bytes(path, b"damage")
    with pytest.raises(NoCheckpointError) as caught:
        newest(root, on_problem=lambda problem: None)
    assert all(f"{step}.ckpt/{TREE}" in str(caught.value) for step in (1, 2, 3))


def test_a_damaged_manifest_is_corrupt_and_a_missing_one_is_no_checkpoint(root: str) -> None:
    manifest = join(save(join(root, "a.ckpt"), 1), "manifest.json")
    data, backend = backend_for(root).read_bytes(manifest), backend_for(root)
    backend.remove_file(manifest)
    with pytest.raises(NoCheckpointError, match=r"manifest\.json"):
        read_manifest(join(root, "a.ckpt"))
    for damaged in (b"", b"{}", data[:-1], data.replace(b"1", b"2", 1), data + b" "):
        backend.write_bytes(manifest, damaged)
        with pytest.raises(CorruptCheckpointError, match=r"manifest\.json"):
            read_manifest(join(root, "a.ckpt"))
        backend.remove_file(manifest)


def test_links_to_a_checkpoint_do_not_list_it_twice(tmp_path: Path) -> None:
    save(str(tmp_path / "a.ckpt"), 1)
    save(str(tmp_path / "elsewhere" / "b.ckpt"), 2)
    os.mkdir(tmp_path / "run")
    (tmp_path / "a-first").symlink_to("a.ckpt")
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")
    (tmp_path / "loop.ckpt").symlink_to("loop.ckpt")
    (tmp_path / "far.ckpt").symlink_to("elsewhere/b.ckpt")
    assert names(str(tmp_path)) == ["far.ckpt", "a.ckpt"]


def test_a_manifest_that_is_a_link_or_a_pipe_is_refused(tmp_path: Path) -> None:
    manifest = Path(save(str(tmp_path / "a.ckpt"), 1)) / "manifest.json"
    manifest.rename(tmp_path / "outside.json")
    manifest.symlink_to(tmp_path / "outside.json")
    with pytest.raises(CorruptCheckpointError):
        read_manifest(str(tmp_path / "a.ckpt"))
    manifest.unlink()
    os.mkfifo(manifest)
    with pytest.raises(CorruptCheckpointError):
        read_manifest(str(tmp_path / "a.ckpt"))


def test_files_of_other_tools_are_passed_over_and_empty_ones_named(root: str) -> None:
    backend = backend_for(root)
    backend.write_bytes(join(root, "vanilla.ckpt"), b"pickle")
    backend.write_bytes(join(root, "metrics.csv"), b"")
    backend.write_bytes(join(root, "empty.ckpt"), b"")
    assert not is_checkpoint(join(root, "vanilla.ckpt"))
    found = scan(root)
    assert found.entries == ()
    assert len(found.problems) == 1
    assert "empty.ckpt" in found.problems[0]


def test_notes_inside_a_checkpoint_do_no_harm(root: str) -> None:
    path = save(join(root, "a.ckpt"), 1)
    backend_for(root).write_bytes(join(path, "README.txt"), b"the good one")
    backend_for(root).write_bytes(join(path, ".nfs0001"), b"")
    assert newest(root).manifest.step == 1
