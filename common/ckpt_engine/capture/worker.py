"""A single background thread that runs jobs in order, keeps their errors and can be waited for with a bound."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

from ckpt_engine.errors import SaveTimeoutError

Job = Callable[[], None]


class Worker:
    """Runs jobs one after another on a daemon thread that starts with the first job.

    Example:
        >>> worker, done = Worker("example"), []
        >>> worker.submit(lambda: done.append(1))
        >>> worker.drain(timeout=10)
        >>> done
        [1]
        >>> worker.close(timeout=10)
    """

    def __init__(self, name: str, *, nice: int = 0) -> None:
        self._name = name
        self._nice = nice
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._busy = False
        self._closed = False
        self._errors: list[BaseException] = []
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> None:
        """Queue ``job``; an exception that it raises is kept for :meth:`errors` and the next job runs."""
        with self._changed:
            if self._closed:
                raise SaveTimeoutError(f"The {self._name} thread is closed: create a new engine to save again.")
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"ckpt-{self._name}", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def drain(self, timeout: float) -> None:
        """Wait until every queued job has run.

        Raises:
            SaveTimeoutError: Work was left after ``timeout`` seconds.
        """
        if threading.current_thread() is self._thread:
            return
        with self._changed:
            if not self._changed.wait_for(lambda: not self._jobs and not self._busy, timeout):
                raise SaveTimeoutError(
                    f"The {self._name} thread still has {len(self._jobs) + 1} job(s) after {timeout:g} s on rank "
                    f"{os.environ.get('RANK', '0')}: the disk or the processor may be stalled; raise save_timeout_s."
                )

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or running."""
        with self._changed:
            return not self._jobs and not self._busy

    def errors(self) -> list[BaseException]:
        """Return the exceptions raised since the last call, and forget them."""
        with self._changed:
            errors, self._errors = self._errors, []
            return errors

    def close(self, timeout: float) -> None:
        """Run what is queued, then end the thread; waits at most ``timeout`` seconds."""
        self.drain(timeout)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        self._lower_priority()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                job, self._busy = self._jobs.popleft(), True
            try:
                job()
            except BaseException as error:
                with self._changed:
                    self._errors.append(error)
            finally:
                job = _nothing
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _lower_priority(self) -> None:
        if self._nice and hasattr(os, "setpriority"):
            try:
                # On Linux a thread id names one thread, so only this one steps back.
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
            except OSError:
                return


def _nothing() -> None:
    """Stands in for a finished job so that the thread keeps no reference to what it held."""
