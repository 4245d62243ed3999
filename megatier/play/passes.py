"""Passes over the units: the orders that were recorded, the timelines made of them, and how far one pass has come."""

from __future__ import annotations

from collections.abc import Sequence, Set

from megatier.schedule.order import passed_over
from megatier.schedule.placement import Placement
from megatier.schedule.timeline import Access, Timeline, build
from megatier.store.transfer import Transfer
from megatier.tier import Tier

TRAIN = "train"
"""The pass that has a backward. Every other name is that of an evaluation."""


class Pass:
    """One pass, as far as it has come. The thread that computes changes it; others may look at it.

    Attributes:
        name: `train`, or that of an evaluation.
        timeline: what is being played; None while the order is recorded.
        is_open: it has begun, and neither ended nor been cancelled.
        accesses: uses of units so far, in order.
        loads: loads that were submitted, by the index of the access that needs them.
        left_out: units that it did not use, though its record has them, with their group.
        sums_ahead: accesses for whose backward the sum of the groups before comes to the GPU ahead.
    """

    def __init__(self, name: str) -> None:
        """It has not begun."""
        self.name = name
        self.timeline: Timeline | None = None
        self.is_open = False
        self.accesses: list[Access] = []
        self.loads: dict[int, Transfer] = {}
        self.left_out: set[tuple[str, int]] = set()
        self.sums_ahead: frozenset[int] = frozenset()

    @property
    def trains(self) -> bool:
        """Whether it has a backward."""
        return self.name == TRAIN

    def expects(self, access: Access) -> bool:
        """Whether an access is the next one of the record, or anything may come because there is no record."""
        done = len(self.accesses)
        return self.timeline is None or self.timeline.accesses[done : done + 1] == (access,)

    def leave_out(self, access: Access | None, trained: Set[str]) -> list[Access]:
        """The recorded accesses before one that comes now (None: before the end), which this pass leaves out.

        Raises:
            TimelineError: the order is another.
        """
        assert self.timeline is not None
        skipped = passed_over(self.timeline.accesses, self.accesses, access, self.left_out, trained)
        self.left_out.update((recorded.unit, recorded.group) for recorded in skipped)
        return skipped


class Orders:
    """The order of each pass, recorded the first time, and the timelines that follow from it."""

    def __init__(self, units: Set[str], placement: Placement) -> None:
        """Nothing is recorded yet.

        Args:
            units: all of the run.
            placement: homes and slots.
        """
        self._units = units
        self._placement = placement
        self._orders: dict[str, tuple[Access, ...]] = {}
        self._timelines: dict[tuple[str, Set[str]], Timeline] = {}
        """By the name of the pass, and the units that it updates."""

    def record(self, name: str, accesses: Sequence[Access]) -> None:
        """Keep the order of a pass, unless it is known."""
        self._orders.setdefault(name, tuple(accesses))

    def knows(self, name: str) -> bool:
        """Whether the order of a pass was recorded."""
        return name in self._orders

    def timeline(self, name: str, updated: frozenset[str]) -> Timeline | None:
        """The timeline of a pass that updates some units; None before its order is known."""
        if name not in self._orders:
            return None
        if (name, updated) not in self._timelines:
            others = self._units - updated
            planned = build(self._orders[name], self._placement, updates=bool(updated), updated=others)
            self._timelines[name, updated] = planned
        return self._timelines[name, updated]

    def planned(self, name: str, *, updates: bool) -> Timeline:
        """The timeline of a recorded pass in which no unit, or every unit, is updated."""
        return build(self._orders[name], self._placement, updates=updates)

    def sums_ahead(self, played: Pass) -> frozenset[int]:
        """Accesses whose backward adds to a sum that left the GPU after the group before, and has to come again."""
        if played.timeline is None or not played.trains or not self._placement.sums_on_gpu:
            return frozenset()
        shipped = {unit for unit, home in self._placement.grad_homes.items() if home is not Tier.GPU}
        uses = played.timeline.last_uses().items()
        return frozenset(index for (unit, group), index in uses if group and unit in shipped)
