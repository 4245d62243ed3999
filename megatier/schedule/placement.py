"""The placement of a run: the home tier of every block, and the slots through which other blocks pass. Pure.

The planner and the session call `place` with units, budgets and policy. Homes never change in a run, because a step
uses all units in a cycle, for which least-recently-used eviction always evicts the unit that is needed next. Units fill
the GPU first (`gpu`). RAM takes as much as it can of the rest (`ram`), and some of that may be streamed to the GPU for
its update. All else lies on NVMe.

Units that spill may have several generations of state, each in a place of its own on NVMe. One may be kept as a
savepoint, and a speculative update writes to a spare one. Units in RAM have a second place there if it has room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from megatier.errors import PlanError
from megatier.schedule.budgets import Budgets
from megatier.schedule.gpu import GpuShare, fill_gpu
from megatier.schedule.policy import Policy
from megatier.schedule.ram import Homes, RamShare, fill_ram, spills
from megatier.schedule.sizes import grad_bytes, home_bytes, state_bytes, trained_units
from megatier.schedule.slots import SlotPlan
from megatier.schedule.unit_spec import UnitSpec
from megatier.tier import Kind, Tier, round_up

UpdateQueue = Literal["update", "update_nvme", "update_gpu"]
"""A queue for updates: of units in RAM on the CPU, of units that spill on the CPU, or on the GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The home of every block, and all slots."""

    homes: Mapping[tuple[str, Kind], Tier]
    """The home tier of each unit's block of each kind of state."""
    slots: tuple[SlotPlan, ...]
    """Equal slots for blocks that pass through a tier, one plan for each tier and kind."""
    chunk_elements: int
    """Elements of one update chunk."""
    activation_homes: Mapping[str, Tier]
    """The tier where each offloaded activation waits for the backward, by unit: ram or nvme."""
    grad_homes: Mapping[str, Tier | None]
    """The tier where the final gradient of each trained unit waits for its update: NVMe if RAM is too short for all.
    None: the gradient is only in slots."""
    sums_on_gpu: bool = False
    """Whether groups are summed in GPU slots, so that each sum comes back from RAM or NVMe for each group. This is so
    if RAM is too short for the sums, or if each group adds gradients of several ranks."""
    num_ranks: int = 1
    """Ranks that share the state. Homes are those of shards, and whole weights are only in slots."""
    streamed: tuple[str, ...] = ()
    """Units at home in RAM whose state passes through GPU slots and is updated there, in forward order."""
    spilled: tuple[str, ...] = ()
    """Trained units with state on NVMe, in forward order."""
    generations: int = 1
    """Places on NVMe for the state of each unit that spills."""
    speculative: tuple[str, ...] = ()
    """Units that may be updated before the norm is known, in forward order: those that spill, and those in RAM with a
    second place there. Empty if there is no generation for it."""
    state_bytes: Mapping[Tier, int] = field(default_factory=dict)
    """Bytes of one generation of the state in each tier."""
    other_bytes: Mapping[Tier, int] = field(default_factory=dict)
    """Bytes of gradients, activations, slots and further generations in each tier."""

    def update_queue(self, unit: str) -> UpdateQueue:
        """Return the queue that updates a trained unit."""
        is_on_gpu = self.homes[unit, Kind.WEIGHT] is Tier.GPU
        if is_on_gpu or unit in self.streamed:
            return "update_gpu"

        # A gradient on NVMe is read chunk by chunk too. Drives must not hold up units that are whole in RAM.
        reads_drives = unit in self.spilled or self.grad_homes[unit] is Tier.NVME
        return "update_nvme" if reads_drives else "update"

    def sum_tier(self, unit: str) -> Tier:
        """Return the tier where the gradients of several groups are added up for a trained unit: gpu or ram."""
        if self.sums_on_gpu or self.grad_homes[unit] is Tier.GPU:
            return Tier.GPU
        return Tier.RAM

    def num_slots(self, tier: Tier, kind: Kind) -> int:
        """Return the number of slots for one kind of block in a tier."""
        return sum(plan.num_slots for plan in self.slots if (plan.tier, plan.kind) == (tier, kind))


def place(units: Sequence[UnitSpec], budgets: Budgets, policy: Policy) -> Placement:
    """Choose every home and every slot.

    Raises:
        PlanError: it does not fit. The error names the tier, the figures, and what to change.
    """
    # The gradient of a streamed unit stays on the GPU, where its update needs it.
    gpu = fill_gpu(units, budgets.gpu, policy)
    streamed = {spec.name for spec in gpu.streamed}
    grads_leave_gpu = [spec for spec in trained_units(gpu.rest) if spec.name not in streamed]
    ram = fill_ram(units, gpu.rest, grads_leave_gpu, budgets, policy)

    # A streamed unit has to be whole in RAM. If RAM is too short for all state, none is streamed.
    if streamed and Tier.NVME in ram.homes.values():
        none_streamed = replace(policy, streamed_share=0.0)
        return place(units, budgets, none_streamed)

    return _combine(units, gpu, ram, grads_leave_gpu, budgets, policy)


