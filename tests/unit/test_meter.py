from __future__ import annotations

from ckpt_engine.capture.meter import Meter


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _round(meter: Meter, clock: Clock, hidden: float, update: float, rest: float) -> None:
    meter.step_begin()
    clock.now += hidden
    meter.before_update()
    clock.now += update
    meter.after_update()
    clock.now += rest
    meter.step_end()


def test_medians_survive_one_slow_step() -> None:
    clock = Clock()
    meter = Meter(clock)
    for hidden in (2.0, 2.0, 90.0, 2.0, 2.0):
        _round(meter, clock, hidden, 0.5, 0.25)
    assert (meter.step_s, meter.hidden_s, meter.update_s) == (2.75, 2.0, 0.5)


def test_two_rounds_are_needed() -> None:
    clock = Clock()
    meter = Meter(clock)
    _round(meter, clock, 1.0, 1.0, 0.0)
    assert not meter.ready
    _round(meter, clock, 1.0, 1.0, 0.0)
    assert meter.ready


def test_a_round_without_an_update_says_nothing() -> None:
    clock = Clock()
    meter = Meter(clock)
    for _ in range(3):
        meter.step_begin()
        clock.now += 7.0
        meter.step_end()
    assert not meter.ready
    assert meter.last is None


def test_several_updates_of_a_round_span_from_the_first_to_the_last() -> None:
    clock = Clock()
    meter = Meter(clock)
    for _ in range(2):
        meter.step_begin()
        clock.now += 3.0
        for _ in range(2):
            meter.before_update()
            clock.now += 1.0
            meter.after_update()
        meter.step_end()
    assert (meter.hidden_s, meter.update_s) == (3.0, 2.0)


def test_rounds_follow_a_change_of_pace() -> None:
    clock = Clock()
    meter = Meter(clock)
    for hidden in [1.0] * 20 + [5.0] * 20:
        _round(meter, clock, hidden, 0.0, 0.0)
    assert meter.hidden_s == 5.0
