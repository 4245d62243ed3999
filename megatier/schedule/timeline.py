"""The timeline of a pass: what its queues load, update, reduce-scatter and exchange, and in which order. Pure.

Step 1 runs the units in module order and records their accesses. From step 2 on `build` plans each pass from that
order. The player hands the items of a timeline to its queues, and the forecast simulates them.

A load takes the GPU slot whose occupant is used again furthest in the future. This is Belady's rule, which is optimal
because the order is known. As a result the backward starts with the units that the forward left in the slots.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Collection, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from megatier.errors import PlanError
from megatier.schedule.placement import Placement
from megatier.schedule.policy import Policy
from megatier.schedule.sizes import trained_units
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
    """The time at which an item of a timeline is needed, and at which it may begin."""

    access: int = -1
    """Index of the first access that needs the item; -1: no access of the pass does."""
    after_access: int = -1
    """Index of the access that must be over before the item begins; -1: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load(Timing):
    """A load of a unit's weights into a GPU slot, for one access and for later ones while they stay there.

    If ranks share the state, each brings its shard to the GPU, and the slot takes the result of the all-gather.
    """

    unit: str
    slot: int
    """Number of the GPU slot."""
    evicts: str | None
    """The unit that leaves the slot before the load; None: the slot is empty."""
    updates: bool = False
    """Whether AdamW runs in the slot before the unit is used, because the unit is streamed and its update is due."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Update(Timing):
    """An update of a unit whose gradient is final."""

    unit: str
    load: Load | None = None
    """The load that this update feeds with the new weights, so that they are read from NVMe once; None: no load."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReduceScatter(Timing):
    """A reduce-scatter of a unit's gradient of one group, after the access that makes it."""

    unit: str
    group: int
    """Group of the step, from 0."""
    width: int
    """Bytes of an element while it moves: as few as keep its value exact."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange(Timing):
    """A move of the state of streamed units, except weights: home, and to the GPU for the next update."""

    home: tuple[str, ...]
    """Units whose state goes home when all updates before the exchange are over."""
    fetched: tuple[str, ...]
    """Units whose state comes to the GPU, each as soon as its old bytes are home."""


Item = Load | Update | ReduceScatter | Exchange
"""A piece of work for a queue in a pass."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """The items of one pass over a recorded order.

    The player hands all items to their queues, in this order, before the first access. `Moves.of` says which bytes each
    item moves.

    The order keeps four rules, from which `play/player.py` proves that nothing deadlocks. A load or an update *serves*
    the access that needs it.

    1. Loads and updates stand in the order of the accesses that they serve. One that serves access k waits only for
       accesses before k, which use the slot that it fills, and for items before it: a load waits for its unit's update.
       An update that serves no access stands behind all of these, and waits for no access.
    2. A reduce-scatter waits for its access s. It stands behind the loads that serve s and earlier accesses, and before
       the first load that waits for s or follows such a load. So all items before a load that serves access k wait only
       for accesses before k.
    3. An exchange is the last item, and nothing in the pass waits for it; or it is the first, and waits for no access.
    4. Loads and reduce-scatters have the same order on all ranks, whichever updates are due.
    """

    accesses: tuple[Access, ...]
    """The recorded order."""
    items: tuple[Item, ...]
    """All items, in the order in which the queues get them."""

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
        placement: homes and GPU slots. Units at home on the GPU are never loaded, unless ranks share them.
        due: units whose updates run in this pass, each before the unit's first access. Frozen units are not updated.
        ahead: streamed units whose state is on the GPU when the pass begins.
        scatters: the reduce-scatters of the pass, as they were recorded.
        absent: the units and groups that this pass leaves out, and so does not load. Only a single rank has any.
        trains: whether another step follows. If so, streamed state comes to the GPU for its updates.

    Raises:
        PlanError: a unit must be loaded and there is no slot.
    """
    due_units = set(due).intersection(placement.grad_homes)
    passed = _indices_without_load(accesses, absent, due_units.intersection(placement.streamed))
    loads = {load.access: load for load in _assign_slots(accesses, placement, passed)}
    waiting_scatters = deque(scatters)
    waits_for = -1
    items: list[Item] = []

    for index, access in enumerate(accesses):
        load = loads.get(index)
        if load is not None:
            # Loads stay in their own order. A load that waits for little stands behind earlier ones that wait for more,
            # and behind the scatters before those.
            waits_for = max(waits_for, load.after_access)
            while waiting_scatters and waiting_scatters[0].after_access <= waits_for:
                items.append(waiting_scatters.popleft())

        # Only a unit's first access waits for its update, because all others come later.
        if access.unit in due_units and index not in passed:
            due_units.remove(access.unit)
            items += _update_and_load(access.unit, index, load, placement)
        elif load is not None:
            items.append(load)

    # No load comes after the gradients of the first units.
    items += waiting_scatters

    # Units that the pass leaves out are updated last, in the order of `homes`, because nothing in the pass waits.
    items += [Update(unit=unit) for unit, kind in placement.homes if kind is Kind.WEIGHT and unit in due_units]
    exchanged = _with_exchanges(items, placement, ahead, comes_again=trains)
    return Timeline(tuple(accesses), exchanged)


