"""Decides which gradients wait in RAM, which state is at home there, and which slots the rest has. Pure.

Offloaded activations come first. Gradients come before state, because they have to be somewhere between the backward
and the update. State fills what is left by kind, weight planes first: a spilled parameter then moves 20 bytes a step
instead of 26. Only of units that are mostly frozen, such as layers with adapters, the rest of the state comes before
all weights: it is small, and NVMe would write it in each step, while frozen weights are read alone. State that does not
fit is at home on NVMe. If RAM is too short even so, activations go on to NVMe too: as few as will do, and those of the
first layers, which a backward needs last.

A speculative update writes to a generation that does not hold. What is at home in RAM of a unit that spills then has a
second place there. A unit that is whole in RAM needs none, so with speculation RAM takes the kinds of a unit together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatier.errors import PlanError, at_least
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
    """The share of RAM in the units that are not at home on the GPU."""

    homes: Homes
    """RAM or NVMe, for each block of their state."""
    slots: tuple[SlotPlan, ...]
    """Slots in RAM for gradients, and for what passes on its way from and to NVMe."""
    chunk_elements: int
    """Elements of one update chunk."""
    waiting: frozenset[str]
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
    shipped: Sequence[UnitSpec],
    budgets: Budgets,
    policy: Policy,
) -> RamShare:
    """Choose what RAM takes.

    Args:
        units: all units, in forward order.
        rest: those that are not at home on the GPU.
        shipped: those whose gradients leave the GPU.
        budgets: bytes of each tier.
        policy: the tiers that may hold state, and all that decides sizes.

    Raises:
        PlanError: RAM is too short, and NVMe may not or cannot take what is left.
    """
    fill = partial(_fill, units=units, rest=rest, shipped=shipped, budgets=budgets, policy=policy)
    offloaded = [spec for spec in units if spec.activation_bytes]
    try:
        return fill(())
    except PlanError:
        if not (offloaded and budgets.nvme):
            raise

    # The refusal, if there is one, is that of the least RAM which would do: with all activations on NVMe.
    share = fill(offloaded)
    too_few = 0
    enough = len(offloaded)

    # The more of them lie on NVMe, the more room there is, so the fewest that will do are found by halves. They leave
    # room for update chunks that drives move at full speed, as gradients that spill do.
    chunk = min(share.chunk_elements, CHUNK_ELEMENTS_FAST)
    while enough - too_few > 1:
        tried = (too_few + enough) // 2
        try:
            found = fill(offloaded[:tried])
        except PlanError:
            too_few = tried
            continue
        if found.chunk_elements < chunk:
            too_few = tried
        else:
            share = found
            enough = tried

    return share


def _fill(
    spilled: Sequence[UnitSpec],
    *,
    units: Sequence[UnitSpec],
    rest: Sequence[UnitSpec],
    shipped: Sequence[UnitSpec],
    budgets: Budgets,
    policy: Policy,
) -> RamShare:
    """Choose what RAM takes if the activations of these units lie on NVMe; see `fill_ram`."""
    names = frozenset(spec.name for spec in spilled)
    kept = [spec for spec in units if spec.name not in names]
    activations = sum(round_up(spec.activation_bytes) for spec in kept)
    passing_activations = activation_slots(spilled, budgets.ram, policy)
    taken = activations + total_bytes(passing_activations)

    # If gradients spill, no sum is taken in RAM (docs/decisions/0025), so none passes through slots to one.
    waiting, spills_grads = _choose_waiting(taken, rest, shipped, budgets, policy)
    slots = [] if spills_grads else grad_slots(waiting, policy)
    held = _held_bytes(waiting, policy)
    used = taken + held + total_bytes(slots)
    if used > budgets.ram:
        raise _no_room_for_gradients(used, waiting, budgets, policy)

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
        slots = [_deepened(plan, free) for plan in slots]
    elif Tier.NVME not in policy.state or not budgets.nvme:
        raise _no_room(units, needed, all_state, budgets, policy)
    else:
        spilling: set[str] = set()
        if spills_grads:
            spilling = {spec.name for spec in trained_units(rest) if spec not in waiting}
        homes, passing, chunk = _spill_some(rest, spilling, used, budgets, policy, spills_grads)
        slots += passing

    return RamShare(
        homes=homes,
        slots=(*slots, *passing_activations),
        chunk_elements=chunk,
        waiting=frozenset(spec.name for spec in waiting),
        spills_grads=spills_grads,
        fixed_bytes=activations + held,
        spilled_activations=names,
    )


def spills(spec: UnitSpec, homes: Homes) -> bool:
    """Return whether any of a unit's state is at home on NVMe."""
    return any(homes[spec.name, kind] is Tier.NVME for kind in spec.kinds)


