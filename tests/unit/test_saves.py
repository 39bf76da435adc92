from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine.capture.worker import Worker
from ckpt_engine.errors import SaveFailedError, SaveTimeoutError
from ckpt_engine.image.arena import HostBuffer
from ckpt_engine.observe.record import SaveRecord
from ckpt_engine.observe.timeline import Timeline
from ckpt_engine.prepare import fill, layout_of
from ckpt_engine.restore.reader import load
from ckpt_engine.saves import EXTRA, IMAGE, TREE, Image, SaveHandle, SaveQueue, SaveRequest, tensor_records


class Setting:
    """A queue and an image of one tensor."""

    def __init__(self, **options: Any) -> None:
        self.records: list[SaveRecord] = []
        self.worker = Worker("persist")
        self.queue = SaveQueue(
            worker=self.worker,
            replay=Worker("replay"),
            timeout=10,
            direct_io=True,
            timeline=Timeline(),
            clock=time.perf_counter,
            **{"on_record": self.records.append, **options},
        )
        self.tensors = {"model.w": torch.arange(3000.0)}
        layout = layout_of(self.tensors)
        arena = HostBuffer(layout.total_bytes)
        fill(layout, arena.tensor, self.tensors)
        self.released: list[int] = []
        self.image = Image(layout=layout, arena=arena, window=None, release=lambda: self.released.append(1))

    def save(self, destination: Path | str, **options: Any) -> SaveHandle:
        request = SaveRequest(
            destination=str(destination),
            step=3,
            tree={"value": 1},
            extras={"extra.x": torch.ones(2)},
            meta={"why": "test"},
            mode="async",
            stall_s=0.25,
            on_commit=options.get("on_commit"),
        )
        handle = SaveHandle(str(destination), 3)
        self.image.users += 1
        self.queue.save(self.image, request, handle)
        return handle


def test_a_save_writes_image_extras_and_tree(tmp_path: Path) -> None:
    setting = Setting()
    record = setting.save(tmp_path / "a").wait(10)
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == sorted([IMAGE, EXTRA, TREE, "manifest.json"])
    loaded = load(f"{tmp_path}/a")
    assert torch.equal(loaded.tensors["model.w"], setting.tensors["model.w"])
    assert torch.equal(loaded.tensors["extra.x"], torch.ones(2))
    assert (loaded.manifest.step, loaded.manifest.meta) == (3, {"why": "test"})
    assert (record.ok, record.mode, record.stall_s, record.extra_bytes) == (True, "async", 0.25, 8)
    assert setting.records == [record]
    assert setting.released == [1]


def test_a_second_save_of_one_image_shares_its_file(tmp_path: Path) -> None:
    setting = Setting()
    setting.image.users += 1
    setting.save(tmp_path / "a").wait(10)
    setting.save(tmp_path / "b").wait(10)
    assert (tmp_path / "a" / IMAGE).stat().st_ino == (tmp_path / "b" / IMAGE).stat().st_ino
    assert setting.released == []


def test_a_second_save_writes_again_when_the_first_is_gone(tmp_path: Path) -> None:
    setting = Setting()
    setting.save(tmp_path / "a").wait(10)
    for file in (tmp_path / "a").iterdir():
        file.unlink()
    setting.save(tmp_path / "b").wait(10)
    assert torch.equal(load(f"{tmp_path}/b").tensors["model.w"], setting.tensors["model.w"])


def test_a_failure_is_reported_once_and_cancels_what_follows(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    setting, done = Setting(), []
    handle = setting.save(tmp_path / "file" / "a")
    setting.queue.then(lambda: done.append(1), "removing")
    with pytest.raises(SaveFailedError, match="Earlier checkpoints are untouched"):
        handle.wait(10)
    setting.worker.drain(10)
    assert done == []
    (failure,) = setting.queue.take_failures()
    assert "step 3" in str(failure)
    assert setting.queue.take_failures() == []
    assert [record.ok for record in setting.records] == [False]
    assert setting.released == [1]
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_actions_go_on_after_the_next_good_save(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    setting, done = Setting(), []
    setting.save(tmp_path / "file" / "a")
    setting.save(tmp_path / "b")
    setting.queue.then(lambda: done.append(1), "removing")
    setting.worker.drain(10)
    assert done == [1]


def test_a_refused_save_cancels_what_follows_too() -> None:
    setting, done = Setting(), []
    handle = SaveHandle("a", 3)
    setting.queue.refuse(handle, SaveFailedError("busy."))
    setting.queue.then(lambda: done.append(1), "removing")
    with pytest.raises(SaveFailedError, match="busy"):
        handle.wait(10)
    setting.worker.drain(10)
    assert done == []


def test_commit_callbacks_run_once_durable_and_their_errors_are_kept(tmp_path: Path) -> None:
    setting, seen = Setting(), []
    setting.save(tmp_path / "a", on_commit=lambda record: seen.append((record.ok, (tmp_path / "a").is_dir())))
    setting.save(tmp_path / "b", on_commit=lambda record: 1 / 0)
    setting.worker.drain(10)
    assert seen == [(True, True)]
    assert "the commit callback failed" in str(setting.queue.take_failures()[0])


def test_a_record_that_cannot_be_kept_does_not_leave_the_handle_waiting(tmp_path: Path) -> None:
    setting = Setting(on_record=lambda record: 1 / 0)
    assert setting.save(tmp_path / "a").wait(10).ok
    setting.worker.drain(10)
    assert "keeping the record failed" in str(setting.queue.take_failures()[0])


def test_waiting_is_bounded_and_says_what_to_do() -> None:
    with pytest.raises(SaveTimeoutError, match="settle"):
        SaveHandle("a", 1).wait(0.01)


def test_manifest_rows_are_boxes_of_whole_tensors() -> None:
    setting = Setting()
    (row,) = tensor_records(setting.image.layout, IMAGE)
    assert (row.name, row.dtype, row.shape, row.box_offset, row.nbytes) == ("model.w", "float32", (3000,), (0,), 12000)
