"""A window is drawn from a timeline; what does not belong to it is left out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ckpt_engine.errors import ConfigError
from ckpt_engine.observe.figure import COLOURS, ROWS, draw_window, spans_of_window
from ckpt_engine.observe.timeline import Span, Timeline


def timeline() -> list[Span]:
    line = Timeline()
    for step in range(1, 12):
        line.add("forward+backward", "round", float(step), step + 0.8, step=step)
        line.add("update", "round", step + 0.8, step + 0.95, step=step)
    for target in (4, 9):
        for part in range(3):
            line.add("state copies", "block", target - 1 + part, target - 0.8 + part, step=target)
            line.add("gradient copies", "gradients", target - 0.2 + part, target + part)
        line.add("replay", "update", target, target + 0.1, step=target)
        line.add("persist", "checkpoint", target + 1.5, target + 2.5, step=target)
    return line.spans


def test_only_spans_of_one_window_and_what_runs_beside_it_are_chosen() -> None:
    chosen = spans_of_window(timeline(), 9)
    assert {span.step for span in chosen if span.lane in ("state copies", "replay", "persist")} == {9}
    assert [span.step for span in chosen if span.lane == "forward+backward"] == [8, 9, 10, 11]
    assert len([span for span in chosen if span.lane == "gradient copies"]) == 3


def test_a_target_without_a_window_is_refused_with_the_targets_that_have_one() -> None:
    with pytest.raises(ConfigError, match=r"no window for step 5: choose one of \[4, 9\]"):
        spans_of_window(timeline(), 5)


def test_every_lane_has_a_row_and_a_colour() -> None:
    assert {lane for lanes in ROWS.values() for lane in lanes} == COLOURS.keys()
    assert {span.lane for span in timeline()} <= COLOURS.keys()


@pytest.mark.parametrize(("ending", "magic"), [("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_the_file_is_an_image_of_the_kind_its_name_says(tmp_path: Path, ending: str, magic: bytes) -> None:
    path = tmp_path / f"window.{ending}"
    draw_window(timeline(), 4, str(path))
    assert path.read_bytes().startswith(magic)


def test_an_svg_shows_the_steps_and_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "window.svg"
    draw_window(timeline(), 4, str(path))
    text = path.read_text(encoding="utf-8")
    for label in (*ROWS, "The window for step 4"):
        assert f"<!-- {label} -->" in text


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"overlap-ckpt\[figure\]"):
        draw_window(timeline(), 4, str(tmp_path / "window.png"))