# ---------------------------------------------------------------------- gradients


def _choose_waiting(
    taken: int,
    rest: Sequence[UnitSpec],
    shipped: Sequence[UnitSpec],
    budgets: Budgets,
    policy: Policy,
) -> tuple[Sequence[UnitSpec], bool]:
    """Choose the units whose gradients wait in RAM, and say whether others spill theirs to NVMe.

    All wait in RAM, unless they would leave no room for update chunks and NVMe can take some. If sums of groups spill,
    RAM takes as many as it has room for, and none is added up there.

    Args:
        taken: bytes of RAM that activations take.
        rest: units that are not at home on the GPU.
        shipped: those whose gradients leave the GPU.
        budgets: bytes of each tier.
        policy: the tiers that may hold state, and all that decides sizes.
    """
    # What is not held leaves its slot at once, in the backward itself, and NVMe could only slow that down.
    held = policy.deferred or policy.groups > 1
    if not (shipped and held and Tier.NVME in policy.state and budgets.nvme):
        return shipped, False

    # Perhaps nothing spills: then no update chunk needs room either.
    room = budgets.ram - taken
    wanted = sum(grad_bytes(spec, policy) for spec in shipped)
    wanted += total_bytes(grad_slots(shipped, policy))
    state = sum(state_bytes(spec) for spec in rest)
    if Tier.RAM in policy.state and wanted + state <= room:
        return shipped, False

    # Perhaps state alone spills: then its update chunks need room, at their smallest.
    least = update_slots(policy.align_elements, rest, trained_units(rest), policy, spills_grads=False)
    if wanted + total_bytes(least) <= room:
        return shipped, False

    # Gradients spill too. Chunks come first, at the size that drives need for full speed; gradients take what is left.
    longest = max(spec.num_elements for spec in rest)
    num_elements = policy.chunk_elements or min(longest, CHUNK_ELEMENTS_FAST)
    chunk = round_up(num_elements, policy.align_elements)
    passing = update_slots(chunk, rest, trained_units(rest), policy, spills_grads=True)
    room -= total_bytes(passing)

    # A gradient that is too large is passed over, and a smaller one after it may fit.
    waiting = []
    for spec in shipped:
        size = grad_bytes(spec, policy)
        if size <= room:
            waiting.append(spec)
            room -= size

    return waiting, True


def _held_bytes(waiting: Sequence[UnitSpec], policy: Policy) -> int:
    """Return the bytes of the gradients that are held in RAM."""
    # A single group of the immediate mode leaves its slot at once.
    if not policy.deferred and policy.groups == 1:
        return 0
    return sum(grad_bytes(spec, policy) for spec in waiting)


def _deepened(plan: SlotPlan, free: int) -> SlotPlan:
    """Return the slots for gradients, more of them as far as free bytes of RAM go, which nothing else wants.

    With more slots, gradients come while the CPU still adds up others.
    """
    more = free // round_up(plan.slot_bytes)
    return replace(plan, num_slots=min(GRAD_DEPTH, plan.num_slots + more))


# ---------------------------------------------------------------------- state


def _spill_some(
    rest: Sequence[UnitSpec], spilling: Collection[str], used: int, budgets: Budgets, policy: Policy, spills_grads: bool
) -> tuple[Homes, list[SlotPlan], int]:
    """Choose homes when RAM is too short for all, the slots through which the rest passes, and the chunk size.

    Args:
        rest: units that are not at home on the GPU.
        spilling: names of those whose gradients are at home on NVMe.
        used: bytes of RAM that are taken already.
        budgets: bytes of each tier.
        policy: all that decides sizes.
        spills_grads: whether any gradient is at home on NVMe.

    Raises:
        PlanError: RAM has no room for the slots.
    """
    room = budgets.ram - used
    slots = list[SlotPlan]()

    # Slots take the largest unit that is updated through them. Which one that is depends on the homes, and these on the
    # room that slots leave. So the sizes are tried from the least one, and the first that holds is taken.
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
    remedy = f"Raise tiers.ram to at least {at_least(needed)}{other}."
    raise PlanError("RAM slots for what comes from NVMe", needed, had, remedy, Tier.RAM)


