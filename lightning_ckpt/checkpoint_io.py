"""A CheckpointIO, so that everything in Lightning that saves or loads a path works on our checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

from ckpt_engine.config import CheckpointConfig
from ckpt_engine.engine import Engine
from ckpt_engine.errors import SaveFailedError
from ckpt_engine.storage.backend import backend_for
from ckpt_engine.storage.cleanup import remove_checkpoint
from lightning_ckpt.fallback import is_ours, load_whole
from lightning_ckpt.requeue import earlier_requeues

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
        self._told: list[BaseException | None] = []
        self._stand_ins: Callable[[str], Sequence[str]] = lambda path: ()

    def stand_ins(self, find: Callable[[str], Sequence[str]]) -> None:
        """Ask ``find`` what may be loaded in place of a damaged checkpoint, best first."""
        self._stand_ins = find

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
        try:
            handle.wait(self._config.save_timeout_s)
        except SaveFailedError as error:
            self._told.append(error.__cause__)
            raise

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load one of our checkpoints, or whatever the wrapped IO knows.

        A damaged checkpoint of a requeue, or the damaged best one, is passed over for the one before it, with a
        warning that names it.

        Args:
            path: A checkpoint directory, its manifest, or any path that the wrapped IO loads.
            map_location: Passed to the wrapped IO; our tensors are on the host.
            weights_only: False allows unpickling of custom objects that the checkpoint may hold.

        Raises:
            CorruptCheckpointError: It is damaged; the message names the file.
        """
        location = str(path).removesuffix(MANIFEST)
        self._engine_wait()
        others = (*earlier_requeues(location), *self._stand_ins(location))
        if is_ours(location) or (others and not backend_for(location).exists(location)):
            state = load_whole(location, others, weights_only=weights_only is not False)
            assert isinstance(state, dict)
            return state
        base = self.checkpoint_io or TorchCheckpointIO()
        # A base with a default of its own (Lightning's maps to the host) keeps it.
        mapped = {} if map_location is None else {"map_location": map_location}
        return base.load_checkpoint(path, weights_only=weights_only, **mapped)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, behind every save that is under way."""
        location = str(path)
        self._engine().after_saves(lambda: remove_checkpoint(location), f"removing {location}")

    def teardown(self) -> None:
        """Wait for what is under way."""
        if self._own is not None:
            # What a caller has been told already is not raised again.
            failures = [failure for failure in self._own.close() if failure.__cause__ not in self._told]
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
