"""Online estimates of what a training step takes: its length, the part that copies can hide behind, and the update.

Example:
    >>> now = iter([0.0, 0.7, 0.9, 1.0, 1.0, 1.7, 1.9, 2.0]).__next__
    >>> meter = Meter(now)
    >>> for _ in range(2):
    ...     meter.step_begin(); meter.before_update(); meter.after_update(); meter.step_end()
    >>> meter.ready, round(meter.step_s, 3), round(meter.hidden_s, 3), round(meter.update_s, 3)
    (True, 1.0, 0.7, 0.2)
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

_RECENT = 15
_ENOUGH = 2


class Meter:
    """Running medians over the last steps; robust to the odd slow one.

    Args:
        clock: Seconds, monotonic.

    Attributes:
        last: When the last round began, when its first update did, and when its last update ended; None for a round
            without an update.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begin: float | None = None
        self._before: float | None = None
        self._after: float | None = None
        self._steps: deque[float] = deque(maxlen=_RECENT)
        self._hidden: deque[float] = deque(maxlen=_RECENT)
        self._updates: deque[float] = deque(maxlen=_RECENT)
        self.last: tuple[float, float, float] | None = None

    def step_begin(self) -> None:
        """A round begins."""
        self._begin, self._before, self._after = self._clock(), None, None

    def before_update(self) -> None:
        """The first update of the round begins."""
        if self._before is None:
            self._before = self._clock()

    def after_update(self) -> None:
        """An update of the round is done."""
        self._after = self._clock()

    def step_end(self) -> None:
        """The round is complete. One without an update (a skipped step) says nothing about a usual one."""
        end = self._clock()
        self.last = None
        if self._begin is None or self._before is None or self._after is None:
            return
        self.last = (self._begin, self._before, self._after)
        self._steps.append(end - self._begin)
        self._hidden.append(self._before - self._begin)
        self._updates.append(self._after - self._before)
        self._begin = None

    @property
    def ready(self) -> bool:
        """Whether enough rounds were seen."""
        return len(self._steps) >= _ENOUGH

    @property
    def step_s(self) -> float:
        """Seconds a round takes."""
        return _median(self._steps)

    @property
    def hidden_s(self) -> float:
        """Seconds from the beginning of a round to its update: forward and backward."""
        return _median(self._hidden)

    @property
    def update_s(self) -> float:
        """Seconds the update takes."""
        return _median(self._updates)


def _median(values: deque[float]) -> float:
    return statistics.median(values) if values else 0.0
