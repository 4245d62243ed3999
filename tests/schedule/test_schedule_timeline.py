"""Timelines: the fewest loads, each as early as it may."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
from small_timelines import accesses, placement, planned_loads, planned_updates

from megatier.errors import PlanError
from megatier.schedule.timeline import Exchange, Load, Timeline, Update, build, drain_items
from megatier.tier import Tier


def fewest_loads(order: str, num_slots: int) -> int:
    """By trying every choice."""

    @cache
    def least(index: int, held: frozenset[str]) -> int:
        if index == len(order):
            return 0
        unit = order[index]
        if unit in held:
            return least(index + 1, held)
        if len(held) < num_slots:
            return 1 + least(index + 1, held | {unit})
        return 1 + min(least(index + 1, held - {out} | {unit}) for out in held)

    return least(0, frozenset())


def check_loads(timeline: Timeline, loads: Sequence[Load], num_slots: int) -> None:
    """Play the loads in order of access: whatever is needed is there, and nothing leaves before its last use."""
    by_access = {load.access: load for load in loads}
    slots: list[str | None] = [None] * num_slots
    last_use = [-1] * num_slots
    for index, access in enumerate(timeline.accesses):
        if (load := by_access.get(index)) is not None:
            assert load.unit == access.unit
            assert load.unit not in slots, "it is there already"
            assert load.evicts == slots[load.slot]
            assert load.after_access == last_use[load.slot] < index
            slots[load.slot] = load.unit
        assert access.unit in slots
        last_use[slots.index(access.unit)] = index


def test_loads_are_the_fewest_there_can_be() -> None:
    choose = random.Random(0)
    for _ in range(150):
        order = "".join(choose.choice("abcde") for _ in range(choose.randint(1, 12)))
        num_slots = choose.randint(1, 4)
        timeline = build(accesses(order), placement("abcde", num_slots))
        assert len(planned_loads(timeline)) == fewest_loads(order, num_slots), (order, num_slots)
        check_loads(timeline, planned_loads(timeline), num_slots)


def test_forward_then_backward_starts_with_what_is_there() -> None:
    timeline = build(accesses("abcdef" + "fedcba"), placement("abcdef", 3))
    loads = planned_loads(timeline)
    assert [load.unit for load in loads[:6]] == list("abcdef")
    assert timeline.accesses[loads[6].access].unit in "dcb"  # f and what lay beside it are still there
    assert len(loads) == fewest_loads("abcdeffedcba", 3) == 9


def test_first_loads_wait_for_nothing_and_later_ones_for_the_use_they_displace() -> None:
    timeline = build(accesses("abcd"), placement("abcd", 2))
    assert [(load.unit, load.evicts, load.after_access) for load in planned_loads(timeline)] == [
        ("a", None, -1),
        ("b", None, -1),
        ("c", "a", 0),
        ("d", "b", 1),
    ]


def test_units_at_home_on_the_gpu_are_never_loaded() -> None:
    timeline = build(accesses("abcabc"), placement("abc", 1, gpu="ac"))
    assert [(load.unit, load.access) for load in planned_loads(timeline)] == [("b", 1)]
    everything = build(accesses("abcabc"), placement("abc", 0, gpu="abc"), due="abc")
    assert not planned_loads(everything)


def test_units_that_are_absent_are_updated_last_and_not_loaded() -> None:
    timeline = build(accesses("abcab"), placement("abc", 2), due="abc", absent={("a", 0), ("c", 0)})
    assert [(update.unit, update.access, update.after_access) for update in planned_updates(timeline)] == [
        ("b", 1, -1),
        ("a", -1, -1),
        ("c", -1, -1),
    ]
    assert not planned_loads(timeline), "b comes with its update, and stays"
    assert timeline.accesses == tuple(accesses("abcab"))


def test_streamed_unit_that_is_absent_is_updated_by_its_first_load() -> None:
    streamed = replace(placement("abc", 2, grads=Tier.GPU), streamed=("a",))
    timeline = build(accesses("abcab"), streamed, due="a", absent={("a", 0)})
    loads = [(load.unit, load.access, load.updates) for load in planned_loads(timeline)]
    assert loads == [("a", 0, True), ("b", 1, False), ("c", 2, False)]
    again = build(accesses("abcab"), streamed, absent={("a", 0)})
    assert [load.unit for load in planned_loads(again)] == ["b", "c"]


def test_load_without_a_slot_is_refused() -> None:
    with pytest.raises(PlanError, match=r"GPU slots for b.*Raise tiers\.gpu"):
        build(accesses("ab"), placement("ab", 0, gpu="a"))


def test_updates_come_once_per_unit_in_order_of_first_use() -> None:
    timeline = build(accesses("cabbac"), placement("abc", 3, gpu="a"), due="abc")
    assert [update.unit for update in planned_updates(timeline)] == ["c", "a", "b"]
    assert planned_updates(build(accesses("cabbac"), placement("abc", 3))) == []


def test_updates_feed_the_first_load_of_weights_from_nvme_alone() -> None:
    timeline = build(accesses("abccba"), placement("abc", 1, ram="b"), due="abc")
    fed = {update.unit: update.load for update in planned_updates(timeline)}
    assert fed["b"] is None  # its weights lie in RAM: the load reads them there
    for unit in "ac":
        load = fed[unit]
        assert load is not None
        assert load.access == "abccba".index(unit)
        assert load not in planned_loads(timeline)
    assert sorted(load.access for load in planned_loads(timeline)) == [1, 4, 5]
    every = [*planned_loads(timeline), *(load for load in fed.values() if load is not None)]
    check_loads(timeline, every, 1)


def test_timeline_is_pure() -> None:
    order = accesses("abcabccba")
    where = placement("abc", 2)
    assert build(order, where, due="abc") == build(list(order), where, due="abc")


def test_streamed_units_are_updated_by_their_first_load_and_exchanged_behind_all() -> None:
    where = replace(placement("abc", 3, ram="abc"), streamed=("a", "c"))
    timeline = build(accesses("abccba"), where, due="abc", ahead="ac")
    assert [type(item) for item in timeline.items] == [Load, Update, Load, Load, Exchange]
    assert [(load.unit, load.updates) for load in planned_loads(timeline)] == [("a", True), ("b", False), ("c", True)]
    assert timeline.items[-1] == Exchange(home=("a", "c"), fetched=("a", "c"))


def test_exchange_ahead_of_updates_brings_the_state_that_is_missing() -> None:
    where = replace(placement("abc", 3, ram="abc"), streamed=("a", "c"))
    first, *_, last = build(accesses("abc"), where, due="ac", ahead="a").items
    assert (first, last) == (Exchange(home=(), fetched=("c",)), Exchange(home=("a", "c"), fetched=("a", "c")))


def test_exchange_of_a_pass_without_updates_brings_what_the_next_step_needs() -> None:
    where = replace(placement("abc", 3, ram="abc"), streamed=("a", "c"))
    assert build(accesses("abc"), where, ahead="a").items[-1] == Exchange(home=(), fetched=("c",))
    for timeline in (build(accesses("abc"), where, ahead="ac"), build(accesses("abc"), where, trains=False)):
        assert [type(item) for item in timeline.items] == [Load, Load, Load]


def test_drain_updates_what_is_due_and_takes_streamed_state_home() -> None:
    where = replace(placement("abc", 3, ram="abc"), streamed=("a", "c"))
    assert drain_items("ab", where, "c") == (
        Exchange(home=(), fetched=("a",)),
        Update(unit="a"),
        Update(unit="b"),
        Exchange(home=("a",), fetched=()),
    )
