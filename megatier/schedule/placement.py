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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatier.errors import PlanError, at_least
from megatier.store.tier import STATE_KINDS, Kind, Tier, round_up

SLOTS_MIN = 2
"""One unit computes while the next arrives."""
GPU_SLOTS = "GPU slots"
"""What is short where a unit is too large."""
GRAD_DEPTH = 4
"""Gradients of groups in RAM at once, where there is room: the CPU adds up the last one slower than they come."""
UPDATE_DEPTH = 3
"""Update chunks in RAM at once: one arrives, one is worked on, one leaves. The new bytes of a speculative
one lie beside the old ones."""
CHUNK_ELEMENTS_MAX = 8 << 20
CHUNK_ELEMENTS_FAST = 1 << 20
"""Of chunks that drives move at full speed; where gradients have to spill, they leave room for so many."""


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """What placement needs to know of a unit."""

    name: str
    num_elements: int
    """Padded parameters of the unit."""
    activation_bytes: int = 0
    """Boundary activation of one group, where it is offloaded to RAM."""
    frozen_elements: int = 0
    """Of the elements, the last ones, which have a weight and no more: no update, no gradient."""

    @property
    def num_trained(self) -> int:
        """Elements with a gradient and a whole state; 0: the unit is never updated."""
        return self.num_elements - self.frozen_elements

    def elements_of(self, kind: Kind) -> int:
        """Elements of a block of state."""
        return self.num_elements if kind is Kind.WEIGHT else self.num_trained


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes that each tier may use."""

    gpu: int
    ram: int
    nvme: int


@dataclass(frozen=True, slots=True)
class Policy:
    """Choices that are not placement but decide how many bytes there are."""

    state: tuple[Tier, ...] = (Tier.GPU, Tier.RAM, Tier.NVME)
    """Tiers that may hold state."""
    split: bool = True
    """bf16 weight plane and remainder; False: one fp32 weight."""
    deferred: bool = True
    """Updates wait for the global norm, so every gradient is held; False: they run inside the backward."""
    groups: int = 1
    slices: int = 1
    chunk_elements: int | None = None
    """Elements of one update chunk; None: chosen from the RAM budget."""
    streamed_share: float = 0.0
    """Share of the parameters outside the GPU whose state passes through it to be updated there, 0 to 1 (deferred)."""
    generations: int = 1
    """Places on NVMe for the state of a unit that spills (deferred)."""
    savepoints: bool = False
    """One of the generations may be kept, so that updates do without it."""
    gpu_direct: bool = False
    """Weights on NVMe that no update feeds go to the GPU past RAM."""
    align_elements: int = 32 << 10
    """Update chunks are multiples of this (one checksummed chunk of the narrowest plane)."""

    @property
    def speculates(self) -> bool:
        """Whether there is a generation to update into, beside the one that holds and the one that is kept."""
        return self.deferred and self.generations > 1 + self.savepoints


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Equal slots for one kind of block in one tier."""

    tier: Tier
    kind: Kind
    slot_bytes: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where everything lives."""

    homes: Mapping[tuple[str, Kind], Tier]
    """Home tier per unit and kind of state."""
    slots: tuple[SlotPlan, ...]
    chunk_elements: int
    grad_homes: Mapping[str, Tier | None]
    """Where a finished gradient of a unit that is trained waits for its update; None: only in a slot. On NVMe where RAM
    is too short for all."""
    sums_on_gpu: bool = False
    """RAM is too short for the sums of several groups: those of all units are taken in GPU slots, to which they come
    again, from RAM or NVMe, for each group."""
    streamed: tuple[str, ...] = ()
    """Units at home in RAM whose state passes through GPU slots and is updated there, in forward order."""
    spilled: tuple[str, ...] = ()
    """Units with state on NVMe, in forward order; not those that are frozen whole."""
    generations: int = 1
    """Of the state of each unit that spills."""
    speculative: tuple[str, ...] = ()
    """Units that may be updated before the norm is known: those that spill, if any."""
    state_bytes: Mapping[Tier, int] = field(default_factory=dict)
    other_bytes: Mapping[Tier, int] = field(default_factory=dict)
    """Gradients, activations, slots and further generations."""

    def updater(self, unit: str) -> Tier:
        """Where AdamW runs for a unit: gpu or ram."""
        return Tier.GPU if self.homes[unit, Kind.WEIGHT] is Tier.GPU or unit in self.streamed else Tier.RAM

    def num_slots(self, tier: Tier, kind: Kind) -> int:
        """Slots for one kind of block; 0 where none are planned."""
        return sum(plan.num_slots for plan in self.slots if (plan.tier, plan.kind) == (tier, kind))


def bytes_per_element(kind: Kind, *, split: bool) -> int:
    """Bytes of one parameter in a block of state; 0 where the kind does not exist."""
    return {Kind.WEIGHT: 2 if split else 4, Kind.REMAINDER: 2 if split else 0}.get(kind, 4)


def state_kinds(*, split: bool) -> tuple[Kind, ...]:
    """The kinds of state there are: without a split the weight block is the master itself."""
    return tuple(kind for kind in STATE_KINDS if bytes_per_element(kind, split=split))


def kinds_of(unit: UnitSpec, *, split: bool) -> tuple[Kind, ...]:
    """The kinds of state that a unit has: weights alone where it is frozen."""
    return state_kinds(split=split) if unit.num_trained else (Kind.WEIGHT,)


def block_bytes(unit: UnitSpec, kind: Kind, policy: Policy) -> int:
    """Bytes of a unit's block of state, in whole pages."""
    return round_up(unit.elements_of(kind) * bytes_per_element(kind, split=policy.split))


