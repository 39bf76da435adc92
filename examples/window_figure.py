"""Draw a window from a real run: the model of `lightning_gpt.py` in a plain loop, driven without a framework.

    make figure          # docs/window.png

Between tensors in host memory a copy takes next to no time. So that there is something to see, copies go through a link
that is slowed until copying the whole state takes about two steps, as it does between a GPU and its host.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from lightning_gpt import ByteGPT, Chunks, standard_library
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ckpt_engine.capture.emulated_link import EmulatedLink
from ckpt_engine.config import CheckpointConfig
from ckpt_engine.engine import Engine
from ckpt_engine.observe.figure import draw_window

# The first window of a run compares everything that it replayed; the second is a usual one.
EVERY, TARGET, LAST = 8, 16, 18
STEPS_TO_COPY = 2.0


class Loop:
    """A plain training loop that tells an engine, once it has one, where it is."""

    def __init__(self) -> None:
        self.model = ByteGPT()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batches = itertools.cycle(DataLoader(Chunks(standard_library(200_000), 128), batch_size=8))
        self.engine: Engine | None = None

    def step(self) -> None:
        """Forward, backward, update. Gradients live until the next backward, so that their copies have time."""
        batch = next(self.batches)
        loss = F.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        if self.engine is not None:
            self.engine.before_zero_grad()
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()

    def state(self) -> dict[str, object]:
        return {"state_dict": self.model.state_dict(), "optimizer_states": [self.optimizer.state_dict()]}


def seconds_for(step: Callable[[], None], repeats: int = 5) -> float:
    """How long a step takes on a quiet machine: the shortest of a few."""
    times = [time.perf_counter()]
    for _ in range(repeats):
        step()
        times.append(time.perf_counter())
    return min(end - start for start, end in itertools.pairwise(times))


def main(path: str) -> None:
    """Train, save every few steps, and draw one of the windows into ``path``."""
    torch.manual_seed(1)
    loop = Loop()
    state_bytes = 3 * sum(parameter.nbytes for parameter in loop.model.parameters())
    link = EmulatedLink(state_bytes / (STEPS_TO_COPY * seconds_for(loop.step)))
    engine = loop.engine = Engine(CheckpointConfig(mode="multi_step"), link=link)
    engine.attach([loop.optimizer], dict(loop.model.named_parameters()), step=0, fenced=True)
    with tempfile.TemporaryDirectory() as folder:
        for step in range(1, LAST + 1):
            engine.expect(-(-step // EVERY) * EVERY)
            engine.step_begin()
            loop.step()
            engine.step_end(step)
            if step % EVERY == 0:
                engine.save(f"{folder}/step-{step}", loop.state(), step=step)
        failures = engine.close()
    if failures:
        raise failures[0]
    draw_window(engine.timeline.spans, TARGET, path)
    print(f"Drew the window for step {TARGET} into {path}.")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "window.png")
