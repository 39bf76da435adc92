"""SLURM's requeue signal: noted at once, acted on between steps, and the job is requeued."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ckpt_engine.restore.catalog import is_checkpoint
from lightning_ckpt import OverlappedCheckpoint
from lightning_ckpt.signals import RequeueSignal, requeue
from tests.equivalence.harness import differences
from tests.lightning_runs import Tiny, final, fit, names, state_of


class Sends(Tiny):
    """Sends this very process a signal in the middle of a step, and notes what it finds right after."""

    number = signal.SIGUSR1
    at = 2
    folder: Path
    found: list[str] | None = None

    @classmethod
    def into(cls, folder: Path, number: signal.Signals = signal.SIGUSR1) -> Sends:
        module = cls()
        module.folder, module.number = folder, number
        return module

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        if self.global_step == self.at:
            os.kill(os.getpid(), self.number)
            self.found = names(self.folder)
        super().optimizer_step(*args, **kwargs)


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name which writes down how it was called; ``refuse`` beside it makes it fail."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "scontrol"
    program.write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\n[ ! -e {folder}/refuse ]\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "1234")
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    return folder


def calls(folder: Path) -> list[str]:
    path = folder / "calls"
    return path.read_text().splitlines() if path.exists() else []


def slurm(monkeypatch: pytest.MonkeyPatch, number: signal.Signals | None = None) -> SLURMEnvironment:
    for name, value in {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "1")
    return SLURMEnvironment(auto_requeue=True, requeue_signal=number)


def test_the_job_is_requeued_by_its_number(scontrol: Path) -> None:
    assert requeue()
    assert calls(scontrol) == ["requeue 1234"]


def test_a_task_of_an_array_is_requeued_alone(scontrol: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "77")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert requeue()
    assert calls(scontrol) == ["requeue 77_3"]


def test_a_refusal_warns(scontrol: Path) -> None:
    (scontrol / "refuse").touch()
    with pytest.warns(UserWarning, match=r"refused to requeue job 1234 \(exit 1\): requeue it by hand"):
        assert not requeue()


def test_a_missing_program_warns(scontrol: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(scontrol.parent))
    with pytest.warns(UserWarning, match="was not requeued"):
        assert not requeue()


@pytest.mark.parametrize("job", ["", "12; rm -rf", "--help me"])
def test_what_is_no_job_number_is_never_passed_on(scontrol: Path, monkeypatch: pytest.MonkeyPatch, job: str) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", job)
    with pytest.warns(UserWarning, match="is no id"):
        assert not requeue()
    assert calls(scontrol) == []


def test_the_handler_only_notes_the_signal_and_is_taken_off_again(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    run = L.Trainer(logger=False, accelerator="cpu", plugins=[slurm(monkeypatch, signal.SIGUSR2)])
    noted = RequeueSignal(run)
    assert not noted.received
    os.kill(os.getpid(), signal.SIGUSR2)
    assert noted.received
    noted.remove()
    noted.remove()
    assert signal.getsignal(signal.SIGUSR2) is before


def test_without_slurm_no_handler_is_installed() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    noted = RequeueSignal(L.Trainer(logger=False, accelerator="cpu"))
    assert signal.getsignal(signal.SIGUSR1) is before
    noted.remove()


@pytest.mark.parametrize("number", [None, signal.SIGUSR2])
def test_a_requeue_signal_in_a_step_saves_at_the_next_boundary_and_requeues(
    tmp_path: Path, scontrol: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals | None
) -> None:
    root = tmp_path / "root"
    module = Sends.into(root, number or signal.SIGUSR1)
    whole = fit(
        OverlappedCheckpoint(dirpath=tmp_path / "c", every_n_train_steps=5, capture="multi_step", window_steps=3),
        module=module,
        default_root_dir=root,
        max_steps=8,
        plugins=[slurm(monkeypatch, number)],
    )
    assert module.found == [], "the handler saved by itself, in the middle of a step"
    assert names(root) == ["hpc_ckpt_1.ckpt"]
    assert state_of(root / "hpc_ckpt_1.ckpt")["global_step"] == 3
    assert calls(scontrol) == ["requeue 1234"]
    resumed = fit(
        OverlappedCheckpoint(dirpath=tmp_path / "d"), module=Tiny(), default_root_dir=root, max_steps=8, seed=4
    )
    assert differences(final(*resumed), final(*whole)) == []


def test_a_requeue_checkpoint_that_fails_does_not_requeue(
    tmp_path: Path, scontrol: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    root.write_text("a file where the directory should be")
    with pytest.warns(UserWarning, match="the job is not requeued"):
        fit(
            OverlappedCheckpoint(dirpath=tmp_path / "c"),
            module=Sends.into(tmp_path / "c"),
            default_root_dir=root,
            max_steps=4,
            plugins=[slurm(monkeypatch)],
        )
    assert calls(scontrol) == []


@pytest.mark.parametrize("wanted", [True, False])
def test_a_request_to_end_saves_a_whole_step(tmp_path: Path, wanted: bool) -> None:
    callback = OverlappedCheckpoint(
        dirpath=tmp_path, every_n_train_steps=100, filename="{step}", save_on_sigterm=wanted
    )
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises((SIGTERMException, SystemExit)):
        fit(callback, module=Sends.into(tmp_path, signal.SIGTERM))
    assert names(tmp_path) == (["step=3.ckpt"] if wanted else [])
    assert not wanted or is_checkpoint(str(tmp_path / "step=3.ckpt"))
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_handlers_of_others_are_put_back_after_training(
    tmp_path: Path, scontrol: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mine(number: int, frame: Any) -> None:
        raise AssertionError("never called")

    class Look(Callback):
        during: Any = None

        def on_train_batch_start(self, *_: Any) -> None:
            self.during = signal.getsignal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, mine)
    look = Look()
    try:
        fit(OverlappedCheckpoint(dirpath=tmp_path / "c"), look, max_steps=1, plugins=[slurm(monkeypatch)])
        assert signal.getsignal(signal.SIGUSR1) is mine
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert look.during is not mine
