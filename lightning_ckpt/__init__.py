"""Overlapped checkpoints for PyTorch Lightning: one callback, and everything that loads a path goes on working."""

from __future__ import annotations

from ckpt_engine.config import CheckpointConfig
from lightning_ckpt.callback import OverlappedCheckpoint
from lightning_ckpt.checkpoint_io import OverlappedCheckpointIO
from lightning_ckpt.loading import load_from_checkpoint

__all__ = ["CheckpointConfig", "OverlappedCheckpoint", "OverlappedCheckpointIO", "load_from_checkpoint"]
