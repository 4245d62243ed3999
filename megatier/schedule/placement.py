"""Plans the home tier of every block, and the slots through which the others pass.

A pure function of units, budgets and policy: no torch, no machine. Residency is static, because a step scans all units
in a cycle, which defeats any recently-used rule. Units fill the GPU first (`schedule.gpu`). Of what is left, RAM takes
as much as it can (`schedule.ram`); some of it may be streamed to the GPU to be updated there. The rest lies on NVMe.

Units that spill may have several generations of state, each with a place of its own on NVMe. One of them may be kept as
a savepoint, and a speculative update writes to one that does not hold. Of units in RAM those have a second place there
for which it has room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from megatier.errors import PlanError
from megatier.schedule.budgets import Budgets
from megatier.schedule.gpu import fill_gpu
from megatier.schedule.policy import Policy
from megatier.schedule.ram import Homes, RamShare, fill_ram, spills
from megatier.schedule.sizes import grad_bytes, home_bytes, state_bytes, trained
from megatier.schedule.slots import SlotPlan
from megatier.schedule.unit_spec import UnitSpec
from megatier.tier import Kind, Tier, round_up

UpdateQueue = Literal["update", "update_nvme", "update_gpu"]
"""A queue that updates: on the CPU units in RAM, on the CPU units that spill, or on the GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The plan of where every block lies, and of all slots."""

    homes: Mapping[tuple[str, Kind], Tier]
    """The home tier of each unit's block of each kind of state."""
    slots: tuple[SlotPlan, ...]
    """Equal slots for blocks that pass through a tier, one plan for each tier and kind."""
    chunk_elements: int
    """Elements of one update chunk."""
    activation_homes: Mapping[str, Tier]
    """The tier where the activation of each unit that offloads it waits for the backward: ram or nvme."""
    grad_homes: Mapping[str, Tier | None]
    """The tier where the finished gradient of each trained unit waits for its update: NVMe if RAM is too short for all.
    None: the gradient is only ever in a slot."""
    sums_on_gpu: bool = False
    """Whether the sums of several groups are taken in GPU slots, to which they come again, from RAM or NVMe, for each
    group: because RAM is too short for them, or because each group adds gradients of several ranks."""
    num_ranks: int = 1
    """Ranks that share the state. All homes are those of shards; whole weights are only ever in slots."""
    streamed: tuple[str, ...] = ()
    """Units at home in RAM whose state passes through GPU slots and is updated there, in forward order."""
    spilled: tuple[str, ...] = ()
    """Units with state on NVMe, in forward order. Those that are frozen whole are not among them."""
    generations: int = 1
    """Places on NVMe for the state of each unit that spills."""
    speculative: tuple[str, ...] = ()
    """Units that may be updated before the norm is known, in forward order: those that spill, and those in RAM that
    have a second place there; or none."""
    state_bytes: Mapping[Tier, int] = field(default_factory=dict)
    """Bytes of one generation of the state in each tier."""
    other_bytes: Mapping[Tier, int] = field(default_factory=dict)
    """Bytes of gradients, activations, slots and further generations in each tier."""

    def update_queue(self, unit: str) -> UpdateQueue:
        """Return the queue on which AdamW runs for a unit that is trained."""
        is_on_gpu = self.homes[unit, Kind.WEIGHT] is Tier.GPU
        if is_on_gpu or unit in self.streamed:
            return "update_gpu"

        # A gradient on NVMe is read chunk by chunk too. No drive shall hold up units that are in RAM whole.
        reads_drives = unit in self.spilled or self.grad_homes[unit] is Tier.NVME
        return "update_nvme" if reads_drives else "update"

    def sum_tier(self, unit: str) -> Tier:
        """Return the tier where the gradients of several groups are added up for a unit that is trained: gpu or ram."""
        if self.sums_on_gpu or self.grad_homes[unit] is Tier.GPU:
            return Tier.GPU
        return Tier.RAM

    def num_slots(self, tier: Tier, kind: Kind) -> int:
        """Return the number of slots for one kind of block; 0 if none are planned."""
        return sum(plan.num_slots for plan in self.slots if (plan.tier, plan.kind) == (tier, kind))


