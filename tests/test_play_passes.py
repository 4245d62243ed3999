"""Passes: what is recorded of them, how far one has come, and what it leaves out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from small_timelines import accesses, placement, planned_updates

from megatier.errors import TimelineError
from megatier.play.passes import Orders, Pass
from megatier.schedule.timeline import Access
from megatier.tier import Phase

UNITS = {"a", "b", "c"}


def recorded(name: str, order: Sequence[Access]) -> Pass:
    """A pass that is over."""
    played = Pass(name)
    played.accesses.extend(order)
    return played


def orders() -> Orders:
    made = Orders(placement("abc", 2))
    made.record(recorded("train", accesses("abccba")))
    return made


def test_orders_keep_the_first_record_of_a_pass() -> None:
    made = orders()
    made.record(recorded("train", accesses("cba")))
    timeline = made.timeline("train", frozenset(), frozenset())
    assert timeline is not None
    assert [access.unit for access in timeline.accesses] == list("abccba")
    assert made.knows("train")
    assert not made.knows("other")
    assert made.timeline("other", frozenset(), frozenset()) is None


def test_timeline_updates_the_units_that_are_named_and_is_made_once() -> None:
    made = orders()
    timeline = made.timeline("train", frozenset({"a", "c"}), frozenset())
    assert timeline is not None
    assert [update.unit for update in planned_updates(timeline)] == ["a", "c"]
    assert made.timeline("train", frozenset({"a", "c"}), frozenset()) is timeline


def test_pass_expects_the_next_access_of_its_record_alone() -> None:
    played = Pass("train")
    assert played.expects(Access("z", Phase.FORWARD, 0))
    played.timeline = orders().timeline("train", frozenset(), frozenset())
    assert played.timeline is not None
    first, second, *_ = played.timeline.accesses
    assert played.expects(first)
    assert not played.expects(second)
    played.accesses.append(first)
    assert played.expects(second)


def test_pass_leaves_units_out_and_notes_which() -> None:
    played = Pass("train")
    played.timeline = orders().timeline("train", frozenset(), frozenset())
    assert played.timeline is not None
    played.accesses.append(played.timeline.accesses[0])
    assert played.leave_out(Access("c", Phase.FORWARD, 0), UNITS) == [Access("b", Phase.FORWARD, 0)]
    assert played.left_out == {("b", 0)}
    with pytest.raises(TimelineError, match="not what step 1 recorded"):
        played.leave_out(Access("z", Phase.FORWARD, 0), UNITS)
