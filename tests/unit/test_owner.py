"""A process is recognised, and never confused with a later one of the same number."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from ckpt_engine.storage.owner import Owner

PRINT = "from ckpt_engine.storage.owner import Owner; print(Owner.current().to_bytes().decode(), flush=True)"


def test_a_record_survives_being_written() -> None:
    owner = Owner.current()
    assert Owner.from_bytes(owner.to_bytes()) == owner
    assert owner.pid == os.getpid()


def test_another_process_is_alive_until_it_ends_and_dead_even_before_it_is_reaped() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", f"{PRINT}; import sys; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    owner = Owner.from_bytes(process.stdout.readline())
    assert owner.pid == process.pid
    assert owner.liveness() == "alive"
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, and still a zombie
    assert owner.liveness() == "dead"
    process.communicate(timeout=60)
    assert owner.liveness() == "dead"


def test_the_same_number_with_another_start_is_another_process() -> None:
    assert replace(Owner.current(), started="12").liveness() == "dead"


@pytest.mark.parametrize("field", ["host", "boot", "pid_space"])
def test_elsewhere_nothing_is_claimed(field: str) -> None:
    assert replace(Owner.current(), **{field: "x"}).liveness() == "unknown"  # type: ignore[arg-type]


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"pid": 1}'])
def test_anything_else_is_no_record(data: bytes) -> None:
    with pytest.raises(ValueError):
        Owner.from_bytes(data)
