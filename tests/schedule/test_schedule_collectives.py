"""Collectives in one order: whatever a rank waits for comes before, so ranks never wait for each other for ever.

Ranks are simulated by the rules of `play`, and no bytes move. Each lane of each rank is a generator that yields what it
waits for; a random choice among those that may go on stands for every possible delay.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace

import pytest
from small_timelines import planned_loads, planned_reduce_scatters, planned_updates

from megatier.schedule.placement import Placement
from megatier.schedule.slots import SLOTS_MIN, SlotPlan
from megatier.schedule.timeline import Access, Exchange, Load, ReduceScatter, Timeline, Update, build
from megatier.tier import STATE_KINDS, Kind, Phase, Tier

SIZE = 2048
Condition = Callable[[], bool]
Lane = Iterator[Condition]


@dataclass(frozen=True)
class Pass:
    """A pass that ranks share."""

    accesses: tuple[Access, ...]
    scatters: tuple[ReduceScatter, ...]
    placement: Placement

    def timeline(self, updated: Set[str] = frozenset()) -> Timeline:
        due = self.placement.grad_homes.keys() - updated
        return build(self.accesses, self.placement, due=due, ahead=self.placement.streamed, scatters=self.scatters)


def placement(
    units: Sequence[str], trained: Set[str], on_gpu: Set[str], streamed: Set[str], num_slots: int, ranks: int
) -> Placement:
    """Shards of some units on the GPU, and of the others in RAM, or on NVMe if none is streamed."""
    away = Tier.RAM if streamed else Tier.NVME
    homes = {(unit, kind): Tier.GPU if unit in on_gpu else away for unit in units for kind in STATE_KINDS}
    updated_there = on_gpu | streamed
    counts = {Kind.GATHERED: num_slots, Kind.WEIGHT: SLOTS_MIN, Kind.GROUP_GRAD: SLOTS_MIN, Kind.GRAD: SLOTS_MIN}
    return Placement(
        homes=homes,
        slots=tuple(
            SlotPlan(tier=Tier.GPU, kind=kind, slot_bytes=SIZE, num_slots=count) for kind, count in counts.items()
        ),
        chunk_elements=SIZE,
        activation_homes={},
        grad_homes={unit: Tier.GPU if unit in updated_there else Tier.RAM for unit in sorted(trained)},
        num_ranks=ranks,
        streamed=tuple(unit for unit in units if unit in streamed),
    )


def some_pass(rng: random.Random, ranks: int) -> Pass:
    """Forward and backward in some groups, with units that are used twice, frozen, streamed, or at home on the GPU."""
    units = [f"u{number}" for number in range(rng.randint(1, 7))]
    trained = {unit for unit in units if rng.random() < 0.8} or {units[0]}
    on_gpu = {unit for unit in units if rng.random() < 0.3}
    share = rng.choice([0, 0.5, 1])
    streamed = {unit for unit in units if unit in trained - on_gpu and rng.random() < share}
    forward = [*units, *rng.choices(units, k=rng.choice([0, 0, 1, 2]))]
    accesses = []
    for group in range(rng.randint(1, 3)):
        backward = list(reversed(forward))
        if rng.random() < 0.2:
            rng.shuffle(backward)
        accesses += [Access(unit, Phase.FORWARD, group) for unit in forward]
        accesses += [Access(unit, Phase.BACKWARD, group) for unit in backward[rng.choice([0, 0, 1]) :]]

    last_uses = {(access.unit, access.group): index for index, access in enumerate(accesses)}
    scatters = [
        ReduceScatter(unit=access.unit, group=access.group, after_access=index, width=2)
        for index, access in enumerate(accesses)
        if access.unit in trained and last_uses[access.unit, access.group] == index
    ]
    where = placement(units, trained, on_gpu, streamed, rng.randint(1, len(units) + 1), ranks)
    return Pass(tuple(accesses), tuple(scatters), where)


@dataclass
class World:
    """What the ranks know of each other."""

    ranks: int
    begun: Counter[int] = field(default_factory=Counter)
    """How many ranks have come to each collective, by its number."""
    what: dict[int, Load | ReduceScatter] = field(default_factory=dict)
    """What each collective is: the same on all ranks."""


def collectives(timeline: Timeline) -> list[Load | ReduceScatter]:
    """Loads and scatters in their order."""
    return [item for item in timeline.items if isinstance(item, Load | ReduceScatter)]


class Rank:
    """One rank in one pass: its lanes, and what they tell each other."""

    def __init__(self, world: World, played: Pass, left_out: Set[tuple[str, int]], rng: random.Random) -> None:
        self.world = world
        self.rng = rng
        self.timeline = played.timeline()
        self.placement = played.placement
        self.left_out = left_out
        self.collectives = collectives(self.timeline)
        self.made_by = {scatter.after_access: scatter for scatter in played.scatters}
        self.used = 0  # accesses that are over: the gate
        self.updated: set[str] = set()
        self.arrived: set[int] = set()  # own shards, by the access of their load
        self.gathered: set[int] = set()  # gathers that are over, by the access of their load
        self.handed: set[tuple[str, int]] = set()
        self.scattered: set[tuple[str, int]] = set()
        self.slots: dict[str | None, int] = {}  # unit in each slot for whole weights
        self.shards: list[str] = []  # units in slots for shards
        self.grads: list[tuple[str, int]] = []  # gradients in slots for groups
        self.leaving: list[str] = []  # gradients of shards in slots on their way to RAM
        self.returning: list[str] = []  # new shards of streamed units on their way to RAM

    def lanes(self) -> dict[str, Lane]:
        return {
            "update": self.updates(),
            "update_gpu": self.updates_on_gpu(),
            "load": self.loads(),
            "ranks": self.ranks(),
            "gpu_to_ram": self.copies(),
            "returns": self.returns(),
            "compute": self.computes(),
        }

    def updates(self) -> Lane:
        """Updates on the CPU wait for nothing of this pass."""
        for update in planned_updates(self.timeline):
            if self.placement.update_queue(update.unit) != "update_gpu":
                yield lambda: True
                self.updated.add(update.unit)

    def updates_on_gpu(self) -> Lane:
        """A streamed unit is updated where its shard came to; a unit at home there waits for nothing. Exchanges end."""
        for item in self.timeline.items:
            if isinstance(item, Load) and item.updates:
                yield lambda access=item.access: access in self.arrived  # type: ignore[misc]
                assert item.unit in self.shards, "its shard left before its update"
                self.returning.append(item.unit)
                self.updated.add(item.unit)
            elif isinstance(item, Update) and self.placement.update_queue(item.unit) == "update_gpu":
                yield lambda: True
                self.updated.add(item.unit)
            elif isinstance(item, Exchange):
                yield lambda: {update.unit for update in planned_updates(self.timeline)} <= self.updated

    def is_updated(self, unit: str) -> bool:
        return unit in self.updated or unit not in self.placement.grad_homes

    def loads(self) -> Lane:
        """A shard comes when its unit is updated, and when the gather before the last one is over."""
        before: list[int] = []
        for load in planned_loads(self.timeline):
            unit = load.unit
            if len(before) == SLOTS_MIN:
                yield lambda first=before[0]: first in self.gathered  # type: ignore[misc]
            if not load.updates:
                yield lambda unit=unit: self.is_updated(unit)  # type: ignore[misc]
            if self.placement.homes[unit, Kind.WEIGHT] is not Tier.GPU:
                yield lambda unit=unit: self.has_room(unit)  # type: ignore[misc]
                self.shards.append(unit)
                yield lambda: True
            self.arrived.add(load.access)
            before = [*before, load.access][-SLOTS_MIN:]

    def has_room(self, unit: str) -> bool:
        """A shard that goes home keeps its slot, and comes again only after that."""
        return unit not in self.returning and len({*self.shards, *self.returning}) < SLOTS_MIN

    def ranks(self) -> Lane:
        """One collective after the other; each is over when all ranks have come to it."""
        for number, planned in enumerate(self.collectives):
            if isinstance(planned, Load):
                yield lambda access=planned.access: access in self.arrived  # type: ignore[misc]
                yield lambda unit=planned.unit: self.is_updated(unit)  # type: ignore[misc]
                yield lambda after=planned.after_access: self.used > after  # type: ignore[misc]
                self.slots.pop(planned.evicts, None)
                assert planned.slot not in self.slots.values(), "the slot is taken"
                yield from self.meet(number, planned)
                self.slots[planned.unit] = planned.slot
                self.gathered.add(planned.access)
                if planned.unit in self.shards:
                    self.shards.remove(planned.unit)
            else:
                named = planned.unit, planned.group
                yield lambda named=named: named in self.handed  # type: ignore[misc]
                yield from self.meet(number, planned)
                self.grads.remove(named)
                self.scattered.add(named)
                yield from self.add(planned.unit)

    def meet(self, number: int, planned: Load | ReduceScatter) -> Lane:
        assert self.world.what.setdefault(number, planned) == planned, "ranks have different orders"
        self.world.begun[number] += 1
        yield lambda: self.world.begun[number] == self.world.ranks

    def add(self, unit: str) -> Lane:
        """The sum of the rank's shard leaves the GPU through a slot, unless it is at home there."""
        yield lambda: self.is_updated(unit)
        if self.placement.grad_homes[unit] is not Tier.GPU:
            yield lambda: len(self.leaving) < SLOTS_MIN
            self.leaving.append(unit)

    def copies(self) -> Lane:
        shipped = [
            s for s in planned_reduce_scatters(self.timeline) if self.placement.grad_homes[s.unit] is not Tier.GPU
        ]
        for _ in shipped:
            yield lambda: bool(self.leaving)
            self.leaving.pop(0)

    def returns(self) -> Lane:
        for load in planned_loads(self.timeline):
            if load.updates:
                yield lambda: bool(self.returning)
                self.returning.pop(0)

    def computes(self) -> Lane:
        """One access after the other. A gradient is handed over before the access is left, or after it."""
        loads = {load.access for load in planned_loads(self.timeline)}
        for index, access in enumerate(self.timeline.accesses):
            yield lambda unit=access.unit: self.is_updated(unit)  # type: ignore[misc]
            if index in loads:
                yield lambda index=index: index in self.gathered  # type: ignore[misc]
            assert access.unit in self.slots, "its weights left before their use"
            leaves_first = self.rng.random() < 0.5 or (access.unit, access.group) in self.left_out
            if leaves_first:
                self.used = index + 1
            if (scatter := self.made_by.get(index)) is not None:
                yield from self.hand_over(scatter)
            self.used = index + 1

    def hand_over(self, scatter: ReduceScatter) -> Lane:
        """Make a gradient, or zeros for a unit that is left out, when its block and a slot for it are free."""
        named = scatter.unit, scatter.group
        before = [(scatter.unit, group) for group in range(scatter.group)]
        yield lambda: all(other in self.scattered for other in before if other in self.handed)
        yield lambda: len(self.grads) < SLOTS_MIN
        self.grads.append(named)
        yield lambda: True
        self.handed.add(named)