def place(units: Sequence[UnitSpec], budgets: Budgets, policy: Policy) -> Placement:
    """Choose every home and every slot.

    Raises:
        PlanError: it does not fit; names what is short, the figures, and what to change.
    """
    # The GPU first, then RAM. The gradient of a streamed unit stays on the GPU, where its update needs it.
    gpu = fill_gpu(units, budgets.gpu, policy)
    streamed = tuple(spec.name for spec in gpu.streamed)
    shipped = [spec for spec in trained(gpu.rest) if spec.name not in streamed]
    ram = fill_ram(units, gpu.rest, shipped, budgets, policy)

    # RAM is too short for all state, and a streamed unit has to be at home there whole: so none is streamed.
    if streamed and Tier.NVME in ram.homes.values():
        none_streamed = replace(policy, streamed_share=0.0)
        return place(units, budgets, none_streamed)

    homes = {(spec.name, kind): Tier.GPU for spec in gpu.resident for kind in spec.kinds}
    homes |= ram.homes
    slots = gpu.slots + ram.slots
    spilled = [spec for spec in trained(gpu.rest) if spills(spec, homes)]

    # The immediate mode updates in place, in the only generation that there is.
    generations = policy.generations if policy.deferred else 1

    one_generation = _bytes_by_home(units, homes)
    other = _gradient_and_slot_bytes(units, shipped, slots, ram, policy)
    further = _further_bytes(spilled, homes, generations, policy)
    other.update(further)

    # What RAM has left is for updates that need not wait for the norm.
    free_bytes = budgets.ram - one_generation[Tier.RAM] - other[Tier.RAM]
    waiting = [spec for spec in shipped if spec.name in ram.waiting]
    doubled = _choose_doubled(waiting, homes, free_bytes) if policy.speculates else []
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
        grad_homes=_grad_homes(trained(units), shipped, ram.waiting, policy),
        sums_on_gpu=sums_on_gpu and policy.groups > 1,
        num_ranks=policy.num_ranks,
        streamed=streamed,
        spilled=tuple(spec.name for spec in spilled),
        generations=generations,
        speculative=tuple(spec.name for spec in units if spec.name in speculative),
        state_bytes=dict(one_generation),
        other_bytes=dict(other),
    )


def _activation_homes(units: Iterable[UnitSpec], spilled: Collection[str]) -> dict[str, Tier]:
    """Return the tier where the activation of each unit that offloads it waits for the backward."""
    homes = {}
    for spec in units:
        if spec.activation_bytes:
            homes[spec.name] = Tier.NVME if spec.name in spilled else Tier.RAM
    return homes


def _grad_homes(
    units: Sequence[UnitSpec], shipped: Sequence[UnitSpec], waiting: Collection[str], policy: Policy
) -> dict[str, Tier | None]:
    """Return the tier where each unit's finished gradient waits for its update; None: only in a slot.

    Args:
        units: those that are trained.
        shipped: those whose gradients leave the GPU.
        waiting: names of those that RAM takes.
        policy: groups, and whether updates wait.
    """
    # With one group in the immediate mode, the update takes the gradient from its slot at once.
    is_held = policy.deferred or policy.groups > 1
    in_ram = Tier.RAM if is_held else None

    homes: dict[str, Tier | None] = {}
    for spec in units:
        homes[spec.name] = Tier.GPU
    for spec in shipped:
        homes[spec.name] = in_ram if spec.name in waiting else Tier.NVME
    return homes


def _gradient_and_slot_bytes(
    units: Sequence[UnitSpec], shipped: Sequence[UnitSpec], slots: Sequence[SlotPlan], ram: RamShare, policy: Policy
) -> Counter[Tier]:
    """Return the bytes of gradients, offloaded activations and slots, in each tier.

    Args:
        units: all units.
        shipped: those whose gradients leave the GPU.
        slots: all slots, of the GPU and of RAM.
        ram: what RAM takes.
        policy: dtype, groups.
    """
    total = Counter({Tier.RAM: ram.fixed_bytes})
    for plan in slots:
        total[plan.tier] += round_up(plan.slot_bytes) * plan.num_slots

    leaving = {spec.name for spec in shipped}
    staying = [spec for spec in units if spec.name not in leaving]
    staying_bytes = sum(grad_bytes(spec, policy) for spec in staying)
    total[Tier.GPU] += staying_bytes

    # What RAM takes of gradients and activations is in its fixed bytes, and NVMe has the others.
    spilled = [spec for spec in shipped if spec.name not in ram.waiting]
    spilled_bytes = sum(grad_bytes(spec, policy) for spec in spilled)
    offloaded = [spec for spec in units if spec.name in ram.spilled_activations]
    activation_bytes = sum(round_up(spec.activation_bytes) for spec in offloaded)
    total[Tier.NVME] += spilled_bytes + activation_bytes
    return total


