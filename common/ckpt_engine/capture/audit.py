"""Compare the replayed image with live tensors of the target step, and say how equal they are.

The samples are taken from the live tensors when training is *at* the target; the image reaches that step later, by
replay. On CPU the two must agree bit for bit. State trained on an accelerator is replayed by host kernels that round
differently: there the error is measured, bounded by ``audit_rtol`` and written into the manifest.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from ckpt_engine.capture.units import Unit, state_tensors

RUN = 64
"""Elements in a sampled run."""
MAX_UNITS = 96
"""Units sampled per save."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Live elements ``low:low+len(values)`` of an image tensor, in row-major order, taken at the target step."""

    name: str
    low: int
    values: Tensor
    exact: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditResult:
    """Outcome of an audit.

    Args:
        kind: ``sample``, ``full`` or ``off``.
        tensors: Image tensors compared.
        elements: Elements compared.
        different: Elements whose bits differ.
        max_error: Largest absolute difference.
        max_relative: Largest absolute difference over the largest sampled magnitude of the same tensor.
        failures: Names of tensors that differ more than allowed.
    """

    kind: str
    tensors: int = 0
    elements: int = 0
    different: int = 0
    max_error: float = 0.0
    max_relative: float = 0.0
    failures: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the image may commit."""
        return not self.failures

    def to_dict(self) -> dict[str, object]:
        """The record kept in the manifest."""
        return {
            "kind": self.kind,
            "tensors": self.tensors,
            "elements": self.elements,
            "different": self.different,
            "max_error": self.max_error,
            "max_relative": self.max_relative,
            "result": "failed" if self.failures else "bit-exact" if self.different == 0 else "within tolerance",
        }


def take_samples(units: Sequence[Unit], optimizers: Sequence[Optimizer], *, kind: str, seed: int) -> list[Sample]:
    """Copy live values of ``units`` for a later comparison.

    Args:
        units: Candidates; with ``kind="sample"`` at most 96 of them are drawn, a run of 64 elements per tensor,
            sometimes the last one, where vector kernels handle the tail apart.
        optimizers: The live optimizers.
        kind: ``sample``, ``full`` (every element) or ``off``.
        seed: Makes the draw reproducible; the target step.
    """
    if kind == "off":
        return []
    # An own generator: drawing from the global stream would change the training that it audits.
    draw = random.Random(seed)
    chosen = list(units) if kind == "full" or len(units) <= MAX_UNITS else draw.sample(list(units), MAX_UNITS)
    samples = []
    for unit in chosen:
        tensors = {unit.name(): unit.tensor}
        if not unit.is_static:
            state = state_tensors(optimizers[unit.optimizer], unit.tensor)
            tensors |= {unit.name(key): state[key] for key in unit.state_keys if key in state}
        low, high = (0, unit.tensor.numel()) if kind == "full" else _run(unit.tensor.numel(), draw)
        samples += [_sample(name, tensor.detach(), low, high) for name, tensor in tensors.items()]
    return samples


def _run(numel: int, draw: random.Random) -> tuple[int, int]:
    if numel <= RUN:
        return 0, numel
    low = numel - RUN if draw.random() < 0.25 else draw.randrange(numel - RUN + 1)
    return low, low + RUN


def _sample(name: str, tensor: Tensor, low: int, high: int) -> Sample:
    # A state tensor of another shape (a step counter, a factored moment) is compared from its start.
    count = tensor.numel()
    span = (low, high) if high <= count else (0, min(count, max(1, high - low)))
    flat = tensor.reshape(-1)[span[0] : span[1]] if tensor.is_contiguous() else _gather(tensor, *span)
    return Sample(name=name, low=span[0], values=flat.to("cpu", copy=True), exact=tensor.device.type == "cpu")


def _gather(tensor: Tensor, low: int, high: int) -> Tensor:
    if low == 0 and high == tensor.numel():
        return tensor.reshape(-1)
    index = torch.arange(low, high, device=tensor.device)
    return tensor[tuple(torch.unravel_index(index, tensor.shape))]


def compare(samples: Sequence[Sample], image: Mapping[str, Tensor], *, kind: str, rtol: float) -> AuditResult:
    """Compare samples with the image, after replay.

    Args:
        samples: What :func:`take_samples` returned.
        image: Image tensors by name.
        kind: Recorded in the result.
        rtol: Accepted error relative to the largest sampled magnitude, for state of an accelerator.
    """
    elements = different = 0
    max_error = max_relative = 0.0
    failures = []
    for sample in samples:
        values = image[sample.name].reshape(-1)[sample.low : sample.low + sample.values.numel()]
        elements += values.numel()
        wrong = _differing(values, sample.values)
        if not wrong:
            continue
        different += wrong
        error, relative = _error(values, sample.values)
        max_error, max_relative = max(max_error, error), max(max_relative, relative)
        if sample.exact or not relative <= rtol:
            failures.append(sample.name)
    return AuditResult(
        kind=kind,
        tensors=len(samples),
        elements=elements,
        different=different,
        max_error=max_error,
        max_relative=max_relative,
        failures=tuple(failures),
    )


def equals_live(pairs: Iterable[tuple[Tensor, Tensor]], *, rtol: float) -> bool:
    """Whether host copies equal the live tensors they stand for: bit for bit on CPU, within ``rtol`` elsewhere."""
    for host, live in pairs:
        sample = Sample(name="", low=0, values=live.to("cpu").reshape(-1), exact=live.device.type == "cpu")
        if not compare([sample], {"": host}, kind="full", rtol=rtol).passed:
            return False
    return True


def _differing(left: Tensor, right: Tensor) -> int:
    """Count elements whose bits differ (NaNs with equal bits are equal, 0.0 and -0.0 are not)."""
    if left.numel() == 0:
        return 0
    size = left.element_size()
    bits = [t.contiguous().view(torch.uint8).view(-1, size) for t in (left, right)]
    return int((bits[0] != bits[1]).any(dim=1).sum())


def _error(left: Tensor, right: Tensor) -> tuple[float, float]:
    wide = torch.complex128 if left.is_complex() else torch.float64
    a, b = left.to(wide), right.to(wide)
    error = float((a - b).abs().max())
    scale = float(b.abs().max())
    if error != error:  # a NaN or an infinity on one side only
        return float("inf"), float("inf")
    return error, error / scale if scale > 0 else float("inf")
