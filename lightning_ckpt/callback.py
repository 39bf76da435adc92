"""The callback: ModelCheckpoint's decisions, names and retention, on the overlapped engine."""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal
from weakref import proxy

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ckpt_engine.config import CheckpointConfig
from ckpt_engine.engine import Engine
from ckpt_engine.errors import ConfigError, NoCheckpointError
from ckpt_engine.observe.record import SaveRecord
from ckpt_engine.restore.catalog import is_checkpoint, newest, scan
from ckpt_engine.storage.backend import is_local
from ckpt_engine.storage.cleanup import remove_checkpoint, sweep_incomplete
from lightning_ckpt.boundary import Boundary
from lightning_ckpt.carried import KEY, collect, mid_accumulation
from lightning_ckpt.checkpoint_io import MANIFEST, OverlappedCheckpointIO
from lightning_ckpt.links import link_checkpoint
from lightning_ckpt.loader_position import starts_anew
from lightning_ckpt.requeue import publish, requeue_path, writing_path
from lightning_ckpt.resume import Resume
from lightning_ckpt.schedule import next_target
from lightning_ckpt.signals import RequeueSignal, requeue

Mode = Literal["auto", "multi_step", "one_step", "async", "sync"]


class OverlappedCheckpoint(ModelCheckpoint):
    """Saves checkpoints that training does not wait for, and resumes exactly.

    Adding it to the trainer's callbacks is all that is needed: it installs the CheckpointIO that loads its files.
    Checkpoints are directories named as ModelCheckpoint names its files; ``ckpt_path="last"`` takes the newest complete
    one.

    Args:
        dirpath: Directory or fsspec URL for checkpoints; by default as for ModelCheckpoint.
        filename: Name template, for example ``"{epoch}-{step}-{val_loss:.2f}"``.
        monitor: Metric that ranks checkpoints.
        verbose: Report each save.
        save_last: Also keep ``last.ckpt``: True for one of its own (sharing the files on disk), "link" for a symlink.
        save_top_k: How many of the best to keep; -1 keeps all, 0 saves none.
        save_on_exception: Save when training raises.
        save_weights_only: Leave the states of optimizers and schedulers out.
        mode: "min" or "max" of the monitored metric.
        auto_insert_metric_name: Put metric names into file names.
        every_n_train_steps: Save every n optimizer steps.
        train_time_interval: Save when this much time has passed.
        every_n_epochs: Save every n epochs.
        save_on_train_epoch_end: Save at the end of training epochs rather than after validation.
        enable_version_counter: Append a version to a name that exists.
        capture: How state is captured: "auto" measures and chooses, "multi_step" spreads the copy over several steps,
            "one_step" over one, "async" copies at once and writes in the background, "sync" waits for the disk.
        window_steps: A fixed number of steps for a window; by default the engine plans it.
        metrics_path: JSON-lines file that receives one record per save.
        on_failure: "warn" when a save fails, or "raise" at the next step.
        save_on_sigterm: Save when the process is asked to end (SIGTERM).
        config: All engine settings at once, instead of the four above.

    Example:
        >>> callback = OverlappedCheckpoint(dirpath="checkpoints", every_n_train_steps=100, capture="multi_step")
        >>> callback.config.mode
        'multi_step'
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        *,
        capture: Mode | None = None,
        window_steps: int | None = None,
        metrics_path: str | None = None,
        on_failure: Literal["warn", "raise"] | None = None,
        save_on_sigterm: bool = True,
        config: CheckpointConfig | None = None,
    ) -> None:
        # `mode` is ModelCheckpoint's word for min or max; the engine's modes are accepted there too.
        if mode in ("auto", "multi_step", "one_step", "async", "sync") and capture is None:
            mode, capture = "min", mode  # type: ignore[assignment]
        super().__init__(
            dirpath=dirpath,
            filename=filename,
            monitor=monitor,
            verbose=verbose,
            save_last=save_last,
            save_top_k=save_top_k,
            save_on_exception=save_on_exception,
            save_weights_only=save_weights_only,
            mode=mode,
            auto_insert_metric_name=auto_insert_metric_name,
            every_n_train_steps=every_n_train_steps,
            train_time_interval=train_time_interval,
            every_n_epochs=every_n_epochs,
            save_on_train_epoch_end=save_on_train_epoch_end,
            enable_version_counter=enable_version_counter,
        )
        self.config = _config(config, capture, window_steps, metrics_path, on_failure)
        self.save_on_sigterm = save_on_sigterm
        self.engine: Engine | None = None
        self._boundary: Boundary | None = None
        self._signal: RequeueSignal | None = None
        self._resume: Resume | None = None
        self._trainer: Trainer | None = None
        self._commands: list[Callable[[], None]] = []
        self._pending: set[str] = set()
        self._removing: set[str] = set()
        self._committed: deque[str] = deque()
        self._round = 0
        self._stride = 1
        self._last_step = 0

    # -- life cycle ----------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Install the CheckpointIO and, when fitting, watch the loop."""
        super().setup(trainer, pl_module, stage)
        io = trainer.strategy.checkpoint_io
        if not isinstance(io, OverlappedCheckpointIO):
            io = OverlappedCheckpointIO(io, self.config)
            trainer.strategy.checkpoint_io = io
        if trainer.checkpoint_callback is self:
            io.stand_ins(self._stand_ins)
        if stage == "fit" and not bool(trainer.fast_dev_run):  # type: ignore[attr-defined]
            self._trainer = trainer
            self._boundary = Boundary(
                trainer,
                between=self._at_boundary,
                before_epoch=self._before_epoch,
                before_first=self._before_first,
                before_end=self._before_end,
            )
            if trainer.is_global_zero:
                self.engine = Engine(self.config)
                io.bind(self.engine)
                if self.dirpath is not None and is_local(str(self.dirpath)):
                    sweep_incomplete(str(self.dirpath))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self._boundary is None:
            return
        if self._resume is not None:
            self._resume.on_train_start(trainer)
        self._signal = RequeueSignal(trainer)
        self._round = self._last_step = trainer.global_step
        if self.engine is not None:
            self.engine.attach(
                trainer.optimizers,
                _named_tensors(pl_module),
                step=self._round,
                fenced=pl_module.automatic_optimization,
                weights_only=self.save_weights_only,
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Everything of the run is done: flush, finish the open window, wait for the disk."""
        if self._signal is not None:
            # Before Lightning puts back the handlers that it had replaced.
            self._signal.remove()
        self._flush(trainer)
        super().on_train_end(trainer, pl_module)
        self._flush(trainer)
        failures = self._drain(trainer)
        self._tell_loggers(trainer)
        for failure in failures:
            if self.config.on_failure == "raise":
                raise failure
            warnings.warn(str(failure), stacklevel=2)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save what can be saved, wait for it, and let the user's exception through."""
        try:
            self._save_at_the_end(trainer, pl_module, exception)
            for failure in self._drain(trainer):
                exception.add_note(f"A checkpoint failed too: {failure}")
            self._tell_loggers(trainer)
        except BaseException as error:
            exception.add_note(f"The checkpoint callback failed too: {error!r}")
        finally:
            self._release(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        self._release(trainer)

    # -- the loop ------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.engine is not None:
            self.engine.step_begin()

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if self.engine is not None:
            self.engine.before_zero_grad()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        if self.engine is not None:
            self.engine.before_backward()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._resume is not None:
            self._resume.on_train_batch_end(trainer)
        if trainer.global_step == self._last_step:
            # A micro-batch of an accumulation: only a completed optimizer step can be a target.
            return
        self._stride, self._last_step = trainer.global_step - self._last_step, trainer.global_step
        self._round += 1
        if self.engine is not None:
            self.engine.step_end(self._round)
        with warnings.catch_warnings():
            # Its manual-optimization branch recommends saving stale weights; ours are those of the boundary.
            warnings.filterwarnings("ignore", message="Using ModelCheckpoint with manual optimization")
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._resume is not None:
            self._resume.on_train_epoch_end()
        super().on_train_epoch_end(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.engine is not None:
            self.engine.pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if self.engine is not None:
            self.engine.resume()

    def _before_first(self, data_fetcher: Any) -> None:
        assert self._trainer is not None
        if self._resume is None or not self._resume.before_first(self._trainer, data_fetcher):
            loop = self._trainer.fit_loop
            assert loop._combined_loader is not None
            starts_anew(loop._combined_loader.flattened, loop.epoch_loop.batch_progress.current.ready)
        self._plan(self._trainer)

    def _before_epoch(self) -> None:
        assert self._trainer is not None
        if self._resume is not None:
            self._resume.before_epoch(self._trainer)

    def _before_end(self) -> None:
        """Weights are still those of the last step; other callbacks may put others in their place now."""
        assert self._trainer is not None
        self._flush(self._trainer)
        if self.engine is not None:
            self.engine.settle()

    def _at_boundary(self) -> None:
        """Nothing of the finished batch is left to do: save what was decided, plan what comes next."""
        assert self._trainer is not None
        trainer = self._trainer
        self._flush(trainer)
        if self._signal is not None and self._signal.received:
            self._signal.received = False
            self._save_and_requeue(trainer)
        self._tell_loggers(trainer)
        self._plan(trainer)

    def _tell_loggers(self, trainer: Trainer) -> None:
        """One call for each checkpoint that has become durable, on the main thread."""
        while self._committed:
            self._committed.popleft()
            for logger in trainer.loggers:
                logger.after_save_checkpoint(proxy(self))

    def _plan(self, trainer: Trainer) -> None:
        if self.engine is not None and not mid_accumulation(trainer):
            self.engine.expect(next_target(self, trainer, rounds=self._round, stride=self._stride))

    # -- ModelCheckpoint's primitives, as ordered commands -------------------------------------------------------

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        if self._boundary is None or trainer.state.fn != TrainerFn.FITTING:
            super()._save_checkpoint(trainer, filepath)
            return
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath
        self._pending.add(filepath)
        self._removing.discard(filepath)
        self._commands.append(lambda: self._save_now(trainer, filepath))

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        self._removing.add(filepath)
        self._after_saves(trainer, lambda: self._removed(filepath), f"removing {filepath}")

    def _link_checkpoint(self, trainer: Trainer, filepath: str, linkpath: str) -> None:  # type: ignore[override]
        self._after_saves(trainer, lambda: link_checkpoint(filepath, linkpath), f"linking {linkpath}")

    def file_exists(self, filepath: Any, trainer: Trainer) -> bool:
        """Whether a name is taken: by a file, or by a save under way; a removal under way frees it."""
        name = str(filepath)
        if name in self._pending:
            return True
        return name not in self._removing and super().file_exists(filepath, trainer)

    def _after_saves(self, trainer: Trainer, action: Callable[[], None], what: str) -> None:
        def command() -> None:
            if self.engine is not None:
                self.engine.after_saves(action, what)
            elif trainer.is_global_zero:
                action()

        self._commands.append(command)
        if self._boundary is None:
            self._flush(trainer)

    def _flush(self, trainer: Trainer) -> None:
        commands, self._commands = self._commands, []
        for command in commands:
            command()

    def _save_now(self, trainer: Trainer, filepath: str, *, weights_only: bool | None = None) -> None:
        only = self.save_weights_only if weights_only is None else weights_only
        if self.engine is None:
            trainer._checkpoint_connector.dump_checkpoint(only)
            return
        with self.engine.muted():
            state = trainer._checkpoint_connector.dump_checkpoint(only)
        self.engine.save(
            filepath,
            state,
            step=self._round,
            recorded_step=trainer.global_step,
            meta={"framework": "lightning", "epoch": trainer.current_epoch},
            on_commit=self._on_commit,
        )

    def _on_commit(self, record: SaveRecord) -> None:
        self._pending.discard(record.destination)
        self._committed.append(record.destination)

    def _removed(self, filepath: str) -> None:
        remove_checkpoint(filepath)
        self._removing.discard(filepath)

    # -- the end of a run ----------------------------------------------------------------------------------------

    def _save_at_the_end(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self.engine is not None and self.engine.updating:
            exception.add_note("No checkpoint was written: the exception came in the middle of an optimizer step.")
            self._commands.clear()
            return
        self._flush(trainer)
        wanted = isinstance(exception, SIGTERMException) and self.save_on_sigterm and not self.save_on_exception
        if wanted and self._boundary is not None and self._last_global_step_saved != trainer.global_step:
            candidates = self._monitor_candidates(trainer)
            self._save_checkpoint(trainer, self._get_metric_interpolated_filepath_name(candidates, trainer))
        else:
            super().on_exception(trainer, pl_module, exception)
        self._flush(trainer)

    def _save_and_requeue(self, trainer: Trainer) -> None:
        path = requeue_path(str(trainer.default_root_dir))
        written = writing_path(path)
        self._save_now(trainer, written, weights_only=False)
        for failure in self._drain(trainer):
            warnings.warn(str(failure), stacklevel=2)
        if not trainer.is_global_zero:
            return
        if not is_checkpoint(written):
            warnings.warn(f"{path} could not be written, so the job is not requeued.", stacklevel=2)
            return
        publish(written, path)
        requeue()

    def _drain(self, trainer: Trainer) -> list[Exception]:
        if self.engine is None:
            return []
        self.engine.settle()
        return list(self.engine.wait())

    def _release(self, trainer: Trainer) -> None:
        if self._signal is not None:
            self._signal.remove()
        if self._boundary is not None:
            self._boundary.remove()
        if self.engine is not None:
            io = trainer.strategy.checkpoint_io
            if isinstance(io, OverlappedCheckpointIO):
                io.bind(None)
            for failure in self.engine.close():
                warnings.warn(str(failure), stacklevel=2)
        self._signal = self._boundary = self.engine = self._resume = self._trainer = None
        self._commands.clear()

    # -- state ---------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Carry what Lightning's own checkpoint lacks."""
        if trainer.state.fn == TrainerFn.FITTING:
            checkpoint[KEY] = collect(trainer)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep what is to be put back later; take over the state of a plain ModelCheckpoint."""
        callbacks = checkpoint.get("callbacks", {})
        vanilla = self.state_key.replace(type(self).__qualname__, "ModelCheckpoint", 1)
        if self.state_key not in callbacks and vanilla in callbacks:
            self.load_state_dict(callbacks[vanilla])
        if KEY in checkpoint and trainer.state.fn == TrainerFn.FITTING:
            self._resume = Resume(checkpoint[KEY], checkpoint.get("optimizer_states", []))

    def _stand_ins(self, path: str) -> list[str]:
        """What is loaded if the best checkpoint is damaged: the next best; earlier ones where none is ranked."""
        if path != self.best_model_path:
            return []
        if self.best_k_models:
            ranked = sorted(self.best_k_models, key=lambda k: float(self.best_k_models[k]), reverse=self.mode == "max")
        else:
            ranked = [entry.path for entry in scan(str(self.dirpath)).entries]
        return [other for other in ranked if other != path]

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        root = str(self.dirpath or self._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]
        vanilla = {path for path in super()._find_last_checkpoints(trainer) if os.path.isfile(path)}
        try:
            path = newest(root, on_problem=lambda problem: warnings.warn(problem, stacklevel=2)).path
        except NoCheckpointError:
            return vanilla
        return vanilla | {path if is_local(path) else path + MANIFEST}


def _named_tensors(module: LightningModule) -> dict[str, torch.Tensor]:
    """Live parameters and persistent buffers under their state-dict keys."""
    state = module.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _config(
    config: CheckpointConfig | None,
    capture: Mode | None,
    window_steps: int | None,
    metrics_path: str | None,
    on_failure: Literal["warn", "raise"] | None,
) -> CheckpointConfig:
    given = {
        "mode": capture,
        "window_steps": window_steps,
        "metrics_path": metrics_path,
        "on_failure": on_failure,
    }
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if config is not None and chosen:
        raise ConfigError(f"config= and {', '.join(chosen)} were both given: put everything into config.")
    return config or CheckpointConfig(**chosen)
