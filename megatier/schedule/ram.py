"""The share of RAM in a placement: gradients that wait there, state at home there, and slots for all else. Pure.

`place` calls it after the GPU was filled. Offloaded activations come first. Gradients come before state, because they
have to be somewhere between the backward and the update. State then fills the rest by kind, weights first: a spilled
parameter moves 20 bytes a step instead of 26. In units that are mostly frozen, such as layers with adapters, the other
state comes before all weights, because it is small and would be written to NVMe in each step, while frozen weights are
only read. State that does not fit is at home on NVMe. If RAM is still too short, activations go to NVMe too: as few as
possible, from the first layers on, whose backward comes last.

A speculative update keeps the valid generation, so state in RAM of a unit that spills needs a second place there. A
unit that is whole in RAM needs none. So with speculation RAM takes all kinds of a unit together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatier.byte_counts import format_bytes_up
from megatier.errors import PlanError
from megatier.schedule.budgets import Budgets, host_ram
from megatier.schedule.policy import Policy
from megatier.schedule.sizes import block_bytes, grad_bytes, state_bytes, trained_units
from megatier.schedule.slots import (
    CHUNK_ELEMENTS_FAST,
    CHUNK_ELEMENTS_MAX,
    GRAD_DEPTH,
    SlotPlan,
    activation_slots,
    chunk_slots,
    grad_slots,
    total_bytes,
    update_slots,
)
from megatier.schedule.unit_spec import UnitSpec
from megatier.tier import Kind, Tier, round_up

Homes = Mapping[tuple[str, Kind], Tier]
"""The home tier of each unit's block of each kind of state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RamShare:
    """The bytes and slots of RAM for the units that are not at home on the GPU."""

    homes: Homes
    """RAM or NVMe, for each block of their state."""
    slots: tuple[SlotPlan, ...]
    """Slots in RAM for gradients, and for blocks that pass from and to NVMe."""
    chunk_elements: int
    """Elements of one update chunk."""
    with_grads_in_ram: frozenset[str]
    """Units whose gradients wait in RAM."""
    spills_grads: bool
    """Whether other units' gradients wait on NVMe, because RAM is too short for all."""
    fixed_bytes: int
    """Bytes of RAM for held gradients and offloaded activations."""
    spilled_activations: frozenset[str]
    """Units whose offloaded activations lie on NVMe."""


def fill_ram(
    units: Sequence[UnitSpec],
    rest: Sequence[UnitSpec],
    grads_leave_gpu: Sequence[UnitSpec],
    budgets: Budgets,
    policy: Policy,
) -> RamShare:
    """Choose the state, gradients and slots of RAM.

    Args:
        units: all units, in forward order.
        rest: units that are not at home on the GPU.
        grads_leave_gpu: units whose gradients leave the GPU.
        budgets: bytes of each tier.
        policy: the tiers that may hold state, and all else that decides sizes.

    Raises:
        PlanError: RAM is too short, and NVMe cannot take the rest or is not allowed to.
    """
    fill = partial(_fill, units=units, rest=rest, grads_leave_gpu=grads_leave_gpu, budgets=budgets, policy=policy)
    offloaded = [spec for spec in units if spec.activation_bytes]
    try:
        return fill(())
    except PlanError:
        if not (offloaded and budgets.nvme):
            raise

    # An error here names the least RAM that suffices, with all activations on NVMe.
    share = fill(offloaded)
    too_few = 0
    enough = len(offloaded)

    # More activations on NVMe leave more room, so a binary search finds the fewest. They leave room for update chunks
    # that drives move at full speed, as gradients that spill do.
    chunk = min(share.chunk_elements, CHUNK_ELEMENTS_FAST)
    while enough - too_few > 1:
        tried = (too_few + enough) // 2
        try:
            smaller_share = fill(offloaded[:tried])
        except PlanError:
            too_few = tried
            continue
        if smaller_share.chunk_elements < chunk:
            too_few = tried
        else:
            share = smaller_share
            enough = tried

    return share