def grad_bytes(unit: UnitSpec, policy: Policy) -> int:
    """Bytes of a unit's gradient on its way: a summand of an fp32 sum over groups, else the compute dtype."""
    return round_up(unit.num_trained * (4 if policy.groups > 1 or not policy.split else 2))


def final_grad_bytes(unit: UnitSpec, policy: Policy) -> int:
    """Bytes of its final gradient: the front of such a sum, in whole checksummed chunks."""
    size = grad_bytes(unit, policy)
    return min(round_up(2 * unit.num_trained, 2 * policy.align_elements), size) if policy.split else size


def place(units: Sequence[UnitSpec], budgets: Budgets, policy: Policy) -> Placement:
    """Choose every home and every slot.

    Raises:
        PlanError: it does not fit; names what is short, the figures, and what to change.
    """
    on_gpu = _choose_gpu(units, budgets, policy)
    rest = [unit for unit in units if unit.name not in on_gpu]
    homes = {(unit.name, kind): Tier.GPU for unit in units if unit.name in on_gpu for kind in _kinds(unit, policy)}
    homed = sum(_state_size(unit, policy) + grad_bytes(unit, policy) for unit in units if unit.name in on_gpu)
    streamed = _choose_streamed(rest, homed, budgets, policy)
    gpu_slots = _gpu_slots(rest, homed, streamed, budgets, policy)
    names = tuple(unit.name for unit in streamed)
    shipped = {unit.name: unit for unit in _trained(rest) if unit.name not in names}
    waiting, spills_grads = _waiting(units, rest, tuple(shipped.values()), budgets, policy)
    ram_homes, ram_slots, chunk = _fill_ram(units, rest, tuple(waiting.values()), budgets, policy, spills_grads)
    if streamed and Tier.NVME in ram_homes.values():  # RAM is what is short
        return place(units, budgets, replace(policy, streamed_share=0.0))
    homes |= ram_homes
    spilled = [unit for unit in _trained(rest) if _spills(unit, homes, policy)]
    on_nvme = tuple(unit.name for unit in spilled)
    generations = policy.generations if policy.deferred else 1
    state, again = _state_bytes(units, homes, policy), _state_bytes(spilled, homes, policy)
    again[Tier.RAM] *= policy.speculates
    again[Tier.NVME] *= generations - 1
    again[Tier.NVME] += sum(grad_bytes(unit, policy) for unit in shipped.values() if unit.name not in waiting)
    if state[Tier.NVME] + again[Tier.NVME] > budgets.nvme:
        remedy = "Give tiers.nvme more space, raise tiers.ram, or train a smaller model."
        if generations > 1 + policy.savepoints:
            remedy = f"Set tiers.generations to {generations - 1}. {remedy}"
        raise PlanError("state on NVMe", state[Tier.NVME] + again[Tier.NVME], budgets.nvme, remedy)
    held = policy.deferred or policy.groups > 1
    on_ram = Tier.RAM if held else None
    grad_homes: dict[str, Tier | None] = {unit.name: Tier.GPU for unit in _trained(units)}
    grad_homes |= {name: on_ram if name in waiting else Tier.NVME for name in shipped}
    other = Counter({Tier.GPU: 0, Tier.RAM: 0})
    other.update(again)
    for plan in (*gpu_slots, *ram_slots):
        other[plan.tier] += round_up(plan.slot_bytes) * plan.num_slots
    other[Tier.GPU] += sum(grad_bytes(unit, policy) for unit in units if unit.name not in shipped)
    other[Tier.RAM] += _ram_fixed(units, tuple(waiting.values()), policy)
    return Placement(
        homes,
        (*gpu_slots, *ram_slots),
        chunk,
        grad_homes,
        spills_grads and policy.groups > 1,
        names,
        on_nvme,
        generations,
        on_nvme if policy.speculates else (),
        dict(state),
        dict(other),
    )


