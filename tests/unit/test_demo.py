"""The demo's own parts; the demo itself runs with `make demo`."""

from __future__ import annotations

from pathlib import Path

import demo
import pytest
from bitwise import Comparison


def line(step: int, target: int | None) -> dict[str, object]:
    return {"event": "backward", "step": step, "window": target and {"target": target, "steps": 4}}


def test_a_line_that_is_still_being_written_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    assert demo.read_lines(path) == []
    path.write_text('{"step": 1}\n{"st')
    assert demo.read_lines(path) == [{"step": 1}]


def test_the_kill_comes_in_the_middle_of_the_right_window() -> None:
    target = demo.KILL_TARGET
    assert not demo.in_the_window([])
    assert not demo.in_the_window([line(target - 5, None)])
    assert not demo.in_the_window([line(target - 2, target - 10)])
    assert not demo.in_the_window([line(target - 2, target)])
    assert demo.in_the_window([line(target - 1, target)])


def test_a_process_that_fails_is_reported_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(demo.OPTIONS, "every", "often")
    with pytest.raises(demo.DemoError, match="invalid int value: 'often'"):
        demo.run(tmp_path)


def test_the_exit_status_is_zero_only_without_a_difference(capsys: pytest.CaptureFixture[str]) -> None:
    same = Comparison(tensors=3, leaves=2)
    assert demo.report({10: same, 20: same}) == 0
    assert demo.report({10: same, 20: Comparison(tensors=3, bits=1, differences=["w: 1 bits differ"])}) == 1
    assert demo.report({}) == 1
    said = capsys.readouterr().out
    assert "identical: yes (6 tensors, 0 differing bits)" in said
    assert "identical: NO (6 tensors, 1 differing bits)" in said
    assert "step 20: w: 1 bits differ" in said
