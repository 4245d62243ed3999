"""Placement: the planned home tier of every block, and the slots through which the others pass.

A pure function of units, budgets and policy: no torch, no machine. Residency is static, because a step scans all units
in a cycle, which defeats any recently-used rule. Units fill the GPU first, in forward order, so that the next forward
starts at once. What is left fills RAM by kind, weight planes first (a spilled parameter then moves 20 bytes a step
instead of 26); some of it may be streamed to the GPU to be updated there. The rest lies on NVMe.

Units that spill may have several generations of state, each with a place of its own on NVMe. One of them may be kept as
a savepoint. A speculative update writes to one that does not hold, so then what is at home in RAM of such a unit has a
second place there. What is whole in RAM needs none, so RAM then takes the other kinds of a unit together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatier.errors import PlanError, at_least
from megatier.schedule.sizes import (
    Budgets,
    Policy,
    UnitSpec,
    block_bytes,
    grad_bytes,
    kinds_of,
    passing_kinds,
    state_bytes,
    trained,
)
from megatier.schedule.slots import (
    CHUNK_ELEMENTS_FAST,
    CHUNK_ELEMENTS_MAX,
    GRAD_DEPTH,
    SlotPlan,
    chunk_slots,
    gpu_slots,
    grad_slots,
    least_gpu_bytes,
    total_bytes,
    update_slots,
)
from megatier.tier import Kind, Tier, round_up


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where everything lives.

    Attributes:
        homes: home tier per unit and kind of state.
        slots: equal slots for blocks that pass through a tier, one plan per tier and kind.
        chunk_elements: elements of one update chunk.
        grad_homes: per unit that is trained, where its finished gradient waits for its update. None: only in a slot.
            On NVMe if RAM is too short for all.
        sums_on_gpu: RAM is too short for the sums of several groups. Those of all units are taken in GPU slots, to
            which they come again, from RAM or NVMe, for each group.
        streamed: units at home in RAM whose state passes through GPU slots and is updated there, in forward order.
        spilled: units with state on NVMe, in forward order; not those that are frozen whole.
        generations: places on NVMe for the state of each unit that spills.
        speculative: units that may be updated before the norm is known: those that spill, if any.
        state_bytes: bytes of one generation of the state, per tier.
        other_bytes: bytes of gradients, activations, slots and further generations, per tier.
    """

    homes: Mapping[tuple[str, Kind], Tier]
    slots: tuple[SlotPlan, ...]
    chunk_elements: int
    grad_homes: Mapping[str, Tier | None]
    sums_on_gpu: bool = False
    streamed: tuple[str, ...] = ()
    spilled: tuple[str, ...] = ()
    generations: int = 1
    speculative: tuple[str, ...] = ()
    state_bytes: Mapping[Tier, int] = field(default_factory=dict)
    other_bytes: Mapping[Tier, int] = field(default_factory=dict)

    def updater(self, unit: str) -> Tier:
        """The tier where AdamW runs for a unit: gpu or ram."""
        return Tier.GPU if self.homes[unit, Kind.WEIGHT] is Tier.GPU or unit in self.streamed else Tier.RAM

    def sums_at(self, unit: str) -> Tier:
        """The tier where the gradients of several groups are added up for a unit that is trained: gpu or ram."""
        return Tier.GPU if self.grad_homes[unit] is Tier.GPU or self.sums_on_gpu else Tier.RAM

    def num_slots(self, tier: Tier, kind: Kind) -> int:
        """The number of slots for one kind of block; 0 if none are planned."""
        return sum(plan.num_slots for plan in self.slots if (plan.tier, plan.kind) == (tier, kind))


