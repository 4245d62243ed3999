"""The slots of a placement: how many a tier has for the blocks that pass through it, and how large. Pure.

`gpu` and `ram` call these functions when they divide a tier between slots and homes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatier.byte_counts import format_bytes_up
from megatier.errors import PlanError
from megatier.schedule.policy import Policy
from megatier.schedule.sizes import (
    block_bytes,
    gathered_bytes,
    grad_bytes,
    group_grad_bytes,
    passing_kinds_of,
    trained_units,
    updated_at_once,
)
from megatier.schedule.unit_spec import UnitSpec
from megatier.tier import Kind, Tier, round_up

SLOTS_MIN = 2
"""The fewest slots for weights or gradients on the GPU: one unit computes while the next one arrives."""
GPU_SLOTS = "GPU slots"
"""The first words of the error that a unit is too large for the GPU's slots."""
GRAD_DEPTH = 4
"""Slots in RAM for groups' gradients, if there is room, because the CPU adds up the last group slower than they
come."""
UPDATE_DEPTH = 3
"""Update chunks in RAM at once: one arrives, one is updated, one leaves. A speculative update needs more, because it
keeps the old bytes beside the new ones."""
CHUNK_DEPTH = UPDATE_DEPTH - 1
"""Update chunks that arrive or are being updated. All others leave."""
MATRICES_CARRIED = 3
"""Matrices that are carried to the GPU at once: one arrives, one is updated, one leaves."""
ACTIVATION_SLOTS = 2
"""Slots in RAM through which activations pass to NVMe: one is filled while the other one is written."""
ACTIVATION_BYTES_MAX = 64 << 20
"""The most bytes of such a slot. Drives move it at full speed."""
ACTIVATION_SHARE = 64
"""Such a slot takes at most this part of RAM (one 64th), unless that is less than a granule."""
CHUNK_ELEMENTS_MAX = 8 << 20
"""The most elements of an update chunk."""
CHUNK_ELEMENTS_FAST = 1 << 20
"""Elements of the smallest chunk that drives move at full speed. Gradients spill only as far as it keeps its room."""


# Slots of a kind are equal. A general allocator would pack blocks more tightly, but fragmentation could make it fail in
# the middle of a run (docs/decisions/0002).
@dataclass(frozen=True, kw_only=True, slots=True)
class SlotPlan:
    """Equal slots for one kind of block in one tier."""

    tier: Tier
    kind: Kind
    slot_bytes: int
    num_slots: int


def least_gpu_bytes(rest: Sequence[UnitSpec], policy: Policy) -> int:
    """Return the bytes of the fewest GPU slots with which units can run that are not at home there."""
    if not rest:
        return 0

    # The largest unit sets the size of all slots. A single unit needs no slot for a next one.
    weight_bytes = max(block_bytes(unit, Kind.WEIGHT) for unit in rest)
    num_weights = min(len(rest), SLOTS_MIN)
    grad = _gpu_grad_slots(rest, policy)
    return num_weights * weight_bytes + grad.num_slots * grad.slot_bytes


def gpu_slots(
    rest: Sequence[UnitSpec],
    homed: int,
    streamed: Sequence[UnitSpec],
    budget: int,
    policy: Policy,
) -> tuple[SlotPlan, ...]:
    """Plan all GPU slots, with as many for weights as there is room for.

    Args:
        rest: units that are not at home on the GPU.
        homed: bytes of the units that are.
        streamed: units of the rest whose state passes through the GPU.
        budget: bytes of the GPU.
        policy: groups and ranks.

    Raises:
        PlanError: there is no room for the fewest slots.
    """
    if not rest:
        return ()

    # A streamed unit keeps its slots for the whole step, because its update needs state and gradient there.
    passing = _streamed_slots(streamed)
    streamed_grads = sum(grad_bytes(unit, policy) for unit in streamed)
    used = homed + total_bytes(passing) + streamed_grads

    largest = max(rest, key=lambda unit: block_bytes(unit, Kind.WEIGHT))
    needed = used + least_gpu_bytes(rest, policy)
    if needed > budget:
        purpose = f"{GPU_SLOTS} for the largest unit, {largest.name}"
        remedy = f"Raise tiers.gpu to at least {format_bytes_up(needed)}."
        raise PlanError(purpose, needed, budget, remedy, Tier.GPU)

    weight_bytes = block_bytes(largest, Kind.WEIGHT)
    grad = _gpu_grad_slots(rest, policy)

    # The fewest slots fit. More than one for each unit would stay empty. With several ranks, shards only pass on their
    # way to an all-gather, so whole weights get the room.
    room = budget - used - grad.num_slots * grad.slot_bytes
    most = SLOTS_MIN if policy.num_ranks > 1 else room // weight_bytes
    weight = SlotPlan(
        tier=Tier.GPU,
        kind=Kind.WEIGHT,
        slot_bytes=weight_bytes,
        num_slots=min(len(rest), most),
    )
    grads = [grad] if grad.num_slots else []
    return (weight, *grads, *passing)