def _fill(
    spilled: Sequence[UnitSpec],
    *,
    units: Sequence[UnitSpec],
    rest: Sequence[UnitSpec],
    grads_leave_gpu: Sequence[UnitSpec],
    budgets: Budgets,
    policy: Policy,
) -> RamShare:
    """Choose the share of RAM if the activations of these units are on NVMe; see `fill_ram`."""
    names = frozenset(spec.name for spec in spilled)
    kept = [spec for spec in units if spec.name not in names]
    activations = sum(round_up(spec.activation_bytes) for spec in kept)
    passing_activations = activation_slots(spilled, budgets.ram, policy)
    taken = activations + total_bytes(passing_activations)

    # If gradients spill, groups are not summed in RAM (docs/decisions/0025), so no slots for gradients are needed.
    with_grads_in_ram, spills_grads = _choose_grads_in_ram(taken, rest, grads_leave_gpu, budgets, policy)
    slots = [] if spills_grads else grad_slots(with_grads_in_ram, policy)
    held = _held_bytes(with_grads_in_ram, policy)
    used = taken + held + total_bytes(slots)
    if used > budgets.ram:
        raise _no_room_for_gradients(used, with_grads_in_ram, budgets, policy)

    all_state = sum(state_bytes(spec) for spec in rest)
    needed = used + all_state
    fits = Tier.RAM in policy.state and needed <= budgets.ram and not spills_grads
    homes: Homes
    if fits or not rest:
        homes = {(spec.name, kind): Tier.RAM for spec in rest for kind in spec.kinds}
        longest = max((spec.num_elements for spec in rest), default=0)
        wanted = policy.chunk_elements or min(longest, CHUNK_ELEMENTS_MAX)
        chunk = max(wanted, policy.align_elements)
        free = budgets.ram - needed
        slots = [_deepen(plan, free) for plan in slots]
    elif Tier.NVME not in policy.state or not budgets.nvme:
        raise _no_room(units, needed, all_state, budgets, policy)
    else:
        spilling: set[str] = set()
        if spills_grads:
            spilling = {spec.name for spec in trained_units(rest) if spec not in with_grads_in_ram}
        homes, passing, chunk = _spill_some(rest, spilling, used, budgets, policy, spills_grads)
        slots += passing

    return RamShare(
        homes=homes,
        slots=(*slots, *passing_activations),
        chunk_elements=chunk,
        with_grads_in_ram=frozenset(spec.name for spec in with_grads_in_ram),
        spills_grads=spills_grads,
        fixed_bytes=activations + held,
        spilled_activations=names,
    )


def spills(spec: UnitSpec, homes: Homes) -> bool:
    """Return whether any of a unit's state is at home on NVMe."""
    return any(homes[spec.name, kind] is Tier.NVME for kind in spec.kinds)


# ---------------------------------------------------------------------- gradients


def _choose_grads_in_ram(
    taken: int,
    rest: Sequence[UnitSpec],
    grads_leave_gpu: Sequence[UnitSpec],
    budgets: Budgets,
    policy: Policy,
) -> tuple[Sequence[UnitSpec], bool]:
    """Choose the units whose gradients wait in RAM. Return them, and whether other gradients spill to NVMe.

    All wait in RAM, unless they would leave no room for update chunks and NVMe can take some. If sums of groups spill,
    RAM takes as many as fit, and none is summed there.

    Args:
        taken: bytes of RAM that activations take.
        rest: units that are not at home on the GPU.
        grads_leave_gpu: those whose gradients leave the GPU.
        budgets: bytes of each tier.
        policy: the tiers that may hold state, and all that decides sizes.
    """
    # Gradients that are not held leave their slots in the backward itself, which NVMe could only slow down.
    held = policy.deferred or policy.groups > 1
    if not (grads_leave_gpu and held and Tier.NVME in policy.state and budgets.nvme):
        return grads_leave_gpu, False

    # If nothing spills, update chunks need no room either.
    room = budgets.ram - taken
    wanted = sum(grad_bytes(spec, policy) for spec in grads_leave_gpu)
    wanted += total_bytes(grad_slots(grads_leave_gpu, policy))
    state = sum(state_bytes(spec) for spec in rest)
    if Tier.RAM in policy.state and wanted + state <= room:
        return grads_leave_gpu, False

    # If only state spills, the smallest update chunks need room.
    least = update_slots(policy.align_elements, rest, trained_units(rest), policy, spills_grads=False)
    if wanted + total_bytes(least) <= room:
        return grads_leave_gpu, False

    # Gradients spill too. Chunks come first, at the size for full speed of drives, and gradients get the rest.
    longest = max(spec.num_elements for spec in rest)
    num_elements = policy.chunk_elements or min(longest, CHUNK_ELEMENTS_FAST)
    chunk = round_up(num_elements, policy.align_elements)
    passing = update_slots(chunk, rest, trained_units(rest), policy, spills_grads=True)
    room -= total_bytes(passing)

    # If a gradient is too large, a smaller one after it may still fit.
    with_grads_in_ram = []
    for spec in grads_leave_gpu:
        size = grad_bytes(spec, policy)
        if size <= room:
            with_grads_in_ram.append(spec)
            room -= size

    return with_grads_in_ram, True


