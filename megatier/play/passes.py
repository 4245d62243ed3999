"""Passes over the units: the orders that were recorded, the timelines made of them, and how far one pass has come.

A training pass has a course: its forwards and backwards, in order. Which one, only the user's loop knows. So a pass is
planned for the course that came after the last one before. If it takes another, what is left of it is planned anew, or
recorded if no pass has taken that course.

Threads: the thread that computes changes all of it. The watchdog looks at how far a pass has come.
"""

from __future__ import annotations

from collections.abc import Set

from megatier.errors import TimelineError
from megatier.schedule.order import passed_over
from megatier.schedule.placement import Placement
from megatier.schedule.timeline import Access, Load, Scatter, Timeline, Update, build, rest
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
        self.course = ""
        """The legs so far; empty in an evaluation."""
        self.planned = ""
        """The course that the timeline is for."""
        self.recorded_from = 0
        """The first access that no timeline has, while the order is recorded."""
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

    @property
    def is_on_course(self) -> bool:
        """Whether the legs so far are those that were planned. If nothing was planned, any are."""
        return self.timeline is None or self.planned.startswith(self.course)

    @property
    def updates_ahead(self) -> bool:
        """Whether accesses that have not come yet are planned with an update of their unit."""
        items = () if self.timeline is None else self.timeline.items
        updating = (item for item in items if isinstance(item, Update) or (isinstance(item, Load) and item.updates))
        return any(item.access >= len(self.accesses) for item in updating)

    def check_turn(self, *, is_alone: bool) -> None:
        """Refuse to leave the planned course where what is left cannot be planned anew.

        Args:
            is_alone: whether no other rank takes part in the pass.

        Raises:
            TimelineError: others do, or updates have not all begun.
        """
        if not is_alone or self.updates_ahead:
            raise TimelineError(
                f"this step takes another course ({self.course}) than the one before ({self.planned}). Several ranks "
                "take the same forwards and backwards in every step. So does a step whose first forward leaves units "
                "out that are updated, such as a vision tower where there is no image."
            )

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
        self._orders: dict[tuple[str, str], tuple[Access, ...]] = {}
        """The orders, by the name and the course of the pass."""
        self._scatters: dict[tuple[str, str], tuple[Scatter, ...]] = {}
        self._timelines: dict[tuple[str, str, Set[str], Set[str]], Timeline] = {}
        """The timelines so far, by the name and the course of the pass, the units that it updates, and those whose
        state is ahead."""
        self._last: dict[str, str] = {}
        """The last course of the passes of each name."""
        self._followed: dict[tuple[str, str], str] = {}
        """The course that came after each course the last time, by name and course."""

    def record(self, played: Pass) -> None:
        """Remember the order of a pass, unless it is known, and that its course came now."""
        name = played.name
        course = played.course if played.timeline is None else played.planned
        self._orders.setdefault((name, course), tuple(played.accesses))
        self._scatters.setdefault((name, course), tuple(played.scatters))

        if name in self._last:
            self._followed[name, self._last[name]] = course
        self._last[name] = course

    def knows(self, name: str) -> bool:
        """Whether the order of a pass was recorded."""
        return name in self._last

    def expected(self, name: str) -> str:
        """The course that the next pass of this name is expected to take: the one that came after the last one before.

        If none came after it, that is the last one again. Nothing is known of a name that was not recorded.
        """
        last = self._last.get(name, "")
        return self._followed.get((name, last), last)

    def timeline(self, name: str, due: frozenset[str], ahead: frozenset[str]) -> Timeline | None:
        """The timeline of the next pass, on the course that is expected; None before its order is known.

        Args:
            name: the name of the pass.
            due: the units that are updated in it.
            ahead: the streamed units whose state is on the GPU when it begins.
        """
        if not self.knows(name):
            return None

        course = self.expected(name)
        if (name, course, due, ahead) not in self._timelines:
            self._timelines[name, course, due, ahead] = build(
                self._orders[name, course],
                self._placement,
                due=due,
                ahead=ahead,
                scatters=self._scatters[name, course],
                trains=name == TRAIN,
            )
        return self._timelines[name, course, due, ahead]

    def turn(self, played: Pass) -> None:
        """Plan what is left of a pass that has left its course; or let it be recorded, if that course is not known.

        Its slots are empty, and nothing is updated in what is left.
        """
        done = len(played.accesses)
        played.timeline = None
        played.recorded_from = done

        for (name, course), order in self._orders.items():
            is_begun = order[:done] == tuple(played.accesses)
            if name == played.name and course.startswith(played.course) and is_begun:
                played.planned = course
                played.timeline = rest(order, done, self._placement)
                return
