"""When a checkpoint is due by time: the clock is the test's."""

from __future__ import annotations

import pytest

from megatier.checkpoint.checkpoint_clock import (
    EVERY_S,
    FIRST_S,
    SHARE,
    CheckpointClock,
    every_seconds,
    first_seconds,
    format_about,
    unmeasured_seconds,
)


class Clock:
    """Stands still unless it is told to go on."""

    def __init__(self) -> None:
        self.now = 1e6

    def __call__(self) -> float:
        return self.now


def waited(checkpoints: CheckpointClock, clock: Clock, step_s: float = 10.0) -> float:
    """Seconds until a checkpoint is due, looked at after each step."""
    began = clock.now
    while not checkpoints.is_due():
        clock.now += step_s
        checkpoints.note_step(step_s, is_beside=False)
    return clock.now - began


def test_cheap_checkpoints_come_by_the_clock_alone() -> None:
    clock = Clock()
    checkpoints = CheckpointClock(0.0, clock)
    assert waited(checkpoints, clock) == FIRST_S
    for _ in range(3):
        checkpoints.note_begin()
        checkpoints.note_end(0.0, 0.0)
        assert waited(checkpoints, clock) == EVERY_S


@pytest.mark.parametrize("cost_s", [1.0, 10.0, 720.0])
def test_first_checkpoint_waits_for_fifty_times_what_it_will_cost(cost_s: float) -> None:
    clock = Clock()
    assert waited(CheckpointClock(cost_s, clock), clock) == first_seconds(cost_s) == max(300.0, 50 * cost_s)
    assert every_seconds(cost_s) == max(1800.0, 50 * cost_s)


@pytest.mark.parametrize("expected_s", [0.0, 20.0, 500.0])
def test_checkpoints_never_cost_more_than_their_share_however_wrong_the_expectation(expected_s: float) -> None:
    clock = Clock()
    checkpoints, began, spent = CheckpointClock(expected_s, clock), clock.now, 0.0
    for cost_s in (100.0, 100.0, 30.0, 300.0):
        waited(checkpoints, clock)
        if spent:  # the first one was begun by what was expected
            assert spent <= SHARE * (clock.now - began)
        checkpoints.note_begin()
        clock.now += cost_s
        checkpoints.note_end(cost_s, 0.0)
        spent += cost_s


def test_cost_is_what_training_waited_and_what_steps_beside_it_took_longer() -> None:
    checkpoints = CheckpointClock(0.0, Clock())
    for seconds in (90.0, 10.0, 11.0, 10.0, 9.0):  # the first one learns the order of units
        checkpoints.note_step(seconds, is_beside=False)
    checkpoints.note_begin()
    for seconds in (13.0, 12.0):
        checkpoints.note_step(seconds, is_beside=True)
    checkpoints.note_end(2.0, 100.0)
    assert checkpoints.cost_s == 2.0 + 3.0 + 2.0


def test_cost_is_no_more_than_the_time_that_it_was_written() -> None:
    checkpoints = CheckpointClock(0.0, Clock())
    checkpoints.note_step(10.0, is_beside=False)
    checkpoints.note_begin()
    checkpoints.note_step(500.0, is_beside=True)  # held up by something else
    checkpoints.note_end(2.0, 30.0)
    assert checkpoints.cost_s == 32.0


def test_cost_is_no_less_than_what_training_waited() -> None:
    checkpoints = CheckpointClock(0.0, Clock())
    checkpoints.note_step(10.0, is_beside=False)
    checkpoints.note_begin()
    checkpoints.note_step(1.0, is_beside=True)
    checkpoints.note_end(2.0, 30.0)
    assert checkpoints.cost_s == 2.0


def test_cost_where_no_step_is_known_is_the_time_that_it_was_written() -> None:
    checkpoints = CheckpointClock(0.0, Clock())
    checkpoints.note_begin()
    checkpoints.note_step(10.0, is_beside=True)
    checkpoints.note_end(2.0, 30.0)
    assert checkpoints.cost_s == 32.0


def test_checkpoint_that_failed_is_tried_again_when_as_much_time_is_over() -> None:
    clock = Clock()
    checkpoints = CheckpointClock(0.0, clock)
    waited(checkpoints, clock)
    checkpoints.note_begin()
    assert waited(checkpoints, clock) == EVERY_S


def test_end_is_worth_a_checkpoint_in_a_long_run_alone() -> None:
    clock = Clock()
    checkpoints = CheckpointClock(1e9, clock)
    clock.now += FIRST_S - 1
    assert not checkpoints.is_long()
    clock.now += 1
    assert checkpoints.is_long()


def test_drive_that_nobody_measured_takes_a_gigabyte_a_second() -> None:
    assert unmeasured_seconds(12 * 10**9) == 12.0


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(300.0, "5 minutes"), (5400.0, "90 minutes"), (7200.0, "2 hours"), (36_000.0, "10 hours"), (9000.0, "2.5 hours")],
)
def test_about_says_minutes_and_then_hours(seconds: float, words: str) -> None:
    assert format_about(seconds) == words
