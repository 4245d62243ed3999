"""A pass over a training step or an evaluation, as far as it has come.

The player, the weights and the collectives share the current pass.

Threads: only the thread that computes changes it. The watchdog reads how far it has come.
"""

from __future__ import annotations

from collections.abc import Set

from megatier.errors import TimelineError
from megatier.schedule.order import find_left_out
from megatier.schedule.timeline import Access, Load, ReduceScatter, Timeline, Update
from megatier.store.transfer import Transfer

TRAIN = "train"
"""The name of the pass with a backward. All other names are those of evaluations."""


class Pass:
    """The progress of one pass."""

    def __init__(self, name: str) -> None:
        """Make a pass that has not begun.

        Args:
            name: `train`, or the name of an evaluation.
        """
        self.name = name
        """The name: `train`, or that of an evaluation."""
        self.timeline: Timeline | None = None
        """The timeline that is played; None while the order is recorded."""
        self.course = ""
        """The legs so far; empty in an evaluation."""
        self.planned = ""
        """The course for which the timeline was built."""
        self.recorded_from = 0
        """While the order is recorded, the first access that was not in a timeline."""
        self.is_open = False
        """Whether the pass has begun, and neither ended nor been cancelled."""
        self.accesses: list[Access] = []
        """The uses of units so far, in order."""
        self.scatters: list[ReduceScatter] = []
        """With several ranks, the reduce-scatters so far, in order."""
        self.loads: dict[int, Transfer] = {}
        """The loads that were submitted, by the index of the access that needs them."""
        self.left_out: set[tuple[str, int]] = set()
        """The units, each with a group, that this pass has left out although they were recorded."""
        self.text_groups: frozenset[int] = frozenset()
        """The groups that have no pixels."""
        self.absent: frozenset[tuple[str, int]] = frozenset()
        """The units, each with a group, that are not loaded, because groups without pixels left them out before."""
        self.used: set[tuple[str, int]] = set()
        """The units, each with a group, that compute has asked for."""
        self.sums_ahead: frozenset[int] = frozenset()
        """The accesses before which a sum of groups comes to the GPU ahead."""

    @property
    def trains(self) -> bool:
        """Whether the pass has a backward."""
        return self.name == TRAIN

    @property
    def is_on_course(self) -> bool:
        """Whether the legs so far are the planned ones; True if nothing was planned."""
        return self.timeline is None or self.planned.startswith(self.course)

    @property
    def updates_ahead(self) -> bool:
        """Whether a later access is planned with an update of its unit."""
        if self.timeline is None:
            return False

        for item in self.timeline.items:
            # The update of a streamed unit is part of its load.
            updates = isinstance(item, Update) or (isinstance(item, Load) and item.updates)
            if updates and item.access >= len(self.accesses):
                return True
        return False

    def check_can_replan(self, *, is_alone: bool) -> None:
        """Raise if the pass leaves its course and the rest cannot be planned anew.

        Args:
            is_alone: whether this is a single rank.

        Raises:
            TimelineError: there are other ranks, or updates that have not begun.
        """
        # Submitted updates cannot be taken back, and other ranks go on with the timeline.
        if not is_alone or self.updates_ahead:
            raise TimelineError(
                f"this step takes another course ({self.course}) than the one before ({self.planned}). Several ranks "
                "take the same forwards and backwards in every step. So does a step whose first forward leaves units "
                "out that are updated, such as a vision tower where there is no image."
            )

    def expects(self, access: Access) -> bool:
        """Return whether an access is the next recorded one; True if nothing was recorded.

        Raises:
            TimelineError: its unit is not loaded, because groups like this one have left it out before.
        """
        if self.timeline is not None and (access.unit, access.group) in self.absent:
            raise TimelineError(
                f"{access.unit} is used in group {access.group}, which has no pixels; groups without pixels left it "
                "out before. Run the step again: then it is loaded for these groups too."
            )
        done = len(self.accesses)
        return self.timeline is None or self.timeline.accesses[done : done + 1] == (access,)

    def leave_out(self, access: Access | None, trained: Set[str]) -> list[Access]:
        """Return the recorded accesses that this pass leaves out before its next access.

        Args:
            access: the next access; None: the end of the pass.
            trained: the units that have gradients.

        Raises:
            TimelineError: the order is another one.
        """
        assert self.timeline is not None

        # Their loads are on the queue already, so the caller has to use and leave each of these accesses.
        skipped = find_left_out(self.timeline.accesses, self.accesses, access, self.left_out, trained)
        for recorded in skipped:
            self.left_out.add((recorded.unit, recorded.group))
        return skipped