def _combine(
    units: Sequence[UnitSpec],
    gpu: GpuShare,
    ram: RamShare,
    grads_leave_gpu: Sequence[UnitSpec],
    budgets: Budgets,
    policy: Policy,
) -> Placement:
    """Return the placement of the shares of GPU and RAM, with the rest on NVMe.

    Raises:
        PlanError: NVMe is too small.
    """
    # The two never overlap, because RAM was filled with the units that the GPU has left.
    homes = {(spec.name, kind): Tier.GPU for spec in gpu.resident for kind in spec.kinds}
    homes |= ram.homes
    slots = gpu.slots + ram.slots
    spilled = [spec for spec in trained_units(gpu.rest) if spills(spec, homes)]

    # The immediate mode updates in place, so it has one generation.
    generations = policy.generations if policy.deferred else 1

    one_generation = _bytes_by_home(units, homes)
    other = _gradient_and_slot_bytes(units, grads_leave_gpu, slots, ram, policy)
    further = _further_bytes(spilled, homes, generations, policy)
    other.update(further)

    # The rest of RAM is for second places, so that more updates need not wait for the norm.
    free_bytes = budgets.ram - one_generation[Tier.RAM] - other[Tier.RAM]
    with_grads_in_ram = [spec for spec in grads_leave_gpu if spec.name in ram.with_grads_in_ram]
    doubled = _choose_doubled(with_grads_in_ram, homes, free_bytes) if policy.speculates else []
    other[Tier.RAM] += sum(map(state_bytes, doubled))

    needed = one_generation[Tier.NVME] + other[Tier.NVME]
    spills_activations = bool(ram.spilled_activations)
    _check_nvme(needed, generations, budgets, policy, spills_activations=spills_activations)

    speculative = {spec.name for spec in (*spilled, *doubled)} if policy.speculates else set()
    sums_on_gpu = ram.spills_grads or policy.num_ranks > 1
    return Placement(
        homes=homes,
        slots=slots,
        chunk_elements=ram.chunk_elements,
        activation_homes=_activation_homes(units, ram.spilled_activations),
        grad_homes=_grad_homes(trained_units(units), grads_leave_gpu, ram.with_grads_in_ram, policy),
        sums_on_gpu=sums_on_gpu and policy.groups > 1,
        num_ranks=policy.num_ranks,
        streamed=tuple(spec.name for spec in gpu.streamed),
        spilled=tuple(spec.name for spec in spilled),
        generations=generations,
        speculative=tuple(spec.name for spec in units if spec.name in speculative),
        state_bytes=dict(one_generation),
        other_bytes=dict(other),
    )


def _activation_homes(units: Iterable[UnitSpec], spilled: Collection[str]) -> dict[str, Tier]:
    """Return the tier where each offloaded activation waits for the backward, by unit."""
    homes = {}
    for spec in units:
        if spec.activation_bytes:
            homes[spec.name] = Tier.NVME if spec.name in spilled else Tier.RAM
    return homes


def _grad_homes(
    units: Sequence[UnitSpec], grads_leave_gpu: Sequence[UnitSpec], with_grads_in_ram: Collection[str], policy: Policy
) -> dict[str, Tier | None]:
    """Return the tier where each unit's final gradient waits for its update; None: the gradient is only in slots.

    Args:
        units: the trained units.
        grads_leave_gpu: units whose gradients leave the GPU.
        with_grads_in_ram: names of the units whose gradients RAM takes.
        policy: groups, and whether updates wait for the norm.
    """
    # In the immediate mode with one group, the update takes the gradient from its slot at once.
    is_held = policy.deferred or policy.groups > 1
    in_ram = Tier.RAM if is_held else None

    homes: dict[str, Tier | None] = {}
    for spec in units:
        homes[spec.name] = Tier.GPU
    for spec in grads_leave_gpu:
        homes[spec.name] = in_ram if spec.name in with_grads_in_ram else Tier.NVME
    return homes


def _gradient_and_slot_bytes(
    units: Sequence[UnitSpec],
    grads_leave_gpu: Sequence[UnitSpec],
    slots: Sequence[SlotPlan],
    ram: RamShare,
    policy: Policy,
) -> Counter[Tier]:
    """Return the bytes of gradients, offloaded activations and slots, in each tier.

    Args:
        units: all units.
        grads_leave_gpu: units whose gradients leave the GPU.
        slots: all slots, of the GPU and of RAM.
        ram: the share of RAM.
        policy: dtype and groups.
    """
    total = Counter({Tier.RAM: ram.fixed_bytes})
    for plan in slots:
        total[plan.tier] += round_up(plan.slot_bytes) * plan.num_slots

    leaving = {spec.name for spec in grads_leave_gpu}
    staying = [spec for spec in units if spec.name not in leaving]
    staying_bytes = sum(grad_bytes(spec, policy) for spec in staying)
    total[Tier.GPU] += staying_bytes

    # Gradients and activations in RAM are in `fixed_bytes`, and all others are on NVMe.
    spilled = [spec for spec in grads_leave_gpu if spec.name not in ram.with_grads_in_ram]
    spilled_bytes = sum(grad_bytes(spec, policy) for spec in spilled)
    offloaded = [spec for spec in units if spec.name in ram.spilled_activations]
    activation_bytes = sum(round_up(spec.activation_bytes) for spec in offloaded)
    total[Tier.NVME] += spilled_bytes + activation_bytes
    return total


