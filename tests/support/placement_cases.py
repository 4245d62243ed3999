"""Many random models and budgets for tests of placement, and the bytes that a placement takes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

from megatier.errors import PlanError
from megatier.schedule.budgets import Budgets
from megatier.schedule.placement import Placement, place
from megatier.schedule.policy import Policy
from megatier.schedule.sizes import grad_bytes
from megatier.schedule.unit_spec import UnitSpec
from megatier.state import ADAMW_BF16, ADAMW_FP32
from megatier.tier import Tier, round_up

KIB = 1 << 10
SEEDS = range(300)
LAYERS = [
    UnitSpec(name="embed", num_elements=64 << 10),
    *[UnitSpec(name=f"layer{i}", num_elements=32 << 10) for i in range(6)],
    UnitSpec(name="head", num_elements=64 << 10),
]
PLENTY = Budgets(1 << 40, 1 << 40, 1 << 40)
Case = tuple[list[UnitSpec], Budgets, Policy]


def random_case(seed: int) -> Case:
    """Units, budgets and a policy; about half of them fit."""
    choose = random.Random(seed)
    units = [
        UnitSpec(
            name=f"unit{number}",
            num_elements=2048 * choose.randint(1, 40),
            activation_bytes=choose.choice([0, 0, 5000]),
        )
        for number in range(choose.randint(1, 10))
    ]
    state = 12 * sum(unit.num_elements for unit in units)
    budgets = Budgets(*(int(state * choose.uniform(0, 1.5)) for _ in range(3)))
    tiers = [(Tier.GPU, Tier.RAM, Tier.NVME), (Tier.RAM, Tier.NVME), (Tier.GPU,), (Tier.NVME,), (Tier.RAM,)]
    state_tiers = choose.choice(tiers)
    schema = ADAMW_BF16 if choose.random() < 0.5 else ADAMW_FP32
    policy = Policy(
        state=state_tiers,
        deferred=choose.random() < 0.5,
        groups=choose.choice([1, 1, 3]),
        chunk_elements=choose.choice([None, None, 2048, 5000]),
        streamed_share=choose.choice([0.0, 0.5, 1.0]),
        align_elements=2048,
    )
    return [replace(unit, schema=schema) for unit in units], budgets, policy


def mixed(case: Case) -> Case:
    """The same with units of two schemas."""
    units, budgets, policy = case
    schemas = cycle((ADAMW_BF16, ADAMW_FP32, ADAMW_BF16))
    return [replace(unit, schema=schema) for unit, schema in zip(units, schemas, strict=False)], budgets, policy


def streaming_case(seed: int) -> Case:
    """The same with streaming asked for, RAM that is nearly enough, and clipping."""
    units, budgets, policy = random_case(seed)
    choose = random.Random(seed)
    state = 12 * sum(unit.num_elements for unit in units)
    budgets = replace(budgets, gpu=int(state * choose.uniform(0.5, 2)), ram=int(state * choose.uniform(1, 1.5)))
    tiers = choose.choice([(Tier.RAM,), (Tier.RAM, Tier.NVME)])
    return units, budgets, replace(policy, state=tiers, deferred=True, streamed_share=choose.choice([0.3, 0.7, 1.0]))


def placed(case: Case) -> tuple[Case, Placement] | None:
    try:
        return case, place(*case)
    except PlanError:
        return None


CASES = [*map(random_case, SEEDS), *map(streaming_case, range(100))]
CASES += [mixed(case) for case in CASES[::4]]
PLACED = [(case, placed(case)) for case in CASES]
FITTING = [found for _, found in PLACED if found is not None]
REFUSED = [case for case, found in PLACED if found is None]


def homes_of(placement: Placement, units: Sequence[UnitSpec], tier: Tier) -> int:
    """Bytes of state at home in a tier."""
    return sum(
        round_up(unit.num_elements * unit.schema.width(kind))
        for unit in units
        for kind in unit.schema.kinds
        if placement.homes[unit.name, kind] is tier
    )


def taken(case: Case, placement: Placement, tier: Tier) -> int:
    """Everything that the store will set aside in a tier, counted from the placement alone."""
    units, _, policy = case
    total = homes_of(placement, units, tier)
    total += sum(round_up(plan.slot_bytes) * plan.num_slots for plan in placement.slots if plan.tier is tier)
    total += sum(grad_bytes(unit, policy) for unit in units if placement.grad_homes[unit.name] is tier)
    homes = placement.activation_homes
    return total + sum(round_up(unit.activation_bytes) for unit in units if homes.get(unit.name) is tier)