def _fill_room(
    rest: Sequence[UnitSpec], slots: Sequence[SlotPlan], room: int, policy: Policy
) -> tuple[Homes, list[SlotPlan]]:
    """Choose homes in the room that slots leave; return them and the slots that are needed.

    If all weights are at home in RAM, no slots for weights are needed, and their room is taken for homes.
    """
    choose = _homes_by_unit if policy.speculates else _homes_by_kind
    takes_state = Tier.RAM in policy.state
    others = [plan for plan in slots if plan.kind is not Kind.WEIGHT]
    left = room - total_bytes(others) if takes_state else 0
    homes = choose(rest, left)
    if all(homes[spec.name, Kind.WEIGHT] is Tier.RAM for spec in rest):
        return homes, others

    # Some weights pass through RAM after all, so their slots need room, and homes are chosen anew.
    left = room - total_bytes(slots) if takes_state else 0
    homes = choose(rest, left)
    return homes, list(slots)


def _homes_by_kind(units: Sequence[UnitSpec], room: int) -> Homes:
    """Fill the room by kind, unit by unit. What does not fit is on NVMe.

    The kinds beside weights come first if their unit is mostly frozen, and last if not.
    """
    weights = [(spec, Kind.WEIGHT) for spec in units]
    first: list[tuple[UnitSpec, Kind]] = []
    last: list[tuple[UnitSpec, Kind]] = []
    for spec in trained_units(units):
        others = first if spec.num_trained < spec.frozen_elements else last
        others += [(spec, kind) for kind in spec.schema.passing_kinds]

    # A block that does not fit is passed over, and a smaller one after it may fit.
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
    """Fill the room for speculative updates: a unit that spills has a second place for all that it has in RAM.

    Weight planes come first, twice, but once if the unit is frozen. Then come the other kinds of whole units. These
    spill no more, so their second weight plane is not needed.
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
    """Return the RAM of the host of which these are a rank's part."""
    return (budgets.ram + budgets.shared_ram) * policy.num_host_ranks


def _no_room_for_gradients(used: int, waiting: Sequence[UnitSpec], budgets: Budgets, policy: Policy) -> PlanError:
    """Return the error that says why RAM does not take the gradients, when NVMe takes none."""
    what = "gradients and activations in RAM"
    other = "."
    if not waiting:  # no gradient counts
        other = ", set train.activations to recompute, or train on fewer tokens a step."
    elif policy.groups > 1:
        sums = sum(grad_bytes(spec, policy) for spec in waiting) * policy.num_host_ranks
        what = f"gradients and activations in RAM, {at_least(sums)} of it for sums of groups,"
        other = ", let NVMe hold state (tiers.nvme, tiers.state), so that sums go there, or lower train.groups."
    elif policy.deferred and policy.num_ranks == 1:
        other = ", or set train.clip to null and numerics.guard to false."

    needed = host_ram(used, policy)
    had = _host_ram_of(budgets, policy)
    remedy = f"Raise tiers.ram to at least {at_least(needed)}{other}"
    return PlanError(what, needed, had, remedy, Tier.RAM)


def _no_room(units: Sequence[UnitSpec], in_ram: int, spilled: int, budgets: Budgets, policy: Policy) -> PlanError:
    """Return the error that says why state finds no home, when NVMe takes none."""
    mount = ", or give tiers.nvme a mount." if Tier.NVME in policy.state else ", or add nvme to tiers.state."
    host = policy.num_host_ranks
    if Tier.RAM in policy.state:
        needed = host_ram(in_ram, policy)
        had = _host_ram_of(budgets, policy)
        remedy = f"Raise tiers.ram to at least {at_least(needed)}{mount}"
        return PlanError("state in RAM", needed, had, remedy, Tier.RAM)

    if Tier.NVME in policy.state:
        remedy = "The state has no other home: give tiers.nvme a mount, or add ram to tiers.state."
        return PlanError("state on NVMe", spilled * host, budgets.nvme * host, remedy, Tier.NVME)

    needed = sum(state_bytes(spec) + grad_bytes(spec, policy) for spec in units)
    remedy = f"Raise tiers.gpu to at least {at_least(needed)}, or add ram to tiers.state."
    return PlanError("state on the GPU", needed, budgets.gpu, remedy, Tier.GPU)
