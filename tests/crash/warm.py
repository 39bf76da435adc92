"""Preloaded by the fork server: one round of training pays for torch's lazy imports once, not in every process.

One thread only, so that no thread pool exists when processes are forked.
"""

from __future__ import annotations

import torch

from tests.crash import killed_run
from tests.equivalence.harness import Run

torch.set_num_threads(1)
Run(killed_run.RECIPE).one_round(None)