def _update_and_load(unit: str, index: int, load: Load | None, placement: Placement) -> list[Item]:
    """Return the update of a unit, and its load if it has one, for the access that uses the new weights first."""
    # AdamW on a streamed unit works in the slot that the load fills.
    if unit in placement.streamed:
        assert load is not None
        return [replace(load, updates=True)]

    # An update that reads weights from NVMe feeds them to the load. A load that all-gathers cannot be fed, because the
    # shards of all ranks have to be there at once.
    if placement.homes[unit, Kind.WEIGHT] is Tier.NVME and placement.num_ranks == 1:
        assert load is not None
        return [Update(unit=unit, access=index, after_access=load.after_access, load=load)]

    update = Update(unit=unit, access=index)
    return [update] if load is None else [update, load]


def _indices_without_load(
    accesses: Sequence[Access], absent: Set[tuple[str, int]], streamed: Set[str]
) -> frozenset[int]:
    """Return the indices of the accesses that have no load, because the pass leaves them out.

    Args:
        accesses: the recorded order.
        absent: units that the pass leaves out, each with its group.
        streamed: the streamed units that are updated. Even if the pass never uses such a unit, its first access keeps
            its load, because AdamW works in the slot that it fills.
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


def build_rest(accesses: Sequence[Access], done: int, placement: Placement) -> Timeline:
    """Plan the rest of a pass that has begun, from empty GPU slots and without updates.

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

        # A load into an empty slot need not wait.
        load = replace(
            item,
            access=item.access + done,
            after_access=item.after_access + done if item.evicts else -1,
        )
        loads.append(load)
    return Timeline(tuple(accesses), tuple(loads))


def drain_items(due: Iterable[str], placement: Placement, ahead: Collection[str]) -> tuple[Item, ...]:
    """Plan the due updates outside of a pass, after which streamed state goes home.

    Args:
        due: trained units, in the order of their updates.
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
        items: the items of the pass.
        placement: says which units are streamed.
        ahead: streamed units whose state is on the GPU.
        comes_again: whether all streamed state comes to the GPU after the updates.
    """
    updated = set()
    for item in items:
        if isinstance(item, Update) or (isinstance(item, Load) and item.updates):
            updated.add(item.unit)

    home = tuple(unit for unit in placement.streamed if unit in updated)
    missing = tuple(unit for unit in home if unit not in ahead)

    # State that a drain took home comes too, although its unit is not updated in this pass.
    fetched: tuple[str, ...] = ()
    if comes_again:
        fetched = tuple(unit for unit in placement.streamed if unit in home or unit not in ahead)

    # The updates of this pass need this state first.
    all_items = list(items)
    if missing:
        first = Exchange(home=(), fetched=missing)
        all_items.insert(0, first)

    # State goes home after the CPU's updates, which need all the bandwidth of RAM (docs/decisions/0011).
    if home or fetched:
        last = Exchange(home=home, fetched=fetched)
        all_items.append(last)
    return tuple(all_items)


