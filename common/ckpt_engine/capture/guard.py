"""Notice writes to a tensor that no optimizer update explains.

Every in-place operation raises a tensor's version counter. A window notes the counters right after each update and
compares them right before the next one and at the target: a difference means that something else wrote (weight
clamping, ``load_state_dict``, a re-tied weight), so the unit is copied again. Writes through ``.data`` or by fused
kernels leave no trace in the counter; the audit is there for those.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from ckpt_engine.capture.units import Unit, is_plain

Stamp = tuple[int, ...]


def stamp(unit: Unit, optimizers: Sequence[Optimizer]) -> Stamp:
    """Return what identifies the content of a unit: memory and version of its tensor and of its state tensors."""
    marks = [unit.tensor.data_ptr(), unit.tensor._version]
    if unit.is_static:
        return tuple(marks)
    entry = optimizers[unit.optimizer].state.get(unit.tensor)
    for value in entry.values() if isinstance(entry, dict) else ():
        if isinstance(value, Tensor):
            # The identity alone could be that of a later object in the place of a freed one.
            marks += (id(value), value.data_ptr() if is_plain(value) else 0, value._version)
    return tuple(marks)


class Guard:
    """Stamps of the units that a window has captured.

    Example:
        >>> import torch
        >>> from ckpt_engine.capture.units import Unit, is_plain
        >>> unit = Unit(fqn="w", tensor=torch.zeros(3))
        >>> guard = Guard([])
        >>> guard.note(unit)
        >>> guard.changed([unit])
        []
        >>> _ = unit.tensor.add_(1)
        >>> [u.fqn for u in guard.changed([unit])]
        ['w']
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._stamps: dict[Unit, Stamp] = {}

    def note(self, unit: Unit) -> None:
        """Take the unit as it is now for unchanged."""
        self._stamps[unit] = stamp(unit, self._optimizers)

    def note_once(self, unit: Unit) -> None:
        """Note a unit that has no stamp yet; a unit captured in several parts keeps its first."""
        if unit not in self._stamps:
            self.note(unit)

    def forget(self, unit: Unit) -> None:
        """Drop the stamp of a unit that will be captured again."""
        self._stamps.pop(unit, None)

    def changed(self, units: Sequence[Unit]) -> list[Unit]:
        """Return those of ``units`` that were written since they were noted."""
        return [
            unit
            for unit in units
            if (known := self._stamps.get(unit)) is not None and known != stamp(unit, self._optimizers)
        ]
