"""Draw one window from a timeline: what training did, and what went on behind it.

matplotlib is needed only here, and only when a figure is drawn.

Example:
    >>> from ckpt_engine.observe.timeline import Timeline
    >>> timeline = Timeline()
    >>> for step in (1, 2, 3):
    ...     timeline.add("forward+backward", "step", float(step), step + 0.8, step=step)
    >>> timeline.add("state copies", "block", 2.0, 2.3, step=2)
    >>> chosen = spans_of_window(timeline.spans, 2)
    >>> [(span.lane, span.step) for span in chosen]
    [('forward+backward', 2), ('state copies', 2)]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ckpt_engine.errors import ConfigError
from ckpt_engine.observe.timeline import Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROWS: dict[str, tuple[str, ...]] = {
    "training": ("forward+backward", "update", "stall"),
    "state copies": ("state copies",),
    "gradient copies": ("gradient copies",),
    "replay": ("replay",),
    "persist": ("persist",),
}
"""Rows of the figure from top to bottom, and the lanes that each of them shows."""

COLOURS = {
    "forward+backward": "#b9c4cf",
    "update": "#5f7183",
    "stall": "#d1495b",
    "state copies": "#2e86ab",
    "gradient copies": "#e29f3d",
    "replay": "#4f9d69",
    "persist": "#8a6fae",
}
_OF_A_TARGET = ("state copies", "replay", "persist")
_ROW_HEIGHT = 0.62


def spans_of_window(spans: Sequence[Span], target: int) -> list[Span]:
    """The spans of the window for ``target``, and those of training and gradients that overlap it.

    Args:
        spans: A timeline's spans. Copies, replay and persisting carry the target as their step, all others the step
            of training that they belong to.
        target: Step that the window captured.

    Raises:
        ConfigError: The timeline holds no copy for this target.
    """
    copies = [span for span in spans if span.lane == "state copies" and span.step == target]
    if not copies:
        known = sorted({span.step for span in spans if span.lane == "state copies" and span.step is not None})
        raise ConfigError(f"The timeline has no window for step {target}: choose one of {known}.")
    low = min(span.start_s for span in copies)
    high = max(span.end_s for span in spans if span.lane in _OF_A_TARGET and span.step == target)
    rest = [span for span in spans if span.lane not in _OF_A_TARGET and span.start_s < high and span.end_s > low]
    return rest + [span for span in spans if span.lane in _OF_A_TARGET and span.step == target]


def draw_window(spans: Sequence[Span], target: int, path: str) -> None:
    """Draw the window for ``target`` into an image file.

    Args:
        spans: A timeline's spans.
        target: Step that the window captured.
        path: Local file; its ending chooses the format (``.png``, ``.svg``, ``.pdf``).

    Raises:
        ConfigError: matplotlib is not installed, or the timeline has no window for this target.
    """
    chosen = spans_of_window(spans, target)
    figure = _figure_class()(figsize=(9.5, 3.3), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    origin = min(span.start_s for span in chosen)
    for row, lanes in enumerate(ROWS.values()):
        for lane in lanes:
            _draw_lane(axes, row, lane, chosen, origin)
    _label_steps(axes, chosen, origin)
    _label_rows(axes)
    axes.set_xlabel("milliseconds since the window opened")
    axes.set_title(f"The window for step {target}", loc="left", fontsize=10)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    figure.savefig(path)


def _figure_class() -> type[Figure]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("Drawing needs matplotlib: pip install 'overlap-ckpt[figure]'.") from error
    return Figure


def _draw_lane(axes: Axes, row: int, lane: str, spans: Sequence[Span], origin: float) -> None:
    bars = [(1e3 * (s.start_s - origin), 1e3 * (s.end_s - s.start_s)) for s in spans if s.lane == lane]
    if bars:
        place: Any = (row - _ROW_HEIGHT / 2, _ROW_HEIGHT)
        axes.broken_barh(bars, place, facecolors=COLOURS[lane], edgecolors=COLOURS[lane], label=lane, linewidth=0.6)


def _label_steps(axes: Axes, spans: Sequence[Span], origin: float) -> None:
    """Write each step's number over its forward and backward pass, and draw where it begins through all rows."""
    for span in spans:
        if span.lane == "forward+backward":
            start, end = 1e3 * (span.start_s - origin), 1e3 * (span.end_s - origin)
            axes.axvline(start, color="#dddddd", linewidth=0.7, zorder=0)
            axes.text((start + end) / 2, 0, str(span.step), ha="center", va="center", fontsize=8, clip_on=True)


def _label_rows(axes: Axes) -> None:
    axes.set_yticks(range(len(ROWS)), list(ROWS), fontsize=9)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
