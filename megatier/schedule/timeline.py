"""Timeline: the planned loads and updates of a pass, from the order in which its units are used. Pure.

Step 1 runs in module order and records its accesses. From step 2 on this timeline says which load goes into which GPU
slot, and after which access it may start. A load takes the slot whose occupant is used again furthest in the future.
This rule, Belady's, is optimal because the order is known. So the backward starts with the units that the forward left
in the slots.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatier.errors import PlanError
from megatier.schedule.placement import Placement
from megatier.schedule.sizes import Policy, UnitSpec, trained
from megatier.tier import Kind, Phase, Tier


@dataclass(frozen=True, slots=True)
class Access:
    """One use of a unit by compute."""

    unit: str
    phase: Phase
    group: int
    """Group of the step, from 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Weights of a unit come into a GPU slot, for one access and for those that follow while they stay there."""

    unit: str
    access: int
    """Index of the access that needs it."""
    slot: int
    """Number of the GPU slot."""
    evicts: str | None
    """The unit that leaves the slot first; None: the slot is empty."""
    after_access: int
    """Index of the access that must be over before; -1: none."""


@dataclass(frozen=True, slots=True)
class Update:
    """AdamW on a unit whose gradient has waited since the last step."""

    unit: str
    load: Load | None
    """The load that it feeds span by span, if the weights come from NVMe and would otherwise be read twice."""


@dataclass(frozen=True, slots=True)
class Scatter:
    """A group's gradient of a unit, whose shards go to the ranks that own them."""

    unit: str
    group: int
    """Group of the step, from 0."""
    access: int
    """Index of the access after which compute hands the gradient over."""
    width: int
    """Bytes of an element on its way: as few as lose nothing."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """All planned loads and updates of one pass over a recorded order."""

    accesses: tuple[Access, ...]
    """The recorded order."""
    loads: tuple[Load, ...]
    """The loads that no update feeds, in the order in which they are issued."""
    updates: tuple[Update, ...]
    """The updates, in the order in which the pass comes to their units."""
    scatters: tuple[Scatter, ...] = ()
    """The scatters, in the order in which compute hands gradients over. One rank alone has none."""

    def collectives(self) -> list[Load | Scatter]:
        """Loads and scatters in the order in which every rank begins them.

        It is the same on all ranks, and nobody waits for what comes later. A load for access k waits for accesses
        before k, and stands before all scatters of access k and later ones. A scatter waits for its access, whose
        load stands before it.
        """
        merged: list[Load | Scatter] = []
        scatters = deque(self.scatters)
        after = -1

        # Loads stay in their own order, so one that waits for little comes behind those before it that wait for more.
        for load in self.loads:
            after = max(after, load.after_access)
            while scatters and scatters[0].access <= after:
                merged.append(scatters.popleft())
            merged.append(load)

        return [*merged, *scatters]

    def last_uses(self) -> dict[tuple[str, int], int]:
        """Index of each unit's last access in each group, which makes its gradient."""
        return {(access.unit, access.group): index for index, access in enumerate(self.accesses)}


