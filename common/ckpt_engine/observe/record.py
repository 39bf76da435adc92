"""One record per save, and its file of JSON lines."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field

from ckpt_engine.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveRecord:
    """What one save did; sizes in bytes, times in seconds.

    Args:
        step: The step it represents.
        destination: Where it was written.
        mode: ``multi_step``, ``one_step``, ``async`` or ``sync``.
        window_steps: Steps that the copy was spread over; 0 for a direct copy.
        parts_bytes: New state copied in each of them.
        image_bytes: Size of the image.
        extra_bytes: Small state outside it.
        gradient_bytes: Gradients copied for replay.
        stall_s: Time that training waited.
        replay_s: Time that replay computed.
        persist_s: Time from the start of writing to the commit.
        audit: Outcome of the audit.
        ok: Whether the checkpoint is durable.
        error: Why not.
    """

    step: int
    destination: str
    mode: str
    window_steps: int
    parts_bytes: tuple[int, ...]
    image_bytes: int
    extra_bytes: int
    gradient_bytes: int
    stall_s: float
    replay_s: float
    persist_s: float
    audit: dict[str, object] = field(default_factory=dict)
    ok: bool
    error: str = ""


def append_record(path: str, record: SaveRecord) -> None:
    """Append ``record`` to a file of JSON lines, in one write, so that several writers do not mix their lines.

    Raises:
        ConfigError: The file cannot be written.
    """
    line = json.dumps(_portable(asdict(record)), separators=(",", ":"), allow_nan=False) + "\n"
    try:
        with open(path, "ab", buffering=0) as file:
            file.write(line.encode())
    except OSError as error:
        raise ConfigError(
            f"metrics_path={path!r} cannot be written ({error}): give a file in a folder that exists."
        ) from error


def _portable(value: object) -> object:
    """JSON has no infinities and no NaN: they become words, so that any reader takes the line.

    Example:
        >>> _portable({"largest": float("inf"), "parts": (1, 2.5)})
        {'largest': 'inf', 'parts': [1, 2.5]}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(item) for item in value]
    return value
