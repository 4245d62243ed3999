"""Passes: what is recorded of them, how far one has come, and what it leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from small_timelines import accesses, placement

from megatier.errors import TimelineError
from megatier.play.passes import Orders, Pass
from megatier.schedule.timeline import Access
from megatier.tier import Phase, Tier

UNITS = {"a", "b", "c"}


def recorded(name: str, order: Sequence[Access]) -> Pass:
    """A pass that is over."""
    played = Pass(name)
    played.accesses.extend(order)
    return played


def orders(**changes: object) -> Orders:
    where = replace(placement("abc", 2), **changes)  # type: ignore[arg-type]
    made = Orders(UNITS, where)
    made.record(recorded("train", accesses("abccba")))
    return made


def test_orders_keep_the_first_record_of_a_pass() -> None:
    made = orders()
    made.record(recorded("train", accesses("cba")))
    timeline = made.timeline("train", frozenset())
    assert timeline is not None
    assert [access.unit for access in timeline.accesses] == list("abccba")
    assert made.knows("train")
    assert not made.knows("other")
    assert made.timeline("other", frozenset()) is None


def test_timeline_updates_the_units_that_are_named_and_is_made_once() -> None:
    made = orders()
    timeline = made.timeline("train", frozenset({"a", "c"}))
    assert timeline is not None
    assert [update.unit for update in timeline.updates] == ["a", "c"]
    assert made.timeline("train", frozenset({"a", "c"})) is timeline
    assert {update.unit for update in made.planned("train", updates=True).updates} == UNITS


def test_sums_come_ahead_for_every_group_but_the_first_of_units_that_ship_their_gradient() -> None:
    made = orders(sums_on_gpu=True, grad_homes={"a": Tier.NVME, "b": Tier.RAM, "c": Tier.GPU})
    order = [replace(access, group=group) for group in range(2) for access in accesses("abccba")]
    made.record(recorded("grouped", order))
    played = Pass("train")
    assert made.sums_ahead(played) == frozenset()
    played.timeline = made.planned("grouped", updates=False)
    assert made.sums_ahead(played) == {10, 11}  # the last uses of b and a in the second group
    evaluation = Pass("holdout")
    evaluation.timeline = played.timeline
    assert made.sums_ahead(evaluation) == frozenset()


def test_pass_expects_the_next_access_of_its_record_alone() -> None:
    played = Pass("train")
    assert played.expects(Access("z", Phase.FORWARD, 0))
    played.timeline = orders().planned("train", updates=False)
    first, second, *_ = played.timeline.accesses
    assert played.expects(first)
    assert not played.expects(second)
    played.accesses.append(first)
    assert played.expects(second)


def test_pass_leaves_units_out_and_notes_which() -> None:
    played = Pass("train")
    played.timeline = orders().planned("train", updates=False)
    played.accesses.append(played.timeline.accesses[0])
    assert played.leave_out(Access("c", Phase.FORWARD, 0), UNITS) == [Access("b", Phase.FORWARD, 0)]
    assert played.left_out == {("b", 0)}
    with pytest.raises(TimelineError, match="not what step 1 recorded"):
        played.leave_out(Access("z", Phase.FORWARD, 0), UNITS)
