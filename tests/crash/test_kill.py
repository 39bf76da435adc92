"""SIGKILL at random moments: the newest complete checkpoint always loads, equals the uninterrupted run's state at its
step, and the run that goes on from it ends in the same bits."""

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
from tests.crash import killed_run


def _reference(path: str) -> None:
    Path(path).write_text(json.dumps(killed_run.reference()))


def _campaign(folder: Path, kills: int, seed: int) -> dict[str, int]:
    """Kill ``kills`` processes; whenever a run comes to its end, compare it and begin another."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.crash.warm"])
    told = context.Process(target=_reference, args=(str(folder / "reference.json"),))
    told.start()
    told.join(120)
    expected = {int(step): text for step, text in json.loads((folder / "reference.json").read_text()).items()}
    draw, counts = random.Random(seed), {"kills": 0, "ends": 0, "resumed": 0, "fallbacks": 0}
    runs = 0
    while counts["kills"] < kills or counts["ends"] == 0:
        target = folder / f"run-{runs}"
        started = folder / "started"
        started.unlink(missing_ok=True)
        process = context.Process(target=killed_run.main, args=(str(target), str(started)))
        process.start()
        patience = time.monotonic() + 60
        while not started.exists() and process.is_alive() and time.monotonic() < patience:
            time.sleep(0.005)
        process.join(draw.uniform(0.0, 1.2) if counts["kills"] < kills else 120)
        if process.is_alive():
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join(60)
            counts["kills"] += 1
        _check_newest(target, expected, counts)
        if (target / "end.json").exists():
            ended = json.loads((target / "end.json").read_text())
            assert ended["fingerprint"] == expected[killed_run.STEPS]
            counts["ends"] += 1
            runs += 1
    return counts


def _check_newest(target: Path, expected: dict[int, str], counts: dict[str, int]) -> None:
    try:
        state, problems = killed_run.newest(str(target))
    except NoCheckpointError:
        # Only before the first save of a run; afterwards one must always be there.
        assert not (target / "seen").exists()
        return
    (target / "seen").write_text("a checkpoint was complete once")
    assert killed_run.fingerprint(state) == expected[state["step"]]
    counts["resumed"] += 1
    counts["fallbacks"] += len(problems)


@pytest.mark.timeout(600)
def test_fifty_kills_lose_nothing(tmp_path: Path) -> None:
    counts = _campaign(tmp_path, kills=50, seed=1)
    assert counts["kills"] == 50
    assert counts["resumed"] >= 40
    assert counts["ends"] >= 1


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_two_hundred_kills_lose_nothing(tmp_path: Path) -> None:
    counts = _campaign(tmp_path, kills=200, seed=2)
    print(counts)
    assert counts["kills"] == 200
