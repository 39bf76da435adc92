"""The engine's settings: one frozen, keyword-only record, validated where it is made.

Example:
    >>> CheckpointConfig(mode="multi_step", window_steps=4).window_steps
    4
    >>> CheckpointConfig(mode="fast")
    Traceback (most recent call last):
        ...
    ckpt_engine.errors.ConfigError: mode='fast' is not a mode: use one of auto, multi_step, one_step, async, sync.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ckpt_engine.errors import ConfigError

Mode = Literal["auto", "multi_step", "one_step", "async", "sync"]
WhenBusy = Literal["wait", "skip"]
OnFailure = Literal["warn", "raise"]
Audit = Literal["sample", "full", "off"]

MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """How checkpoints are captured, checked and written.

    Args:
        mode: How state leaves the training process. ``auto`` chooses from measured copy bandwidth and step time;
            ``multi_step`` spreads the copy over a window of steps and replays the optimizer; ``one_step`` copies
            everything during the step after the target; ``async`` copies at once and writes in the background;
            ``sync`` copies and writes before training goes on.
        window_steps: A fixed number of steps for a window; None lets the planner choose.
        max_window_steps: The planner never chooses more steps than this.
        block_bytes: Size in bytes of the slices of a parameter that are copied and replayed as one.
        max_images: How many images may exist in host memory at once: one being captured, the others being written.
        when_busy: What to do when all images are still being written: ``wait`` for one, or ``skip`` the save.
        on_failure: ``warn`` when a save fails and train on, or ``raise`` at the next step.
        audit: Which live values are compared with the replayed image at the target step before it may commit.
        audit_rtol: Largest error, relative to the largest sampled value of a tensor, that the audit accepts for
            state trained on an accelerator. On CPU the comparison is always bit for bit.
        direct_io: Write images with direct I/O where the file system takes it.
        save_timeout_s: Bound in seconds on any wait for background work.
        owed_bytes: Bound in bytes on gradients waiting on the host for replay; None means twice the gradients of
            the captured parameters.
        metrics_path: A JSON-lines file that gets one record per save; None writes none.
    """

    mode: Mode = "auto"
    window_steps: int | None = None
    max_window_steps: int = 20
    block_bytes: int = 4 * MIB
    max_images: int = 2
    when_busy: WhenBusy = "wait"
    on_failure: OnFailure = "warn"
    audit: Audit = "sample"
    audit_rtol: float = 1e-5
    direct_io: bool = True
    save_timeout_s: float = 600.0
    owed_bytes: int | None = None
    metrics_path: str | None = None

    def __post_init__(self) -> None:
        _one_of("mode", self.mode, get_args(Mode), "a mode")
        _one_of("when_busy", self.when_busy, get_args(WhenBusy), "an answer to a busy engine")
        _one_of("on_failure", self.on_failure, get_args(OnFailure), "an answer to a failed save")
        _one_of("audit", self.audit, get_args(Audit), "an audit")
        _at_least("max_window_steps", self.max_window_steps, 1)
        _at_least("max_images", self.max_images, 1)
        _at_least("block_bytes", self.block_bytes, 4096)
        if self.window_steps is not None:
            _at_least("window_steps", self.window_steps, 1)
            self._check_window_steps(self.window_steps)
        if self.owed_bytes is not None:
            _at_least("owed_bytes", self.owed_bytes, 1)
        if not self.save_timeout_s > 0:
            raise ConfigError(f"save_timeout_s={self.save_timeout_s!r} must be above 0 seconds: give a longer bound.")
        if not self.audit_rtol >= 0:
            raise ConfigError(f"audit_rtol={self.audit_rtol!r} must not be negative: 0 asks for equal bits.")

    def _check_window_steps(self, steps: int) -> None:
        if steps > 1 and self.mode in ("one_step", "async", "sync"):
            raise ConfigError(
                f"window_steps={steps} contradicts mode={self.mode!r}, which has no window of several steps: "
                "drop window_steps or use mode='multi_step'."
            )
        if steps > self.max_window_steps:
            raise ConfigError(f"window_steps={steps} is above max_window_steps={self.max_window_steps}: change either.")


def _one_of(field: str, value: object, allowed: tuple[str, ...], what: str) -> None:
    if value not in allowed:
        raise ConfigError(f"{field}={value!r} is not {what}: use one of {', '.join(allowed)}.")


def _at_least(field: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{field}={value!r} must be a whole number of at least {least}: change {field}.")
