"""Compare two checkpoints bit by bit: every tensor, and everything else in the state.

    python examples/bitwise.py runs/a/checkpoints/epoch=0-step=40.ckpt runs/b/checkpoints/epoch=0-step=40.ckpt
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ckpt_engine.restore.reader import load

_ONES = torch.tensor([value.bit_count() for value in range(256)])


@dataclass(kw_only=True, slots=True)
class Comparison:
    """What two states have in common.

    Args:
        tensors: Tensors compared.
        bits: Bits that differ in them.
        leaves: Other values compared: numbers, strings, flags.
        differences: Everything that differs, named.
    """

    tensors: int = 0
    bits: int = 0
    leaves: int = 0
    differences: list[str] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        return self.tensors > 0 and not self.bits and not self.differences

    def __str__(self) -> str:
        return f"{'yes' if self.identical else 'NO'} ({self.tensors} tensors, {self.bits} differing bits)"


def differing_bits(left: Tensor, right: Tensor) -> int:
    """How many bits of two tensors of one dtype and shape differ; NaN equals NaN only with the same bits.

    >>> differing_bits(torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]))
    1
    """
    a, b = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (left, right))
    return 0 if torch.equal(a, b) else int(_ONES[(a ^ b).long()].sum())


def compare(left: object, right: object, *, roots: tuple[str, str] = ("", "")) -> Comparison:
    """Compare two nested states leaf by leaf.

    Args:
        left: A state dict.
        right: Another one.
        roots: Directories of the two runs; a path below one equals the same path below the other.
    """
    result = Comparison()
    ours, theirs = dict(_leaves(left, roots[0])), dict(_leaves(right, roots[1]))
    result.differences += [f"{path} is only in one of them" for path in sorted(ours.keys() ^ theirs.keys())]
    for path in (path for path in ours if path in theirs):
        _compare_leaf(path, ours[path], theirs[path], result)
    return result


def compare_checkpoints(left: str, right: str) -> Comparison:
    """Load and compare two checkpoint directories of two runs, each in ``<run>/checkpoints``."""
    runs = str(Path(left).resolve().parents[1]), str(Path(right).resolve().parents[1])
    return compare(load(left).state, load(right).state, roots=runs)


def _leaves(value: object, root: str, path: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        yield f"{path}{{}}", f"{type(value).__name__} of {list(value)!r}".replace(root or "\0", "<run>")
        for key, item in value.items():
            yield from _leaves(item, root, f"{path}.{key}".replace(root or "\0", "<run>"))
    elif isinstance(value, list | tuple):
        yield f"{path}[]", f"{type(value).__name__} of {len(value)}"
        for index, item in enumerate(value):
            yield from _leaves(item, root, f"{path}[{index}]")
    else:
        yield path, value if isinstance(value, Tensor) else repr(value).replace(root or "\0", "<run>")


def _compare_leaf(path: str, left: object, right: object, result: Comparison) -> None:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        result.tensors += 1
        kinds = [f"{tensor.dtype} {list(tensor.shape)}" for tensor in (left, right)]
        if kinds[0] != kinds[1]:
            result.differences.append(f"{path}: {kinds[0]} against {kinds[1]}")
        elif bits := differing_bits(left, right):
            result.bits += bits
            result.differences.append(f"{path}: {bits} bits differ")
        return
    result.leaves += 1
    if isinstance(left, Tensor) or isinstance(right, Tensor) or left != right:
        result.differences.append(f"{path}: {left} against {right}")


if __name__ == "__main__":
    outcome = compare_checkpoints(*sys.argv[1:3])
    print(f"identical: {outcome}", *outcome.differences, sep="\n  ")
    sys.exit(0 if outcome.identical else 1)