def place(units: Sequence[UnitSpec], budgets: Budgets, policy: Policy) -> Placement:
    """Choose every home and every slot.

    Raises:
        PlanError: it does not fit; names what is short, the figures, and what to change.
    """
    # The GPU first. Its slots depend only on the units that are not at home there.
    on_gpu = _choose_gpu(units, budgets, policy)
    rest = [unit for unit in units if unit.name not in on_gpu]
    homes = {(unit.name, kind): Tier.GPU for unit in units if unit.name in on_gpu for kind in kinds_of(unit, policy)}
    homed = sum(state_bytes(unit, policy) + grad_bytes(unit, policy) for unit in units if unit.name in on_gpu)
    streamed = _choose_streamed(rest, homed, budgets, policy)
    slots = gpu_slots(rest, homed, streamed, budgets.gpu, policy)

    # RAM next. Gradients come before state: they have to be somewhere between backward and update.
    names = tuple(unit.name for unit in streamed)
    shipped = {unit.name: unit for unit in trained(rest) if unit.name not in names}
    waiting, spills_grads = _waiting(units, rest, tuple(shipped.values()), budgets, policy)
    ram_homes, ram_slots, chunk = _fill_ram(units, rest, tuple(waiting.values()), budgets, policy, spills_grads)

    # RAM is too short for all state, and a streamed unit has to be at home there whole: so none is streamed.
    if streamed and Tier.NVME in ram_homes.values():
        return place(units, budgets, replace(policy, streamed_share=0.0))

    homes |= ram_homes
    spilled = [unit for unit in trained(rest) if _spills(unit, homes, policy)]
    on_nvme = tuple(unit.name for unit in spilled)
    generations = policy.generations if policy.deferred else 1
    state = _bytes_by_home(units, homes, policy)

    # An update into another generation leaves the one that holds as it is, in RAM too, so RAM has a second place.
    again = _bytes_by_home(spilled, homes, policy)
    again[Tier.RAM] *= policy.speculates
    again[Tier.NVME] *= generations - 1
    again[Tier.NVME] += sum(grad_bytes(unit, policy) for unit in shipped.values() if unit.name not in waiting)
    _check_nvme(state[Tier.NVME] + again[Tier.NVME], generations, budgets, policy)

    held = policy.deferred or policy.groups > 1
    on_ram = Tier.RAM if held else None
    grad_homes: dict[str, Tier | None] = {unit.name: Tier.GPU for unit in trained(units)}
    grad_homes |= {name: on_ram if name in waiting else Tier.NVME for name in shipped}

    other = Counter({Tier.GPU: 0, Tier.RAM: 0})
    other.update(again)
    for plan in (*slots, *ram_slots):
        other[plan.tier] += round_up(plan.slot_bytes) * plan.num_slots
    other[Tier.GPU] += sum(grad_bytes(unit, policy) for unit in units if unit.name not in shipped)
    other[Tier.RAM] += _ram_fixed(units, tuple(waiting.values()), policy)

    return Placement(
        homes=homes,
        slots=(*slots, *ram_slots),
        chunk_elements=chunk,
        grad_homes=grad_homes,
        sums_on_gpu=spills_grads and policy.groups > 1,
        streamed=names,
        spilled=on_nvme,
        generations=generations,
        speculative=on_nvme if policy.speculates else (),
        state_bytes=dict(state),
        other_bytes=dict(other),
    )


def _check_nvme(needed: int, generations: int, budgets: Budgets, policy: Policy) -> None:
    """Refuse state, generations and gradients that NVMe has no room for."""
    if needed > budgets.nvme:
        remedy = "Give tiers.nvme more space, raise tiers.ram, or train a smaller model."
        if generations > 1 + policy.savepoints:
            remedy = f"Set tiers.generations to {generations - 1}. {remedy}"
        raise PlanError("state on NVMe", needed, budgets.nvme, remedy)


def _spills(unit: UnitSpec, homes: Mapping[tuple[str, Kind], Tier], policy: Policy) -> bool:
    """Whether any of a unit's state is at home on NVMe."""
    return any(homes[unit.name, kind] is Tier.NVME for kind in kinds_of(unit, policy))


def _bytes_by_home(units: Iterable[UnitSpec], homes: Mapping[tuple[str, Kind], Tier], policy: Policy) -> Counter[Tier]:
    """Bytes of one generation of the units' state, by home."""
    total: Counter[Tier] = Counter()
    for unit in units:
        for kind in kinds_of(unit, policy):
            total[homes[unit.name, kind]] += block_bytes(unit, kind, policy)
    return total


