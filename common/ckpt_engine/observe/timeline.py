"""What happened when: spans of training, copies, replay and writing, kept for a figure or a trace viewer.

Example:
    >>> timeline = Timeline()
    >>> timeline.add("replay", "update", 1.0, 1.5, step=7)
    >>> [(span.lane, span.end_s - span.start_s) for span in timeline.spans]
    [('replay', 0.5)]
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

LIMIT = 50_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Something that took time.

    Args:
        lane: The kind of work: ``forward+backward``, ``update``, ``stall``, ``state copies``, ``gradient copies``,
            ``replay``, ``persist``.
        name: What it was.
        start_s: Begin, seconds on the engine's clock.
        end_s: End.
        step: The step it belongs to (the target for copies, replay and persisting); None where it belongs to none.
    """

    lane: str
    name: str
    start_s: float
    end_s: float
    step: int | None = None


class Timeline:
    """A bounded, thread-safe list of spans; the oldest are dropped.

    Args:
        limit: Spans kept.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._spans: deque[Span] = deque(maxlen=limit)
        self._lock = threading.Lock()

    def add(self, lane: str, name: str, start_s: float, end_s: float, *, step: int | None = None) -> None:
        """Note a finished span."""
        span = Span(lane=lane, name=name, start_s=start_s, end_s=end_s, step=step)
        with self._lock:
            self._spans.append(span)

    @contextmanager
    def span(self, lane: str, name: str, clock: Callable[[], float], *, step: int | None = None) -> Iterator[None]:
        """Note a block of code, also when it raises."""
        start = clock()
        try:
            yield
        finally:
            self.add(lane, name, start, clock(), step=step)

    @property
    def spans(self) -> list[Span]:
        """A copy of all spans, oldest first."""
        with self._lock:
            return list(self._spans)

    def to_chrome_trace(self) -> str:
        """JSON for ``chrome://tracing`` and Perfetto: one row per lane, microseconds."""
        spans = self.spans
        lanes = {lane: index for index, lane in enumerate(dict.fromkeys(span.lane for span in spans))}
        names = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": index, "args": {"name": lane}}
            for lane, index in lanes.items()
        ]
        events = [
            {
                "ph": "X",
                "name": span.name,
                "pid": 0,
                "tid": lanes[span.lane],
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "args": {} if span.step is None else {"step": span.step},
            }
            for span in spans
        ]
        return json.dumps({"traceEvents": [*names, *events]})