def _held_bytes(with_grads_in_ram: Sequence[UnitSpec], policy: Policy) -> int:
    """Return the bytes of the gradients that are held in RAM."""
    # In the immediate mode the gradient of a single group leaves its slot at once.
    if not policy.deferred and policy.groups == 1:
        return 0
    return sum(grad_bytes(spec, policy) for spec in with_grads_in_ram)


def _deepen(plan: SlotPlan, free: int) -> SlotPlan:
    """Return the slots for gradients, with as many more as free bytes of RAM allow.

    With more slots, gradients can come while the CPU still adds up others.
    """
    more = free // round_up(plan.slot_bytes)
    return replace(plan, num_slots=min(GRAD_DEPTH, plan.num_slots + more))


# ---------------------------------------------------------------------- state


def _spill_some(
    rest: Sequence[UnitSpec], spilling: Collection[str], used: int, budgets: Budgets, policy: Policy, spills_grads: bool
) -> tuple[Homes, list[SlotPlan], int]:
    """Choose homes if RAM is too short for all state, the slots for the rest, and the chunk size.

    Args:
        rest: units that are not at home on the GPU.
        spilling: names of the units whose gradients are at home on NVMe.
        used: bytes of RAM that are used already.
        budgets: bytes of each tier.
        policy: the choices that decide sizes.
        spills_grads: whether any gradient is at home on NVMe.

    Raises:
        PlanError: RAM has no room for the slots.
    """
    room = budgets.ram - used
    slots = list[SlotPlan]()

    # The largest unit that is updated through slots sets their size. Which unit that is depends on homes, and homes
    # depend on the room that slots leave. So sizes are tried in ascending order, and the first consistent one is used.
    sizes = {0} | {spec.num_trained for spec in rest}
    for largest in sorted(sizes):
        updated = [spec for spec in trained_units(rest) if spec.num_trained <= largest]
        chunk, slots = chunk_slots(room, rest, updated, policy, spills_grads=spills_grads)
        homes, passing = _fill_room(rest, slots, room, policy)

        largest_passing = 0
        for spec in rest:
            passes = spec.name in spilling or spills(spec, homes)
            if passes:
                largest_passing = max(largest_passing, spec.num_trained)

        if total_bytes(slots) <= room and largest_passing <= largest:
            return homes, passing, chunk

    needed = host_ram(used + total_bytes(slots), policy)
    had = _host_ram_of(budgets, policy)
    other = ", or lower tiers.chunk" if policy.chunk_elements else ""
    remedy = f"Raise tiers.ram to at least {format_bytes_up(needed)}{other}."
    raise PlanError("RAM slots for what comes from NVMe", needed, had, remedy, Tier.RAM)


def _fill_room(
    rest: Sequence[UnitSpec], slots: Sequence[SlotPlan], room: int, policy: Policy
) -> tuple[Homes, list[SlotPlan]]:
    """Choose homes in the room that slots leave. Return the homes, and the slots that are needed.

    If all weights are at home in RAM, they need no slots, and homes get that room.
    """
    choose = _homes_by_unit if policy.speculates else _homes_by_kind
    takes_state = Tier.RAM in policy.state
    others = [plan for plan in slots if plan.kind is not Kind.WEIGHT]
    left = room - total_bytes(others) if takes_state else 0
    homes = choose(rest, left)
    if all(homes[spec.name, Kind.WEIGHT] is Tier.RAM for spec in rest):
        return homes, others

    # Some weights do pass through RAM, so their slots need room, and homes are chosen again.
    left = room - total_bytes(slots) if takes_state else 0
    homes = choose(rest, left)
    return homes, list(slots)


