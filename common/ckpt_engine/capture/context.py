"""What every window of one engine shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch.optim import Optimizer

from ckpt_engine.capture.link import DeviceLink
from ckpt_engine.capture.traits import Traits
from ckpt_engine.capture.worker import Worker
from ckpt_engine.config import CheckpointConfig
from ckpt_engine.image.arena import StagingPool
from ckpt_engine.observe.timeline import Timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """Collaborators of a window.

    Args:
        config: The engine's settings.
        link: Copies tensors to the host.
        replay: The thread that replays optimizers.
        staging: Host buffers for gradients.
        timeline: Records what happened when.
        clock: Seconds, monotonic.
        optimizers: The live optimizers.
        traits: What is known about each of them.
        fenced: The caller announces ``before_zero_grad`` and ``before_backward``, so gradient copies may outlive the
            update.
    """

    config: CheckpointConfig
    link: DeviceLink
    replay: Worker
    staging: StagingPool
    timeline: Timeline
    clock: Callable[[], float]
    optimizers: Sequence[Optimizer]
    traits: Sequence[Traits]
    fenced: bool


@dataclass(kw_only=True, slots=True)
class WindowStats:
    """Counters of one window, in bytes and seconds.

    Args:
        parts: Bytes of new state copied in each step of the window.
        gradient_bytes: Bytes of gradients copied.
        stall_s: Time that training waited for copies.
        replay_s: Time that the replay thread spent in optimizer steps.
        replayed: Updates replayed.
        recaptured: Units copied again because something outside the optimizer wrote to them.
        scratch_bytes: Host memory beside the image: copies in another memory order, step counters of blocks.
    """

    parts: list[int] = field(default_factory=list)
    gradient_bytes: int = 0
    stall_s: float = 0.0
    replay_s: float = 0.0
    replayed: int = 0
    recaptured: int = 0
    scratch_bytes: int = 0
