"""Load a model from a checkpoint directory without a Trainer."""

from __future__ import annotations

from typing import Any, TypeVar

from lightning.pytorch import LightningModule
from lightning.pytorch.core.saving import _load_state
from lightning.pytorch.utilities.migration.utils import pl_legacy_patch

from ckpt_engine.restore.catalog import is_checkpoint
from ckpt_engine.restore.reader import load

Module = TypeVar("Module", bound=LightningModule)


def load_from_checkpoint(
    module_class: type[Module],
    checkpoint_path: str,
    *,
    strict: bool | None = None,
    weights_only: bool = True,
    **kwargs: Any,
) -> Module:
    """What ``ModelClass.load_from_checkpoint(path)`` is for single-file checkpoints, for our directories and for both.

    Args:
        module_class: The LightningModule subclass.
        checkpoint_path: A checkpoint directory or URL, or a vanilla ``.ckpt`` file.
        strict: Require that the state dict's keys match; by default what the module says.
        weights_only: False allows unpickling of custom objects among the hyper-parameters.
        **kwargs: Arguments of the module's constructor; they override saved hyper-parameters.

    Raises:
        CorruptCheckpointError: The checkpoint is damaged.
    """
    if not is_checkpoint(checkpoint_path):
        return module_class.load_from_checkpoint(checkpoint_path, strict=strict, weights_only=weights_only, **kwargs)
    state: Any = load(checkpoint_path, weights_only=weights_only).state
    with pl_legacy_patch():
        model = _load_state(module_class, state, strict=strict, **kwargs)
    assert isinstance(model, module_class)
    return model
