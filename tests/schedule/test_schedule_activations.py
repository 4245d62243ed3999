"""Offloaded activations: each comes back one ahead of its backward."""

from __future__ import annotations

from megatier.schedule.activations import AwayActivations


def stashed(units: str) -> AwayActivations:
    made = AwayActivations()
    for unit in units:
        made.stash(unit)
    return made


def test_activations_come_back_one_ahead_of_the_backward() -> None:
    made = stashed("abc")
    assert made.fetch("c") == ["c", "b"]
    assert made.fetch("b") == ["a"]
    assert made.fetch("a") == []


def test_activation_that_is_wanted_out_of_order_is_asked_for_at_once() -> None:
    made = stashed("abcd")
    assert made.fetch("d") == ["d", "c"]
    assert made.fetch("a") == ["a", "b"]
    assert made.fetch("c") == []
    assert made.fetch("b") == []


def test_activations_of_the_next_group_come_back_in_the_same_way() -> None:
    made = stashed("ab")
    assert [made.fetch(unit) for unit in "ba"] == [["b", "a"], []]
    made.stash("a")
    made.stash("b")
    assert [made.fetch(unit) for unit in "ba"] == [["b", "a"], []]