def play(played: Pass, ranks: int, rng: random.Random) -> list[Rank]:
    """Play a pass on all ranks, some of which leave units out; ranks and lanes are faster and slower at random."""
    world = World(ranks)
    units = sorted({(access.unit, access.group) for access in played.accesses})
    made = [Rank(world, played, {unit for unit in units if rng.random() < 0.2}, rng) for _ in range(ranks)]
    lanes = {(number, name): lane for number, rank in enumerate(made) for name, lane in rank.lanes().items()}
    waits: dict[tuple[int, str], Condition] = dict.fromkeys(lanes, lambda: True)
    weights = {key: rng.choice([0.01, 1, 10]) for key in lanes}

    while waits:
        able = [key for key, is_free in waits.items() if is_free()]
        assert able, f"everyone waits: {sorted(waits)}"
        key = rng.choices(able, weights=[weights[each] for each in able])[0]
        found = next(lanes[key], None)
        if found is None:
            del waits[key]
        else:
            waits[key] = found

    return made


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_ranks_with_any_orders_slots_and_delays_never_wait_for_ever(ranks: int) -> None:
    rng = random.Random(ranks)
    for _ in range(120):
        played = some_pass(rng, ranks)
        for rank in play(played, ranks, rng):
            assert rank.used == len(played.accesses)
            assert rank.scattered == {(scatter.unit, scatter.group) for scatter in played.scatters}
            assert not rank.grads


