"""A CheckpointIO, so that everything in Lightning that saves or loads a path works on our checkpoints."""

from __future__ import annotations

from typing import Any

from ckpt_engine.config import CheckpointConfig
from ckpt_engine.engine import Engine
from ckpt_engine.restore.catalog import is_checkpoint
from ckpt_engine.restore.reader import load
from ckpt_engine.storage.cleanup import remove_checkpoint
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

MANIFEST = "/manifest.json"


class OverlappedCheckpointIO(_WrappingCheckpointIO):
    """Saves and loads checkpoint directories; any other path is left to the wrapped IO.

    ``trainer.save_checkpoint`` and a plain ``ModelCheckpoint`` write our format through it, durable when the call
    returns. ``fit``, ``validate``, ``test`` and ``predict`` load ours and vanilla ``.ckpt`` files alike.

    Args:
        checkpoint_io: The IO for everything that is not our format; by default Lightning's own.
        config: Settings of the engine that writes when no callback has bound its own.

    Example:
        >>> io = OverlappedCheckpointIO()
        >>> import tempfile, torch
        >>> path = tempfile.mkdtemp() + "/model.ckpt"
        >>> io.save_checkpoint({"state_dict": {"w": torch.ones(2)}, "global_step": 3}, path)
        >>> io.load_checkpoint(path)["state_dict"]["w"]
        tensor([1., 1.])
        >>> io.teardown()
    """

    def __init__(self, checkpoint_io: CheckpointIO | None = None, config: CheckpointConfig | None = None) -> None:
        super().__init__(checkpoint_io)
        self._config = config or CheckpointConfig(max_images=1)
        self._bound: Engine | None = None
        self._own: Engine | None = None

    def bind(self, engine: Engine | None) -> None:
        """Write through a callback's engine, so that its saves and these keep one order; None unbinds."""
        self._bound = engine

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Save a checkpoint dict; durable on return.

        Args:
            checkpoint: Lightning's checkpoint dict.
            path: Directory to write, a path or an fsspec URL.
            storage_options: Accepted for compatibility; credentials come from fsspec's own configuration.

        Raises:
            SaveFailedError: It could not be written; what was saved before is untouched.
        """
        engine = self._engine()
        if engine.window is not None and engine.window.sealed:
            engine.settle()
        step = int(checkpoint.get("global_step", 0))
        handle = engine.save(str(path), checkpoint, step=None, recorded_step=step)
        handle.wait(self._config.save_timeout_s)

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load one of our checkpoints, or whatever the wrapped IO knows.

        Args:
            path: A checkpoint directory, its manifest, or any path that the wrapped IO loads.
            map_location: Passed to the wrapped IO; our tensors are on the host.
            weights_only: False allows unpickling of custom objects that the checkpoint may hold.

        Raises:
            CorruptCheckpointError: It is damaged; the message names the file.
        """
        location = str(path).removesuffix(MANIFEST)
        self._engine_wait()
        if is_checkpoint(location):
            state = load(location, weights_only=weights_only is not False).state
            assert isinstance(state, dict)
            return state
        base = self.checkpoint_io or TorchCheckpointIO()
        return base.load_checkpoint(path, map_location=map_location, weights_only=weights_only)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, behind every save that is under way."""
        location = str(path)
        self._engine().after_saves(lambda: remove_checkpoint(location), f"removing {location}")

    def teardown(self) -> None:
        """Wait for what is under way."""
        if self._own is not None:
            failures = self._own.close()
            self._own = None
            if failures:
                raise failures[0]
        if self.checkpoint_io is not None:
            self.checkpoint_io.teardown()

    def _engine(self) -> Engine:
        if self._bound is not None:
            return self._bound
        if self._own is None:
            self._own = Engine(self._config)
        return self._own

    def _engine_wait(self) -> None:
        engine = self._bound or self._own
        if engine is not None:
            engine.drain()
