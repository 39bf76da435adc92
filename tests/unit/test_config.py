from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ckpt_engine.config import CheckpointConfig
from ckpt_engine.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "value", "advice"),
    [
        ("mode", "fast", "use one of auto, multi_step"),
        ("when_busy", "drop", "use one of wait, skip"),
        ("on_failure", "ignore", "use one of warn, raise"),
        ("audit", True, "use one of sample, full, off"),
        ("window_steps", 0, "at least 1"),
        ("window_steps", 99, "max_window_steps"),
        ("window_steps", 2.5, "whole number"),
        ("max_window_steps", True, "whole number"),
        ("max_images", 0, "at least 1"),
        ("block_bytes", 10, "at least 4096"),
        ("owed_bytes", 0, "at least 1"),
        ("save_timeout_s", 0.0, "longer bound"),
        ("save_timeout_s", float("nan"), "longer bound"),
        ("audit_rtol", -1.0, "must not be negative"),
    ],
)
def test_bad_settings_are_refused_with_advice(field: str, value: Any, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        CheckpointConfig(**{field: value})


@pytest.mark.parametrize("mode", ["one_step", "async", "sync"])
def test_a_window_of_several_steps_contradicts_modes_without_one(mode: Any) -> None:
    with pytest.raises(ConfigError, match="contradicts"):
        CheckpointConfig(mode=mode, window_steps=3)


def test_settings_cannot_change_after_the_engine_took_them() -> None:
    config = CheckpointConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.mode = "sync"  # type: ignore[misc]


def test_settings_are_keyword_only() -> None:
    with pytest.raises(TypeError):
        CheckpointConfig("sync")  # type: ignore[misc]
