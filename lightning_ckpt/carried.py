"""What an exact resume needs and Lightning's own checkpoint does not hold.

Random streams, the position in the data, gradients of an accumulation under way, the running values of metrics logged
with ``on_epoch=True``, the metrics that callbacks and schedulers read, and the epoch for which loaders were made last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer

from ckpt_engine.capture.rng import rng_state
from lightning_ckpt.loader_position import position

KEY = "overlap_ckpt"


def collect(trainer: Trainer) -> dict[str, Any]:
    """Everything to carry, as plain data and tensors; by reference, to be copied at once."""
    loop = trainer.fit_loop
    loaders = loop._combined_loader.flattened if loop._combined_loader is not None else []
    now, begun = moment(trainer), loop.epoch_loop.batch_progress.current.ready
    return {
        "version": 1,
        "moment": now,
        "rng": rng_state(),
        "loaders": position(loaders, begun - 1 if now == "broken" else begun),
        "batches_that_stepped": loop.epoch_loop._batches_that_stepped,
        "gradients": _gradients(trainer),
        "running_metrics": _running_metrics(trainer),
        "reloaded_epoch": loop._last_train_dl_reload_epoch,
        "callback_metrics": {k: v for k, v in trainer.callback_metrics.items() if isinstance(v, torch.Tensor)},
    }


def moment(trainer: Trainer) -> str:
    """Where training is.

    ``batch``: between two batches of an epoch. ``epoch``: between two epochs. ``hook``: a batch is trained, but hooks
    of its end are still to come, as for a ``trainer.save_checkpoint`` in one of them. ``broken``: a batch was begun and
    not trained, as after an exception. ``other``: in what follows the last batch of an epoch.
    """
    loop = trainer.fit_loop
    epochs: Any = loop.epoch_progress.total
    batches: Any = loop.epoch_loop.batch_progress.current
    if epochs.completed == epochs.started:
        return "epoch"
    if batches.completed == batches.ready:
        return "other" if loop.epoch_loop._num_ready_batches_reached() else "batch"
    if batches.completed != batches.ready - 1:
        return "other"
    if batches.processed != batches.ready:
        return "broken"
    return "other" if loop.epoch_loop._num_ready_batches_reached() else "hook"


def mid_accumulation(trainer: Trainer) -> bool:
    """Whether gradients of earlier micro-batches are waiting for the optimizer step."""
    module = trainer.lightning_module
    return module.automatic_optimization and trainer.fit_loop.epoch_loop._should_accumulate()


def _gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    if not mid_accumulation(trainer):
        return {}
    named = trainer.lightning_module.named_parameters()
    return {name: p.grad.detach() for name, p in named if p.grad is not None and p.grad.layout is torch.strided}


def restore_gradients(trainer: Trainer, gradients: Mapping[str, torch.Tensor]) -> None:
    """Put accumulated gradients back."""
    parameters = dict(trainer.lightning_module.named_parameters())
    for name, gradient in gradients.items():
        if name in parameters:
            parameters[name].grad = gradient.to(parameters[name].device, copy=True)


def _running_metrics(trainer: Trainer) -> dict[str, dict[str, torch.Tensor]]:
    """Sums of metrics that are averaged over the epoch under way; torchmetrics keep their state in the module."""
    results = trainer.fit_loop.epoch_loop._results
    running = {}
    for key, metric in results.items():
        if getattr(metric, "is_tensor", False) and metric.meta.on_epoch and not metric.has_reset:
            size = getattr(metric, "cumulated_batch_size", None)
            running[key] = {"value": metric.value.detach()} | ({} if size is None else {"size": size.detach()})
    return running


def add_running_metrics(trainer: Trainer, running: dict[str, dict[str, torch.Tensor]]) -> None:
    """Add carried sums to the metrics that have been logged since; what was added is removed from ``running``."""
    results = trainer.fit_loop.epoch_loop._results
    for key in [key for key in running if key in results]:
        metric, carried = results[key], running.pop(key)
        value = carried["value"].to(metric.value.device)
        if metric.meta.is_max_reduction or metric.meta.is_min_reduction:
            metric.value = metric.meta.reduce_fx(metric.value, value)
        else:
            metric.value = value + metric.value
        if "size" in carried:
            metric.cumulated_batch_size = metric.cumulated_batch_size + carried["size"].to(metric.value.device)
