"""Plans what the queues do in a pass, in which order, from the order in which its units are used. Pure.

Step 1 runs in module order and records its accesses. From step 2 on this timeline says what is loaded, updated,
scattered and exchanged. A load says into which GPU slot it goes, and after which access it may start. It takes the slot
whose occupant is used again furthest in the future. This rule, Belady's, is optimal because the order is known. So the
backward starts with the units that the forward left in the slots.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Collection, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from megatier.errors import PlanError
from megatier.schedule.placement import Placement
from megatier.schedule.policy import Policy
from megatier.schedule.sizes import trained
from megatier.schedule.unit_spec import UnitSpec
from megatier.tier import Kind, Phase, Tier


@dataclass(frozen=True, slots=True)
class Access:
    """One use of a unit by compute."""

    unit: str
    phase: Phase
    group: int
    """Group of the step, from 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """When an item of a timeline is needed, and when it may begin."""

    access: int = -1
    """Index of the first access that needs it; -1: none in the pass does."""
    after_access: int = -1
    """Index of the access that must be over before; -1: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load(Timing):
    """Weights of a unit come into a GPU slot, for one access and for those that follow while they stay there.

    If ranks share the state, each brings its shard to the GPU, and the slot takes what they gather.
    """

    unit: str
    slot: int
    """Number of the GPU slot."""
    evicts: str | None
    """The unit that leaves the slot first; None: the slot is empty."""
    updates: bool = False
    """Whether AdamW runs on the GPU on what has come, before anyone uses it: the unit is streamed and its update is
    due."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Update(Timing):
    """AdamW on a unit whose gradient is final."""

    unit: str
    load: Load | None = None
    """The load that it feeds span by span, if the weights come from NVMe and would otherwise be read twice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReduceScatter(Timing):
    """A group's gradient of a unit, whose shards go to the ranks that own them, after the access that makes it."""

    unit: str
    group: int
    """Group of the step, from 0."""
    width: int
    """Bytes of an element on its way: as few as lose nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange(Timing):
    """State of streamed units, except weights, goes home and comes to the GPU for the next update."""

    home: tuple[str, ...]
    """Units whose state goes home, when all updates before are over."""
    fetched: tuple[str, ...]
    """Units whose state comes, each as soon as its old bytes are home."""


Item = Load | Update | ReduceScatter | Exchange
"""Something that a queue does in a pass."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """All that is planned in one pass over a recorded order.

    The player hands the items to their queues in this order, all of them before the first access. The simulator makes
    jobs of them in this order. `Moves.of` says what each one moves.

    The order has four rules, by which `play/player.py` proves that nothing deadlocks. A load or an update serves the
    access that needs it.

    1. Loads and updates stand in the order of the accesses that they serve. One that serves access k waits for accesses
       before k, which use the slot that it fills, and for items that stand before it: a load for its unit's update. An
       update that serves none stands behind them, and waits for no access.
    2. A scatter waits for its access s. It stands behind the loads that serve s and earlier accesses. It stands before
       the first load that waits for s, or that comes after such a load. So what stands before a load that serves access
       k waits for accesses before k alone.
    3. An exchange is last, and nothing in the pass waits for it; or it is first, and waits for no access.
    4. The order of loads and scatters is the same on all ranks, whichever updates are due.
    """

    accesses: tuple[Access, ...]
    """The recorded order."""
    items: tuple[Item, ...]
    """Everything that the queues do, in the order in which they are handed it."""

    def last_uses(self) -> dict[tuple[str, int], int]:
        """Return the index of each unit's last access in each group, which makes its gradient."""
        return _last_uses(self.accesses)


