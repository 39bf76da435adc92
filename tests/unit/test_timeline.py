from __future__ import annotations

import json
import threading

import pytest

from ckpt_engine.observe.timeline import Timeline


def test_spans_of_many_threads_are_all_kept() -> None:
    timeline = Timeline()

    def work(lane: str) -> None:
        for index in range(200):
            timeline.add(lane, "x", float(index), float(index + 1))

    threads = [threading.Thread(target=work, args=(f"lane-{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(timeline.spans) == 800


def test_the_oldest_spans_make_room() -> None:
    timeline = Timeline(limit=3)
    for index in range(5):
        timeline.add("a", str(index), 0.0, 1.0)
    assert [span.name for span in timeline.spans] == ["2", "3", "4"]


def test_a_block_is_noted_also_when_it_raises() -> None:
    timeline, clock = Timeline(), iter([1.0, 4.0]).__next__
    with pytest.raises(ValueError, match="no"), timeline.span("persist", "write", clock, step=2):
        raise ValueError("no")
    (span,) = timeline.spans
    assert (span.lane, span.start_s, span.end_s, span.step) == ("persist", 1.0, 4.0, 2)


def test_the_trace_has_one_row_per_lane_and_microseconds() -> None:
    timeline = Timeline()
    timeline.add("replay", "update", 1.0, 1.5, step=3)
    timeline.add("persist", "write", 2.0, 2.25)
    events = json.loads(timeline.to_chrome_trace())["traceEvents"]
    rows = {event["args"]["name"]: event["tid"] for event in events if event["ph"] == "M"}
    assert sorted(rows) == ["persist", "replay"]
    replay = next(event for event in events if event["name"] == "update")
    assert (replay["tid"], replay["ts"], replay["dur"], replay["args"]) == (rows["replay"], 1e6, 5e5, {"step": 3})
