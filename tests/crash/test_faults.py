"""Storage that fails or crawls: training goes on, nothing valid is lost, and host memory comes back."""

from __future__ import annotations

import copy
import resource
import shutil
import subprocess
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_engine.config import CheckpointConfig
from ckpt_engine.engine import Engine
from ckpt_engine.errors import SaveFailedError
from ckpt_engine.restore.catalog import is_checkpoint
from ckpt_engine.restore.reader import load


class Training:
    """A model with an engine; ``train`` runs rounds and saves at the last of them."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 200), nn.Tanh(), nn.Linear(200, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.engine = Engine(CheckpointConfig(**{"block_bytes": 4096, "audit": "full", **options}))
        self.engine.attach([self.optimizer], dict(self.model.named_parameters()), step=0, fenced=True)
        self.step = 0

    def state(self) -> dict[str, Any]:
        return {"state_dict": self.model.state_dict(), "optimizer_states": [self.optimizer.state_dict()]}

    def round(self) -> None:
        self.engine.step_begin()
        self.engine.before_zero_grad()
        self.optimizer.zero_grad()
        self.engine.before_backward()
        self.model(torch.full((2, 16), float(self.step))).pow(2).mean().backward()
        self.optimizer.step()
        self.step += 1
        self.engine.step_end(self.step)

    def train(self, steps: int, destination: Path | str) -> Any:
        target = self.step + steps
        self.engine.expect(target)
        while self.step < target:
            self.round()
        return self.engine.save(str(destination), self.state(), step=self.step)


@pytest.fixture
def blocked(tmp_path: Path) -> Path:
    """A destination that cannot be: its parent is a file."""
    (tmp_path / "file").write_text("in the way")
    return tmp_path / "file" / "step"


class SmallDisk:
    """A folder whose storage can run full: a small file system, or a limit on file sizes where mounting is refused."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
        self.mounted = subprocess.run(command, check=False, capture_output=True).returncode == 0
        self.limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self) -> None:
        if self.mounted:
            free = shutil.disk_usage(self.folder).free
            (self.folder / "filler").write_bytes(b"x" * (free - 16384))
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (16384, self.limits[1]))

    def free(self) -> None:
        (self.folder / "filler").unlink(missing_ok=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)

    def close(self) -> None:
        self.free()
        if self.mounted:
            subprocess.run(["umount", str(self.folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    disk = SmallDisk(tmp_path / "small")
    yield disk
    disk.close()


def refused(run: Training, steps: int, destination: Path | str) -> None:
    """Train, save, and see the save fail; the warning comes at the end of some later step."""
    with pytest.warns(UserWarning, match="failed"):
        _refused(run, steps, destination)


def _refused(run: Training, steps: int, destination: Path | str) -> None:
    handle = run.train(steps, destination)
    run.engine.after_saves(lambda: pytest.fail("an action followed a failed save"))
    run.round()
    with pytest.raises(SaveFailedError, match="Earlier checkpoints are untouched"):
        handle.wait(30)
    run.engine.drain(30)
    run.round()


MODES = ["multi_step", "one_step", "async", "sync"]


@pytest.mark.parametrize("mode", MODES)
def test_twenty_failing_saves_leak_nothing(mode: str, blocked: Path, tmp_path: Path) -> None:
    run = Training(mode=mode, window_steps=3 if mode == "multi_step" else None)
    for _ in range(20):
        refused(run, 4, blocked)
    images = max(record.image_bytes for record in run.engine.records)
    assert run.engine.memory["images_peak"] <= 2 * (images + 4096)
    assert run.engine._staging.outstanding == 0
    good = run.train(4, tmp_path / "good")
    run.round()
    assert good.wait(30).ok
    run.engine.close(30)
    assert [record.ok for record in run.engine.records] == [False] * 20 + [True]
    assert run.engine.memory["images"] == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_failed_save_raises_once_where_the_loop_sees_it(mode: str, blocked: Path, tmp_path: Path) -> None:
    run = Training(mode=mode, window_steps=3 if mode == "multi_step" else None, on_failure="raise")
    def until_told() -> None:
        run.train(4, blocked)
        run.round()
        run.engine.drain(30)
        run.round()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(SaveFailedError, match="file/step"):
            until_told()
    handle = run.train(4, tmp_path / "good")
    run.round()
    assert handle.wait(30).ok
    assert run.engine.close(30) == []


def test_a_full_disk_costs_the_save_and_keeps_the_checkpoint_before(small_disk: SmallDisk) -> None:
    run = Training(mode="multi_step", window_steps=3)
    destination = small_disk.folder / "last"
    run.train(4, destination)
    run.round()
    run.engine.wait(30)
    before = copy.deepcopy(load(str(destination)).tensors)
    small_disk.fill()
    refused(run, 4, destination)
    small_disk.free()
    after = load(str(destination)).tensors
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert [p.name for p in small_disk.folder.iterdir()] == ["last"]
    handle = run.train(4, destination)
    run.round()
    assert handle.wait(30).ok
    assert run.engine.close(30) == []


def test_a_commit_callback_and_a_following_action_that_raise_are_reported(tmp_path: Path) -> None:
    run = Training(mode="one_step")
    run.engine.expect(3)
    while run.step < 3:
        run.round()
    handle = run.engine.save(f"{tmp_path}/a", run.state(), step=3, on_commit=lambda _: 1 / 0)
    run.engine.after_saves(lambda: (tmp_path / "missing").unlink(), "removing an older one")
    run.round()
    assert handle.wait(30).ok
    problems = " ".join(str(failure) for failure in run.engine.close(30))
    assert "the commit callback failed: ZeroDivisionError" in problems
    assert "removing an older one failed: FileNotFoundError" in problems


def test_metrics_that_cannot_be_written_do_not_cost_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    run = Training(mode="one_step", metrics_path=str(tmp_path / "file" / "metrics.jsonl"))
    handle = run.train(3, tmp_path / "out")
    run.round()
    assert handle.wait(30).ok
    assert "keeping the record failed" in str(run.engine.close(30)[0])
    assert is_checkpoint(f"{tmp_path}/out")


class Gate:
    """Holds the persist thread until it is opened: storage at its slowest."""

    def __init__(self, engine: Engine) -> None:
        self.open = threading.Event()
        engine._persist.submit(lambda: self.open.wait(60))


@pytest.mark.parametrize("mode", ["multi_step", "one_step", "async"])
def test_one_image_and_slow_storage_skips_when_asked(mode: str, tmp_path: Path) -> None:
    steps = 3 if mode == "multi_step" else None
    run = Training(mode=mode, window_steps=steps, max_images=1, when_busy="skip")
    gate = Gate(run.engine)
    removed: list[str] = []
    first = run.train(4, tmp_path / "a")
    run.round()
    with pytest.warns(UserWarning, match="save of step 9 is skipped: all 1 images are still being written"):
        second = run.train(4, tmp_path / "b")
    run.engine.after_saves(lambda: removed.append("a"))
    gate.open.set()
    run.round()
    assert first.wait(30).ok
    with pytest.raises(SaveFailedError, match="still being written"):
        second.wait(30)
    run.engine.wait(30)
    third = run.train(4, tmp_path / "c")
    run.round()
    assert third.wait(30).ok
    assert run.engine.close(30) == []
    assert removed == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "c"]


@pytest.mark.parametrize("mode", ["multi_step", "one_step", "async"])
def test_one_image_and_slow_storage_waits_by_default(mode: str, tmp_path: Path) -> None:
    run = Training(mode=mode, window_steps=3 if mode == "multi_step" else None, max_images=1)
    gate = Gate(run.engine)
    first = run.train(4, tmp_path / "a")
    run.round()
    threading.Timer(0.3, gate.open.set).start()
    second = run.train(4, tmp_path / "b")
    run.round()
    assert first.wait(30).ok
    assert second.wait(30).ok
    assert run.engine.close(30) == []


@pytest.mark.parametrize("busy", [False, True])
def test_an_unplanned_save_while_a_window_holds_the_only_image(busy: bool, tmp_path: Path) -> None:
    run = Training(mode="multi_step", window_steps=4, max_images=1, save_timeout_s=20)
    run.engine.expect(8)
    while run.step < 6:
        run.round()
    assert run.engine.window is not None
    if busy:
        gate = Gate(run.engine)
        threading.Timer(0.2, gate.open.set).start()
    truth = copy.deepcopy(dict(run.model.state_dict()))
    handle = run.engine.save(f"{tmp_path}/now", run.state(), step=None, recorded_step=6)
    planned = run.train(2, tmp_path / "planned")
    run.round()
    assert handle.wait(30).ok
    assert planned.wait(30).ok
    assert run.engine.close(30) == []
    loaded = load(f"{tmp_path}/now").state["state_dict"]  # type: ignore[index]
    assert all(torch.equal(loaded[name], truth[name]) for name in truth)


def test_storage_that_never_answers_is_reported_within_the_bound(tmp_path: Path) -> None:
    run = Training(mode="async", max_images=1, save_timeout_s=0.3)
    gate = Gate(run.engine)
    run.train(2, tmp_path / "a")
    with pytest.raises(SaveFailedError, match="storage is too slow"):
        run.train(2, tmp_path / "b")
    gate.open.set()
    assert run.engine.close(30) == []


@pytest.mark.parametrize("saved", [False, True])
def test_a_copy_that_fails_costs_the_window_and_not_the_training(saved: bool, tmp_path: Path) -> None:
    """The image has lost the memory of its tensors, before or after the save."""
    run = Training(mode="multi_step", window_steps=3)
    run.engine.expect(4 if saved else 5)
    while run.step < 4:
        run.round()
    window = run.engine.window
    assert window is not None
    handle = run.engine.save(f"{tmp_path}/lost", run.state(), step=4) if saved else None
    for name, view in window._views.items():
        window._views[name] = view.new_empty(3)
    with pytest.warns(UserWarning, match="failed"):
        _rounds(run, 3)
    if handle is not None:
        with pytest.raises(SaveFailedError):
            handle.wait(30)
    good = run.train(3, tmp_path / "good")
    run.round()
    assert good.wait(30).ok
    assert run.engine.close(30) == []
    assert run.engine.memory["images"] == 0


def _rounds(run: Training, count: int) -> None:
    for _ in range(count):
        run.round()
        run.engine.drain(30)
