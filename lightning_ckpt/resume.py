"""Puts back what :mod:`lightning_ckpt.carried` collected, at the moments when Lightning will not overwrite it again."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.loop import _Loop

from ckpt_engine.capture.rng import set_rng_state
from ckpt_engine.capture.tap import unwrap
from ckpt_engine.restore.optimizer import restore_dtypes
from lightning_ckpt.carried import add_running_metrics, restore_gradients
from lightning_ckpt.loader_position import is_stateful, resume


class Resume:
    """One resumption.

    Args:
        carried: What was collected at the boundary that the checkpoint represents.
        optimizer_states: The checkpoint's optimizer states, to undo torch's casts.
    """

    def __init__(self, carried: Mapping[str, Any], optimizer_states: Sequence[Mapping[str, Any]]) -> None:
        self.moment = str(carried["moment"])
        self._carried = carried
        self._optimizer_states = optimizer_states
        self._running = dict(carried.get("running_metrics", {}))
        self._rng_is_set = False

    def on_train_start(self, trainer: Trainer) -> None:
        """State that nothing touches any more: optimizer dtypes, accumulated gradients, metrics of earlier epochs."""
        for optimizer, state in zip(trainer.optimizers, self._optimizer_states, strict=False):
            restore_dtypes(unwrap(optimizer), state)
        restore_gradients(trainer, self._carried.get("gradients", {}))
        trainer._logger_connector._callback_metrics.update(self._carried.get("callback_metrics", {}))
        # The loaders made for this run were made in place of those of that epoch.
        loop: Any = trainer.fit_loop
        loop._last_train_dl_reload_epoch = self._carried.get("reloaded_epoch", loop._last_train_dl_reload_epoch)
        self._optimizer_states = []
        if self.moment in ("batch", "broken", "hook"):
            _without_warning(trainer)

    def before_epoch(self, trainer: Trainer) -> None:
        """A checkpoint between epochs: the coming one starts like any other, with its own iterators and hooks."""
        if self.moment != "epoch" or self._rng_is_set:
            return
        _go_on_normally(trainer)
        trainer.fit_loop._resuming_from_checkpoint = False
        if _load_late_states(trainer):
            # The first iterator takes the state that was loaded; the epoch makes its own.
            iter(trainer.fit_loop._data_fetcher)  # type: ignore[arg-type]
        self._set_rng()

    def before_first(self, trainer: Trainer, data_fetcher: Any) -> bool:
        """A checkpoint within an epoch: the loaders continue where they were. Whether they do."""
        if self.moment in ("batch", "broken", "epoch"):
            self._continue_logging(trainer)
        if self._rng_is_set:
            return False
        loop = trainer.fit_loop
        assert loop._combined_loader is not None
        loaders = loop._combined_loader.flattened
        delivered = loop.epoch_loop.batch_progress.current.ready
        if self.moment in ("batch", "broken", "hook"):
            self._continue_loaders(trainer, data_fetcher, loaders, delivered)
        if self.moment == "broken":
            _forget_broken_batch(trainer)
        if self.moment in ("batch", "broken"):
            _go_on_normally(trainer)
        self._set_rng()
        return self.moment in ("batch", "broken", "hook")

    def on_train_batch_end(self, trainer: Trainer) -> None:
        """Metrics of the resumed epoch exist from its first batch on."""
        if self.moment == "hook":
            self.moment = "over"
            _go_on_normally(trainer)
        if self._running:
            add_running_metrics(trainer, self._running)

    def on_train_epoch_end(self) -> None:
        """Sums of this epoch have no place in the next."""
        self._running.clear()

    def _continue_logging(self, trainer: Trainer) -> None:
        # The step of loggers; Lightning supposes that it was not advanced yet when the checkpoint was written.
        stepped = self._carried.get("batches_that_stepped")
        if stepped is not None:
            trainer.fit_loop.epoch_loop._batches_that_stepped = int(stepped)

    def _continue_loaders(self, trainer: Trainer, data_fetcher: Any, loaders: list[Any], delivered: int) -> None:
        again = resume(loaders, self._carried["loaders"])
        again = _load_late_states(trainer) or again
        plain = [record for record in self._carried["loaders"] if record["kind"] == "plain"]
        if again or plain:
            iter(data_fetcher)
            self._align(data_fetcher, loaders, delivered)
        if plain:
            self._skip_by_fetching(data_fetcher, delivered)
        data_fetcher.fetched = max(data_fetcher.fetched, delivered)

    def _align(self, data_fetcher: Any, loaders: list[Any], delivered: int) -> None:
        modes = data_fetcher.combined_loader._iterator
        modes._idx = delivered
        if hasattr(modes, "_consumed"):
            modes._consumed = [record.get("iterations", 1) > 1 for record in self._carried["loaders"]]

    def _skip_by_fetching(self, data_fetcher: Any, delivered: int) -> None:
        # Nothing else is known to advance an iterable without a state of its own.
        iterators = data_fetcher.combined_loader._iterator.iterators
        prefetched = len(getattr(data_fetcher, "batches", []))
        for iterator, record in zip(iterators, self._carried["loaders"], strict=True):
            if record["kind"] == "plain":
                for _ in range(delivered - prefetched):
                    next(iterator, None)
        if prefetched:
            data_fetcher.batches = [next(data_fetcher.iterator)]

    def _set_rng(self) -> None:
        self._rng_is_set = True
        set_rng_state(self._carried["rng"])


def _without_warning(trainer: Trainer) -> None:
    """Lightning is about to warn, once, that the loaders cannot be resumed; here they can."""
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    original = epoch_loop.reset

    def reset() -> None:
        epoch_loop.__dict__.pop("reset", None)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch")
            original()

    epoch_loop.reset = reset


def _load_late_states(trainer: Trainer) -> bool:
    """Load the states of stateful loaders that were made before those were known; whether there are any.

    ``estimated_stepping_batches`` in ``configure_optimizers`` makes the loaders that early.
    """
    loop = trainer.fit_loop
    loader, states = loop._combined_loader, loop._combined_loader_states_to_load
    if not states or loader is None or not any(map(is_stateful, loader.flattened)):
        return False
    loader._load_state_dicts(states)
    loop._combined_loader_states_to_load = []
    return True


def _go_on_normally(trainer: Trainer) -> None:
    """Lightning's restart logic has done its part: from here on nothing is skipped because of the restart.

    Left on, it would leave out the epoch-end step of schedulers that follow a metric, and would validate again.
    """
    # The fit loop's own setter sets it to True for good where ``max_steps`` is given.
    _Loop.restarting.fset(trainer.fit_loop, False)  # type: ignore[attr-defined]


def _forget_broken_batch(trainer: Trainer) -> None:
    """A batch that was begun and not trained comes again; Lightning would go on counting its first start."""
    trainer.fit_loop.epoch_loop.batch_progress.total.reset_on_restart()
