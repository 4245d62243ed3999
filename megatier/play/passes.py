"""Keeps the orders of passes that were recorded, their timelines, and how far one pass has come.

A training pass has a course: its forwards and backwards, in order. Which one, only the user's loop knows. So a pass is
planned for the course that came after the last one before. If it takes another, what is left of it is planned anew, or
recorded if no pass has taken that course.

Threads: the thread that computes changes all of it. The watchdog looks at how far a pass has come.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Set
from dataclasses import dataclass, field
from itertools import product

from megatier.errors import TimelineError
from megatier.schedule.order import find_left_out
from megatier.schedule.placement import Placement
from megatier.schedule.timeline import Access, Load, ReduceScatter, Timeline, Update, build, build_rest
from megatier.store.transfer import Transfer
from megatier.tier import Leg

TRAIN = "train"
"""The pass that has a backward. Every other name is that of an evaluation."""
COURSES_MAX = 8
"""Courses of a name that are remembered, those that came last. Loops take few courses by turns: whole groups and a
shorter last one, steps with a second forward and without. One that was forgotten is recorded again, with the same bits,
but its loads do not come ahead."""
ACCESSES_MAX = 1 << 18
"""Accesses of all courses of a name that are remembered: a text that is generated within a step has a forward for each
token. An access takes about 250 bytes with its timeline, so these take 64 MiB."""
TIMELINES_MAX = 8
"""Timelines of a course that are remembered, those that were played last. Which units were updated ahead of the norm
depends on time, so a course may have any number of them. One that was forgotten is built again."""


class Pass:
    """One pass, as far as it has come."""

    def __init__(self, name: str) -> None:
        """Make a pass that has not begun.

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
        self.scatters: list[ReduceScatter] = []
        """The gradients that compute has handed over so far, in order, if ranks scatter them."""
        self.loads: dict[int, Transfer] = {}
        """The loads that were submitted, by the index of the access that needs them."""
        self.left_out: set[tuple[str, int]] = set()
        """The units, with their group, that this pass did not use, though its record has them."""
        self.text_groups: frozenset[int] = frozenset()
        """The groups of which it is known that they have tokens alone, and no pixels."""
        self.absent: frozenset[tuple[str, int]] = frozenset()
        """The units, with their group, that are not loaded ahead, since groups without pixels left them out before."""
        self.used: set[tuple[str, int]] = set()
        """The units that compute has asked for, with their group."""
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
        if self.timeline is None:
            return False

        for item in self.timeline.items:
            # A streamed unit's update comes with its load, and all others are items of their own.
            updates = isinstance(item, Update) or (isinstance(item, Load) and item.updates)
            if updates and item.access >= len(self.accesses):
                return True
        return False

    def check_can_replan(self, *, is_alone: bool) -> None:
        """Refuse to leave the planned course where what is left cannot be planned anew.

        Args:
            is_alone: whether no other rank takes part in the pass.

        Raises:
            TimelineError: others do, or updates have not all begun.
        """
        # Updates that were submitted cannot be taken back. And of several ranks, the others play the timeline that this
        # one would leave.
        if not is_alone or self.updates_ahead:
            raise TimelineError(
                f"this step takes another course ({self.course}) than the one before ({self.planned}). Several ranks "
                "take the same forwards and backwards in every step. So does a step whose first forward leaves units "
                "out that are updated, such as a vision tower where there is no image."
            )

    def expects(self, access: Access) -> bool:
        """Return whether an access is the next one of the record. Without a record, any access is.

        Raises:
            TimelineError: its unit is not loaded, since groups like this one have left it out.
        """
        if self.timeline is not None and (access.unit, access.group) in self.absent:
            raise TimelineError(
                f"{access.unit} is used in group {access.group}, which has no pixels; groups without pixels left it "
                "out before. Run the step again: then it is loaded for these groups too."
            )
        done = len(self.accesses)
        return self.timeline is None or self.timeline.accesses[done : done + 1] == (access,)

    def leave_out(self, access: Access | None, trained: Set[str]) -> list[Access]:
        """Return the recorded accesses that this pass leaves out before one that comes now.

        Args:
            access: the one that comes now; None: the end of the pass.
            trained: the units that have gradients.

        Raises:
            TimelineError: the order is another one.
        """
        assert self.timeline is not None

        # Loads of what is left out were submitted long ago, so each such access has to come and go for the queues to go
        # on.
        skipped = find_left_out(self.timeline.accesses, self.accesses, access, self.left_out, trained)
        for recorded in skipped:
            self.left_out.add((recorded.unit, recorded.group))
        return skipped


@dataclass(slots=True)
class _Course:
    """The memory of one course of a pass."""

    accesses: tuple[Access, ...]
    """Its order."""
    scatters: tuple[ReduceScatter, ...]
    """The gradients that it hands over, in order, if ranks scatter them."""
    timelines: dict[tuple[Set[str], Set[str], Set[tuple[str, int]]], Timeline] = field(default_factory=dict)
    """Its timelines so far, the last one last, by the units that they update, those whose state is ahead, and those
    that they leave out of a group."""


