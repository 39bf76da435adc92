"""Every error the engine raises on purpose.

All derive from :class:`CheckpointError`, so ``except CheckpointError`` catches what this package reports and
nothing else. Each message is a sentence that names the object at fault and says what to do.
"""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """Base of all errors raised by this package."""


class ConfigError(CheckpointError, ValueError):
    """A setting or an argument is invalid or contradicts another."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint is damaged: the message names the file and the place."""


class NoCheckpointError(CheckpointError, FileNotFoundError):
    """No complete checkpoint was found where one was asked for."""


class StateMismatchError(CheckpointError):
    """A checkpoint does not fit the model: missing, unexpected or misshapen tensors are listed."""


class SaveFailedError(CheckpointError):
    """A save did not become durable; what was saved before is untouched."""


class SaveTimeoutError(CheckpointError, TimeoutError):
    """Background work did not finish within its bound; the message says what is missing and on which rank."""
