"""Passes over the units: the orders that were recorded, the timelines made of them, and how far one pass has come.

Threads: the thread that computes changes all of it. The watchdog looks at how far a pass has come.
"""

from __future__ import annotations

from collections.abc import Set

from megatier.schedule.order import passed_over
from megatier.schedule.placement import Placement
from megatier.schedule.timeline import Access, Scatter, Timeline, build
from megatier.store.transfer import Transfer

TRAIN = "train"
"""The pass that has a backward. Every other name is that of an evaluation."""


class Pass:
    """One pass, as far as it has come."""

    def __init__(self, name: str) -> None:
        """It has not begun.

        Args:
            name: `train`, or the name of an evaluation.
        """
        self.name = name
        """The name: `train`, or that of an evaluation."""
        self.timeline: Timeline | None = None
        """The timeline that is being played; None while the order is recorded."""
        self.is_open = False
        """The pass has begun, and neither ended nor been cancelled."""
        self.accesses: list[Access] = []
        """The uses of units so far, in order."""
        self.scatters: list[Scatter] = []
        """The gradients that compute has handed over so far, in order, if ranks scatter them."""
        self.loads: dict[int, Transfer] = {}
        """The loads that were submitted, by the index of the access that needs them."""
        self.left_out: set[tuple[str, int]] = set()
        """The units, with their group, that this pass did not use, though its record has them."""
        self.sums_ahead: frozenset[int] = frozenset()
        """The accesses for whose backward the sum of the groups before comes to the GPU ahead."""

    @property
    def trains(self) -> bool:
        """Whether the pass has a backward."""
        return self.name == TRAIN

    def expects(self, access: Access) -> bool:
        """Whether an access is the next one of the record. Without a record, any access is."""
        done = len(self.accesses)
        return self.timeline is None or self.timeline.accesses[done : done + 1] == (access,)

    def leave_out(self, access: Access | None, trained: Set[str]) -> list[Access]:
        """The recorded accesses that this pass leaves out before one that comes now.

        Args:
            access: the one that comes now; None: the end of the pass.
            trained: the units that have gradients.

        Raises:
            TimelineError: the order is another one.
        """
        assert self.timeline is not None
        skipped = passed_over(self.timeline.accesses, self.accesses, access, self.left_out, trained)
        self.left_out.update((recorded.unit, recorded.group) for recorded in skipped)
        return skipped


class Orders:
    """The order of each pass, recorded the first time, and the timelines that follow from it."""

    def __init__(self, placement: Placement) -> None:
        """Nothing is recorded yet.

        Args:
            placement: the units' homes and slots.
        """
        self._placement = placement
        self._orders: dict[str, tuple[Access, ...]] = {}
        self._scatters: dict[str, tuple[Scatter, ...]] = {}
        self._timelines: dict[tuple[str, Set[str], Set[str]], Timeline] = {}
        """The timelines so far, by the name of the pass, the units that it updates, and those whose state is ahead."""

    def record(self, played: Pass) -> None:
        """Remember the order of a pass, unless it is known."""
        self._orders.setdefault(played.name, tuple(played.accesses))
        self._scatters.setdefault(played.name, tuple(played.scatters))

    def knows(self, name: str) -> bool:
        """Whether the order of a pass was recorded."""
        return name in self._orders

    def timeline(self, name: str, due: frozenset[str], ahead: frozenset[str]) -> Timeline | None:
        """The timeline of a pass; None before its order is known.

        Args:
            name: the name of the pass.
            due: the units that are updated in it.
            ahead: the streamed units whose state is on the GPU when it begins.
        """
        if name not in self._orders:
            return None

        if (name, due, ahead) not in self._timelines:
            self._timelines[name, due, ahead] = build(
                self._orders[name],
                self._placement,
                due=due,
                ahead=ahead,
                scatters=self._scatters[name],
                trains=name == TRAIN,
            )
        return self._timelines[name, due, ahead]
