"""The life of the one window that may be open: opened, sealed by a save, captured, handed to the persist thread."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from ckpt_engine.capture.window import Window
from ckpt_engine.capture.worker import Worker
from ckpt_engine.config import CheckpointConfig
from ckpt_engine.errors import SaveFailedError, SaveTimeoutError
from ckpt_engine.image.arena import ArenaPool, HostBuffer
from ckpt_engine.opener import Opener
from ckpt_engine.prepare import fill, layout_of
from ckpt_engine.saves import Image

logger = logging.getLogger("ckpt_engine")

_WORTH_RESERVING = 256 * 1024 * 1024
"""Images below this are touched faster than it is worth keeping a window waiting for."""


class SkippedError(SaveFailedError):
    """A planned save was left out because all images are being written and ``when_busy="skip"``."""


class Windows:
    """Owns the open window, its arena, and the jobs that wait for it.

    Args:
        config: The engine's settings.
        pool: Host memory for images.
        replay: The replay thread.
        persist: The persist thread.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        pool: ArenaPool,
        replay: Worker,
        persist: Worker,
        clock: Callable[[], float],
    ) -> None:
        self.opener: Opener | None = None
        self.window: Window | None = None
        self.image: Image | None = None
        self.one_step_for: int | None = None
        self._config = config
        self._pool = pool
        self._replay = replay
        self._persist = persist
        self._clock = clock
        self._deferred: list[Callable[[], None]] = []
        self._reserved = 0
        self._reasons: set[str] = set()
        self._shape: list[object] = []

    def maybe_open(self, step: int, target: int) -> None:
        """Open a window for ``target`` if its time has come and host memory is free."""
        if self.opener is None or self.window is not None or self._config.mode in ("async", "sync"):
            return
        left = target - step + 1
        if not 1 <= left <= self._config.max_window_steps:
            return
        limit = 1 if self.one_step_for == target else left
        if self.opener.plan(self.opener.recent_units(), limit=limit).steps < left:
            self._reserve()
            return
        units = self.opener.units()
        plan = self.opener.plan(units, limit=limit)
        wait = self._config.save_timeout_s if step == target and self._config.when_busy == "wait" else 0.0
        opened = self.opener.open(units, plan, target, timeout=wait)
        if opened is None:
            return
        self._shape = self.opener.shape()
        self.window, arena = opened
        self.image = Image(
            layout=self.window.layout, arena=arena, window=self.window, release=lambda: self._pool.release(arena)
        )

    def outdated(self) -> bool:
        """Whether parameters joined or left, or changed type or shape, since the open window was laid out."""
        return self.window is not None and self.opener is not None and self.opener.shape() != self._shape

    def seal(self, step: int) -> Image | None:
        """The image of the window that targets ``step``, sealed; None when there is no such window."""
        window = self.window
        if window is None or window.captured or window.target != step or (window.sealed and window.moved()):
            return None
        if not window.sealed:
            with self.safely(), self.stall():
                window.seal()
        return self.image

    def hand_over(self) -> None:
        """The window is captured: its saves, and what follows them, go to the persist thread."""
        window, image = self.window, self.image
        self.window = self.image = None
        deferred, self._deferred = self._deferred, []
        assert window is not None
        assert image is not None
        self._learn(window)
        if image.users == 0:
            # Sealed, but the state that was saved did not fit it: free the arena once nothing writes to it.
            self._replay.submit(image.release)
        for job in deferred:
            job()

    def settle(self) -> None:
        """Finish a window that was saved by copying what is missing now; drop one that was not."""
        window = self.window
        if window is None:
            return
        if not window.sealed:
            self._drop()
            return
        with self.safely():
            with self.stall():
                window.finish()
            self.hand_over()

    @contextlib.contextmanager
    def safely(self) -> Iterator[None]:
        """What goes wrong in a window costs its saves, never a training step."""
        try:
            yield
        except Exception as error:
            self._give_up(error)

    def in_order(self, job: Callable[[], None]) -> None:
        """Run ``job`` now, or behind the saves that wait for the open window."""
        if self.window is not None and self.window.sealed:
            self._deferred.append(job)
        else:
            job()

    def copy_directly(self, tensors: Mapping[str, Tensor], *, planned: bool = False) -> Image:
        """Make an image of ``tensors`` while the caller waits.

        Args:
            tensors: What goes into the image, by name.
            planned: The save was announced, so ``when_busy`` says whether it waits for host memory.

        Raises:
            SkippedError: No host memory is free, and a planned save does not wait for it.
            SaveFailedError: No host memory became free within ``save_timeout_s``.
        """
        layout = layout_of(tensors)
        arena = self._pool.acquire(layout.total_bytes, 0.0)
        if arena is None and planned and self._config.when_busy == "skip":
            raise SkippedError(
                f"all {self._config.max_images} images are still being written. Save less often, or raise max_images."
            )
        arena = arena or self._wait_for_arena(layout.total_bytes)
        try:
            if self.opener is not None:
                self.opener.forget(arena)
            fill(layout, arena.tensor, tensors)
        except BaseException:
            self._pool.release(arena)
            raise
        return Image(layout=layout, arena=arena, window=None, release=lambda: self._pool.release(arena))

    @contextlib.contextmanager
    def stall(self) -> Iterator[None]:
        """Count what training waits for in the engine itself, beside the barriers that the window counts."""
        window = self.window
        if window is None:
            yield
            return
        start, before = self._clock(), window.stats.stall_s
        try:
            yield
        finally:
            inside = window.stats.stall_s - before
            window.stats.stall_s += max(0.0, self._clock() - start - inside)

    def _drop(self) -> None:
        window, image = self.window, self.image
        self.window = self.image = None
        assert window is not None
        assert image is not None
        try:
            window.drop(self._config.save_timeout_s)
        except SaveTimeoutError:
            # Something may still write to the arena: nobody gets it again.
            raise
        except BaseException:
            image.release()
            raise
        self._learn(window)
        image.release()

    def _give_up(self, error: Exception) -> None:
        window = self.window
        if window is None:
            logger.warning("a checkpoint window failed to open", exc_info=error)
            warnings.warn(f"A checkpoint window could not be opened ({error}): the save copies directly.", stacklevel=4)
        elif window.sealed:
            window.fail(error)
            self.hand_over()
        else:
            logger.warning("a checkpoint window failed", exc_info=error)
            warnings.warn(
                f"The window for step {window.target} failed ({error!r}): that checkpoint is captured in one step.",
                stacklevel=4,
            )
            self.one_step_for = window.target
            with contextlib.suppress(Exception):
                self._drop()

    def _learn(self, window: Window) -> None:
        if self.opener is not None:
            self.opener.learn(window)
        if window.reason and window.reason not in self._reasons:
            self._reasons.add(window.reason)
            warnings.warn(
                f"Part of the checkpoint of step {window.target} is copied directly: {window.reason}.", stacklevel=2
            )

    def _reserve(self) -> None:
        """Touch host memory in the background, once, while there is time before the first window."""
        if self._reserved or self.opener is None:
            return
        nbytes = self._reserved = self.opener.image_bytes()
        opener = self.opener
        if nbytes >= _WORTH_RESERVING:
            self._persist.submit(lambda: self._warm_up(opener, nbytes))

    def _warm_up(self, opener: Opener, nbytes: int) -> None:
        self._pool.reserve(nbytes)
        arena = self._pool.acquire(nbytes, 0.0)
        if arena is not None:
            opener.calibrate(arena)
            self._pool.release(arena)

    def _wait_for_arena(self, nbytes: int) -> HostBuffer:
        if self.window is not None:
            # Images being written come free by themselves; if only the window holds memory, this save comes first.
            with contextlib.suppress(SaveTimeoutError):
                self._persist.drain(self._config.save_timeout_s)
            arena = self._pool.acquire(nbytes, 0.0)
            if arena is not None:
                return arena
            self.settle()
        arena = self._pool.acquire(nbytes, self._config.save_timeout_s)
        if arena is None:
            raise SaveFailedError(
                f"No host memory for an image became free within {self._config.save_timeout_s:g} s: the storage is "
                "too slow for this interval. Save less often, raise max_images or save_timeout_s."
            )
        return arena