def _homes_by_kind(units: Sequence[UnitSpec], room: int) -> Homes:
    """Fill the room by kind, unit by unit. Blocks that do not fit are on NVMe.

    Kinds other than weights come first in units that are mostly frozen, and last in all others.
    """
    weights = [(spec, Kind.WEIGHT) for spec in units]
    first: list[tuple[UnitSpec, Kind]] = []
    last: list[tuple[UnitSpec, Kind]] = []
    for spec in trained_units(units):
        others = first if spec.num_trained < spec.frozen_elements else last
        others += [(spec, kind) for kind in spec.schema.passing_kinds]

    # If a block does not fit, a smaller one after it may still fit.
    homes = {}
    for spec, kind in [*first, *weights, *last]:
        size = block_bytes(spec, kind)
        if size <= room:
            homes[spec.name, kind] = Tier.RAM
            room -= size
        else:
            homes[spec.name, kind] = Tier.NVME
    return homes


def _homes_by_unit(units: Sequence[UnitSpec], room: int) -> Homes:
    """Fill the room for speculative updates, where a unit that spills needs a second place for its state in RAM.

    Weights come first: twice, or once if the unit is frozen. Then the other kinds of whole units follow. These units no
    longer spill, so they do not need their second weights.
    """
    homes = {(spec.name, kind): Tier.NVME for spec in units for kind in spec.kinds}
    for spec in units:
        places = 2 if spec.num_trained else 1
        size = places * block_bytes(spec, Kind.WEIGHT)
        if size <= room:
            homes[spec.name, Kind.WEIGHT] = Tier.RAM
            room -= size

    for spec in trained_units(units):
        size = state_bytes(spec)
        if homes[spec.name, Kind.WEIGHT] is Tier.RAM:
            size -= 2 * block_bytes(spec, Kind.WEIGHT)
        if size <= room:
            homes |= {(spec.name, kind): Tier.RAM for kind in spec.kinds}
            room -= size

    return homes


# ---------------------------------------------------------------------- refusals


def _host_ram_of(budgets: Budgets, policy: Policy) -> int:
    """Return the RAM of the host for a rank's budgets."""
    return (budgets.ram + budgets.shared_ram) * policy.num_host_ranks


def _no_room_for_gradients(
    used: int, with_grads_in_ram: Sequence[UnitSpec], budgets: Budgets, policy: Policy
) -> PlanError:
    """Return the error that RAM is too short for gradients, if NVMe takes none."""
    purpose = "gradients and activations in RAM"
    other = "."
    if not with_grads_in_ram:  # no gradient counts
        other = ", set train.activations to recompute, or train on fewer tokens a step."
    elif policy.groups > 1:
        sums = sum(grad_bytes(spec, policy) for spec in with_grads_in_ram) * policy.num_host_ranks
        purpose = f"gradients and activations in RAM, {format_bytes_up(sums)} of it for sums of groups,"
        other = ", let NVMe hold state (tiers.nvme, tiers.state), so that sums go there, or lower train.groups."
    elif policy.deferred and policy.num_ranks == 1:
        other = ", or set train.clip to null and numerics.guard to false."

    needed = host_ram(used, policy)
    had = _host_ram_of(budgets, policy)
    remedy = f"Raise tiers.ram to at least {format_bytes_up(needed)}{other}"
    return PlanError(purpose, needed, had, remedy, Tier.RAM)


def _no_room(units: Sequence[UnitSpec], in_ram: int, spilled: int, budgets: Budgets, policy: Policy) -> PlanError:
    """Return the error that state has no home, if NVMe takes none."""
    mount = ", or give tiers.nvme a mount." if Tier.NVME in policy.state else ", or add nvme to tiers.state."
    host = policy.num_host_ranks
    if Tier.RAM in policy.state:
        needed = host_ram(in_ram, policy)
        had = _host_ram_of(budgets, policy)
        remedy = f"Raise tiers.ram to at least {format_bytes_up(needed)}{mount}"
        return PlanError("state in RAM", needed, had, remedy, Tier.RAM)

    if Tier.NVME in policy.state:
        remedy = "The state has no other home: give tiers.nvme a mount, or add ram to tiers.state."
        return PlanError("state on NVMe", spilled * host, budgets.nvme * host, remedy, Tier.NVME)

    needed = sum(state_bytes(spec) + grad_bytes(spec, policy) for spec in units)
    remedy = f"Raise tiers.gpu to at least {format_bytes_up(needed)}, or add ram to tiers.state."
    return PlanError("state on the GPU", needed, budgets.gpu, remedy, Tier.GPU)
