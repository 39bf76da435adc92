"""SLURM's requeue signal, handled between steps.

Lightning saves inside the signal handler, also in the middle of an optimizer step. Here the handler only notes that the
signal came; the checkpoint is written at the next boundary, and then the job is requeued.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import threading
import warnings
from types import FrameType
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer

logger = logging.getLogger("lightning_ckpt")


class RequeueSignal:
    """Notes SLURM's requeue signal while installed.

    Args:
        trainer: Its cluster environment says whether, and by which signal, jobs are requeued.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.received = False
        self._previous: Any = None
        self._signal: signal.Signals | None = None
        environment = trainer._accelerator_connector.cluster_environment
        on_main = threading.current_thread() is threading.main_thread()
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue and on_main:
            self._signal = environment.requeue_signal or signal.SIGUSR1
            self._previous = signal.signal(self._signal, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def remove(self) -> None:
        """Put the previous handler back."""
        if self._signal is not None:
            signal.signal(self._signal, self._previous)
            self._signal = None


def requeue() -> bool:
    """Ask SLURM to requeue this job; warns and returns False when it will not."""
    job = os.environ.get("SLURM_JOB_ID", "")
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ.get('SLURM_ARRAY_TASK_ID', '')}"
    if not re.fullmatch(r"[0-9_-]+", job):
        warnings.warn(f"SLURM job id {job!r} is no id: the job was not requeued.", stacklevel=2)
        return False
    try:
        result = subprocess.run(["scontrol", "requeue", job], check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        warnings.warn(f"SLURM job {job} was not requeued ({error}): requeue it by hand.", stacklevel=2)
        return False
    if result.returncode != 0:
        problem = f"SLURM refused to requeue job {job} (exit {result.returncode}): requeue it by hand."
        warnings.warn(problem, stacklevel=2)
    return result.returncode == 0
