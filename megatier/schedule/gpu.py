"""The share of the GPU in a placement: units at home there, streamed units, and slots for all others. Pure.

`place` calls it first. Units are chosen in forward order, so that the next forward can start at once, but units that
are larger than most come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatier.schedule.policy import Policy
from megatier.schedule.sizes import grad_bytes, passing_kinds_of, state_bytes, trained_bytes, trained_units
from megatier.schedule.slots import SlotPlan, collective_slots, gpu_slots, least_gpu_bytes, total_bytes
from megatier.schedule.unit_spec import UnitSpec
from megatier.tier import Tier


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuShare:
    """The units and slots of the GPU. All lists are in forward order."""

    resident: list[UnitSpec]
    """Units at home on the GPU."""
    rest: list[UnitSpec]
    """All others."""
    streamed: list[UnitSpec]
    """Units of the rest whose state passes through the GPU to be updated there."""
    slots: tuple[SlotPlan, ...]
    """GPU slots for blocks that pass, and for collectives."""


def fill_gpu(units: Sequence[UnitSpec], budget: int, policy: Policy) -> GpuShare:
    """Choose the units and slots of the GPU.

    Args:
        units: all units, in forward order.
        budget: bytes of the GPU.
        policy: the tiers that may hold state, and all else that decides sizes.

    Raises:
        PlanError: there is no room for the fewest slots.
    """
    # Slots for collectives come first, because nothing can be computed without them.
    fewest_slots = collective_slots(units, 0, policy)
    collective_bytes = total_bytes(fewest_slots)

    # All other slots depend only on the units that are not at home here.
    names = _choose_resident(units, budget - collective_bytes, policy)
    resident = [spec for spec in units if spec.name in names]
    rest = [spec for spec in units if spec.name not in names]
    homed_bytes = sum(state_bytes(spec) + grad_bytes(spec, policy) for spec in resident)
    taken_bytes = homed_bytes + collective_bytes
    streamed = _choose_streamed(rest, budget - taken_bytes, policy)
    slots = gpu_slots(rest, taken_bytes, streamed, budget, policy)

    # Whole weights get the rest, so that few have to be gathered twice.
    streamed_grad_bytes = sum(grad_bytes(spec, policy) for spec in streamed)
    left_bytes = budget - homed_bytes - streamed_grad_bytes - total_bytes(slots)
    slots += collective_slots(units, left_bytes, policy)
    return GpuShare(resident=resident, rest=rest, streamed=streamed, slots=slots)


def _choose_resident(units: Sequence[UnitSpec], budget: int, policy: Policy) -> set[str]:
    """Choose units whose whole state fits the budget beside the slots of all other units.

    Units that are larger than most (embeddings, heads) come first, because one that is left out sets the size of every
    slot. All others follow in forward order.
    """
    chosen: set[str] = set()
    if Tier.GPU not in policy.state:
        return chosen

    # The sort is stable, so forward order stays among large units, and among the others.
    usual = _usual_elements([spec.num_elements for spec in units])
    large_first = sorted(units, key=lambda spec: spec.num_elements <= usual)
    used = 0
    for spec in large_first:
        homed = state_bytes(spec) + grad_bytes(spec, policy)

        # Units that are not chosen yet need slots, unless they are chosen later.
        unchosen = [other for other in units if other.name not in chosen]
        rest = [other for other in unchosen if other is not spec]
        if used + homed + least_gpu_bytes(rest, policy) <= budget:
            chosen.add(spec.name)
            used += homed

    return chosen


def _usual_elements(sizes: Sequence[int]) -> int:
    """Return twice the median size. A larger unit counts as larger than most."""
    if not sizes:
        return 0
    middle = sorted(sizes)[len(sizes) // 2]
    return 2 * middle


def _choose_streamed(rest: Sequence[UnitSpec], budget: int, policy: Policy) -> list[UnitSpec]:
    """Choose the first units in forward order, up to the wanted share and the room that homes on the GPU leave.

    Each gets its own slots, all of one size, so units that are larger than most (embeddings) are left to the CPU.

    Args:
        rest: units that are not at home on the GPU.
        budget: bytes of the GPU beside homes and slots for collectives.
        policy: the wanted share, and all else that decides sizes.
    """
    # Streamed state is updated after the backward, for which the immediate mode does not wait.
    candidates = trained_units(rest)
    is_wanted = policy.deferred and policy.streamed_share
    if not (is_wanted and candidates and Tier.RAM in policy.state):
        return []

    # The largest unit that may be chosen sets the size of the slots.
    most_elements = _usual_elements([spec.num_trained for spec in candidates])
    usual = [spec for spec in candidates if spec.num_trained <= most_elements]
    slot_bytes = {}
    for kind in passing_kinds_of(usual):
        sizes = [trained_bytes(spec, kind) for spec in usual if kind in spec.kinds]
        slot_bytes[kind] = max(sizes)

    # The fewest slots for weights and gradients come first, because nothing runs without them.
    wanted = policy.streamed_share * sum(spec.num_trained for spec in candidates)
    room = budget - least_gpu_bytes(rest, policy)
    chosen: list[UnitSpec] = []

    for spec in usual:
        passing = sum(slot_bytes[kind] for kind in spec.schema.passing_kinds)
        cost = passing + grad_bytes(spec, policy)
        if spec.num_trained <= wanted and cost <= room:
            chosen.append(spec)
            wanted -= spec.num_trained
            room -= cost

    return chosen
