"""Timeline: the planned transfers of a step, from the order in which its units are used. Pure.

Step 1 runs in module order and records its accesses; from step 2 this timeline says which load goes into which GPU
slot, and after which access it may start. A load takes the slot whose occupant is used again furthest in the future
(Belady's rule: optimal, since the order is known), so that the backward starts with what the forward left behind.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from megatier.errors import PlanError
from megatier.schedule.placement import Placement
from megatier.tier import Kind, Phase, Tier


@dataclass(frozen=True, slots=True)
class Access:
    """One use of a unit by compute."""

    unit: str
    phase: Phase
    group: int


@dataclass(frozen=True, slots=True)
class Load:
    """Weights of a unit into a GPU slot, for one access and those that follow while they stay."""

    unit: str
    access: int
    """Index of the access that needs it."""
    slot: int
    evicts: str | None
    """Unit that leaves the slot first."""
    after_access: int
    """Index of the access that must be over before, or -1."""


@dataclass(frozen=True, slots=True)
class Update:
    """AdamW on a unit whose gradient waits since the last step."""

    unit: str
    load: Load | None
    """The load it feeds span by span, where the weights come from NVMe and would else be read twice."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """All planned moves of one pass over a recorded order."""

    accesses: tuple[Access, ...]
    loads: tuple[Load, ...]
    """In the order they are issued; those fed by an update are not repeated here."""
    updates: tuple[Update, ...]

    def load_of(self) -> list[Load | Update | None]:
        """Per access, what brings its weights (None: they are on the GPU already)."""
        found: list[Load | Update | None] = [None] * len(self.accesses)
        for load in self.loads:
            found[load.access] = load
        for update in self.updates:
            if update.load is not None:
                found[update.load.access] = update

        return found

    def last_uses(self) -> dict[tuple[str, int], int]:
        """Index of each unit's last access in a group: the one that makes its gradient."""
        return {(access.unit, access.group): index for index, access in enumerate(self.accesses)}


def build(
    accesses: Sequence[Access], placement: Placement, *, updates: bool, updated: Collection[str] = ()
) -> Timeline:
    """Plan one pass.

    Args:
        accesses: the recorded order.
        placement: homes and GPU slots; units at home on the GPU are never loaded.
        updates: the last step's updates run in this pass, each ahead of its unit's first access (deferred mode); what
            is frozen has none.
        updated: units that need none, because theirs ran speculatively.

    Raises:
        PlanError: a unit must be loaded and there is no slot.
    """
    num_slots = placement.num_slots(Tier.GPU, Kind.WEIGHT)
    loads = _assign(accesses, lambda unit: placement.homes[unit, Kind.WEIGHT] is Tier.GPU, num_slots)
    if not updates:
        return Timeline(tuple(accesses), tuple(loads), ())
    first_load = {load.unit: load for load in reversed(loads)}
    planned = []
    trained = (access.unit for access in accesses if access.unit in placement.grad_homes)
    for unit in dict.fromkeys(unit for unit in trained if unit not in updated):
        fed = placement.homes[unit, Kind.WEIGHT] is Tier.NVME
        planned.append(Update(unit, first_load[unit] if fed else None))

    fed_loads = {update.load for update in planned}
    return Timeline(tuple(accesses), tuple(load for load in loads if load not in fed_loads), tuple(planned))


def _assign(accesses: Sequence[Access], is_resident: Callable[[str], bool], num_slots: int) -> list[Load]:
    uses: dict[str, list[int]] = {}
    for index, access in enumerate(accesses):
        uses.setdefault(access.unit, []).append(index)
    occupants: list[str | None] = [None] * num_slots
    last_use = [-1] * num_slots
    loads = []

    for index, access in enumerate(accesses):
        if is_resident(access.unit):
            continue
        if access.unit in occupants:
            last_use[occupants.index(access.unit)] = index
            continue

        if not num_slots:
            raise PlanError(f"GPU slots for {access.unit}", 1, 0, "Raise tiers.gpu.")
        slot = max(range(num_slots), key=lambda s: _next_use(uses, occupants[s], index))
        loads.append(Load(access.unit, index, slot, occupants[slot], last_use[slot]))
        occupants[slot] = access.unit
        last_use[slot] = index

    return loads


def _next_use(uses: Mapping[str, list[int]], unit: str | None, now: int) -> float:
    """Index of the next use after now; beyond everything when there is none, and further still for an empty slot."""
    if unit is None:
        return float("inf")
    # Of units that are not used again, the one whose last use is oldest lets its load start earliest.
    later = bisect_right(uses[unit], now)
    return uses[unit][later] if later < len(uses[unit]) else 1e9 - uses[unit][-1]
