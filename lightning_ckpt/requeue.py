"""Checkpoints of a SLURM requeue: under the names that Lightning looks for, and only complete ones.

Lightning takes whatever digits follow ``hpc_ckpt_`` in any name of the directory for a version. The hidden name of a
save under way would be one of them, so the checkpoint is written under another name and renamed once it is durable.
"""

from __future__ import annotations

import os
import re

from ckpt_engine.storage.backend import backend_for, basename, is_local, join, local_path, parent
from ckpt_engine.storage.exchange import flush_directory

_NAME = re.compile(r"hpc_ckpt_(\d+)\.ckpt")


def requeue_path(root: str) -> str:
    """The path of the next requeue checkpoint in ``root``.

    Example:
        >>> import tempfile
        >>> requeue_path(tempfile.mkdtemp()).rpartition("/")[2]
        'hpc_ckpt_1.ckpt'
    """
    return join(root, f"hpc_ckpt_{max(_versions(root), default=0) + 1}.ckpt")


def writing_path(path: str) -> str:
    """Where to write the checkpoint that is to become ``path``: itself on stores that cannot rename."""
    return join(parent(path), f"requeue-{_version(path)}.ckpt") if is_local(path) else path


def publish(written: str, path: str) -> None:
    """Give a durable checkpoint its final name, in one step."""
    if written == path:
        return
    os.rename(local_path(written), local_path(path))
    flush_directory(local_path(parent(path)))


def earlier_requeues(path: str) -> list[str]:
    """The other requeue checkpoints beside ``path``, newest first; none if it is not one itself."""
    if _NAME.fullmatch(basename(path)) is None:
        return []
    root = parent(path)
    earlier = sorted((version for version in _versions(root) if version < _version(path)), reverse=True)
    return [join(root, f"hpc_ckpt_{version}.ckpt") for version in earlier]


def _version(path: str) -> int:
    match = _NAME.fullmatch(basename(path))
    assert match is not None
    return int(match[1])


def _versions(root: str) -> list[int]:
    backend = backend_for(root)
    if not backend.isdir(root):
        return []
    return [int(match[1]) for name in backend.listdir(root) if (match := _NAME.fullmatch(name)) is not None]
