"""Loading that passes over damaged checkpoints: each is named in a warning, and the next candidate is taken."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from ckpt_engine.errors import ConfigError, CorruptCheckpointError, NoCheckpointError
from ckpt_engine.restore.catalog import is_checkpoint
from ckpt_engine.restore.reader import load
from ckpt_engine.storage.backend import backend_for, is_local, join

MANIFEST = "manifest.json"


def is_ours(path: str) -> bool:
    """Whether ``path`` is a checkpoint directory of ours, complete or not.

    A URL that cannot be opened here is not: whoever knows its scheme may still load it.
    """
    try:
        return is_checkpoint(path) or _looks_like_ours(path)
    except (ConfigError, OSError, NotImplementedError):
        if is_local(path):
            raise
        return False


def _looks_like_ours(path: str) -> bool:
    backend = backend_for(path)
    if not backend.isdir(path):
        return False
    return backend.exists(join(path, MANIFEST)) or any(name.startswith("rank-") for name in backend.listdir(path))


def load_whole(path: str, others: Sequence[str] = (), *, weights_only: bool = True) -> Any:
    """The state of ``path``; if that is damaged or missing, of the first of ``others`` that is whole.

    Args:
        path: A checkpoint of ours.
        others: What may stand in for it, best first.
        weights_only: Refuse state that needs arbitrary code to be restored.

    Raises:
        CorruptCheckpointError: It is damaged, and so are the others.
        NoCheckpointError: It is no complete checkpoint, nor are the others.
    """
    first: Exception | None = None
    for candidate in (path, *others):
        try:
            state = load(candidate, weights_only=weights_only).state
        except (CorruptCheckpointError, NoCheckpointError) as error:
            first = first or error
            if others:
                warnings.warn(f"A checkpoint is passed over: {error}", stacklevel=2)
            continue
        if candidate != path:
            warnings.warn(f"{candidate} is used instead of {path}.", stacklevel=2)
        return state
    assert first is not None
    raise first
