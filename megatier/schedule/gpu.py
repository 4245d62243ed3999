"""Decides which units are at home on the GPU, which are streamed to it, and which slots the others have there. Pure.

Units come in forward order, so that the next forward starts at once; those larger than most come first.
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
    """The share of the GPU in the units. All lists are in forward order."""

    resident: list[UnitSpec]
    """Units at home on the GPU."""
    rest: list[UnitSpec]
    """All others."""
    streamed: list[UnitSpec]
    """Those of the others whose state passes through the GPU to be updated there."""
    slots: tuple[SlotPlan, ...]
    """Slots on the GPU for what passes, and for what ranks send each other."""


def fill_gpu(units: Sequence[UnitSpec], budget: int, policy: Policy) -> GpuShare:
    """Choose what the GPU takes.

    Args:
        units: all units, in forward order.
        budget: bytes of the GPU.
        policy: the tiers that may hold state, and all that decides sizes.

    Raises:
        PlanError: there is no room for the slots without which nothing runs.
    """
    # Slots for what ranks send each other come before all else, since nothing computes without them.
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

    # Whole weights take what is left, so that few of them have to be gathered a second time.
    streamed_grad_bytes = sum(grad_bytes(spec, policy) for spec in streamed)
    left_bytes = budget - homed_bytes - streamed_grad_bytes - total_bytes(slots)
    slots += collective_slots(units, left_bytes, policy)
    return GpuShare(resident=resident, rest=rest, streamed=streamed, slots=slots)


def _choose_resident(units: Sequence[UnitSpec], budget: int, policy: Policy) -> set[str]:
    """Choose units whose whole state fits into so many bytes in addition to the slots of the others.

    Those that are larger than most come first, then all others in forward order. Large ones (embeddings, heads) come
    first because one that is left out sets the size of every slot.
    """
    chosen: set[str] = set()
    if Tier.GPU not in policy.state:
        return chosen

    # The sort is stable: among the large ones, and among the others, forward order stays.
    usual = _usual_elements([spec.num_elements for spec in units])
    large_first = sorted(units, key=lambda spec: spec.num_elements <= usual)
    used = 0
    for spec in large_first:
        homed = state_bytes(spec) + grad_bytes(spec, policy)

        # All units that are not chosen yet have to pass through slots, unless they are chosen later.
        unchosen = [other for other in units if other.name not in chosen]
        rest = [other for other in unchosen if other is not spec]
        if used + homed + least_gpu_bytes(rest, policy) <= budget:
            chosen.add(spec.name)
            used += homed

    return chosen


def _usual_elements(sizes: Sequence[int]) -> int:
    """Return twice the size of the middle unit. A unit above that is larger than most."""
    if not sizes:
        return 0
    middle = sorted(sizes)[len(sizes) // 2]
    return 2 * middle


def _choose_streamed(rest: Sequence[UnitSpec], budget: int, policy: Policy) -> list[UnitSpec]:
    """Choose the first units in forward order, up to the share wanted and to the room that homes on the GPU leave.

    Each has slots of its own, all of one size, so those larger than most (embeddings) are left to the CPU.

    Args:
        rest: units that are not at home on the GPU.
        budget: bytes of the GPU that are left by those that are, and by what ranks need to send each other.
        policy: the share wanted, and all that decides sizes.
    """
    # State comes under the backward and is updated after it, which the immediate mode would not wait for.
    candidates = trained_units(rest)
    is_wanted = policy.deferred and policy.streamed_share
    if not (is_wanted and candidates and Tier.RAM in policy.state):
        return []

    # All slots are as large as those of the largest unit that may be chosen.
    most_elements = _usual_elements([spec.num_trained for spec in candidates])
    usual = [spec for spec in candidates if spec.num_trained <= most_elements]
    slot_bytes = {}
    for kind in passing_kinds_of(usual):
        sizes = [trained_bytes(spec, kind) for spec in usual if kind in spec.kinds]
        slot_bytes[kind] = max(sizes)

    # The fewest slots for weights and gradients are taken off first, because without them nothing runs.
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