def reduce_scatters_of(
    accesses: Sequence[Access], units: Iterable[UnitSpec], policy: Policy
) -> tuple[ReduceScatter, ...]:
    """Return the reduce-scatters of a pass, as a run of several ranks would record them; none for a single rank."""
    if policy.num_ranks == 1:
        return ()

    forwards = [access for access in accesses if access.phase is Phase.FORWARD]
    num_uses = Counter((access.unit, access.group) for access in forwards)
    widths = {spec.name: spec.schema.grad_width for spec in trained_units(units)}
    scatters = []
    for (unit, group), index in _last_uses(accesses).items():
        if unit not in widths:
            continue

        # A sum over uses or slices moves in fp32, and so does the gradient that a fused head makes in the forward.
        num_summands = num_uses[unit, group] * policy.slices
        is_fp32 = num_summands > 1 or accesses[index].phase is Phase.FORWARD
        scatter = ReduceScatter(
            unit=unit,
            group=group,
            after_access=index,
            width=4 if is_fp32 else widths[unit],
        )
        scatters.append(scatter)

    # All ranks need the same order, which is that of the accesses that make the gradients.
    scatters.sort(key=lambda scatter: scatter.after_access)
    return tuple(scatters)


def _last_uses(accesses: Sequence[Access]) -> dict[tuple[str, int], int]:
    """Return the index of each unit's last access in each group, which makes its gradient."""
    # A later access takes the place of an earlier one.
    return {(access.unit, access.group): index for index, access in enumerate(accesses)}


def _assign_slots(accesses: Sequence[Access], placement: Placement, passed: Container[int]) -> list[Load]:
    """Return a load, with its slot, for each access whose unit is not on the GPU already.

    Args:
        accesses: the recorded order.
        placement: homes and GPU slots.
        passed: indices of accesses that need no weights.

    Raises:
        PlanError: a unit must be loaded and there is no slot.
    """
    num_slots = placement.num_slots(Tier.GPU, Kind.GATHERED if placement.num_ranks > 1 else Kind.WEIGHT)
    resident = _whole_on_gpu(placement)
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

        # The weights are still in a slot since an earlier access.
        if unit in occupants:
            last_use[occupants.index(unit)] = index
            continue

        if not num_slots:
            raise PlanError(f"GPU slots for {unit}", 1, 0, "Raise tiers.gpu.")

        # Evict the unit whose next use is furthest away. No other choice needs fewer loads.
        slot = max(range(num_slots), key=lambda s: _next_use(uses, occupants[s], index))

        # The load must wait for the last use of the unit that it evicts.
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


def _whole_on_gpu(placement: Placement) -> set[str]:
    """Return the units whose whole weights are at home on the GPU, and so need no slot."""
    # Ranks have only shards at home, so each unit is gathered into a slot.
    if placement.num_ranks > 1:
        return set()
    homes = placement.homes.items()
    return {unit for (unit, kind), home in homes if kind is Kind.WEIGHT and home is Tier.GPU}


def _next_use(uses: Mapping[str, list[int]], unit: str | None, now: int) -> float:
    """Return the index of a unit's next use: beyond all others if there is none, and infinite for an empty slot."""
    if unit is None:
        return float("inf")

    indices = uses[unit]
    later = bisect_right(indices, now)
    if later < len(indices):
        return indices[later]

    # Of several units that are not used again, the one with the oldest last use lets the load start earliest. 1e9 is
    # larger than any index.
    return 1e9 - indices[-1]
