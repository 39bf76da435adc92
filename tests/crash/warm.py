"""Preloaded by the fork server: imports, torch's lazy ones included, are paid for once, not in every process.

One thread only, so that no thread pool exists when processes are forked.
"""

from __future__ import annotations

import torch

import tests.crash.killed_lightning  # noqa: F401
from tests.crash import killed_run
from tests.equivalence.harness import Run

torch.set_num_threads(1)
Run(killed_run.RECIPE).one_round(None)