def test_items_wait_only_for_what_stands_before_them() -> None:
    """Access k waits for the items that serve it, so what stands before these may wait for accesses before k alone."""
    rng = random.Random(0)
    for ranks in (1, 2):
        for _ in range(500):
            played = some_pass(rng, ranks)
            items = played.timeline().items
            assert [item for item in items if isinstance(item, ReduceScatter)] == list(played.scatters)
            serving = [item for item in items if isinstance(item, Load | Update)]
            assert [item.access for item in serving] == sorted(item.access for item in serving)
            for place, item in enumerate(items):
                behind = [other.access for other in items[place:] if isinstance(other, Load | Update)]
                assert all(access > item.after_access for access in behind)


def test_update_stands_before_what_loads_its_unit_and_the_exchange_behind_all() -> None:
    rng = random.Random(2)
    for ranks in (1, 2):
        for _ in range(300):
            played = some_pass(rng, ranks)
            items = played.timeline().items
            updated: list[str] = []
            for item in items:
                if isinstance(item, Update) or (isinstance(item, Load) and item.updates):
                    updated.append(item.unit)
                if isinstance(item, Load) and item.unit in played.placement.grad_homes:
                    assert item.unit in updated
                if isinstance(item, Exchange):
                    assert item is items[-1]
                    assert {*item.home} == {*item.fetched} == {*played.placement.streamed}
            assert len(updated) == len({*updated}) == len(played.placement.grad_homes)


def test_order_of_collectives_does_not_depend_on_which_updates_are_due() -> None:
    """Updates may have run speculatively on one rank and not on another."""
    rng = random.Random(1)
    for _ in range(300):
        played = some_pass(rng, 2)
        units = sorted(played.placement.grad_homes)
        every = played.timeline()
        assert all(update.load is None for update in planned_updates(every))
        for _ in range(3):
            updated = frozenset(unit for unit in units if rng.random() < 0.5)
            assert plain(played.timeline(updated)) == plain(every)
        idle = build(played.accesses, played.placement, scatters=played.scatters)
        assert plain(idle) == plain(every)


def plain(timeline: Timeline) -> list[Load | ReduceScatter]:
    """Loads and scatters in their order, whether a load updates or not."""
    return [replace(item, updates=False) if isinstance(item, Load) else item for item in collectives(timeline)]
