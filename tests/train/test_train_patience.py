"""The patience of a watchdog: what it takes for a hang."""

from __future__ import annotations

from megatier.train.patience import MULTIPLE, Patience


def looks(patience: Patience, seen: object) -> int:
    """Looks of one second, at what stays the same from now on, until the patience ends."""
    assert not patience.ends(seen, 1.0)
    count = 1
    while not patience.ends(seen, 1.0):
        count += 1
    return count


def test_patience_ends_when_the_least_time_has_passed_without_progress() -> None:
    assert looks(Patience(10.0, 0.0), "seen") == 10


def test_patience_never_ends_while_something_moves_on() -> None:
    patience = Patience(10.0, 0.0)
    assert not any(patience.ends(number // 9, 1.0) for number in range(1000))


def test_patience_lasts_a_multiple_of_the_longest_time_before() -> None:
    patience = Patience(10.0, 0.0)
    for _ in range(9):
        patience.ends("slow", 1.0)
    assert looks(patience, "seen") == MULTIPLE * 8


def test_patience_lasts_a_multiple_of_the_predicted_step() -> None:
    assert looks(Patience(10.0, 60.0), "seen") == MULTIPLE * 60


def test_patience_counts_nothing_between_passes() -> None:
    patience = Patience(10.0, 0.0)
    assert not any(patience.ends(None, 1.0) for _ in range(1000))
    assert looks(patience, "seen") == 10
