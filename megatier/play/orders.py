"""The recorded orders of passes, and the timelines that are built from them.

The course of a training pass is the order of its forwards and backwards, which only the user's loop knows in advance.
So a pass is planned for the course that came after the previous course the last time. If it takes another course, the
rest is planned anew, or recorded if no pass has taken that course.

Threads: only the thread that computes uses them.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Set
from dataclasses import dataclass, field
from itertools import product

from megatier.play.passes import TRAIN, Pass
from megatier.schedule.placement import Placement
from megatier.schedule.timeline import Access, ReduceScatter, Timeline, build, build_rest
from megatier.tier import Leg

COURSES_MAX = 8
"""The most courses of a name that are remembered. Loops use few courses, such as those of whole groups and of a shorter
last one, or with and without a second forward. A course that was forgotten is recorded again: the bits are the same,
but loads do not come ahead."""
ACCESSES_MAX = 1 << 18
"""The most accesses of all remembered courses of a name. Text that is generated within a step has a forward for each
token. An access takes about 250 bytes with its timeline, so this is 64 MiB."""
TIMELINES_MAX = 8
"""The most timelines of a course that are remembered. A course may have any number of them, because it depends on time
which units were updated speculatively. A timeline that was forgotten is built again."""


@dataclass(slots=True)
class _Course:
    """A remembered course."""

    accesses: tuple[Access, ...]
    """The accesses in order."""
    scatters: tuple[ReduceScatter, ...]
    """With several ranks, the reduce-scatters in order."""
    timelines: dict[tuple[Set[str], Set[str], Set[tuple[str, int]]], Timeline] = field(default_factory=dict)
    """Its timelines, the last played one last, by the units that they update, those whose state is ahead, and those
    that they leave out of a group."""


class Orders:
    """The recorded orders of a run's passes.

    Only the last courses of a name are remembered, so that memory stays bounded if every step takes another course.
    """

    def __init__(self, placement: Placement, layers: Container[str] = ()) -> None:
        """Begin without orders.

        Args:
            placement: the units' homes and slots.
            layers: the units that are layers of the decoder, or parts of one.
        """
        self._placement = placement
        self._layers = layers
        self._for_pixels: set[str] = set()
        """The units that groups without pixels have left out, except layers, which may have been dropped at random."""
        self._courses: dict[str, dict[str, _Course]] = {}
        """The remembered courses of each name, the last one last."""
        self._followed: dict[tuple[str, str], str] = {}
        """By name and course, the course that followed it the last time."""

    def record(self, played: Pass) -> None:
        """Remember the order of a pass, if it is new, and that its course was the last one."""
        name = played.name
        for unit, group in played.left_out - played.used:
            if group in played.text_groups and unit not in self._layers:
                self._for_pixels.add(unit)

        # A pass may leave out the end of its course, so its own legs can be fewer than the planned ones.
        course = played.course if played.timeline is None else played.planned
        courses = self._courses.setdefault(name, {})
        if courses:
            # Loops often alternate between courses, such as an epoch whose last step has fewer groups. So the next
            # course is predicted from the last one.
            self._followed[name, self._last(name)] = course

        # Removed and added again, so that the last one is last.
        known = courses.pop(course, None)
        if known is None:
            known = _Course(tuple(played.accesses), tuple(played.scatters))
        courses[course] = known
        self._forget(name)

    def _last(self, name: str) -> str:
        """Return the last course of a name."""
        return next(reversed(self._courses[name]))

    def _forget(self, name: str) -> None:
        """Forget the oldest courses of a name, if they are too many or too long. The last one stays."""
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

            # Otherwise this table would grow without bound.
            self._followed.pop((name, oldest), None)

    def knows(self, name: str) -> bool:
        """Return whether an order of this name was recorded."""
        return name in self._courses

    def expected(self, name: str) -> str:
        """Return the expected course of the next pass of a name: the one that followed the last course before.

        If none is known, it is the last course again. It is empty if the name was not recorded.
        """
        if not self.knows(name):
            return ""
        last = self._last(name)
        followed = self._followed.get((name, last), last)
        is_remembered = followed in self._courses[name]
        return followed if is_remembered else last

    def lacks(self, name: str, units: Set[str]) -> bool:
        """Return whether the expected course lacks any of these units."""
        course = self._courses[name][self.expected(name)]
        return not units <= {access.unit for access in course.accesses}

    def absent(self, name: str, text_groups: Collection[int]) -> frozenset[tuple[str, int]]:
        """Return the units, each with a group, that the next pass is expected to leave out.

        Args:
            name: the name of the pass.
            text_groups: its groups without pixels.
        """
        # It is known only of the first forward of a group that it has no pixels.
        has_further = set(self.expected(name)) - {Leg.FORWARD, Leg.BACKWARD}
        if has_further:
            return frozenset()

        # Groups of text need no unit that groups without pixels have left out.
        left_out = product(self._for_pixels, text_groups)
        return frozenset(left_out)

    def forget_absent(self) -> None:
        """Load all units for all groups again, until groups without pixels leave some out once more."""
        # A pass that needed such a unit has shown that they say nothing of later batches.
        self._for_pixels.clear()

    def timeline(
        self,
        name: str,
        due: frozenset[str],
        ahead: frozenset[str],
        absent: frozenset[tuple[str, int]] = frozenset(),
    ) -> Timeline | None:
        """Return the timeline of the next pass on its expected course; None if no order is known.

        Args:
            name: the name of the pass.
            due: the units that the pass updates.
            ahead: the streamed units whose state is on the GPU when the pass begins.
            absent: the units, each with a group, that the pass leaves out.
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

        # As with courses, the last one is last.
        timelines[due, ahead, absent] = timeline
        if len(timelines) > TIMELINES_MAX:
            oldest = next(iter(timelines))
            del timelines[oldest]
        return timeline

    def replan(self, played: Pass) -> None:
        """Plan the rest of a pass that has left its course, or record it if the new course is not known.

        The slots are empty, and the rest has no updates.
        """
        done = len(played.accesses)

        # It is not known which groups of another course have pixels.
        played.absent = frozenset()

        # If no course matches below, the rest is recorded like a first pass, with loads on demand.
        played.timeline = None
        played.recorded_from = done

        # A course with the same legs may use other units, so the accesses are compared too.
        so_far = tuple(played.accesses)
        for legs, course in self._courses[played.name].items():
            if legs.startswith(played.course) and course.accesses[:done] == so_far:
                played.planned = legs
                played.timeline = build_rest(course.accesses, done, self._placement)
                return
