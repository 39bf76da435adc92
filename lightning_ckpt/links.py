"""``last.ckpt`` as a symbolic link that is switched in one step and survives a move of the directory."""

from __future__ import annotations

import os
import uuid

from ckpt_engine.storage.cleanup import remove_checkpoint


def link_checkpoint(target: str, link: str) -> None:
    """Make ``link`` point to ``target``, relatively; whatever had the name before is replaced.

    Args:
        target: A checkpoint.
        link: Path of the link; a directory of that name is removed once the link is there.
    """
    if os.path.abspath(target) == os.path.abspath(link):
        return
    fresh = f"{link}.{uuid.uuid4().hex}.tmp"
    os.symlink(os.path.relpath(target, os.path.dirname(link)), fresh)
    if os.path.isdir(link) and not os.path.islink(link):
        remove_checkpoint(link)
    os.replace(fresh, link)