def all_short(short: PlanError, units: Sequence[UnitSpec], budgets: Budgets, policy: Policy) -> PlanError:
    """Return a refusal that names every budget that is too small, so that nobody meets them one after the other.

    Args:
        short: the first refusal, of `place` with the same arguments.
        units: as for `place`.
        budgets: as for `place`.
        policy: as for `place`.
    """
    refusals = {short.tier: short}
    last = short

    # Each budget is raised to what is said of it, and what is short then is the next one. One that is short again is
    # said with what it needs in the end.
    for _ in range(2 * len(Tier)):
        if last.tier not in set(Tier):
            break

        # A refusal names bytes of the host, and budgets are those of a rank.
        num_sharing = 1 if last.tier == Tier.GPU else policy.num_host_ranks
        shared = budgets.shared_ram if last.tier == Tier.RAM else 0
        needed = -(-last.needed_bytes // num_sharing) - shared
        least_raise = getattr(budgets, last.tier) + 1
        raised = {str(last.tier): max(needed, least_raise)}
        budgets = replace(budgets, **raised)
        try:
            place(units, budgets, policy)
        except PlanError as other:
            # The budget is that of the user, and not the raised one.
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
    """Return the bytes of all generations but one of the units that spill, in each tier.

    An update into another generation leaves the one that holds as it is, in RAM too, so RAM has a second place.
    """
    one_generation = _bytes_by_home(spilled, homes)
    further: Counter[Tier] = Counter()
    further[Tier.NVME] = one_generation[Tier.NVME] * (generations - 1)

    # A savepoint alone needs no place in RAM: what lies there is copied to its folder.
    further[Tier.RAM] = one_generation[Tier.RAM] if policy.speculates else 0
    return further


def _choose_doubled(waiting: Sequence[UnitSpec], homes: Homes, free: int) -> list[UnitSpec]:
    """Choose the units in RAM that have a second place there, so that their updates need not wait for the norm.

    The first units in forward order come first, since the next forward needs them first. A unit with frozen weights has
    none: they would take room twice, and an update of the rest is short.

    Args:
        waiting: trained units whose gradients wait in RAM.
        homes: the homes of all state outside of the GPU.
        free: bytes of RAM that nothing else takes.
    """
    chosen = []
    for spec in waiting:
        is_in_ram = all(homes[spec.name, kind] is Tier.RAM for kind in spec.kinds)
        size = state_bytes(spec)
        if is_in_ram and not spec.frozen_elements and size <= free:
            chosen.append(spec)
            free -= size
    return chosen


def _check_nvme(needed: int, generations: int, budgets: Budgets, policy: Policy, *, spills_activations: bool) -> None:
    """Refuse state, generations, gradients and activations that NVMe has no room for."""
    if needed > budgets.nvme:
        remedy = "Give tiers.nvme more space, raise tiers.ram, or train a smaller model."
        if spills_activations:
            remedy = "Give tiers.nvme more space, raise tiers.ram, or train on fewer tokens a group."

        # A generation for speculation only saves time, so it is the first to go.
        if generations > 1 + policy.savepoints:
            remedy = f"Set tiers.generations to {generations - 1}. {remedy}"
        what = "state and activations on NVMe" if spills_activations else "state on NVMe"
        host_needs = needed * policy.num_host_ranks
        host_has = budgets.nvme * policy.num_host_ranks
        raise PlanError(what, host_needs, host_has, remedy, Tier.NVME)


def _bytes_by_home(units: Iterable[UnitSpec], homes: Homes) -> Counter[Tier]:
    """Return the bytes of one generation of the units' state, by home."""
    total: Counter[Tier] = Counter()
    for spec in units:
        for kind in spec.kinds:
            home = homes[spec.name, kind]
            total[home] += home_bytes(spec, kind, home)
    return total
