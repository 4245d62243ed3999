"""Timelines: the fewest loads, each as early as it may, and the bytes they demand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from megatier.errors import PlanError
from megatier.schedule.placement import Placement
from megatier.schedule.sizes import Policy, UnitSpec
from megatier.schedule.slots import SlotPlan
from megatier.schedule.timeline import Access, Load, Timeline, Update, build, demanded_bytes, update_bytes
from megatier.tier import STATE_KINDS, Kind, Phase, Tier

SIZE = 2048


def accesses(order: str) -> list[Access]:
    return [Access(unit, Phase.FORWARD, 0) for unit in order]


def placement(
    units: str, num_slots: int, *, gpu: str = "", ram: str = "", grads: Tier | None = Tier.RAM, split: bool = True
) -> Placement:
    """Units on NVMe but those named; `ram` has their weight planes alone there."""
    homes = {}
    for unit in units:
        for kind in STATE_KINDS:
            on_ram = unit in ram and kind is Kind.WEIGHT
            homes[unit, kind] = Tier.GPU if unit in gpu else Tier.RAM if on_ram else Tier.NVME
    slots = (SlotPlan(Tier.GPU, Kind.WEIGHT, SIZE * (2 if split else 4), num_slots),)
    return Placement(homes, slots, SIZE, {unit: Tier.GPU if unit in gpu else grads for unit in units})


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
        timeline = build(accesses(order), placement("abcde", num_slots), updates=False)
        assert len(timeline.loads) == fewest_loads(order, num_slots), (order, num_slots)
        check_loads(timeline, timeline.loads, num_slots)


def test_forward_then_backward_starts_with_what_is_there() -> None:
    timeline = build(accesses("abcdef" + "fedcba"), placement("abcdef", 3), updates=False)
    assert [load.unit for load in timeline.loads[:6]] == list("abcdef")
    assert timeline.accesses[timeline.loads[6].access].unit in "dcb"  # f and what lay beside it are still there
    assert len(timeline.loads) == fewest_loads("abcdeffedcba", 3) == 9


def test_first_loads_wait_for_nothing_and_later_ones_for_the_use_they_displace() -> None:
    timeline = build(accesses("abcd"), placement("abcd", 2), updates=False)
    assert [(load.unit, load.evicts, load.after_access) for load in timeline.loads] == [
        ("a", None, -1),
        ("b", None, -1),
        ("c", "a", 0),
        ("d", "b", 1),
    ]


def test_units_at_home_on_the_gpu_are_never_loaded() -> None:
    timeline = build(accesses("abcabc"), placement("abc", 1, gpu="ac"), updates=False)
    assert [(load.unit, load.access) for load in timeline.loads] == [("b", 1)]
    everything = build(accesses("abcabc"), placement("abc", 0, gpu="abc"), updates=True)
    assert everything.loads == ()
    assert everything.load_of() == [None] * 6


def test_load_without_a_slot_is_refused() -> None:
    with pytest.raises(PlanError, match=r"GPU slots for b.*Raise tiers\.gpu"):
        build(accesses("ab"), placement("ab", 0, gpu="a"), updates=False)


def test_updates_come_once_per_unit_in_order_of_first_use() -> None:
    timeline = build(accesses("cabbac"), placement("abc", 3, gpu="a"), updates=True)
    assert [update.unit for update in timeline.updates] == ["c", "a", "b"]
    assert build(accesses("cabbac"), placement("abc", 3), updates=False).updates == ()


def test_updates_feed_the_first_load_of_weights_from_nvme_alone() -> None:
    timeline = build(accesses("abccba"), placement("abc", 1, ram="b"), updates=True)
    fed = {update.unit: update.load for update in timeline.updates}
    assert fed["b"] is None  # its weights lie in RAM: the load reads them there
    for unit in "ac":
        load = fed[unit]
        assert load is not None
        assert load.access == "abccba".index(unit)
        assert load not in timeline.loads
    assert sorted(load.access for load in timeline.loads) == [1, 4, 5]
    found = timeline.load_of()
    assert [isinstance(step, Update) for step in found] == [True, False, True, False, False, False]
    assert [step is None for step in found] == [False, False, False, True, False, False]
    every = [*timeline.loads, *(load for load in fed.values() if load is not None)]
    check_loads(timeline, every, 1)


def test_timeline_is_pure() -> None:
    order = accesses("abcabccba")
    where = placement("abc", 2)
    assert build(order, where, updates=True) == build(list(order), where, updates=True)


# ---- bytes ----

UNITS = {name: UnitSpec(name, SIZE * (number + 1), 100 * number) for number, name in enumerate("abc")}


def demanded(timeline: Timeline, where: Placement, policy: Policy, *, gradients: bool, updates: bool) -> dict[str, int]:
    trained, updated = UNITS if gradients else (), UNITS if updates else ()
    return demanded_bytes(timeline, where, UNITS, policy, gradients=trained, updated=updated)


def test_demanded_bytes_of_an_evaluation_are_its_loads() -> None:
    where = placement("abc", 1, ram="b")
    timeline = build(accesses("abc"), where, updates=False)
    found = demanded(timeline, where, Policy(), gradients=False, updates=False)
    assert found == {"ram_to_gpu": 2 * 6 * SIZE, "nvme_to_ram": 2 * 4 * SIZE}


@pytest.mark.parametrize("groups", [1, 3])
def test_demanded_bytes_of_a_deferred_step_read_state_once(groups: int) -> None:
    where, policy = placement("abc", 3), Policy(groups=groups)
    timeline = build(accesses("abccba"), where, updates=True)
    found = demanded(timeline, where, policy, gradients=True, updates=True)
    activations = groups * 300
    assert found == {
        "nvme_to_ram": 12 * 6 * SIZE,  # the update feeds the loads
        "ram_to_nvme": 12 * 6 * SIZE,
        "ram_to_gpu": 2 * 6 * SIZE + activations,
        "gpu_to_ram": groups * (2 if groups == 1 else 4) * 6 * SIZE + activations,
    }


def test_demanded_bytes_of_a_backward_that_reloads() -> None:
    where = placement("abc", 1)
    timeline = build(accesses("abccba"), where, updates=True)
    found = demanded(timeline, where, Policy(), gradients=True, updates=True)
    assert found["nvme_to_ram"] == 12 * 6 * SIZE + 2 * (1 + 2) * SIZE  # a and b once more
    assert found["ram_to_gpu"] == 2 * 6 * SIZE + 2 * 3 * SIZE + 300


def test_demanded_bytes_of_a_backward_that_reloads_past_ram() -> None:
    where, policy = placement("abc", 1), Policy(gpu_direct=True)
    timeline = build(accesses("abccba"), where, updates=True)
    found = demanded(timeline, where, policy, gradients=True, updates=True)
    assert found["nvme_to_ram"] == 12 * 6 * SIZE
    assert found["nvme_to_gpu"] == 2 * (1 + 2) * SIZE  # a and b once more
    assert found["ram_to_gpu"] == 2 * 6 * SIZE + 300  # the update feeds the loads


def test_demanded_bytes_past_ram_are_those_on_nvme_alone() -> None:
    where = placement("abc", 1, ram="b")
    timeline = build(accesses("abc"), where, updates=False)
    found = demanded(timeline, where, Policy(gpu_direct=True), gradients=False, updates=False)
    assert found == {"ram_to_gpu": 2 * 2 * SIZE, "nvme_to_gpu": 2 * 4 * SIZE}


def test_demanded_bytes_without_streaming_are_none() -> None:
    units = {name: UnitSpec(name, SIZE) for name in "abc"}
    where = placement("abc", 0, gpu="abc")
    timeline = build(accesses("abccba"), where, updates=True)
    assert demanded_bytes(timeline, where, units, Policy(), gradients=units, updated=units) == {}


def test_update_bytes_count_planes_on_nvme_alone() -> None:
    for where, size in (
        (placement("abc", 1), 12),
        (placement("abc", 1, ram="a"), 10),
        (placement("abc", 1, gpu="a"), 0),
    ):
        moved = update_bytes(UNITS["a"], where, Policy())
        assert moved == {"nvme_to_ram": size * SIZE, "ram_to_nvme": size * SIZE}


def test_update_bytes_count_a_gradient_on_nvme_once() -> None:
    where = replace(placement("abc", 1), grad_homes=dict.fromkeys("abc", Tier.NVME))
    assert update_bytes(UNITS["a"], where, Policy()) == {"nvme_to_ram": 14 * SIZE, "ram_to_nvme": 12 * SIZE}
    timeline = build(accesses("abccba"), where, updates=False)
    found = demanded(timeline, where, Policy(), gradients=True, updates=False)
    assert found["ram_to_nvme"] == 2 * 6 * SIZE


@pytest.mark.parametrize("gpu_direct", [False, True])
def test_demanded_bytes_of_sums_that_come_to_the_gpu_again(gpu_direct: bool) -> None:
    policy = Policy(groups=3, gpu_direct=gpu_direct, align_elements=SIZE)
    homes = {"a": Tier.NVME, "b": Tier.RAM, "c": Tier.GPU}
    where = replace(placement("abc", 1, gpu="abc"), grad_homes=homes, sums_on_gpu=True)
    timeline = build(accesses("abccba"), where, updates=False)
    found = demanded(timeline, where, policy, gradients=True, updates=False)
    a, b = (UNITS[name].num_elements for name in "ab")
    activations = 3 * sum(unit.activation_bytes for unit in UNITS.values())
    assert found == {
        "gpu_to_ram": 10 * (a + b) + activations,
        "ram_to_nvme": 10 * a,
        ("nvme_to_gpu" if gpu_direct else "nvme_to_ram"): 8 * a,
        "ram_to_gpu": 8 * b + activations + (0 if gpu_direct else 8 * a),
    }
