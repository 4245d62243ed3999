"""The stall timer: how long a run may make no progress."""

from __future__ import annotations

from megatier.watch.stall_timer import STALL_MULTIPLE, StallTimer


def looks(timer: StallTimer, seen: object) -> int:
    """Looks of one second, at what stays the same from now on, until the timer finds a stall."""
    assert not timer.observe(seen, 1.0)
    count = 1
    while not timer.observe(seen, 1.0):
        count += 1
    return count


def test_timer_finds_a_stall_when_the_least_time_has_passed_without_progress() -> None:
    assert looks(StallTimer(10.0, 0.0), "seen") == 10


def test_timer_finds_no_stall_while_something_moves_on() -> None:
    timer = StallTimer(10.0, 0.0)
    assert not any(timer.observe(number // 9, 1.0) for number in range(1000))


def test_timer_waits_a_multiple_of_the_longest_time_before() -> None:
    timer = StallTimer(10.0, 0.0)
    for _ in range(9):
        timer.observe("slow", 1.0)
    assert looks(timer, "seen") == STALL_MULTIPLE * 8


def test_timer_waits_a_multiple_of_the_predicted_step() -> None:
    assert looks(StallTimer(10.0, 60.0), "seen") == STALL_MULTIPLE * 60


def test_timer_counts_nothing_between_passes() -> None:
    timer = StallTimer(10.0, 0.0)
    assert not any(timer.observe(None, 1.0) for _ in range(1000))
    assert looks(timer, "seen") == 10
