"""Compares the tensors a model expects with those a checkpoint holds and reports every difference at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from ckpt_engine.errors import StateMismatchError

Signature = tuple[Sequence[int], torch.dtype]


def check_tensors(expected: Mapping[str, Signature], found: Mapping[str, Signature]) -> None:
    """Check that two sets of tensors agree in names, shapes and dtypes.

    Args:
        expected: Name -> (shape, dtype) of what is to be restored.
        found: The same of what the checkpoint holds.

    Raises:
        StateMismatchError: They differ; every missing, unexpected and misshapen tensor is listed, sorted.

    >>> check_tensors({"w": ((2, 3), torch.float32)}, {"w": ((2, 3), torch.float32)})
    >>> check_tensors({"w": ((2,), torch.float32)}, {"v": ((2,), torch.float32)})
    Traceback (most recent call last):
        ...
    ckpt_engine.errors.StateMismatchError: The checkpoint does not fit: 1 missing, 1 unexpected.
    Missing in the checkpoint:
      w: (2,) float32
    Unexpected in the checkpoint:
      v: (2,) float32
    Load it into the model it was saved from, or choose another checkpoint.
    """
    both = expected.keys() & found.keys()
    differing = [name for name in both if _plain(expected[name]) != _plain(found[name])]
    groups = {
        "missing": ("Missing in the checkpoint", _described(expected, expected.keys() - found.keys())),
        "unexpected": ("Unexpected in the checkpoint", _described(found, found.keys() - expected.keys())),
        "of another shape or dtype": (
            "Of another shape or dtype",
            [f"{n}: expected {_text(expected[n])}, found {_text(found[n])}" for n in sorted(differing)],
        ),
    }
    filled = {word: group for word, group in groups.items() if group[1]}
    if not filled:
        return
    counts = ", ".join(f"{len(lines)} {word}" for word, (_, lines) in filled.items())
    lists = "\n".join("\n  ".join([f"{title}:", *lines]) for title, lines in filled.values())
    raise StateMismatchError(
        f"The checkpoint does not fit: {counts}.\n{lists}\n"
        "Load it into the model it was saved from, or choose another checkpoint."
    )


def _described(signatures: Mapping[str, Signature], names: Iterable[str]) -> list[str]:
    return [f"{name}: {_text(signatures[name])}" for name in sorted(names)]


def _plain(signature: Signature) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(signature[0]), signature[1]


def _text(signature: Signature) -> str:
    return f"{tuple(signature[0])} {str(signature[1]).removeprefix('torch.')}"