def _spills(unit: UnitSpec, homes: Mapping[tuple[str, Kind], Tier], policy: Policy) -> bool:
    return any(homes[unit.name, kind] is Tier.NVME for kind in _kinds(unit, policy))


def _state_bytes(units: Iterable[UnitSpec], homes: Mapping[tuple[str, Kind], Tier], policy: Policy) -> Counter[Tier]:
    """One generation of the units' state, by home."""
    total: Counter[Tier] = Counter()
    for unit in units:
        for kind in _kinds(unit, policy):
            total[homes[unit.name, kind]] += block_bytes(unit, kind, policy)
    return total


def _kinds(unit: UnitSpec, policy: Policy) -> tuple[Kind, ...]:
    return kinds_of(unit, split=policy.split)


def _trained(units: Iterable[UnitSpec]) -> list[UnitSpec]:
    return [unit for unit in units if unit.num_trained]


def _state_size(unit: UnitSpec, policy: Policy) -> int:
    return sum(block_bytes(unit, kind, policy) for kind in _kinds(unit, policy))


def _choose_gpu(units: Sequence[UnitSpec], budgets: Budgets, policy: Policy) -> set[str]:
    """Units whose whole state fits beside the slots of the others: first those larger than most, then forward order.

    Large ones (embeddings, heads) come first because one that is left out sets the size of every slot.
    """
    chosen: set[str] = set()
    if Tier.GPU not in policy.state:
        return chosen
    used = 0
    usual = _usual_elements([unit.num_elements for unit in units])
    for unit in sorted(units, key=lambda unit: unit.num_elements <= usual):
        size = _state_size(unit, policy) + grad_bytes(unit, policy)
        rest = [other for other in units if other.name not in chosen and other is not unit]
        if used + size + _gpu_least(rest, policy) <= budgets.gpu:
            chosen.add(unit.name)
            used += size
    return chosen


