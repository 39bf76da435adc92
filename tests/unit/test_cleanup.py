"""Removal never leaves half a checkpoint under its name, and only what dead processes left is swept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_engine.errors import ConfigError
from ckpt_engine.image.manifest import Manifest
from ckpt_engine.storage.backend import backend_for, join
from ckpt_engine.storage.cleanup import is_abandoned, remove_checkpoint, sweep_incomplete
from ckpt_engine.storage.owner import Owner
from ckpt_engine.storage.transaction import Transaction


def write(destination: str, data: bytes = b"data", step: int = 1) -> str:
    """A checkpoint of one file."""
    with Transaction(destination, save_id=uuid.uuid4().hex) as transaction:
        record = transaction.write_bytes("rank-00000.json", data)
        transaction.commit(manifest_of(step, (record,)))
    return destination


def manifest_of(step: int, files: tuple[object, ...]) -> Manifest:
    fields = {
        "version": 1,
        "save_id": uuid.uuid4().hex,
        "step": step,
        "created": float(step),
        "world_size": 1,
        "files": files,
        "tensors": (),
        "window": {},
        "audit": {},
        "meta": {},
    }
    return Manifest(**fields)  # type: ignore[arg-type]


def staging_of(process: Owner | None, root: Path, name: str = "a.ckpt") -> Path:
    path = root / f".{name}.incomplete-x1"
    path.mkdir()
    (path / "rank-00000.safetensors").write_bytes(b"half")
    if process is not None:
        (path / "owner.json").write_bytes(process.to_bytes())
    return path


def age(path: Path, seconds: float) -> None:
    past = time.time() - seconds
    for entry in [*path.iterdir(), path]:
        os.utime(entry, (past, past))


def dead_owner() -> Owner:
    """The record of a process that has really run and ended."""
    code = "from ckpt_engine.storage.owner import Owner; print(Owner.current().to_bytes().decode())"
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    return Owner.from_bytes(ended.stdout)


def test_a_removed_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    remove_checkpoint(write(str(tmp_path / "a.ckpt")))
    assert list(tmp_path.iterdir()) == []


def test_removing_what_is_not_there_is_no_error(tmp_path: Path) -> None:
    remove_checkpoint(str(tmp_path / "a.ckpt"))
    remove_checkpoint(f"memory://{uuid.uuid4().hex}/a.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_a_remote_checkpoint_and_a_remote_file_are_removed() -> None:
    root = f"memory://{uuid.uuid4().hex}/run"
    backend = backend_for(root)
    remove_checkpoint(write(join(root, "a.ckpt")))
    backend.write_bytes(join(root, "b.ckpt"), b"x")
    remove_checkpoint(join(root, "b.ckpt"))
    assert not backend.exists(join(root, "a.ckpt"))
    assert not backend.exists(join(root, "b.ckpt"))


def test_a_plain_file_is_removed(tmp_path: Path) -> None:
    (tmp_path / "vanilla.ckpt").write_bytes(b"pickle")
    remove_checkpoint(str(tmp_path / "vanilla.ckpt"))
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_removed_and_its_checkpoint_kept(tmp_path: Path) -> None:
    write(str(tmp_path / "a.ckpt"))
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")
    (tmp_path / "broken.ckpt").symlink_to("gone.ckpt")
    remove_checkpoint(str(tmp_path / "last.ckpt"))
    remove_checkpoint(str(tmp_path / "broken.ckpt"))
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]
    assert (tmp_path / "a.ckpt" / "manifest.json").exists()


def test_data_linked_from_another_checkpoint_stays(tmp_path: Path) -> None:
    write(str(tmp_path / "a.ckpt"), b"shared")
    os.mkdir(tmp_path / "b.ckpt")
    os.link(tmp_path / "a.ckpt" / "rank-00000.json", tmp_path / "b.ckpt" / "rank-00000.json")
    remove_checkpoint(str(tmp_path / "a.ckpt"))
    assert (tmp_path / "b.ckpt" / "rank-00000.json").read_bytes() == b"shared"


def test_a_directory_of_checkpoints_is_never_removed(tmp_path: Path) -> None:
    write(str(tmp_path / "run" / "a.ckpt"))
    with pytest.raises(ConfigError, match="directory of checkpoints"):
        remove_checkpoint(str(tmp_path / "run"))
    for name in ("/", ".", "memory://", f"{tmp_path}/.."):
        with pytest.raises(ConfigError, match="does not end in a name"):
            remove_checkpoint(name)
    assert (tmp_path / "run" / "a.ckpt" / "manifest.json").exists()


def test_many_processes_may_remove_the_same_checkpoint(tmp_path: Path) -> None:
    path = write(str(tmp_path / "a.ckpt"))
    code = (
        "import sys, time; from ckpt_engine.storage.cleanup import remove_checkpoint; print(flush=True);"
        "sys.stdin.read(1); remove_checkpoint(sys.argv[1])"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(4)
    ]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    for process in processes:
        process.communicate(b"x", timeout=60)
    assert [process.returncode for process in processes] == [0] * 4
    assert list(tmp_path.iterdir()) == []


def test_what_a_dead_process_left_is_swept_at_once(tmp_path: Path) -> None:
    staging = staging_of(dead_owner(), tmp_path)
    write(str(tmp_path / "b.ckpt"))
    assert sweep_incomplete(str(tmp_path)) == [str(staging)]
    assert [path.name for path in tmp_path.iterdir()] == ["b.ckpt"]


def test_what_a_live_process_writes_is_kept_however_old(tmp_path: Path) -> None:
    staging = staging_of(Owner.current(), tmp_path)
    age(staging, 1e6)
    assert sweep_incomplete(str(tmp_path), older_than=0) == []
    assert staging.exists()


def test_a_later_process_with_the_same_number_is_not_the_owner(tmp_path: Path) -> None:
    staging = staging_of(replace(Owner.current(), started="1"), tmp_path)
    assert is_abandoned(str(staging))


@pytest.mark.parametrize("field", ["host", "boot", "pid_space"])
def test_the_owner_on_another_host_boot_or_container_counts_as_dead_only_by_age(tmp_path: Path, field: str) -> None:
    staging = staging_of(replace(Owner.current(), **{field: "elsewhere"}), tmp_path)  # type: ignore[arg-type]
    assert sweep_incomplete(str(tmp_path), older_than=60) == []
    age(staging, 61)
    assert sweep_incomplete(str(tmp_path), older_than=60) == [str(staging)]


@pytest.mark.parametrize("record", [b"", b"{}", b"[1]", b'"x"', json.dumps({"pid": "x"}).encode(), b"\xff"])
def test_an_unreadable_owner_record_counts_as_unknown(tmp_path: Path, record: bytes) -> None:
    staging = staging_of(None, tmp_path)
    (staging / "owner.json").write_bytes(record)
    assert sweep_incomplete(str(tmp_path), older_than=60) == []
    age(staging, 61)
    assert sweep_incomplete(str(tmp_path), older_than=60) == [str(staging)]


def test_sweeping_a_missing_or_remote_directory_does_nothing(tmp_path: Path) -> None:
    assert sweep_incomplete(str(tmp_path / "none")) == []
    assert sweep_incomplete("memory://nowhere") == []


def test_a_replaced_checkpoint_goes_when_its_successor_is_there(tmp_path: Path) -> None:
    write(str(tmp_path / "old.ckpt"))
    aside = tmp_path / ".a.ckpt.replaced-x1"
    (tmp_path / "old.ckpt").rename(aside)
    write(str(tmp_path / "b.ckpt"))
    (tmp_path / "b.ckpt").rename(tmp_path / "a.ckpt")
    assert sweep_incomplete(str(tmp_path)) == [str(aside)]
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def test_a_replaced_checkpoint_without_successor_is_put_back_when_nobody_is_at_it(tmp_path: Path) -> None:
    write(str(tmp_path / "a.ckpt"), b"old")
    aside = tmp_path / ".a.ckpt.replaced-x1"
    (tmp_path / "a.ckpt").rename(aside)
    assert sweep_incomplete(str(tmp_path), older_than=60) == []
    assert sweep_incomplete(str(tmp_path), older_than=-1) == [str(aside)]
    assert (tmp_path / "a.ckpt" / "rank-00000.json").read_bytes() == b"old"