def build(
    accesses: Sequence[Access],
    placement: Placement,
    *,
    due: Collection[str] = (),
    ahead: Collection[str] = (),
    scatters: Sequence[ReduceScatter] = (),
    absent: Set[tuple[str, int]] = frozenset(),
    trains: bool = True,
) -> Timeline:
    """Plan one pass.

    Args:
        accesses: the recorded order.
        placement: homes and GPU slots; units at home on the GPU are never loaded, unless ranks share them.
        due: units whose updates run in this pass, each before its unit's first access. Frozen ones among them have
            none.
        ahead: streamed units whose state is on the GPU when the pass begins.
        scatters: the gradients that ranks scatter in the pass, as they were recorded.
        absent: units, each with a group, that this pass leaves out. They are not loaded there. One rank alone has any.
        trains: whether another step follows, for whose updates streamed state comes to the GPU.

    Raises:
        PlanError: a unit must be loaded and there is no slot.
    """
    # Compute reads whole weights then, for which there are slots of their own.
    is_shared = placement.num_ranks > 1
    num_slots = placement.num_slots(Tier.GPU, Kind.GATHERED if is_shared else Kind.WEIGHT)

    # Ranks have shards at home, so no unit is on the GPU whole.
    resident: set[str] = set()
    for (unit, kind), home in placement.homes.items():
        if kind is Kind.WEIGHT and home is Tier.GPU and not is_shared:
            resident.add(unit)

    # What is frozen has no gradient, and no update.
    not_updated = set(due).intersection(placement.grad_homes)
    passed = _passed(accesses, absent, not_updated.intersection(placement.streamed))
    loads = {load.access: load for load in _assign(accesses, resident, num_slots, passed)}
    waiting_scatters = deque(scatters)
    waits_for = -1
    items: list[Item] = []

    for index, access in enumerate(accesses):
        unit = access.unit
        load = loads.get(index)
        if load is not None:
            # Loads stay in their own order, so one that waits for little comes behind those before it that wait for
            # more, and behind the scatters that stand before those.
            waits_for = max(waits_for, load.after_access)
            while waiting_scatters and waiting_scatters[0].after_access <= waits_for:
                items.append(waiting_scatters.popleft())

        if unit in not_updated and index not in passed:
            # The first access alone needs the update, and all later ones come after it.
            not_updated.remove(unit)

            # AdamW on a streamed unit works in the slot that the load fills. Any other load takes the new weights.
            if unit in placement.streamed:
                load = replace(loads[index], updates=True)
            elif placement.homes[unit, Kind.WEIGHT] is Tier.NVME and not is_shared:
                feeding = Update(
                    unit=unit,
                    access=index,
                    after_access=loads[index].after_access,
                    load=load,
                )
                items.append(feeding)
                load = None
            else:
                # A load that gathers cannot be fed: the shards of all ranks have to be there at once.
                update = Update(unit=unit, access=index)
                items.append(update)

        if load is not None:
            items.append(load)

    # The gradients of the first units, behind which no load comes.
    items += waiting_scatters

    # Nothing in the pass waits for the updates of what it leaves out. Homes have the units in their order.
    items += [Update(unit=unit) for unit, kind in placement.homes if kind is Kind.WEIGHT and unit in not_updated]
    exchanged = _with_exchanges(items, placement, ahead, comes_again=trains)
    return Timeline(tuple(accesses), exchanged)


def _passed(accesses: Sequence[Access], absent: Set[tuple[str, int]], streamed: Set[str]) -> frozenset[int]:
    """Return the indices of the accesses that have no load, because the pass leaves them out.

    Args:
        accesses: the recorded order.
        absent: units that the pass leaves out, each with its group.
        streamed: the streamed units that are updated. One that is never used has its first load all the same: AdamW
            works in the slot that it fills.
    """
    used = {access.unit for access in accesses if (access.unit, access.group) not in absent}
    without_slot = set(streamed) - used
    passed = set[int]()
    for index, access in enumerate(accesses):
        if (access.unit, access.group) not in absent:
            continue
        if access.unit in without_slot:
            without_slot.remove(access.unit)
            continue
        passed.add(index)
    return frozenset(passed)


def rest(accesses: Sequence[Access], done: int, placement: Placement) -> Timeline:
    """Plan what is left of a pass over an order of which a beginning is over, from empty GPU slots and without updates.

    Args:
        accesses: the whole order.
        done: the number of accesses that are over.
        placement: homes and GPU slots, of one rank.
    """
    planned = build(accesses[done:], placement, trains=False)
    loads = []
    for item in planned.items:
        if not isinstance(item, Load):
            continue

        # Into an empty slot a load comes at once.
        load = replace(
            item,
            access=item.access + done,
            after_access=item.after_access + done if item.evicts else -1,
        )
        loads.append(load)
    return Timeline(tuple(accesses), tuple(loads))


def drain_items(due: Iterable[str], placement: Placement, ahead: Collection[str]) -> tuple[Item, ...]:
    """Plan the updates that are due outside of a pass. Streamed state goes home after them.

    Args:
        due: units that are trained, in the order in which they are updated.
        placement: homes.
        ahead: streamed units whose state is on the GPU.
    """
    updates = [Update(unit=unit) for unit in due]
    return _with_exchanges(updates, placement, ahead, comes_again=False)


