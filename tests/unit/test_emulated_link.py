from __future__ import annotations

import pytest
import torch

from ckpt_engine.capture.emulated_link import EmulatedLink
from ckpt_engine.capture.link import Copy
from ckpt_engine.errors import ConfigError


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def _link(bytes_per_s: float) -> tuple[EmulatedLink, Time]:
    time = Time()
    return EmulatedLink(bytes_per_s, clock=time.clock, sleep=time.sleep), time


def _copy(nbytes: int) -> Copy:
    source = torch.ones(nbytes, dtype=torch.uint8)
    return Copy(torch.zeros(nbytes, dtype=torch.uint8), source)


def test_copies_take_as_long_as_the_wire_says_and_are_real() -> None:
    link, time = _link(1e6)
    copies = [_copy(400_000), _copy(100_000)]
    link.submit(copies).wait(30)
    assert time.now == pytest.approx(0.5)
    assert all(torch.equal(copy.dst, copy.src) for copy in copies)
    link.close()


def test_an_idle_wire_saves_nothing_up() -> None:
    link, time = _link(1e6)
    time.now = 100.0
    link.submit([_copy(500_000)]).wait(30)
    assert time.now == pytest.approx(100.5)
    link.close()


def test_the_measured_bandwidth_is_the_emulated_one() -> None:
    link, _ = _link(3e6)
    link.submit([_copy(2_000_000)]).wait(30)
    assert link.bandwidth == pytest.approx(3e6)
    link.close()


def test_a_wire_without_bandwidth_is_refused() -> None:
    with pytest.raises(ConfigError, match="above 0"):
        EmulatedLink(0.0)
