"""The boundary between two training batches, which Lightning has no hook for.

``on_train_batch_end`` comes before validation, before schedulers that follow a metric, and before the module's own
hook; at an epoch's end even more follows. A checkpoint written there loses those steps on resume. The boundary
announced here is the last moment before the next batch is fetched, or before the first hook of the next epoch: nothing
of what is finished is left to do, and nothing of what comes has begun.

Some methods of Lightning's training loops are wrapped on the instance for this; ``tests/unit/test_boundary.py`` holds
the order of events that is relied on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.progress import _StartedTracker

from lightning_ckpt.loader_position import counts, new_epoch, unwatch, watch


class Boundary:
    """Calls back between batches, between epochs, and before the first batch of a run.

    Args:
        trainer: The trainer whose loop is watched.
        between: Called after each batch that is not the last of its epoch, and after each epoch, when everything of it
            is done.
        before_epoch: Called before anything of an epoch happens, the hooks of other callbacks included.
        before_first: Called once, with the data fetcher, right before the first batch of a run is fetched.
        before_end: Called when training is over, before the first ``on_train_end``, which may change weights.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        between: Callable[[], None],
        before_epoch: Callable[[], None],
        before_first: Callable[[Any], None],
        before_end: Callable[[], None],
    ) -> None:
        self._trainer = trainer
        self._between = between
        self._before_epoch = before_epoch
        self._before_first = before_first
        self._before_end = before_end
        self._first = True
        self._originals: dict[tuple[Any, str], Any] = {}
        loop = trainer.fit_loop
        self._wrap(loop, "on_advance_start", self._on_epoch_start)
        self._wrap(loop, "on_advance_end", self._on_epoch_end)
        self._wrap(loop, "on_run_end", self._on_run_end)
        self._wrap(loop.epoch_loop, "on_run_start", self._on_epoch_loop_start)
        self._wrap(loop.epoch_loop, "advance", self._advance)
        self._wrap(loop.epoch_loop, "on_advance_end", self._on_advance_end)
        self._wrap(loop, "_load_combined_loader_states", self._load_states)

    def remove(self) -> None:
        """Put Lightning's methods back."""
        for owner, name in self._originals:
            owner.__dict__.pop(name, None)
        self._originals.clear()
        loader = self._trainer.fit_loop._combined_loader
        if loader is not None:
            unwatch(loader.flattened)

    def _wrap(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        self._originals[owner, name] = getattr(owner, name)
        setattr(owner, name, replacement)

    def _original(self, owner: Any, name: str) -> Callable[..., Any]:
        original: Callable[..., Any] = self._originals[owner, name]
        return original

    def _on_epoch_start(self) -> None:
        self._before_epoch()
        self._original(self._trainer.fit_loop, "on_advance_start")()

    def _on_epoch_end(self) -> None:
        self._original(self._trainer.fit_loop, "on_advance_end")()
        self._between()

    def _on_run_end(self) -> None:
        self._before_end()
        self._original(self._trainer.fit_loop, "on_run_end")()

    def _on_epoch_loop_start(self, data_fetcher: Any) -> None:
        loader = self._trainer.fit_loop._combined_loader
        assert loader is not None
        iterator, before = loader._iterator, counts(loader.flattened)
        self._original(self._trainer.fit_loop.epoch_loop, "on_run_start")(data_fetcher)
        if loader._iterator is not iterator:
            new_epoch(loader.flattened, before)

    def _advance(self, data_fetcher: Any) -> None:
        if self._first:
            self._first = False
            _count_epoch(self._trainer)
            self._before_first(data_fetcher)
        self._original(self._trainer.fit_loop.epoch_loop, "advance")(data_fetcher)

    def _on_advance_end(self, data_fetcher: Any) -> None:
        epoch_loop = self._trainer.fit_loop.epoch_loop
        self._original(epoch_loop, "on_advance_end")(data_fetcher)
        if not epoch_loop._num_ready_batches_reached():
            self._between()

    def _load_states(self) -> None:
        loop = self._trainer.fit_loop
        self._original(loop, "_load_combined_loader_states")()
        if loop._combined_loader is not None:
            watch(loop._combined_loader.flattened, lambda: bool(self._trainer.training))


def _count_epoch(trainer: Trainer) -> None:
    """Count the epoch under way as started.

    Lightning does not, for the first epoch after a checkpoint that it wrote at the last batch of one, and so takes
    every later moment of the run for one between two epochs.
    """
    for epochs in (trainer.fit_loop.epoch_progress.total, trainer.fit_loop.epoch_progress.current):
        assert isinstance(epochs, _StartedTracker)
        if epochs.started == epochs.completed:
            epochs.ready = epochs.started = epochs.completed + 1
