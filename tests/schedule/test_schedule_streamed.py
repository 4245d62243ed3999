"""Placement of streamed units: properties over many random models and budgets."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from placement_cases import FITTING, KIB, LAYERS, PLENTY, placed, streaming_case, taken

from megatier.schedule.budgets import Budgets
from megatier.schedule.placement import place
from megatier.schedule.policy import Policy
from megatier.schedule.sizes import grad_bytes
from megatier.schedule.slots import SLOTS_MIN
from megatier.schedule.unit_spec import UnitSpec
from megatier.state import ADAMW_BF16
from megatier.tier import Kind, Tier, round_up


def test_streamed_units_are_at_home_in_ram_within_the_share_and_none_is_larger_than_most() -> None:
    seen: Counter[bool] = Counter()
    for (units, _, policy), placement in FITTING:
        rest = [unit for unit in units if placement.homes[unit.name, Kind.WEIGHT] is not Tier.GPU]
        sizes = {unit.name: unit.num_elements for unit in rest}
        streamed = placement.streamed
        assert list(streamed) == [name for name in sizes if name in streamed]  # forward order
        assert sum(sizes[name] for name in streamed) <= policy.streamed_share * sum(sizes.values())
        assert all(sizes[name] <= 2 * sorted(sizes.values())[len(rest) // 2] for name in streamed)
        if streamed:
            assert policy.deferred
            assert {placement.homes[unit.name, kind] for unit in rest for kind in unit.kinds} <= {Tier.RAM}
        seen[bool(streamed)] += 1
    assert min(seen.values()) > 15


def test_streamed_state_has_a_gpu_slot_per_unit_and_kind_but_none_for_weights_and_its_gradient_no_ram() -> None:
    for (units, _, policy), placement in FITTING:
        streamed = [unit for unit in units if unit.name in placement.streamed]
        plans = {
            plan.kind: plan
            for plan in placement.slots
            if plan.tier is Tier.GPU and plan.kind in ADAMW_BF16.passing_kinds
        }
        assert set(plans) == {kind for unit in streamed for kind in unit.schema.passing_kinds}
        for kind, plan in plans.items():
            having = [unit for unit in streamed if kind in unit.schema.kinds]
            assert plan.num_slots == len(having)
            assert plan.slot_bytes == max(round_up(unit.num_elements * unit.schema.width(kind)) for unit in having)
        if policy.deferred:
            shipped = [unit for unit in units if placement.update_queue(unit.name) != "update_gpu"]
            held = sum(grad_bytes(unit, policy) for unit in shipped if placement.grad_homes[unit.name] is Tier.RAM)
            homes = placement.activation_homes
            held += sum(round_up(unit.activation_bytes) for unit in units if homes.get(unit.name) is Tier.RAM)
            slots = sum(round_up(plan.slot_bytes) * plan.num_slots for plan in placement.slots if plan.tier is Tier.RAM)
            assert placement.other_bytes[Tier.RAM] == held + slots


def test_streamed_share_zero_or_no_clipping_streams_nothing() -> None:
    for (units, budgets, policy), placement in FITTING:
        plain = replace(policy, streamed_share=0.0)
        if not (policy.streamed_share and policy.deferred):
            assert placement.streamed == ()
            assert place(units, budgets, plain) == placement
        elif not placement.streamed:
            assert place(units, budgets, plain) == placement


def test_ranks_that_stream_take_what_the_plan_says_and_no_more_than_the_budget() -> None:
    seen: Counter[bool] = Counter()
    for seed in range(100):
        units, budgets, policy = streaming_case(seed)
        case = units, replace(budgets, gpu=3 * budgets.gpu), replace(policy, num_ranks=2)
        if (found := placed(case)) is None:
            continue
        placement = found[1]
        planned = placement.state_bytes.get(Tier.GPU, 0) + placement.other_bytes[Tier.GPU]
        assert taken(case, placement, Tier.GPU) == planned <= case[1].gpu
        assert placement.num_slots(Tier.GPU, Kind.GATHERED) >= min(len(units), SLOTS_MIN)
        seen[bool(placement.streamed)] += 1
    assert seen[True] > 30


IN_RAM = Policy(state=(Tier.RAM,), streamed_share=1.0)
WIDE = [UnitSpec(name="embed", num_elements=96 << 10), *LAYERS[1:-1], UnitSpec(name="head", num_elements=96 << 10)]
"""Embedding and head are larger than most."""
LAYER = (10 + 2) * 32 * KIB
"""GPU bytes of a streamed layer: remainder, moments, gradient."""
LEAST = 4 * 2 * 96 * KIB


def test_streamed_units_are_as_many_as_there_is_room_for_beside_the_least() -> None:
    for count in range(7):
        for less in (0, 4096):
            placement = place(WIDE, replace(PLENTY, gpu=LEAST + count * LAYER + less), IN_RAM)
            assert placement.streamed == tuple(f"layer{number}" for number in range(count))
    assert place(WIDE, PLENTY, IN_RAM).streamed == tuple(f"layer{number}" for number in range(6))


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.08, 0), (0.09, 1), (0.2, 2), (0.25, 3), (0.5, 6), (1.0, 6)])
def test_streamed_units_fill_the_share(share: float, count: int) -> None:
    """Six layers of a twelfth each; embedding and head have three."""
    placement = place(WIDE, PLENTY, replace(IN_RAM, streamed_share=share))
    assert placement.streamed == tuple(f"layer{number}" for number in range(count))


def test_streaming_is_given_up_where_ram_is_short() -> None:
    state = 12 * 12 * 32 * KIB
    policy = replace(IN_RAM, state=(Tier.RAM, Tier.NVME))
    grads = 2 * 6 * 32 * KIB  # of embedding and head alone
    enough = place(WIDE, Budgets(8 << 20, state + grads, 1 << 40), policy)
    assert len(enough.streamed) == 6
    short = Budgets(8 << 20, state + grads - 4096, 1 << 40)
    assert place(WIDE, short, policy) == place(WIDE, short, replace(policy, streamed_share=0.0))
    assert Tier.NVME in place(WIDE, short, policy).homes.values()


def test_streaming_comes_after_state_at_home_on_the_gpu() -> None:
    layers = LAYERS[1:-1]
    home, slots = 14 * 32 * KIB, 4 * 2 * 32 * KIB
    policy = replace(IN_RAM, state=(Tier.GPU, Tier.RAM))
    placement = place(layers, replace(PLENTY, gpu=slots + 2 * home + LAYER), policy)
    assert [placement.homes[unit.name, Kind.WEIGHT] for unit in layers] == [Tier.GPU] * 2 + [Tier.RAM] * 4
    assert placement.streamed == ("layer2",)
