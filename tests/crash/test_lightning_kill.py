"""SIGKILL at random moments of a Lightning run: the newest complete checkpoint always loads and equals the run that
nobody kills at its step, and the run that goes on from ``ckpt_path="last"`` ends in the same bits."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest

from ckpt_engine.errors import NoCheckpointError
from tests.crash import killed_lightning

KILLS = 12


@pytest.mark.timeout(300)
def test_a_killed_lightning_run_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.crash.warm"])
    report, started, target = tmp_path / "reference.json", tmp_path / "started", tmp_path / "run"
    told = context.Process(target=killed_lightning.reference, args=(str(tmp_path / "reference"), str(report)))
    begin = time.monotonic()
    told.start()
    told.join(120)
    # A reference run takes about as long as a run that is killed may.
    length = time.monotonic() - begin
    expected = {int(step): text for step, text in json.loads(report.read_text()).items()}
    draw, kills, resumed, ends = random.Random(5), 0, 0, 0
    while kills < KILLS or ends == 0:
        started.unlink(missing_ok=True)
        process = context.Process(target=killed_lightning.main, args=(str(target), str(started)))
        process.start()
        patience = time.monotonic() + 60
        while not started.exists() and process.is_alive() and time.monotonic() < patience:
            time.sleep(0.005)
        process.join(draw.uniform(0.0, min(2.0, length)) if kills < KILLS else 120)
        if process.is_alive():
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join(60)
            kills += 1
        resumed += _check_newest(target, expected)
        end = tmp_path / "run-end.json"
        if end.exists():
            assert json.loads(end.read_text()) == expected[-1]
            end.unlink()
            target.rename(tmp_path / f"ended-{ends}")
            ends += 1
        else:
            assert process.exitcode == -signal.SIGKILL
    assert kills == KILLS
    assert resumed >= KILLS // 2
    assert ends >= 1


def _check_newest(target: Path, expected: dict[int, str]) -> bool:
    """Whether there is a checkpoint; once there was one, there must always be."""
    seen = target.with_name("seen")
    try:
        step, found, _ = killed_lightning.newest(str(target))
    except NoCheckpointError:
        assert not (target.exists() and seen.exists() and seen.read_text() == str(target.stat().st_ino))
        return False
    seen.write_text(str(target.stat().st_ino))
    assert found == expected[step]
    return True
