"""Placement: properties over many random models and budgets."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest
from placement_cases import FITTING, KIB, LAYERS, PLENTY, REFUSED, taken

from megatier.byte_counts import format_bytes_up
from megatier.config.values import parse_bytes
from megatier.errors import PlanError
from megatier.schedule.budgets import Budgets
from megatier.schedule.placement import Placement, place
from megatier.schedule.policy import Policy
from megatier.schedule.sizes import grad_bytes
from megatier.schedule.slots import SLOTS_MIN
from megatier.schedule.unit_spec import UnitSpec
from megatier.state import ADAMW_BF16, ADAMW_FP32
from megatier.tier import Kind, Tier


def test_cases_are_a_fair_mix() -> None:
    assert len(FITTING) > 60
    assert len(REFUSED) > 60
    used = {tuple(sorted(set(placement.homes.values()))) for _, placement in FITTING}
    assert len(used) >= 5


def test_no_tier_for_the_state_is_refused_with_what_would_do() -> None:
    for state, what in (
        ((Tier.GPU,), "state on the GPU"),
        ((Tier.NVME,), "state on NVMe"),
        ((Tier.RAM,), "state in RAM"),
    ):
        with pytest.raises(PlanError, match=what) as caught:
            place(LAYERS, Budgets(1 << 20, 1 << 20, 0), Policy(state=state))
        assert caught.value.needed_bytes > caught.value.had_bytes


# ---- what always holds ----


def test_budgets_are_never_exceeded_and_the_plan_says_what_is_taken() -> None:
    for case, placement in FITTING:
        for tier, budget in ((Tier.GPU, case[1].gpu), (Tier.RAM, case[1].ram), (Tier.NVME, case[1].nvme)):
            planned = placement.state_bytes.get(tier, 0) + placement.other_bytes.get(tier, 0)
            assert taken(case, placement, tier) == planned <= budget, case


def test_every_plane_has_one_home_in_an_allowed_tier() -> None:
    for (units, _, policy), placement in FITTING:
        assert set(placement.homes) == {(unit.name, kind) for unit in units for kind in unit.schema.kinds}
        assert set(placement.homes.values()) <= set(policy.state)


def test_a_unit_on_the_gpu_is_there_whole_with_its_gradient() -> None:
    for (units, _, _), placement in FITTING:
        for unit in units:
            homes = {placement.homes[unit.name, kind] for kind in unit.schema.kinds}
            assert Tier.GPU not in homes or homes == {Tier.GPU}
            is_updated_there = homes == {Tier.GPU} or unit.name in placement.streamed
            assert (placement.grad_homes[unit.name] is Tier.GPU) == is_updated_there
            assert (placement.update_queue(unit.name) == "update_gpu") == is_updated_there


def test_gradients_wait_in_ram_or_on_nvme_where_updates_are_deferred_or_sums_are_taken() -> None:
    seen: Counter[tuple[bool, bool]] = Counter()
    for (_, budgets, policy), placement in FITTING:
        waits = {Tier.GPU, Tier.RAM} if policy.deferred or policy.groups > 1 else {Tier.GPU, None}
        can_spill = None not in waits and Tier.NVME in policy.state and budgets.nvme > 0
        assert set(placement.grad_homes.values()) <= waits | ({Tier.NVME} if can_spill else set())
        assert policy.groups > 1 or not placement.sums_on_gpu
        spills = Tier.NVME in placement.grad_homes.values()
        assert placement.sums_on_gpu or not (spills and policy.groups > 1)
        seen[spills, policy.groups > 1] += 1
    assert seen[True, True] > 0
    assert seen[False, True] > 0


def test_sums_of_groups_stay_in_ram_as_far_as_there_is_room() -> None:
    policy = Policy(state=(Tier.RAM, Tier.NVME), groups=2, chunk_elements=2048, align_elements=2048)
    sums = [grad_bytes(unit, policy) for unit in LAYERS]
    counts = []
    for ram in range(128 * KIB, sum(sums) + 2 * max(sums) + 128 * KIB, 64 * KIB):
        placement = place(LAYERS, Budgets(1 << 20, ram, 1 << 40), policy)
        in_ram = sum(home is Tier.RAM for home in placement.grad_homes.values())
        assert placement.sums_on_gpu or in_ram == len(LAYERS)
        counts.append(in_ram)
    assert counts == sorted(counts)
    assert {0, len(LAYERS)} < set(counts)


def test_sums_of_groups_that_find_no_room_are_refused_with_their_bytes_and_what_helps() -> None:
    policy = Policy(state=(Tier.RAM,), groups=2)
    with pytest.raises(
        PlanError, match=r"of it for sums of groups.*let NVMe hold state.*or lower train\.groups"
    ) as caught:
        place(LAYERS, Budgets(1 << 20, 512 * KIB, 0), policy)
    sums = sum(grad_bytes(unit, policy) for unit in LAYERS)
    assert caught.value.needed_bytes == sums + 2 * 4 * 64 * KIB
    assert f"{format_bytes_up(sums)} of it" in caught.value.what
    advised = replace(policy, state=(Tier.NVME,), chunk_elements=32 * KIB)
    assert place(LAYERS, Budgets(1 << 20, 2048 * KIB, 1 << 40), advised).sums_on_gpu


def test_slots_serve_the_largest_unit_that_passes() -> None:
    for (units, _, policy), placement in FITTING:
        passing = [unit for unit in units if placement.homes[unit.name, Kind.WEIGHT] is not Tier.GPU]
        slots = {(plan.tier, plan.kind): plan for plan in placement.slots}
        if not passing:
            assert not slots
            continue
        weight, grad = slots[Tier.GPU, Kind.WEIGHT], slots[Tier.GPU, Kind.GRAD]
        assert weight.slot_bytes >= max(unit.num_elements * unit.schema.width(Kind.WEIGHT) for unit in passing)
        assert min(len(passing), SLOTS_MIN) <= weight.num_slots <= len(passing)
        assert grad.slot_bytes >= max(grad_bytes(unit, policy) for unit in passing)
        if Tier.NVME in placement.homes.values():
            has_weights = any(placement.homes[unit.name, Kind.WEIGHT] is Tier.NVME for unit in units)
            assert ((Tier.RAM, Kind.WEIGHT) in slots) is has_weights
            for unit in (unit for unit in units if unit.name in placement.spilled):
                for kind in unit.schema.kinds if has_weights else unit.schema.passing_kinds:
                    chunk = min(placement.chunk_elements, unit.num_elements)
                    assert slots[Tier.RAM, kind].slot_bytes >= chunk * unit.schema.width(kind)
            assert placement.chunk_elements % policy.align_elements == 0


def ram_slots(placement: Placement) -> dict[Kind, int]:
    """Bytes of one RAM slot of each kind."""
    return {plan.kind: plan.slot_bytes for plan in placement.slots if plan.tier is Tier.RAM}


def test_frozen_weights_on_nvme_alone_pass_through_slots_for_weights_alone() -> None:
    """80 MiB of slots, where slots for all kinds of state would take 320."""
    frozen = [UnitSpec(name=name, num_elements=64 << 20, frozen_elements=64 << 20) for name in "abc"]
    units = [UnitSpec(name="head", num_elements=1 << 20), *frozen]
    policy = Policy(state=(Tier.GPU, Tier.NVME), chunk_elements=8 << 20)
    placement = place(units, Budgets(320 << 20, 300 << 20, 1 << 30), policy)
    assert placement.homes["head", Kind.EXP_AVG] is Tier.GPU
    assert {placement.homes[name, Kind.WEIGHT] for name in "abc"} == {Tier.NVME}
    assert ram_slots(placement) == {Kind.WEIGHT: 16 << 20}
    assert placement.other_bytes[Tier.RAM] == 80 << 20


def test_frozen_weights_beside_trained_state_in_ram_pass_through_slots_for_weights_alone() -> None:
    units = [
        UnitSpec(name="head", num_elements=1 << 20),
        UnitSpec(name="layer", num_elements=64 << 20, frozen_elements=64 << 20),
    ]
    policy = Policy(state=(Tier.RAM, Tier.NVME), chunk_elements=8 << 20)
    placement = place(units, Budgets(1 << 30, 110 << 20, 1 << 30), policy)
    assert {kind: home for (name, kind), home in placement.homes.items() if home is Tier.NVME} == {
        Kind.WEIGHT: Tier.NVME
    }
    assert set(ram_slots(placement)) == {Kind.WEIGHT}


def test_slots_for_updates_take_the_largest_trained_unit_that_spills() -> None:
    units = [
        UnitSpec(name="head", num_elements=1 << 20),
        UnitSpec(name="layer", num_elements=64 << 20, frozen_elements=60 << 20),
    ]
    units.append(UnitSpec(name="embed", num_elements=64 << 20, frozen_elements=64 << 20))
    policy = Policy(state=(Tier.NVME,), chunk_elements=8 << 20)
    placement = place(units, Budgets(1 << 30, 300 << 20, 1 << 40), policy)
    wide, narrow = 4 * (4 << 20), 2 * (4 << 20)
    moments = {Kind.EXP_AVG: wide, Kind.EXP_AVG_SQ: wide}
    assert ram_slots(placement) == {Kind.WEIGHT: 16 << 20, Kind.REMAINDER: narrow} | moments


def test_small_state_beside_frozen_weights_is_in_ram_before_any_weights() -> None:
    """Layers with adapters: what NVMe would write in each step is little, so RAM takes it first."""
    layers = [UnitSpec(name=name, num_elements=65 << 20, frozen_elements=64 << 20) for name in "abcd"]
    head = UnitSpec(name="head", num_elements=32 << 20)
    policy = Policy(state=(Tier.RAM, Tier.NVME), chunk_elements=1 << 20)
    placement = place([*layers, head], Budgets(1 << 30, 500 << 20, 1 << 40), policy)
    homes = placement.homes
    assert {homes[unit.name, kind] for unit in layers for kind in unit.schema.passing_kinds} == {Tier.RAM}
    assert {homes[unit.name, Kind.WEIGHT] for unit in layers} == {Tier.RAM, Tier.NVME}
    assert {homes["head", kind] for kind in head.schema.passing_kinds} == {Tier.NVME}


def test_more_of_any_budget_keeps_a_plan_possible() -> None:
    for (units, budgets, policy), _ in FITTING:
        for name in ("gpu", "ram", "nvme"):
            for extra in (1, 4096, 100_000, 10_000_000):
                place(units, replace(budgets, **{name: getattr(budgets, name) + extra}), policy)


def test_more_of_any_budget_spills_no_more() -> None:
    for (units, budgets, policy), placement in FITTING:
        for name in ("gpu", "ram"):
            larger = place(units, replace(budgets, **{name: 2 * getattr(budgets, name) + 4096}), policy)
            assert larger.state_bytes.get(Tier.NVME, 0) <= placement.state_bytes.get(Tier.NVME, 0)


def test_placement_repeats() -> None:
    for case, placement in FITTING[:50]:
        assert place(*case) == placement


# ---- refusals ----


def test_refusal_names_figures_and_a_minimum_that_works() -> None:
    """Following the advice, one message after the other, ends in a plan; each figure is what is needed."""
    for units, budgets, policy in REFUSED:
        for _ in range(6):
            try:
                place(units, budgets, policy)
                break
            except PlanError as error:
                assert error.needed_bytes > error.had_bytes >= 0
                budgets = follow(error, budgets)
        else:
            raise AssertionError((units, budgets, policy))


def follow(error: PlanError, budgets: Budgets) -> Budgets:
    """What a user types who reads the message."""
    if error.what in ("state on NVMe", "state and activations on NVMe"):
        return replace(budgets, nvme=error.needed_bytes)
    found = re.search(r"Raise tiers\.(gpu|ram) to at least ([\d.]+ \w+)", error.remedy)
    assert found, error.remedy
    tier, size = found.groups()
    minimum = parse_bytes(size)
    assert minimum >= error.needed_bytes > getattr(budgets, tier)
    return replace(budgets, **{tier: minimum})


def test_gpu_smaller_than_one_unit_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="GPU slots for the largest unit, embed: needs") as caught:
        place(LAYERS, replace(PLENTY, gpu=100 * KIB), Policy())
    assert caught.value.needed_bytes == 2 * 64 * KIB * 2 + 2 * 64 * KIB * 2
    assert caught.value.had_bytes == 100 * KIB


def test_gradients_that_do_not_fit_name_clipping() -> None:
    budgets = Budgets(512 * KIB, 100 * KIB, 1 << 40)
    with pytest.raises(PlanError, match=r"or set train\.clip to null and numerics\.guard to false\."):
        place(LAYERS, budgets, Policy(state=(Tier.RAM,)))


def test_state_without_a_mount_names_both_ways_out() -> None:
    budgets = Budgets(512 * KIB, 1024 * KIB, 0)
    with pytest.raises(PlanError, match=r"or give tiers\.nvme a mount"):
        place(LAYERS, budgets, Policy(state=(Tier.RAM, Tier.NVME)))


# ---- the order of choice ----


def test_gpu_is_filled_in_forward_order() -> None:
    state = 12 * 32 * KIB + 2 * 32 * KIB
    slots = 4 * 2 * 64 * KIB
    for count in range(1, 6):
        units = LAYERS[1:]
        placement = place(units, replace(PLENTY, gpu=count * state + slots), Policy())
        on_gpu = [unit.name for unit in units if placement.homes[unit.name, Kind.WEIGHT] is Tier.GPU]
        assert on_gpu == [f"layer{number}" for number in range(count)]


def test_everything_on_the_gpu_needs_no_slots() -> None:
    placement = place(LAYERS, PLENTY, Policy())
    assert set(placement.homes.values()) == {Tier.GPU}
    assert placement.slots == ()


def test_spare_gpu_memory_becomes_weight_slots() -> None:
    policy = Policy(state=(Tier.RAM,))
    least = place(LAYERS, replace(PLENTY, gpu=512 * KIB), policy)
    more = place(LAYERS, replace(PLENTY, gpu=512 * KIB + 3 * 128 * KIB), policy)
    assert least.num_slots(Tier.GPU, Kind.WEIGHT) == 2
    assert more.num_slots(Tier.GPU, Kind.WEIGHT) == 5
    assert place(LAYERS, PLENTY, policy).num_slots(Tier.GPU, Kind.WEIGHT) == len(LAYERS)


def test_weight_planes_come_first_in_ram() -> None:
    policy = Policy(deferred=False, chunk_elements=2048, align_elements=2048)
    seen: Counter[str] = Counter()
    sizes = {unit.name: unit.num_elements for unit in LAYERS}
    for ram in range(400 * KIB, 3 << 20, 64 * KIB):
        placement = place(LAYERS, Budgets(512 * KIB, ram, 1 << 40), policy)
        homes = placement.homes.items()
        spilled = [2 * sizes[name] for (name, kind), tier in homes if tier is Tier.NVME and kind is Kind.WEIGHT]
        others = [plane for plane, tier in homes if tier is Tier.RAM and plane[1] is not Kind.WEIGHT]
        # Another plane is in RAM only in a rest that is too small for any weight plane that is not.
        rest = sum(sizes[name] * ADAMW_BF16.width(kind) for name, kind in others)
        assert not spilled or rest < min(spilled)
        seen["weights alone" if not others else "more"] += 1
    assert min(seen.values()) > 3


def test_weights_that_are_all_in_ram_leave_the_room_of_their_slots_to_other_state() -> None:
    policy = Policy(state=(Tier.RAM, Tier.NVME), chunk_elements=32 * KIB)
    weights, grads = 2 * 320 * KIB, 2 * 320 * KIB
    slots = (5 * 2, 3 * (2 + 4 + 4))  # bytes an element, of weights and of the rest
    for room in (slots[1] * 32 * KIB, sum(slots) * 32 * KIB):
        placement = place(LAYERS, Budgets(512 * KIB, grads + weights + room, 1 << 40), policy)
        assert {placement.homes[unit.name, Kind.WEIGHT] for unit in LAYERS} == {Tier.RAM}
        assert not placement.num_slots(Tier.RAM, Kind.WEIGHT)
    spilled = place(LAYERS, Budgets(512 * KIB, grads + weights + slots[1] * 32 * KIB - 4096, 1 << 40), policy)
    assert spilled.num_slots(Tier.RAM, Kind.WEIGHT) == 5


def test_gradient_bytes_follow_the_dtype_and_the_groups() -> None:
    unit = UnitSpec(name="unit", num_elements=4096)
    assert grad_bytes(unit, Policy()) == 2 * 4096
    assert grad_bytes(unit, Policy(groups=2)) == 4 * 4096
    assert grad_bytes(replace(unit, schema=ADAMW_FP32), Policy()) == 4 * 4096


# ---- activations ----

OFFLOADED = [replace(unit, activation_bytes=1 << 20) for unit in LAYERS]
ON_GPU = Policy(state=(Tier.GPU,))
"""RAM is left to activations."""


def activation_homes(ram: int, nvme: int = 1 << 30, policy: Policy = ON_GPU) -> list[str]:
    placement = place(OFFLOADED, Budgets(1 << 30, ram, nvme), policy)
    assert placement.other_bytes[Tier.RAM] <= ram
    assert placement.other_bytes[Tier.NVME] == (1 << 20) * list(placement.activation_homes.values()).count(Tier.NVME)
    return [str(home) for home in placement.activation_homes.values()]


def test_activations_stay_in_ram_where_they_fit_and_else_the_fewest_first_ones_spill() -> None:
    assert activation_homes(8 << 20) == ["ram"] * 8
    slots = 2 * (64 << 10)
    assert activation_homes((8 << 20) - 1) == ["nvme"] + ["ram"] * 7
    assert activation_homes((3 << 20) + slots) == ["nvme"] * 5 + ["ram"] * 3
    assert activation_homes((3 << 20) + slots - 1) == ["nvme"] * 6 + ["ram"] * 2
    assert activation_homes(slots) == ["nvme"] * 8


def test_activations_for_which_no_tier_has_room_are_refused_with_what_would_do() -> None:
    for ram, nvme, what in ((4 << 20, 0, "gradients and activations in RAM"), (1 << 16, 1 << 30, "activations in RAM")):
        with pytest.raises(PlanError, match=what) as caught:
            activation_homes(ram, nvme)
        assert activation_homes(caught.value.needed_bytes, nvme)
    with pytest.raises(PlanError, match="state and activations on NVMe"):
        activation_homes(1 << 20, 4 << 20)


def test_activations_leave_room_for_update_chunks_that_drives_move_at_full_speed() -> None:
    """If state spills as well. Chunks of the least size would fit with one activation more in RAM."""
    policy = Policy(state=(Tier.NVME,))
    units = [replace(unit, num_elements=8 << 20, activation_bytes=64 << 20) for unit in LAYERS]
    placement = place(units, Budgets(1 << 30, 512 << 20, 1 << 40), policy)
    assert placement.activation_homes["head"] is Tier.RAM
    assert placement.activation_homes["embed"] is Tier.NVME
    assert placement.chunk_elements >= 1 << 20