def name_all_shortages(short: PlanError, units: Sequence[UnitSpec], budgets: Budgets, policy: Policy) -> PlanError:
    """Return an error that names every budget that is too small, so that a user can raise all of them at once.

    Args:
        short: the error of `place` with the same arguments, which names one budget.
        units: as for `place`.
        budgets: as for `place`.
        policy: as for `place`.
    """
    refusals = {short.tier: short}
    last = short

    # Raise the budget that is named, and see which one is short next. If one is short again, the last figure counts.
    for _ in range(2 * len(Tier)):
        if last.tier not in set(Tier):
            break

        # An error names bytes of the host, and budgets are those of a rank.
        num_sharing = 1 if last.tier == Tier.GPU else policy.num_host_ranks
        shared = budgets.shared_ram if last.tier == Tier.RAM else 0
        needed = -(-last.needed_bytes // num_sharing) - shared
        least_raise = getattr(budgets, last.tier) + 1
        raised = {str(last.tier): max(needed, least_raise)}
        budgets = replace(budgets, **raised)
        try:
            place(units, budgets, policy)
        except PlanError as other:
            # The error shows the user's budget, not the raised one.
            had = refusals.get(other.tier, other).had_bytes
            last = PlanError(other.what, other.needed_bytes, had, other.remedy, other.tier)
            refusals[other.tier] = last
        else:
            break

    first = refusals.pop(short.tier)
    others = map(str, refusals.values())
    remedy = " Besides, ".join([first.remedy, *others])
    return PlanError(first.what, first.needed_bytes, first.had_bytes, remedy, first.tier)


def _further_bytes(spilled: Sequence[UnitSpec], homes: Homes, generations: int, policy: Policy) -> Counter[Tier]:
    """Return the bytes of all further generations of the units that spill, in each tier.

    An update into another generation keeps the valid one, so state of these units in RAM has a second place there.
    """
    one_generation = _bytes_by_home(spilled, homes)
    further: Counter[Tier] = Counter()
    further[Tier.NVME] = one_generation[Tier.NVME] * (generations - 1)

    # A savepoint by itself needs no second place in RAM, because it copies that state to its folder.
    further[Tier.RAM] = one_generation[Tier.RAM] if policy.speculates else 0
    return further


def _choose_doubled(with_grads_in_ram: Sequence[UnitSpec], homes: Homes, free: int) -> list[UnitSpec]:
    """Choose the units in RAM that get a second place there, so that their updates need not wait for the norm.

    They are chosen in forward order, because the next forward needs the first units first. Units with frozen weights
    get none: the frozen weights would take room twice, and the update of the others is short.

    Args:
        with_grads_in_ram: trained units whose gradients wait in RAM.
        homes: the homes of all state outside of the GPU.
        free: bytes of RAM that nothing else takes.
    """
    chosen = []
    for spec in with_grads_in_ram:
        is_in_ram = all(homes[spec.name, kind] is Tier.RAM for kind in spec.kinds)
        size = state_bytes(spec)
        if is_in_ram and not spec.frozen_elements and size <= free:
            chosen.append(spec)
            free -= size
    return chosen


def _check_nvme(needed: int, generations: int, budgets: Budgets, policy: Policy, *, spills_activations: bool) -> None:
    """Raise a PlanError if NVMe has too few bytes for state, generations, gradients and activations."""
    if needed > budgets.nvme:
        remedy = "Give tiers.nvme more space, raise tiers.ram, or train a smaller model."
        if spills_activations:
            remedy = "Give tiers.nvme more space, raise tiers.ram, or train on fewer tokens a group."

        # Speculation only saves time, so its generation is the first to give up.
        if generations > 1 + policy.savepoints:
            remedy = f"Set tiers.generations to {generations - 1}. {remedy}"
        purpose = "state and activations on NVMe" if spills_activations else "state on NVMe"
        host_needs = needed * policy.num_host_ranks
        host_has = budgets.nvme * policy.num_host_ranks
        raise PlanError(purpose, host_needs, host_has, remedy, Tier.NVME)


def _bytes_by_home(units: Iterable[UnitSpec], homes: Homes) -> Counter[Tier]:
    """Return the bytes of one generation of the units' state, by home tier."""
    total: Counter[Tier] = Counter()
    for spec in units:
        for kind in spec.kinds:
            home = homes[spec.name, kind]
            total[home] += home_bytes(spec, kind, home)
    return total