def _choose_gpu(units: Sequence[UnitSpec], budgets: Budgets, policy: Policy) -> set[str]:
    """Choose units whose whole state fits in addition to the slots of the others.

    Those that are larger than most come first, then all others in forward order. Large ones (embeddings, heads) come
    first because one that is left out sets the size of every slot.
    """
    chosen: set[str] = set()
    if Tier.GPU not in policy.state:
        return chosen
    used = 0
    usual = _usual_elements([unit.num_elements for unit in units])

    # The sort is stable: among the large ones, and among the others, forward order stays.
    for unit in sorted(units, key=lambda unit: unit.num_elements <= usual):
        size = state_bytes(unit, policy) + grad_bytes(unit, policy)
        rest = [other for other in units if other.name not in chosen and other is not unit]
        if used + size + least_gpu_bytes(rest, policy) <= budgets.gpu:
            chosen.add(unit.name)
            used += size

    return chosen


def _usual_elements(sizes: Sequence[int]) -> int:
    """Twice the size of the middle unit. A unit above that is larger than most."""
    return 2 * sorted(sizes)[len(sizes) // 2] if sizes else 0


def _choose_streamed(rest: Sequence[UnitSpec], homed: int, budgets: Budgets, policy: Policy) -> list[UnitSpec]:
    """Choose the first units in forward order, up to the share wanted and to the room that homes on the GPU leave.

    Each has slots of its own, all of one size, so those larger than most (embeddings) are left to the CPU.
    """
    able = trained(rest)
    if not (policy.deferred and policy.streamed_share and able and Tier.RAM in policy.state):
        return []
    at_most = _usual_elements([unit.num_trained for unit in able])
    usual = max(unit.num_trained for unit in able if unit.num_trained <= at_most)
    wanted = policy.streamed_share * sum(unit.num_trained for unit in able)
    room = budgets.gpu - homed - least_gpu_bytes(rest, policy)
    passing = sum(
        block_bytes(UnitSpec(name="", num_elements=usual), kind, policy) for kind in passing_kinds(split=policy.split)
    )
    chosen: list[UnitSpec] = []

    for unit in able:
        cost = passing + grad_bytes(unit, policy)
        if unit.num_trained <= usual and unit.num_trained <= wanted and cost <= room:
            chosen.append(unit)
            wanted -= unit.num_trained
            room -= cost

    return chosen


def _ram_fixed(units: Sequence[UnitSpec], shipped: Sequence[UnitSpec], policy: Policy) -> int:
    """Bytes of RAM that do not depend on where the state lies: held gradients and offloaded activations."""
    held = sum(grad_bytes(u, policy) for u in shipped) if policy.deferred or policy.groups > 1 else 0
    return held + sum(round_up(unit.activation_bytes) for unit in units)


def _waiting(
    units: Sequence[UnitSpec],
    rest: Sequence[UnitSpec],
    shipped: Sequence[UnitSpec],
    budgets: Budgets,
    policy: Policy,
) -> tuple[dict[str, UnitSpec], bool]:
    """Choose the units whose gradients wait in RAM, and say whether others spill theirs to NVMe.

    All wait in RAM, unless they would leave no room for update chunks and NVMe can take some. If sums of groups spill,
    RAM takes as many as it has room for, and none is added up there.

    Args:
        units: all units.
        rest: those that are not at home on the GPU.
        shipped: those whose gradients leave the GPU.
        budgets: bytes of each tier.
        policy: groups, and whether updates wait.
    """
    all_of_them = {unit.name: unit for unit in shipped}, False
    held = policy.deferred or policy.groups > 1
    if not (shipped and held and Tier.NVME in policy.state and budgets.nvme):
        return all_of_them

    # Perhaps nothing spills: then no update chunk needs room either.
    room = budgets.ram - _ram_fixed(units, (), policy)
    wanted = sum(grad_bytes(unit, policy) for unit in shipped) + total_bytes(grad_slots(shipped, policy))
    if Tier.RAM in policy.state and wanted + sum(state_bytes(unit, policy) for unit in rest) <= room:
        return all_of_them

    # Perhaps state alone spills: then its update chunks need room, at their smallest.
    longest = max(unit.num_elements for unit in rest)
    updated = max(unit.num_trained for unit in rest)
    if wanted + total_bytes(update_slots(policy.align_elements, longest, updated, policy, spills_grads=False)) <= room:
        return all_of_them

    # Gradients spill too. Chunks come first, at the size that drives need for full speed; gradients take what is left.
    chunk = round_up(policy.chunk_elements or min(longest, CHUNK_ELEMENTS_FAST), policy.align_elements)
    room -= total_bytes(update_slots(chunk, longest, updated, policy, spills_grads=True))
    waiting = {}

    for unit in shipped:
        if (size := grad_bytes(unit, policy)) <= room:
            waiting[unit.name] = unit
            room -= size

    return waiting, True


def _fill_ram(
    units: Sequence[UnitSpec],
    rest: Sequence[UnitSpec],
    waiting: Sequence[UnitSpec],
    budgets: Budgets,
    policy: Policy,
    spills_grads: bool,
) -> tuple[dict[tuple[str, Kind], Tier], tuple[SlotPlan, ...], int]:
    """Choose homes of the state that is not on the GPU, the RAM slots, and the chunk size.

    Args:
        units: all units.
        rest: those that are not at home on the GPU.
        waiting: those whose gradients go to RAM.
        budgets: bytes of each tier.
        policy: the tiers that may hold state, and all that decides sizes.
        spills_grads: whether other units spill their gradients.

    Raises:
        PlanError: RAM is too short, and NVMe may not or cannot take what is left.
    """
    slots = [] if spills_grads else grad_slots(waiting, policy)
    used = _ram_fixed(units, waiting, policy) + total_bytes(slots)
    if used > budgets.ram:
        raise _no_room_for_gradients(used, waiting, budgets, policy)
    longest = max((unit.num_elements for unit in rest), default=0)
    everything = sum(state_bytes(unit, policy) for unit in rest)

    if not rest or (Tier.RAM in policy.state and used + everything <= budgets.ram and not spills_grads):
        chunk = max(policy.chunk_elements or min(longest, CHUNK_ELEMENTS_MAX), policy.align_elements)
        # Nothing else wants what is left of RAM: with more slots, gradients come while the CPU still adds up others.
        for plan in slots:
            spare = (budgets.ram - used - everything) // round_up(plan.slot_bytes)
            slots = [replace(plan, num_slots=min(GRAD_DEPTH, plan.num_slots + spare))]
        return {(unit.name, kind): Tier.RAM for unit in rest for kind in kinds_of(unit, policy)}, tuple(slots), chunk

    if Tier.NVME not in policy.state or not budgets.nvme:
        raise _no_room(units, used + everything, everything, budgets, policy)
    spilling = {unit.name for unit in trained(rest) if spills_grads and unit not in waiting}
    homes, passing, chunk = _spill_some(rest, spilling, used, budgets.ram, policy, spills_grads)
    return homes, (*slots, *passing), chunk


def _spill_some(
    rest: Sequence[UnitSpec], spilling: Collection[str], used: int, budget: int, policy: Policy, spills_grads: bool
) -> tuple[dict[tuple[str, Kind], Tier], list[SlotPlan], int]:
    """Choose homes when RAM is too short for all, the slots through which the rest passes, and the chunk size.

    Slots take the largest unit that is updated through them. Which one that is depends on what they leave of RAM, so
    the least size that holds is taken.

    Args:
        rest: units that are not at home on the GPU.
        spilling: names of those whose gradients are at home on NVMe.
        used: bytes of RAM that are taken already.
        budget: bytes of RAM.
        policy: all that decides sizes.
        spills_grads: whether any gradient is at home on NVMe.

    Raises:
        PlanError: RAM has no room for the slots.
    """
    longest = max(unit.num_elements for unit in rest)
    room = budget - used
    slots = list[SlotPlan]()

    for updated in sorted({0, *(unit.num_trained for unit in rest)}):
        chunk, slots = chunk_slots(room, longest, updated, policy, spills_grads=spills_grads)
        homes, passing = _spill_beside(rest, slots, room, policy)
        updates = [unit.num_trained for unit in rest if unit.name in spilling or _spills(unit, homes, policy)]
        if total_bytes(slots) <= room and max(updates, default=0) <= updated:
            return homes, passing, chunk

    needed = used + total_bytes(slots)
    remedy = f"Raise tiers.ram to at least {at_least(needed)}{', or lower tiers.chunk' * bool(policy.chunk_elements)}."
    raise PlanError("RAM slots for what comes from NVMe", needed, budget, remedy)


def _spill_beside(
    rest: Sequence[UnitSpec], slots: Sequence[SlotPlan], room: int, policy: Policy
) -> tuple[dict[tuple[str, Kind], Tier], list[SlotPlan]]:
    """Choose homes in the room that slots leave; return them and the slots.

    If all weights are at home in RAM, no slots for weights are needed, and their room is taken for homes.
    """
    spill = _spill_whole if policy.speculates else _spill
    others = [plan for plan in slots if plan.kind is not Kind.WEIGHT]
    in_ram = Tier.RAM in policy.state
    homes = spill(rest, (room - total_bytes(others)) * in_ram, policy)
    if all(homes[unit.name, Kind.WEIGHT] is Tier.RAM for unit in rest):
        return homes, others

    # Some weights pass through RAM after all, so their slots need room, and homes are chosen anew.
    return spill(rest, (room - total_bytes(slots)) * in_ram, policy), list(slots)


def _no_room_for_gradients(used: int, waiting: Sequence[UnitSpec], budgets: Budgets, policy: Policy) -> PlanError:
    """The error that says why RAM does not take the gradients, when NVMe takes none."""
    what = "gradients and activations in RAM"
    other = "."
    if not waiting:  # no gradient counts
        other = ", set train.activations to recompute, or train on fewer tokens a step."
    elif policy.groups > 1:
        sums = sum(grad_bytes(unit, policy) for unit in waiting)
        what = f"gradients and activations in RAM, {at_least(sums)} of it for sums of groups,"
        other = ", let NVMe hold state (tiers.nvme, tiers.state), so that sums go there, or lower train.groups."
    elif policy.deferred:
        other = ", or set train.clip to null and numerics.guard to off."

    return PlanError(what, used, budgets.ram, f"Raise tiers.ram to at least {at_least(used)}{other}")


def _no_room(units: Sequence[UnitSpec], in_ram: int, spilled: int, budgets: Budgets, policy: Policy) -> PlanError:
    """The error that says why state finds no home, when NVMe takes none."""
    mount = ", or give tiers.nvme a mount." if Tier.NVME in policy.state else ", or add nvme to tiers.state."
    if Tier.RAM in policy.state:
        return PlanError("state in RAM", in_ram, budgets.ram, f"Raise tiers.ram to at least {at_least(in_ram)}{mount}")
    if Tier.NVME in policy.state:
        remedy = "The state has no other home: give tiers.nvme a mount, or add ram to tiers.state."
        return PlanError("state on NVMe", spilled, budgets.nvme, remedy)

    needed = sum(state_bytes(unit, policy) + grad_bytes(unit, policy) for unit in units)
    remedy = f"Raise tiers.gpu to at least {at_least(needed)}, or add ram to tiers.state."
    return PlanError("state on the GPU", needed, budgets.gpu, remedy)


def _spill(units: Sequence[UnitSpec], room: int, policy: Policy) -> dict[tuple[str, Kind], Tier]:
    """Fill the room with weight planes first, then with the other kinds, unit by unit. What does not fit is on NVMe."""
    others = passing_kinds(split=policy.split)
    blocks = [(unit, Kind.WEIGHT) for unit in units] + [(unit, kind) for unit in trained(units) for kind in others]
    homes = {}

    for unit, kind in blocks:
        size = block_bytes(unit, kind, policy)
        homes[unit.name, kind] = Tier.RAM if size <= room else Tier.NVME
        room -= size if size <= room else 0

    return homes


def _spill_whole(units: Sequence[UnitSpec], room: int, policy: Policy) -> dict[tuple[str, Kind], Tier]:
    """Fill the room for speculative updates: a unit that spills has a second place for all that it has in RAM.

    Weight planes come first, twice, but once if the unit is frozen. Then come the other kinds of whole units. These
    spill no more, so their second weight plane is not needed.
    """
    homes = dict.fromkeys(((unit.name, kind) for unit in units for kind in kinds_of(unit, policy)), Tier.NVME)
    for unit in units:
        if (size := (2 if unit.num_trained else 1) * block_bytes(unit, Kind.WEIGHT, policy)) <= room:
            homes[unit.name, Kind.WEIGHT] = Tier.RAM
            room -= size

    for unit in trained(units):
        taken = 2 * block_bytes(unit, Kind.WEIGHT, policy) if homes[unit.name, Kind.WEIGHT] is Tier.RAM else 0
        if (size := state_bytes(unit, policy) - taken) <= room:
            homes |= {(unit.name, kind): Tier.RAM for kind in kinds_of(unit, policy)}
            room -= size

    return homes
