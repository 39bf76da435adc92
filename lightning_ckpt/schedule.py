"""Foresees the next save: the window opens some steps before it, so that it lands exactly on the step asked for."""

from __future__ import annotations

import math

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint


def next_target(callback: ModelCheckpoint, trainer: Trainer, *, rounds: int, stride: int) -> int | None:
    """The optimizer round after which ``callback`` will save next; None where that cannot be known.

    Args:
        callback: Decides when to save.
        trainer: In the middle of fitting, at the boundary between two batches.
        rounds: Optimizer rounds so far, in the caller's counting.
        stride: How much ``trainer.global_step`` grows in a round (the number of optimizers under manual optimization).

    A save that follows time is not known ahead; one at a round that is never reached is no harm.
    """
    candidates = [
        _by_steps(callback._every_n_train_steps, trainer.global_step, stride),
        _by_validation(callback, trainer),
        _by_epoch(callback, trainer),
    ]
    ahead = [candidate for candidate in candidates if candidate is not None]
    return rounds + min(ahead) if ahead else None


def rounds_until_step(every: int, global_step: int, stride: int) -> int | None:
    """Rounds until ``global_step`` is a multiple of ``every``, at least one.

    Example:
        >>> rounds_until_step(10, 17, 1), rounds_until_step(10, 20, 1), rounds_until_step(10, 14, 2)
        (3, 10, 3)
        >>> rounds_until_step(3, 1, 3) is None
        True
    """
    common = math.gcd(every, stride)
    if global_step % common:
        return None
    # The linear congruence global_step + ahead * stride = 0 (mod every): an interval may be a million steps long.
    period = every // common
    ahead = -(global_step // common) * pow(stride // common, -1, period) % period
    return ahead or period


def _by_steps(every: int, global_step: int, stride: int) -> int | None:
    return rounds_until_step(every, global_step, max(1, stride)) if every >= 1 else None


def _by_epoch(callback: ModelCheckpoint, trainer: Trainer) -> int | None:
    """The end of the epoch, where it is one that saves."""
    every, total = callback._every_n_epochs, trainer.num_training_batches
    if every < 1 or math.isinf(total) or not trainer.lightning_module.automatic_optimization:
        return None
    left = rounds_left(int(total), trainer.fit_loop.epoch_loop.batch_progress.current.ready, trainer)
    if left == 0:
        # At the boundary between epochs: the whole next epoch is ahead.
        left = rounds_left(int(total), 0, trainer)
    return left


def _by_validation(callback: ModelCheckpoint, trainer: Trainer) -> int | None:
    """The next validation within the epoch, where a save follows it."""
    every = getattr(trainer, "val_check_batch", None)
    if callback._every_n_epochs < 1 or callback._should_save_on_train_epoch_end(trainer):
        return None
    if every is None or math.isinf(every) or not trainer.lightning_module.automatic_optimization:
        return None
    done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    if trainer.check_val_every_n_epoch is None:
        done = trainer.fit_loop.epoch_loop.total_batch_idx + 1
    ahead = int(every) - done % int(every)
    accumulate = trainer.accumulate_grad_batches
    # Only a validation that falls on a completed round finds a window; others are copied directly.
    return ahead // accumulate if (done + ahead) % accumulate == 0 else None


def rounds_left(total: int, done: int, trainer: Trainer) -> int:
    """Optimizer rounds until the last batch of the epoch; the last group may be smaller."""
    accumulate = trainer.accumulate_grad_batches
    return math.ceil(total / accumulate) - done // accumulate if done < total else 0
