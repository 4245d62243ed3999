"""Orders and passes: what is recorded of passes, how far one has come, and what it leaves out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from small_timelines import accesses, placement, planned_updates

from megatier.errors import TimelineError
from megatier.play.orders import Orders
from megatier.play.passes import Pass
from megatier.schedule.timeline import Access, Load
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


def test_orders_know_what_groups_without_pixels_leave_out_until_told_to_forget() -> None:
    made = Orders(placement("abc", 2), layers={"b"})
    made.record(played_on("FB", accesses("abccba")))
    played = played_on("FB", accesses("abccba"))
    played.timeline, played.planned = made.timeline("train", frozenset(), frozenset()), "FB"
    played.text_groups = frozenset({0})
    played.left_out |= {("a", 0), ("b", 0), ("c", 0), ("a", 1)}
    played.used.add(("c", 0))
    made.record(played)
    assert made.absent("train", [0, 2]) == {("a", 0), ("a", 2)}
    assert made.lacks("train", {"a", "z"})
    assert not made.lacks("train", {"a", "b"})
    made.record(played_on("FfB", accesses("abcabccba")))
    assert made.absent("train", [0]) == frozenset(), "a further forward may see images"
    made.record(played_on("FB", accesses("abccba")))
    made.record(played_on("FB", accesses("abccba")))
    made.forget_absent()
    assert made.absent("train", [0]) == frozenset()


def played_on(course: str, order: Sequence[Access]) -> Pass:
    played = recorded("train", order)
    played.course = course
    return played


def test_orders_expect_the_course_that_followed_the_last_one() -> None:
    made = Orders(placement("abc", 2))
    expected = []
    for course in ("FB", "FfB", "FfB", "FB", "FfB", "FB"):
        made.record(played_on(course, accesses("abccba")))
        expected.append(made.expected("train"))
    assert expected == ["FB", "FfB", "FfB", "FfB", "FB", "FfB"]


def test_pass_that_leaves_its_course_is_planned_anew_from_empty_slots() -> None:
    made = Orders(placement("abc", 2))
    made.record(played_on("FfB", accesses("abcabccbacba")))
    made.record(played_on("FB", accesses("abccba")))
    made.record(played_on("FB", accesses("abccba")))
    played = played_on("F", accesses("abc"))
    played.timeline = made.timeline("train", frozenset({"a", "b", "c"}), frozenset())
    played.planned = made.expected("train")
    on_course = [played.is_on_course]
    played.course = "Ff"
    assert [*on_course, played.is_on_course] == [True, False]
    played.check_can_replan(is_alone=True)
    made.replan(played)
    timeline = played.timeline
    assert played.planned == "FfB"
    assert timeline is not None
    assert timeline.accesses == tuple(accesses("abcabccbacba"))
    loads = [item for item in timeline.items if isinstance(item, Load)]
    assert loads == list(timeline.items)
    assert [load.access for load in loads[:2]] == [3, 4]
    assert [load.after_access for load in loads[:2]] == [-1, -1]
    assert all(3 <= load.after_access < load.access for load in loads[2:])


def test_pass_on_a_course_that_is_not_known_is_recorded_from_there() -> None:
    made = orders()
    played = played_on("Fa", accesses("abc"))
    played.timeline = made.timeline("train", frozenset(), frozenset())
    made.replan(played)
    assert played.timeline is None
    assert played.recorded_from == 3
    played.accesses.extend(accesses("abccba"))
    made.record(played)
    assert made.expected("train") == "Fa"


def test_course_is_not_left_by_several_ranks_or_before_all_updates_have_begun() -> None:
    played = played_on("Ff", accesses("ab"))
    played.timeline = orders().timeline("train", frozenset(), frozenset())
    with pytest.raises(TimelineError, match=r"another course \(Ff\)"):
        played.check_can_replan(is_alone=False)
    played.check_can_replan(is_alone=True)
    played.timeline = orders().timeline("train", frozenset({"c"}), frozenset())
    with pytest.raises(TimelineError, match="leaves units out"):
        played.check_can_replan(is_alone=True)
