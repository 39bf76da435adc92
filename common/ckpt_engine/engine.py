"""The engine: five moments of a training loop in, durable checkpoints out. It knows no framework.

A loop announces ``step_begin`` and ``step_end``; the optimizer tap finds the two moments of the update in between; and
``save`` names the destination and the small state at the boundary. See ``docs/how-a-window-works.md``.

Example:
    >>> import tempfile, torch
    >>> from ckpt_engine.restore.reader import load
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> engine = Engine(CheckpointConfig(mode="multi_step", window_steps=3))
    >>> engine.attach([optimizer], dict(model.named_parameters()))
    >>> folder = tempfile.mkdtemp()
    >>> engine.expect(5)
    >>> for step in range(1, 7):
    ...     engine.step_begin()
    ...     model(torch.ones(1, 4)).sum().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     engine.step_end(step)
    ...     if step == 5:
    ...         state = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    ...         handle = engine.save(f"{folder}/step-5", state, step=5)
    >>> handle.wait(60).window_steps
    3
    >>> engine.close(60)
    []
    >>> sorted(load(f"{folder}/step-5").state["state_dict"])
    ['bias', 'weight']
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from ckpt_engine.capture.context import Context
from ckpt_engine.capture.link import DeviceLink, link_for
from ckpt_engine.capture.meter import Meter
from ckpt_engine.capture.tap import unwrap
from ckpt_engine.capture.traits import Traits, traits_of
from ckpt_engine.capture.window import Window
from ckpt_engine.capture.worker import Worker
from ckpt_engine.config import CheckpointConfig
from ckpt_engine.errors import ConfigError, SaveFailedError
from ckpt_engine.image.arena import ArenaPool, StagingPool
from ckpt_engine.observe.record import SaveRecord, append_record
from ckpt_engine.observe.timeline import Timeline
from ckpt_engine.opener import Opener
from ckpt_engine.prepare import Prepared, prepare
from ckpt_engine.saves import Image, SaveHandle, SaveQueue, SaveRequest
from ckpt_engine.watch import Watcher
from ckpt_engine.windows import SkippedError, Windows


class Engine:
    """Captures, replays and writes the checkpoints of one training process.

    Args:
        config: Settings; the defaults choose by measurement.
        link: How tensors are copied to the host; by default the link of the first parameter's device.
        clock: Seconds, monotonic; replaced in tests.
    """

    def __init__(
        self,
        config: CheckpointConfig | None = None,
        *,
        link: DeviceLink | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config or CheckpointConfig()
        self.timeline = Timeline()
        self.records: list[SaveRecord] = []
        self._clock = clock
        self._link = link
        self._meter = Meter(clock)
        self._pool = ArenaPool(self.config.max_images, before_free=self._unpin)
        self._staging = StagingPool()
        self._replay = Worker("replay")
        self._persist = Worker("persist", nice=19)
        self._windows = Windows(self.config, self._pool, self._replay, self._persist, clock)
        self._queue = SaveQueue(
            worker=self._persist,
            replay=self._replay,
            timeout=self.config.save_timeout_s,
            direct_io=self.config.direct_io,
            on_record=self._keep,
            timeline=self.timeline,
            clock=clock,
        )
        self._watcher: Watcher | None = None
        self._target: int | None = None
        self._planned: int | None = None
        self._step: int | None = None
        self._in_round = False
        self._extra_peak = 0

    # -- attaching -----------------------------------------------------------------------------------------------

    def attach(
        self,
        optimizers: Sequence[Optimizer],
        tensors: Mapping[str, Tensor],
        *,
        step: int | None = None,
        fenced: bool = False,
        weights_only: bool = False,
    ) -> None:
        """Watch ``optimizers`` and take ``tensors`` for the model.

        Args:
            optimizers: Optimizers, framework wrappers allowed.
            tensors: FQN to live parameter or buffer, as in the model's state dict.
            step: The step that the state is at now, so that a window may open at once; None if not known.
            fenced: The caller will call :meth:`before_zero_grad` and :meth:`before_backward`, which lets gradient
                copies outlive the update.
            weights_only: Checkpoints hold no optimizer state.

        Raises:
            ConfigError: An optimizer is none, or the engine is attached already.
        """
        if self._watcher is not None:
            raise ConfigError("The engine is attached already: call detach() before attaching another model.")
        inner = [unwrap(optimizer) for optimizer in optimizers]
        traits = [traits_of(optimizer) for optimizer in inner]
        self._say_what_is_copied(inner, traits)
        self._link = self._link or link_for(_device_of(inner, tensors))
        context = Context(
            config=self.config,
            link=self._link,
            replay=self._replay,
            staging=self._staging,
            timeline=self.timeline,
            clock=self._clock,
            optimizers=inner,
            traits=traits,
            fenced=fenced,
        )
        opener = Opener(context, self._meter, self._pool, dict(tensors), params_only=weights_only)
        self._windows.opener = opener
        self._watcher = Watcher(context, opener, self._meter, self._before, self._after)
        self._step = step
        self._in_round = False

    def detach(self) -> None:
        """Take the hooks off; an open window is finished if it was saved, dropped otherwise."""
        self.settle()
        if self._watcher is not None:
            self._watcher.remove()
        self._watcher = self._windows.opener = None

    # -- the moments of a step -----------------------------------------------------------------------------------

    def expect(self, step: int | None) -> None:
        """Announce the next planned save: the state after round ``step``. None withdraws it."""
        if step == self._target:
            return
        self._target = step
        self._planned = step if step is not None else self._planned
        window = self._windows.window
        if window is not None and not window.sealed and window.target != step:
            self.cancel()
        self._maybe_open()

    def step_begin(self) -> None:
        """A round is about to start its first forward; further calls until :meth:`step_end` do nothing."""
        if self._in_round or self._watcher is None:
            return
        window = self._windows.window
        if window is not None and not window.sealed and self._step is not None and self._step >= window.target:
            # The loop decided not to save this step after all.
            self.cancel()
        self._maybe_open()
        self._in_round = True
        self._watcher.round_begins()
        self._meter.step_begin()
        window = self._windows.window
        if window is not None:
            with self._windows.safely(), self._windows.stall():
                window.begin_step()

    def before_zero_grad(self) -> None:
        """Gradients are about to be zeroed or dropped."""
        self._fence()

    def before_backward(self) -> None:
        """A backward pass is about to write gradients."""
        self._fence()

    def step_end(self, step: int) -> None:
        """Round ``step`` is complete (also when the scaler skipped its update): the state is at version ``step``.

        Raises:
            SaveFailedError: A save failed in the background and ``on_failure="raise"``.
        """
        if self._in_round:
            self._meter.step_end()
            self._note_round(step)
        self._in_round = False
        self._step = step
        window = self._windows.window
        if window is not None and window.sealed:
            # The scaler skipped the update, so the state is still the target's.
            self.settle()
        elif window is not None and step > window.target:
            self.cancel()
        self._surface()
        self._maybe_open()

    def pause(self) -> None:
        """Nothing may be in flight: something else (validation with swapped weights) will write parameters."""
        if self._windows.window is not None:
            with self._windows.safely():
                self._windows.window.quiesce()

    def resume(self) -> None:
        """Copies may start again; they do so with the next :meth:`step_begin`."""

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Ignore optimizer steps inside: some state-dict calls step the optimizer with zero gradients."""
        if self._watcher is None:
            yield
            return
        with self._watcher.muted():
            yield

    # -- saving --------------------------------------------------------------------------------------------------

    def save(
        self,
        destination: str,
        state: Mapping[str, object],
        *,
        step: int | None,
        recorded_step: int | None = None,
        meta: Mapping[str, object] | None = None,
        on_commit: Callable[[SaveRecord], None] | None = None,
    ) -> SaveHandle:
        """Save ``state``, which represents the state after round ``step``, to ``destination``.

        At the target of an open window the image is the window's; only what the window does not hold is copied now,
        and parameters and optimizer state are those that the next round starts from: call :meth:`settle` before
        loading others into the model between the two. At any other moment the whole state is copied directly, and
        the caller may change everything once the call returns. Writing goes on in the background, except in mode
        ``sync``.

        Args:
            destination: Directory or URL of the checkpoint; an existing one is replaced atomically.
            state: Nested state dict; live tensors are expected in it, by reference.
            step: The round it represents, in the numbering of :meth:`step_end`; None for a state outside it, which is
                copied directly.
            recorded_step: The step that the manifest names, where the caller's own counting differs from rounds.
            meta: JSON-able facts for the manifest.
            on_commit: Called on the persist thread once the checkpoint is durable.

        Raises:
            SaveFailedError: No host memory for an image became free within ``save_timeout_s``; in mode ``sync`` with
                ``on_failure="raise"``, also that the save itself failed.
        """
        start = self._clock()
        recorded = recorded_step if recorded_step is not None else step or 0
        handle = SaveHandle(destination, recorded)
        try:
            prepared = self._prepare(state, step)
        except SkippedError as error:
            warnings.warn(f"The save of step {recorded} is skipped: {error}", stacklevel=2)
            self._windows.in_order(lambda error=error: self._queue.refuse(handle, error))  # type: ignore[misc]
            return handle
        self._extra_peak = max(self._extra_peak, sum(t.nbytes for t in prepared.extras.values()))
        request = SaveRequest(
            destination=destination,
            step=recorded,
            tree=prepared.tree,
            extras=prepared.extras,
            meta=meta or {},
            mode=prepared.mode,
            stall_s=self._clock() - start,
            on_commit=on_commit,
        )
        image = prepared.image
        image.users += 1
        self._windows.in_order(lambda: self._queue.save(image, request, handle))
        if self.config.mode == "sync":
            self._persist.drain(self.config.save_timeout_s)
            self._surface()
        return handle

    def _prepare(self, state: Mapping[str, object], step: int | None) -> Prepared:
        opener = self._windows.opener
        planned = step is not None and step == self._planned
        prepared = prepare(
            state,
            image=self._sealed_image(step),
            names=opener.names() if opener is not None else {},
            copy_directly=partial(self._windows.copy_directly, planned=planned),
            direct_mode="sync" if self.config.mode == "sync" else "async",
        )
        if opener is not None and prepared.stale:
            opener.disown(prepared.stale)
        return prepared

    def after_saves(self, action: Callable[[], None], what: str = "a following action") -> None:
        """Run ``action`` on the persist thread behind all saves so far; not at all if the last of them failed."""
        self._windows.in_order(lambda: self._queue.then(action, what))

    def settle(self) -> None:
        """Finish a window that was saved by copying directly what is missing; drop one that was not."""
        self._windows.settle()

    def cancel(self) -> None:
        """Drop the open window; one that was saved is finished instead, for its save was promised."""
        self._windows.settle()

    def wait(self, timeout: float | None = None) -> list[SaveFailedError]:
        """Wait until all background work is done and return the failures since they were last reported.

        Raises:
            SaveTimeoutError: Work was left after ``timeout`` seconds (default: ``save_timeout_s``).
        """
        self.drain(timeout)
        return self._queue.take_failures()

    def drain(self, timeout: float | None = None) -> None:
        """Wait until all background work is done; failures stay to be reported by :meth:`step_end` or :meth:`wait`.

        Raises:
            SaveTimeoutError: Work was left after ``timeout`` seconds (default: ``save_timeout_s``).
        """
        bound = self.config.save_timeout_s if timeout is None else timeout
        self._replay.drain(bound)
        self._persist.drain(bound)

    def close(self, timeout: float | None = None) -> list[SaveFailedError]:
        """Settle, wait, stop the threads and free host memory; returns failures not reported yet."""
        self.detach()
        failures = self.wait(timeout)
        bound = self.config.save_timeout_s if timeout is None else timeout
        self._replay.close(bound)
        self._persist.close(bound)
        if self._link is not None:
            self._link.close()
        self._pool.close()
        return failures

    @property
    def memory(self) -> dict[str, int]:
        """Host memory that the engine allocated, in bytes: images, gradients owed, and the most beside them."""
        return {
            "images": self._pool.allocated_bytes,
            "images_peak": self._pool.peak_bytes,
            "gradients": self._staging.allocated_bytes,
            "gradients_peak": self._staging.peak_bytes,
            "extras_peak": self._extra_peak,
        }

    @property
    def updating(self) -> bool:
        """Whether an optimizer is in the middle of an update: parameters may be half written."""
        return self._watcher is not None and self._watcher.updating

    @property
    def window(self) -> Window | None:
        """The open window, if any."""
        return self._windows.window

    # -- inside --------------------------------------------------------------------------------------------------

    def _maybe_open(self) -> None:
        if self._target is None or self._step is None or self._in_round:
            return
        with self._windows.safely():
            self._windows.maybe_open(self._step, self._target)

    def _fence(self) -> None:
        if self._windows.window is not None:
            with self._windows.safely():
                self._windows.window.fence()

    def _sealed_image(self, step: int | None) -> Image | None:
        if self._in_round or step is None or self._step != step:
            return None
        if self._windows.outdated():
            self.cancel()
        return self._windows.seal(step)

    def _before(self, index: int, found_inf: Tensor | None, scale: Tensor | None) -> None:
        window = self._windows.window
        if window is None or self._changed_in_window(window):
            return
        with self._windows.safely():
            window.before_update(index, found_inf=found_inf, scale=scale)
            if window.captured:
                self._windows.hand_over()

    def _after(self, index: int) -> None:
        if self._windows.window is not None:
            with self._windows.safely():
                self._windows.window.after_update(index)

    def _changed_in_window(self, window: Window) -> bool:
        """Parameters joined or left: the layout is out of date, so the target is captured in one step."""
        if window.sealed or not self._windows.outdated():
            return False
        self._windows.one_step_for = window.target
        self.cancel()
        return True

    def _keep(self, record: SaveRecord) -> None:
        self.records.append(record)
        if self.config.metrics_path is not None:
            append_record(self.config.metrics_path, record)

    def _unpin(self, buffer: Tensor) -> None:
        if self._link is not None:
            self._link.unpin(buffer)

    def _note_round(self, step: int) -> None:
        if self._meter.last is not None:
            begin, before, after = self._meter.last
            self.timeline.add("forward+backward", "round", begin, before, step=step)
            self.timeline.add("update", "round", before, after, step=step)

    def _surface(self) -> None:
        """Report background failures once, where the user's loop sees them."""
        failures = self._queue.take_failures()
        for failure in failures:
            warnings.warn(str(failure), stacklevel=3)
        for error in (*self._persist.errors(), *self._replay.errors()):
            warnings.warn(f"Background work failed: {error!r}", stacklevel=3)
        if failures and self.config.on_failure == "raise":
            raise failures[0]

    def _say_what_is_copied(self, optimizers: Sequence[Optimizer], traits: Sequence[Traits]) -> None:
        if self.config.mode not in ("auto", "multi_step"):
            return
        for optimizer, known in zip(optimizers, traits, strict=True):
            if known.reason:
                warnings.warn(
                    f"{known.reason}: {type(optimizer).__name__} is checkpointed by copying its state during the "
                    "one step after the target, without replay.",
                    stacklevel=4,
                )


def _device_of(optimizers: Sequence[Optimizer], tensors: Mapping[str, Tensor]) -> torch.device:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                return torch.device(parameter.device)
    for tensor in tensors.values():
        return tensor.device
    return torch.device("cpu")