def build(
    accesses: Sequence[Access],
    placement: Placement,
    *,
    updates: bool,
    updated: Collection[str] = (),
    scatters: Sequence[Scatter] = (),
) -> Timeline:
    """Plan one pass.

    Args:
        accesses: the recorded order.
        placement: homes and GPU slots; units at home on the GPU are never loaded, unless ranks share them.
        updates: whether the last step's updates run in this pass, each before its unit's first access, as they do in
            the deferred mode. Units that are frozen have none.
        updated: units that need no update, because theirs ran speculatively.
        scatters: the gradients that ranks scatter in the pass, as they were recorded.

    Raises:
        PlanError: a unit must be loaded and there is no slot.
    """
    is_shared = placement.ranks > 1
    num_slots = placement.num_slots(Tier.GPU, Kind.GATHERED if is_shared else Kind.WEIGHT)
    on_gpu = {unit for (unit, kind), home in placement.homes.items() if kind is Kind.WEIGHT and home is Tier.GPU}
    loads = _assign(accesses, frozenset() if is_shared else on_gpu, num_slots)
    if not updates:
        return Timeline(tuple(accesses), tuple(loads), (), tuple(scatters))

    # An update runs ahead of its unit's first access, so it can only feed the unit's first load.
    first_load = {load.unit: load for load in reversed(loads)}
    planned = []
    trained = (access.unit for access in accesses if access.unit in placement.grad_homes)
    for unit in dict.fromkeys(unit for unit in trained if unit not in updated):
        # A load that gathers cannot be fed: the shards of all ranks have to be there at once.
        fed = placement.homes[unit, Kind.WEIGHT] is Tier.NVME and not is_shared
        planned.append(Update(unit, first_load[unit] if fed else None))

    fed_loads = {update.load for update in planned}
    unfed = tuple(load for load in loads if load not in fed_loads)
    return Timeline(tuple(accesses), unfed, tuple(planned), tuple(scatters))


def scatters_of(accesses: Sequence[Access], units: Iterable[UnitSpec], policy: Policy) -> tuple[Scatter, ...]:
    """The gradients that ranks scatter in a pass, as a run would record them; none if a rank is alone."""
    if policy.ranks == 1:
        return ()

    # The last use of a unit in a group makes its gradient.
    last = {(access.unit, access.group): index for index, access in enumerate(accesses)}
    uses = Counter((access.unit, access.group) for access in accesses if access.phase is Phase.FORWARD)
    widths = {unit.name: unit.schema.grad_width for unit in trained(units)}
    made = []
    for (unit, group), index in last.items():
        # A sum of uses or slices has fp32 on its way, and so has what a fused head makes in the forward.
        is_sum = uses[unit, group] * policy.slices > 1 or accesses[index].phase is Phase.FORWARD
        if unit in widths:
            made.append(Scatter(unit, group, index, 4 if is_sum else widths[unit]))

    return tuple(sorted(made, key=lambda scatter: scatter.access))


def _assign(accesses: Sequence[Access], resident: Container[str], num_slots: int) -> list[Load]:
    """Give each access whose unit is not on the GPU already a load and a slot.

    Args:
        accesses: the recorded order.
        resident: units that need no slot.
        num_slots: the number of slots.

    Raises:
        PlanError: a unit must be loaded and there is no slot.
    """
    uses: dict[str, list[int]] = {}
    for index, access in enumerate(accesses):
        uses.setdefault(access.unit, []).append(index)
    occupants: list[str | None] = [None] * num_slots
    last_use = [-1] * num_slots
    loads = []

    for index, access in enumerate(accesses):
        if access.unit in resident:
            continue

        # It is still there from an access before.
        if access.unit in occupants:
            last_use[occupants.index(access.unit)] = index
            continue

        if not num_slots:
            raise PlanError(f"GPU slots for {access.unit}", 1, 0, "Raise tiers.gpu.")

        # The occupant's last use must be over before the load: `last_use` becomes its `after_access`.
        slot = max(range(num_slots), key=lambda s: _next_use(uses, occupants[s], index))
        loads.append(
            Load(unit=access.unit, access=index, slot=slot, evicts=occupants[slot], after_access=last_use[slot])
        )
        occupants[slot] = access.unit
        last_use[slot] = index

    return loads


def _next_use(uses: Mapping[str, list[int]], unit: str | None, now: int) -> float:
    """Index of the next use after now: beyond everything if there is none, and further still for an empty slot."""
    if unit is None:
        return float("inf")

    # If several units are not used again, the slot of the one whose last use is oldest lets its load start earliest.
    later = bisect_right(uses[unit], now)
    # 1e9 is larger than any index.
    return uses[unit][later] if later < len(uses[unit]) else 1e9 - uses[unit][-1]