def _usual_elements(sizes: Sequence[int]) -> int:
    """Twice the size of the middle unit: what is above is larger than most."""
    return 2 * sorted(sizes)[len(sizes) // 2] if sizes else 0


def _gpu_least(rest: Sequence[UnitSpec], policy: Policy) -> int:
    if not rest:
        return 0
    weight = max(block_bytes(unit, Kind.WEIGHT, policy) for unit in rest)
    grad, num_grads = _gpu_grads(rest, policy)
    return min(len(rest), SLOTS_MIN) * weight + num_grads * grad


def _gpu_grads(rest: Sequence[UnitSpec], policy: Policy) -> tuple[int, int]:
    """Bytes and number of the slots through which gradients leave the GPU."""
    sizes = [grad_bytes(unit, policy) for unit in _trained(rest)]
    return max(sizes, default=0), min(len(sizes), SLOTS_MIN)


def _choose_streamed(rest: Sequence[UnitSpec], homed: int, budgets: Budgets, policy: Policy) -> list[UnitSpec]:
    """The first units in forward order, up to the share wanted and the room beside what is homed on the GPU.

    Each has slots of its own, all of one size, so those larger than most (embeddings) are left to the CPU.
    """
    trained = _trained(rest)
    if not (policy.deferred and policy.streamed_share and trained and Tier.RAM in policy.state):
        return []
    at_most = _usual_elements([unit.num_trained for unit in trained])
    usual = max(unit.num_trained for unit in trained if unit.num_trained <= at_most)
    wanted = policy.streamed_share * sum(unit.num_trained for unit in trained)
    room = budgets.gpu - homed - _gpu_least(rest, policy)
    passing = sum(block_bytes(UnitSpec("", usual), kind, policy) for kind in _passing(policy))
    chosen: list[UnitSpec] = []
    for unit in trained:
        cost = passing + grad_bytes(unit, policy)
        if unit.num_trained <= usual and unit.num_trained <= wanted and cost <= room:
            chosen.append(unit)
            wanted -= unit.num_trained
            room -= cost
    return chosen


def _passing(policy: Policy) -> list[Kind]:
    """Kinds of a streamed unit's state that have slots of their own: its weights pass through those of all others."""
    return [kind for kind in state_kinds(split=policy.split) if kind is not Kind.WEIGHT]


def _gpu_slots(
    rest: Sequence[UnitSpec],
    homed: int,
    streamed: Sequence[UnitSpec],
    budgets: Budgets,
    policy: Policy,
) -> tuple[SlotPlan, ...]:
    if not rest:
        return ()
    largest_streamed = max(streamed, key=lambda unit: unit.num_trained, default=UnitSpec("", 0))
    passing = [
        SlotPlan(Tier.GPU, kind, block_bytes(largest_streamed, kind, policy), len(streamed))
        for kind in _passing(policy)
    ]
    used = homed + sum(grad_bytes(unit, policy) for unit in streamed)
    used += sum(plan.slot_bytes * plan.num_slots for plan in passing)
    largest = max(rest, key=lambda unit: unit.num_elements)
    least = _gpu_least(rest, policy)
    if used + least > budgets.gpu:
        what = f"{GPU_SLOTS} for the largest unit, {largest.name}"
        remedy = f"Raise tiers.gpu to at least {at_least(used + least)}."
        raise PlanError(what, used + least, budgets.gpu, remedy)
    weight = block_bytes(largest, Kind.WEIGHT, policy)
    grad, num_grads = _gpu_grads(rest, policy)
    num_weights = min(len(rest), (budgets.gpu - used - num_grads * grad) // weight)
    return (
        SlotPlan(Tier.GPU, Kind.WEIGHT, weight, num_weights),
        *([SlotPlan(Tier.GPU, Kind.GRAD, grad, num_grads)] if num_grads else ()),
        *(passing if streamed else ()),
    )


def _ram_fixed(units: Sequence[UnitSpec], shipped: Sequence[UnitSpec], policy: Policy) -> int:
    """RAM that does not depend on where the state lies: held gradients and offloaded activations."""
    held = sum(grad_bytes(u, policy) for u in shipped) if policy.deferred or policy.groups > 1 else 0
    return held + sum(round_up(unit.activation_bytes) for unit in units)


def _waiting(
    units: Sequence[UnitSpec],
    rest: Sequence[UnitSpec],
    shipped: Sequence[UnitSpec],
    budgets: Budgets,
    policy: Policy,
) -> tuple[dict[str, UnitSpec], bool]:
    """Of the units whose gradients leave the GPU, those whose gradients wait in RAM, and whether others spill theirs.

    All wait there, but where there would be no room for update chunks beside them and NVMe can take the others. Where
    sums of groups spill, RAM takes as many as it has room for; none is added up there.
    """
    all_of_them = {unit.name: unit for unit in shipped}, False
    held = policy.deferred or policy.groups > 1
    if not (shipped and held and Tier.NVME in policy.state and budgets.nvme):
        return all_of_them
    room = budgets.ram - _ram_fixed(units, (), policy)
    wanted = sum(grad_bytes(unit, policy) for unit in shipped) + _pool_bytes(_grad_slots(shipped, policy))
    if Tier.RAM in policy.state and wanted + sum(_state_size(unit, policy) for unit in rest) <= room:
        return all_of_them
    longest = max(unit.num_elements for unit in rest)
    if wanted + _pool_bytes(_pools(longest, policy.align_elements, policy, spills_grads=False)) <= room:
        return all_of_them
    chunk = round_up(policy.chunk_elements or min(longest, CHUNK_ELEMENTS_FAST), policy.align_elements)
    room -= _pool_bytes(_pools(longest, chunk, policy, spills_grads=True))
    waiting = {}
    for unit in shipped:
        if (size := grad_bytes(unit, policy)) <= room:
            waiting[unit.name] = unit
            room -= size
    return waiting, True


def _grad_slots(waiting: Sequence[UnitSpec], policy: Policy) -> list[SlotPlan]:
    """RAM slots through which gradients pass to their sums, or to their updates in the immediate mode."""
    if not waiting or (policy.deferred and policy.groups == 1):
        return []
    return [SlotPlan(Tier.RAM, Kind.GRAD, max(grad_bytes(unit, policy) for unit in waiting), SLOTS_MIN)]


def _fill_ram(
    units: Sequence[UnitSpec],
    rest: Sequence[UnitSpec],
    waiting: Sequence[UnitSpec],
    budgets: Budgets,
    policy: Policy,
    spills_grads: bool,
) -> tuple[dict[tuple[str, Kind], Tier], tuple[SlotPlan, ...], int]:
    """Homes of the state that is not on the GPU, the RAM slots, and the chunk size.

    `waiting` are the units whose gradients go to RAM; where others spill theirs, `spills_grads`.
    """
    slots = [] if spills_grads else _grad_slots(waiting, policy)
    used = _ram_fixed(units, waiting, policy) + _pool_bytes(slots)
    if used > budgets.ram:
        raise _no_room_for_gradients(used, waiting, budgets, policy)
    longest = max((unit.num_elements for unit in rest), default=0)
    everything = sum(_state_size(unit, policy) for unit in rest)
    if not rest or (Tier.RAM in policy.state and used + everything <= budgets.ram and not spills_grads):
        chunk = max(policy.chunk_elements or min(longest, CHUNK_ELEMENTS_MAX), policy.align_elements)
        for plan in slots:
            spare = (budgets.ram - used - everything) // round_up(plan.slot_bytes)
            slots = [replace(plan, num_slots=min(GRAD_DEPTH, plan.num_slots + spare))]
        return {(unit.name, kind): Tier.RAM for unit in rest for kind in _kinds(unit, policy)}, tuple(slots), chunk
    if Tier.NVME not in policy.state or not budgets.nvme:
        raise _no_room(units, used + everything, everything, budgets, policy)
    chunk, pools = _chunk_slots(longest, used, budgets.ram, policy, spills_grads)
    others = [plan for plan in pools if plan.kind is not Kind.WEIGHT]
    spill = _spill_whole if policy.speculates else _spill
    room = budgets.ram - used - _pool_bytes(others) if Tier.RAM in policy.state else 0
    homes = spill(rest, room, policy)
    if all(homes[unit.name, Kind.WEIGHT] is Tier.RAM for unit in rest):  # no weights pass through slots
        return homes, (*slots, *others), chunk
    homes = spill(rest, room + _pool_bytes(others) - _pool_bytes(pools), policy)
    return homes, (*slots, *pools), chunk


def _no_room_for_gradients(used: int, waiting: Sequence[UnitSpec], budgets: Budgets, policy: Policy) -> PlanError:
    """Why RAM does not take them when NVMe takes none."""
    what, other = "gradients and activations in RAM", "."
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
    """Why state finds no home when NVMe takes none."""
    mount = ", or give tiers.nvme a mount." if Tier.NVME in policy.state else ", or add nvme to tiers.state."
    if Tier.RAM in policy.state:
        return PlanError("state in RAM", in_ram, budgets.ram, f"Raise tiers.ram to at least {at_least(in_ram)}{mount}")
    if Tier.NVME in policy.state:
        remedy = "The state has no other home: give tiers.nvme a mount, or add ram to tiers.state."
        return PlanError("state on NVMe", spilled, budgets.nvme, remedy)
    needed = sum(_state_size(unit, policy) + grad_bytes(unit, policy) for unit in units)
    remedy = f"Raise tiers.gpu to at least {at_least(needed)}, or add ram to tiers.state."
    return PlanError("state on the GPU", needed, budgets.gpu, remedy)


def _chunk_slots(
    longest: int, used: int, budget: int, policy: Policy, spills_grads: bool
) -> tuple[int, list[SlotPlan]]:
    """Update chunks as large as a quarter of the RAM that is left allows; all of it where gradients have to spill."""
    room, align = max(0, budget - used), policy.align_elements
    per_element = _pool_bytes(_pools(align, align, policy, spills_grads=spills_grads)) // align
    fits = room // per_element
    most = min(CHUNK_ELEMENTS_FAST, fits) if spills_grads else min(CHUNK_ELEMENTS_MAX, fits // 4)
    wanted = policy.chunk_elements or min(longest, most)
    chunk = max(align, wanted // align * align)
    chunk = min(chunk, -(-longest // align) * align)
    pools = _pools(longest, chunk, policy, spills_grads=spills_grads)
    if (needed := used + _pool_bytes(pools)) > budget:
        remedy = f"Raise tiers.ram to at least {at_least(needed)}" + (
            ", or lower tiers.chunk." if policy.chunk_elements else "."
        )
        raise PlanError("RAM slots for updates from NVMe", needed, budget, remedy)
    return chunk, pools


def _pools(longest: int, chunk: int, policy: Policy, *, spills_grads: bool) -> list[SlotPlan]:
    """RAM slots for update chunks; two weight slots more, through which loads pass."""
    depth = UPDATE_DEPTH + (SLOTS_MIN if policy.speculates else 0)
    pools = [
        SlotPlan(
            Tier.RAM,
            kind,
            min(chunk, longest) * bytes_per_element(kind, split=policy.split),
            depth + (SLOTS_MIN if kind is Kind.WEIGHT else 0),
        )
        for kind in state_kinds(split=policy.split)
    ]
    grad = min(chunk * (2 if policy.split else 4), grad_bytes(UnitSpec("", longest), policy))
    return [*pools, SlotPlan(Tier.RAM, Kind.GRAD, grad, depth)] if spills_grads else pools


def _pool_bytes(pools: Iterable[SlotPlan]) -> int:
    return sum(round_up(plan.slot_bytes) * plan.num_slots for plan in pools)


def _spill(units: Sequence[UnitSpec], room: int, policy: Policy) -> dict[tuple[str, Kind], Tier]:
    """Weight planes first, then the rest, unit by unit, as RAM takes it."""
    others = _passing(policy)
    blocks = [(unit, Kind.WEIGHT) for unit in units] + [(unit, kind) for unit in _trained(units) for kind in others]
    homes = {}
    for unit, kind in blocks:
        size = block_bytes(unit, kind, policy)
        homes[unit.name, kind] = Tier.RAM if size <= room else Tier.NVME
        room -= size if size <= room else 0
    return homes


def _spill_whole(units: Sequence[UnitSpec], room: int, policy: Policy) -> dict[tuple[str, Kind], Tier]:
    """Weight planes first, twice; then the rest of whole units, whose second weight plane is not needed.

    Frozen units have one, once.
    """
    homes = dict.fromkeys(((unit.name, kind) for unit in units for kind in _kinds(unit, policy)), Tier.NVME)
    for unit in units:
        if (size := (2 if unit.num_trained else 1) * block_bytes(unit, Kind.WEIGHT, policy)) <= room:
            homes[unit.name, Kind.WEIGHT] = Tier.RAM
            room -= size
    for unit in _trained(units):
        taken = 2 * block_bytes(unit, Kind.WEIGHT, policy) if homes[unit.name, Kind.WEIGHT] is Tier.RAM else 0
        if (size := _state_size(unit, policy) - taken) <= room:
            homes |= {(unit.name, kind): Tier.RAM for kind in _kinds(unit, policy)}
            room -= size
    return homes