class Orders:
    """The order of each pass, recorded the first time, and the timelines that follow from it.

    Only the last courses of a name are remembered, so that a loop whose every step takes another course takes no more
    and more memory.
    """

    def __init__(self, placement: Placement, layers: Container[str] = ()) -> None:
        """Begin with no order recorded.

        Args:
            placement: the units' homes and slots.
            layers: the units that are layers of the decoder, or parts of one.
        """
        self._placement = placement
        self._layers = layers
        self._for_pixels: set[str] = set()
        """The units that groups without pixels have left out. Layers are not among them: one that is dropped at random
        says nothing of the next group."""
        self._courses: dict[str, dict[str, _Course]] = {}
        """The courses of each name that are remembered, the last one last."""
        self._followed: dict[tuple[str, str], str] = {}
        """The course that came after each course the last time, by name and course."""

    def record(self, played: Pass) -> None:
        """Remember the order of a pass, unless it is known, and that its course came now."""
        name = played.name
        for unit, group in played.left_out - played.used:
            if group in played.text_groups and unit not in self._layers:
                self._for_pixels.add(unit)

        # A pass may have left out what its course has at the end, so its own legs can be fewer than those of the course
        # that it was.
        course = played.course if played.timeline is None else played.planned
        courses = self._courses.setdefault(name, {})
        if courses:
            # Loops often take courses by turns, as in an epoch whose last step has fewer groups. So the next one is
            # guessed by the last one.
            self._followed[name, self._last(name)] = course

        # Taken out and put back: the last one is last.
        known = courses.pop(course, None)
        if known is None:
            known = _Course(tuple(played.accesses), tuple(played.scatters))
        courses[course] = known
        self._forget(name)

    def _last(self, name: str) -> str:
        """Return the last course of the passes of a name that was recorded."""
        return next(reversed(self._courses[name]))

    def _forget(self, name: str) -> None:
        """Forget the courses of a name that came longest ago, if they are too many or too long. The last one stays."""
        courses = self._courses[name]
        num_accesses = sum(len(course.accesses) for course in courses.values())
        while len(courses) > 1:
            too_many = len(courses) > COURSES_MAX
            too_long = num_accesses > ACCESSES_MAX
            if not (too_many or too_long):
                break

            oldest = next(iter(courses))
            forgotten = courses.pop(oldest)
            num_accesses -= len(forgotten.accesses)

            # What came after it goes as well, or this table alone would grow without end.
            self._followed.pop((name, oldest), None)

    def knows(self, name: str) -> bool:
        """Return whether the order of a pass was recorded."""
        return name in self._courses

    def expected(self, name: str) -> str:
        """Return the course that the next pass of this name is expected to take: what came after the last one before.

        If none came after it, or that was forgotten, it is the last one again. Nothing is known of a name that was not
        recorded.
        """
        if not self.knows(name):
            return ""
        last = self._last(name)
        followed = self._followed.get((name, last), last)
        is_remembered = followed in self._courses[name]
        return followed if is_remembered else last

    def lacks(self, name: str, units: Set[str]) -> bool:
        """Return whether the pass that is expected uses none of some of these units."""
        course = self._courses[name][self.expected(name)]
        return not units <= {access.unit for access in course.accesses}

    def absent(self, name: str, text_groups: Collection[int]) -> frozenset[tuple[str, int]]:
        """Return the units, each with its group, that the pass that is expected will leave out.

        Args:
            name: the name of the pass.
            text_groups: its groups without pixels.
        """
        # Further forwards of a group may see other batches than its first one, of which alone the kind is known.
        has_further = set(self.expected(name)) - {Leg.FORWARD, Leg.BACKWARD}
        if has_further:
            return frozenset()

        # Text alone needs nothing of the units that take pixels.
        left_out = product(self._for_pixels, text_groups)
        return frozenset(left_out)

    def forget_absent(self) -> None:
        """Load every unit for every group again, until groups without pixels leave some of them out once more."""
        self._for_pixels.clear()

    def timeline(
        self,
        name: str,
        due: frozenset[str],
        ahead: frozenset[str],
        absent: frozenset[tuple[str, int]] = frozenset(),
    ) -> Timeline | None:
        """Return the timeline of the next pass, on the course that is expected; None before its order is known.

        Args:
            name: the name of the pass.
            due: the units that are updated in it.
            ahead: the streamed units whose state is on the GPU when it begins.
            absent: the units, each with its group, that it leaves out.
        """
        if not self.knows(name):
            return None

        course = self._courses[name][self.expected(name)]
        timelines = course.timelines
        timeline = timelines.pop((due, ahead, absent), None)
        if timeline is None:
            timeline = build(
                course.accesses,
                self._placement,
                due=due,
                ahead=ahead,
                scatters=course.scatters,
                absent=absent,
                trains=name == TRAIN,
            )

        # As with courses: what was played last is last.
        timelines[due, ahead, absent] = timeline
        if len(timelines) > TIMELINES_MAX:
            oldest = next(iter(timelines))
            del timelines[oldest]
        return timeline

    def replan(self, played: Pass) -> None:
        """Plan what is left of a pass that has left its course; or let it be recorded, if that course is not known.

        Its slots are empty, and nothing is updated in what is left.
        """
        done = len(played.accesses)

        # Of another course it is not known what its groups are.
        played.absent = frozenset()

        # If no course is found below, the rest is recorded like a first pass, and loads come on demand.
        played.timeline = None
        played.recorded_from = done

        # A course may begin with the same legs and use other units in them, so the accesses are compared too.
        so_far = tuple(played.accesses)
        for legs, course in self._courses[played.name].items():
            if legs.startswith(played.course) and course.accesses[:done] == so_far:
                played.planned = legs
                played.timeline = build_rest(course.accesses, done, self._placement)
                return