def _streamed_slots(streamed: Sequence[UnitSpec]) -> list[SlotPlan]:
    """Return the GPU slots for the state of streamed units, except weights: one of each kind for each unit."""
    plans = []
    for kind in passing_kinds_of(streamed):
        sizes = [block_bytes(spec, kind) for spec in streamed if kind in spec.kinds]
        plan = SlotPlan(
            tier=Tier.GPU,
            kind=kind,
            slot_bytes=max(sizes),
            num_slots=len(sizes),
        )
        plans.append(plan)
    return plans


def collective_slots(units: Sequence[UnitSpec], room: int, policy: Policy) -> tuple[SlotPlan, ...]:
    """Return the GPU slots for collectives: groups' gradients, and as many whole weights as there is room for.

    Args:
        units: all units. Even those at home on the GPU are gathered, because only a shard of them is there.
        room: bytes of the GPU that nothing else takes. If it is too small, the fewest slots are returned.
        policy: groups and ranks.
    """
    if policy.num_ranks == 1:
        return ()

    # A group's gradient is made while the one before is sent. Received gradients are added before the next is sent.
    sizes = [group_grad_bytes(spec, policy) for spec in trained_units(units)]
    largest = max(sizes, default=0)
    grads = []
    if largest:
        grads = [
            SlotPlan(tier=Tier.GPU, kind=Kind.GROUP_GRAD, slot_bytes=largest, num_slots=SLOTS_MIN),
            SlotPlan(tier=Tier.GPU, kind=Kind.RECEIVED, slot_bytes=largest, num_slots=1),
        ]

    whole = max(gathered_bytes(spec, policy) for spec in units)
    left = room - total_bytes(grads)
    most = max(SLOTS_MIN, left // whole)
    weights = SlotPlan(
        tier=Tier.GPU,
        kind=Kind.GATHERED,
        slot_bytes=whole,
        num_slots=min(len(units), most),
    )
    return (weights, *grads)


def _gpu_grad_slots(rest: Sequence[UnitSpec], policy: Policy) -> SlotPlan:
    """Return the fewest slots through which gradients leave the GPU: 0 slots if nothing is trained."""
    sizes = [grad_bytes(spec, policy) for spec in trained_units(rest)]
    return SlotPlan(
        tier=Tier.GPU,
        kind=Kind.GRAD,
        slot_bytes=max(sizes, default=0),
        num_slots=min(len(sizes), SLOTS_MIN),
    )


def grad_slots(with_grads_in_ram: Sequence[UnitSpec], policy: Policy) -> list[SlotPlan]:
    """Return the RAM slots through which gradients pass to their sums, or in the immediate mode to their updates."""
    # Gradients of a single group wait at home, and ranks take their sums on the GPU. Neither pass through slots.
    waits_at_home = policy.deferred and policy.groups == 1
    sums_on_gpu = policy.num_ranks > 1 and policy.groups > 1
    if not with_grads_in_ram or waits_at_home or sums_on_gpu:
        return []

    largest = max(grad_bytes(spec, policy) for spec in with_grads_in_ram)
    plan = SlotPlan(
        tier=Tier.RAM,
        kind=Kind.GRAD,
        slot_bytes=largest,
        num_slots=SLOTS_MIN,
    )
    return [plan]


def chunk_slots(
    room: int, passing: Sequence[UnitSpec], updated: Sequence[UnitSpec], policy: Policy, *, spills_grads: bool
) -> tuple[int, list[SlotPlan]]:
    """Return the elements of an update chunk, and its slots, which exceed the room if even the smallest chunk does.

    The slots take a quarter of the room, or all of it if gradients spill. The other arguments are those of
    `update_slots`.
    """
    # Slots grow in proportion to the chunk, so the smallest chunk shows how many elements fit.
    align = policy.align_elements
    passing_chunk = [replace(spec, num_elements=align, frozen_elements=0) for spec in passing]
    updated_chunk = [replace(spec, num_elements=align, frozen_elements=0) for spec in updated]
    smallest = update_slots(align, passing_chunk, updated_chunk, policy, spills_grads=spills_grads)

    # Units that are updated by matrix pass whole, whatever the chunk is. Chunks get the rest of the room.
    if any(spec.schema.by_matrix for spec in updated):
        least = update_slots(align, passing, updated, policy, spills_grads=spills_grads)
        room -= total_bytes(least)

    # Three quarters are left for state at home. If gradients spill, they have already taken all but these chunks.
    element_bytes = total_bytes(smallest) // align
    fits = max(0, room) // element_bytes
    most = min(CHUNK_ELEMENTS_FAST, fits) if spills_grads else min(CHUNK_ELEMENTS_MAX, fits // 4)

    # A chunk is a number of whole granules, so that drives can verify it by itself.
    longest = max(spec.num_elements for spec in passing)
    wanted = policy.chunk_elements or min(longest, most)
    aligned = max(align, wanted // align * align)
    chunk = min(aligned, round_up(longest, align))

    return chunk, update_slots(chunk, passing, updated, policy, spills_grads=spills_grads)


def update_depth(policy: Policy) -> int:
    """Return the RAM slots for update chunks of each kind but weights."""
    # New bytes of a speculative update do not replace the old ones, so both have slots.
    return UPDATE_DEPTH + SLOTS_MIN if policy.speculates else UPDATE_DEPTH


def update_slots(
    chunk: int, passing: Sequence[UnitSpec], updated: Sequence[UnitSpec], policy: Policy, *, spills_grads: bool
) -> list[SlotPlan]:
    """Return the RAM slots for update chunks. Weights have two more slots, for loads.

    Args:
        chunk: elements of a chunk.
        passing: units whose weights may pass.
        updated: trained units whose updates pass; empty if only weights pass.
        policy: groups and speculation.
        spills_grads: whether gradients pass too.
    """
    depth = update_depth(policy)

    # Weights of all units pass on loads, those of frozen units too.
    largest = 0
    for spec in passing:
        num_elements = min(chunk, spec.num_elements)
        largest = max(largest, num_elements * spec.schema.width(Kind.WEIGHT))

    # Frozen elements have only weights, so slots of the other planes hold trained elements.
    sizes: Counter[Kind] = Counter()
    for spec in updated:
        num_elements = updated_at_once(spec, chunk)
        largest = max(largest, num_elements * spec.schema.width(Kind.WEIGHT))
        for kind in spec.schema.passing_kinds:
            size = num_elements * spec.schema.width(kind)
            sizes[kind] = max(sizes[kind], size)

    if spills_grads:
        for spec in updated:
            # A gradient moves to NVMe in runs of a chunk, or of more if its update works on more at once.
            num_elements = max(chunk, updated_at_once(spec, chunk))
            run_bytes = num_elements * spec.schema.grad_width
            size = min(run_bytes, grad_bytes(spec, policy))
            sizes[Kind.GRAD] = max(sizes[Kind.GRAD], size)

    weight = SlotPlan(
        tier=Tier.RAM,
        kind=Kind.WEIGHT,
        slot_bytes=largest,
        num_slots=depth + SLOTS_MIN,
    )
    slots = [weight]
    for kind, size in sizes.items():
        if size:
            plan = SlotPlan(tier=Tier.RAM, kind=kind, slot_bytes=size, num_slots=depth)
            slots.append(plan)
    return slots


def activation_slots(spilled: Sequence[UnitSpec], ram: int, policy: Policy) -> list[SlotPlan]:
    """Return the RAM slots through which activations pass to NVMe and back, in segments of whole granules.

    Args:
        spilled: the units whose activations lie on NVMe.
        ram: bytes of RAM.
        policy: the size of a granule.
    """
    if not spilled:
        return []

    # A segment has whole granules, because each granule has a checksum.
    granule = policy.granule_bytes
    most = min(ACTIVATION_BYTES_MAX, ram // ACTIVATION_SHARE)
    segment = max(granule, most // granule * granule)
    largest = max(round_up(spec.activation_bytes) for spec in spilled)
    plan = SlotPlan(
        tier=Tier.RAM,
        kind=Kind.ACTIVATION,
        slot_bytes=min(segment, largest),
        num_slots=ACTIVATION_SLOTS,
    )
    return [plan]


def total_bytes(slots: Iterable[SlotPlan]) -> int:
    """Return the bytes that the slots take, in whole pages."""
    return sum(round_up(plan.slot_bytes) * plan.num_slots for plan in slots)
