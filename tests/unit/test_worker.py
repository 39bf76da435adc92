from __future__ import annotations

import threading

import pytest

from ckpt_engine.capture.worker import Worker
from ckpt_engine.errors import SaveTimeoutError


def test_jobs_run_in_order_on_one_thread() -> None:
    worker = Worker("test")
    seen: list[tuple[int, int]] = []
    for index in range(50):
        worker.submit(lambda index=index: seen.append((index, threading.get_ident())))  # type: ignore[misc]
    worker.drain(10)
    assert [index for index, _ in seen] == list(range(50))
    assert len({thread for _, thread in seen}) == 1
    worker.close(10)


def test_an_error_is_kept_once_and_later_jobs_run() -> None:
    worker = Worker("test")
    done: list[int] = []

    def fail() -> None:
        raise OSError("disk full")

    worker.submit(fail)
    worker.submit(lambda: done.append(1))
    worker.drain(10)
    assert [str(error) for error in worker.errors()] == ["disk full"]
    assert worker.errors() == []
    assert done == [1]
    worker.close(10)


def test_drain_is_bounded_and_names_the_rank() -> None:
    worker, release = Worker("persist"), threading.Event()
    worker.submit(lambda: release.wait(30) and None)
    with pytest.raises(SaveTimeoutError, match=r"persist thread .* rank 0"):
        worker.drain(0.05)
    release.set()
    worker.close(10)


def test_close_runs_what_is_queued_and_refuses_more() -> None:
    worker = Worker("test")
    done: list[int] = []
    worker.submit(lambda: done.append(1))
    worker.close(10)
    assert done == [1]
    with pytest.raises(SaveTimeoutError, match="closed"):
        worker.submit(lambda: None)


def test_a_lower_priority_thread_still_works() -> None:
    worker = Worker("test", nice=19)
    done: list[int] = []
    worker.submit(lambda: done.append(1))
    worker.drain(10)
    assert done == [1]
    worker.close(10)
