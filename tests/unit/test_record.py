from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_engine.errors import ConfigError
from ckpt_engine.observe.record import SaveRecord, append_record

RECORD = SaveRecord(
    step=3,
    destination="checkpoints/step-3",
    mode="multi_step",
    window_steps=2,
    parts_bytes=(10, 20),
    image_bytes=4126,
    extra_bytes=5,
    gradient_bytes=7,
    stall_s=0.25,
    replay_s=0.5,
    persist_s=1.5,
    audit={"result": "bit-exact"},
    ok=True,
)


def test_each_save_is_one_line_of_json(tmp_path: Path) -> None:
    path = tmp_path / "saves.jsonl"
    append_record(str(path), RECORD)
    append_record(str(path), RECORD)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == lines[1]
    assert (lines[0]["step"], lines[0]["parts_bytes"], lines[0]["audit"]) == (3, [10, 20], {"result": "bit-exact"})


def test_infinities_do_not_break_readers(tmp_path: Path) -> None:
    path = tmp_path / "saves.jsonl"
    append_record(str(path), replace(RECORD, audit={"largest": float("inf"), "seen": [float("nan"), 1.5]}))

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is not JSON")

    line = json.loads(path.read_text(), parse_constant=refuse)
    assert line["audit"] == {"largest": "inf", "seen": ["nan", 1.5]}


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metrics_path=.*cannot be written"):
        append_record(str(tmp_path / "missing" / "saves.jsonl"), RECORD)