def _with_exchanges(
    items: Sequence[Item], placement: Placement, ahead: Collection[str], *, comes_again: bool
) -> tuple[Item, ...]:
    """Add the exchanges of streamed state before and behind the items of a pass.

    Args:
        items: the updates, and all else.
        placement: streamed units.
        ahead: those of them whose state is on the GPU.
        comes_again: whether all state comes to the GPU after the updates.
    """
    updated = set()
    for item in items:
        if isinstance(item, Update) or (isinstance(item, Load) and item.updates):
            updated.add(item.unit)

    home = tuple(unit for unit in placement.streamed if unit in updated)
    missing = tuple(unit for unit in home if unit not in ahead)

    # State that a drain took home comes as well, though its unit was not updated here.
    fetched: tuple[str, ...] = ()
    if comes_again:
        fetched = tuple(unit for unit in placement.streamed if unit in home or unit not in ahead)

    # Before all else comes what the updates of this pass miss.
    all_items = list(items)
    if missing:
        first = Exchange(home=(), fetched=missing)
        all_items.insert(0, first)

    # What goes home does so when the CPU's updates are over, which need all that memory gives (docs/decisions/0011).
    if home or fetched:
        last = Exchange(home=home, fetched=fetched)
        all_items.append(last)
    return tuple(all_items)


def reduce_scatters_of(
    accesses: Sequence[Access], units: Iterable[UnitSpec], policy: Policy
) -> tuple[ReduceScatter, ...]:
    """Return the gradients that ranks scatter in a pass, as a run would record them; none if a rank is alone."""
    if policy.num_ranks == 1:
        return ()

    forwards = [access for access in accesses if access.phase is Phase.FORWARD]
    num_uses = Counter((access.unit, access.group) for access in forwards)
    widths = {spec.name: spec.schema.grad_width for spec in trained(units)}
    scatters = []
    for (unit, group), index in _last_uses(accesses).items():
        if unit not in widths:
            continue

        # A sum of uses or slices has fp32 on its way, and so has what a fused head makes in the forward.
        num_summands = num_uses[unit, group] * policy.slices
        is_fp32 = num_summands > 1 or accesses[index].phase is Phase.FORWARD
        scatter = ReduceScatter(
            unit=unit,
            group=group,
            after_access=index,
            width=4 if is_fp32 else widths[unit],
        )
        scatters.append(scatter)

    # Compute hands them over in the order of these accesses, and all ranks have to scatter in one order.
    scatters.sort(key=lambda scatter: scatter.after_access)
    return tuple(scatters)


def _last_uses(accesses: Sequence[Access]) -> dict[tuple[str, int], int]:
    """Return the index of each unit's last access in each group, which makes its gradient."""
    # A later access takes the place of an earlier one.
    return {(access.unit, access.group): index for index, access in enumerate(accesses)}


def _assign(accesses: Sequence[Access], resident: Container[str], num_slots: int, passed: Container[int]) -> list[Load]:
    """Give each access whose unit is not on the GPU already a load and a slot.

    Args:
        accesses: the recorded order.
        resident: units that need no slot.
        num_slots: the number of slots.
        passed: indices of accesses that need no weights.

    Raises:
        PlanError: a unit must be loaded and there is no slot.
    """
    uses: dict[str, list[int]] = {}
    for index, access in enumerate(accesses):
        if index not in passed:
            uses.setdefault(access.unit, []).append(index)

    occupants: list[str | None] = [None] * num_slots
    last_use = [-1] * num_slots
    loads = []

    for index, access in enumerate(accesses):
        unit = access.unit
        if unit in resident or index in passed:
            continue

        # The weights are still there from an access before.
        if unit in occupants:
            last_use[occupants.index(unit)] = index
            continue

        if not num_slots:
            raise PlanError(f"GPU slots for {unit}", 1, 0, "Raise tiers.gpu.")

        # The occupant whose next use is furthest away gives way. No other choice needs fewer loads.
        slot = max(range(num_slots), key=lambda s: _next_use(uses, occupants[s], index))

        # The occupant's last use must be over before the load.
        load = Load(
            unit=unit,
            access=index,
            slot=slot,
            evicts=occupants[slot],
            after_access=last_use[slot],
        )
        loads.append(load)
        occupants[slot] = unit
        last_use[slot] = index

    return loads


def _next_use(uses: Mapping[str, list[int]], unit: str | None, now: int) -> float:
    """Return the index of the next use: beyond everything if there is none, and further still for an empty slot."""
    if unit is None:
        return float("inf")

    indices = uses[unit]
    later = bisect_right(indices, now)
    if later < len(indices):
        return indices[later]

    # If several units are not used again, the slot of the one whose last use is oldest lets its load start earliest.
    # 1e9 is larger than any index.
    return 1e9 - indices[-1]
