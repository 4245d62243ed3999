"""Decides how often a run writes checkpoints that was not told.

A checkpoint changes no number of a run, so the clock decides nothing but how much is lost to a kill. Checkpoints may
take one part in fifty of the time that a run has taken so far. Those that cost little come by the clock alone, because
each writes the whole state to a drive that wears.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

SHARE = 0.02
"""Share of a run's time that its checkpoints may take."""
FIRST_S = 300.0
"""Seconds before the first checkpoint, at least."""
EVERY_S = 1800.0
"""Seconds between two checkpoints, at least."""
UNMEASURED_BYTES_PER_S = 1e9
"""Assumed speed of a drive that nobody measured."""
USUAL_STEPS = 16
"""Number of steps without a checkpoint on its way, from which the usual time of a step follows."""


class CheckpointClock:
    """The clock of one process that says when the next checkpoint may begin. Use it from one thread.

    Attributes:
        cost_s: expected cost of the next checkpoint, which is that of the last one.
    """

    def __init__(self, cost_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the clock.

        Args:
            cost_s: seconds that a checkpoint is expected to cost, before one was written.
            clock: gives seconds, counted from anywhere.
        """
        self.cost_s = cost_s

        # By default not the time of day, which a host may set back.
        self._clock = clock
        self._began = clock()
        self._last: float | None = None
        """When the last checkpoint began, or could not; None: none has."""
        self._spent_s = 0.0
        """Cost of all checkpoints so far."""
        self._plain: deque[float] = deque(maxlen=USUAL_STEPS)
        """Seconds of the last steps without a checkpoint on its way."""
        self._beside: list[float] = []
        """Seconds of the steps since the last checkpoint began, while it was on its way."""

    def is_due(self) -> bool:
        """Return whether a checkpoint may begin now."""
        now = self._clock()
        since = self._began if self._last is None else self._last

        # The first one comes early: a run that fails mostly fails soon, and until then nothing of it is safe.
        pause_s = FIRST_S if self._last is None else EVERY_S
        if now - since < pause_s:
            return False

        # The next one must keep within the share too, so a dear one waits for longer than the clock asks.
        return self._spent_s + self.cost_s <= SHARE * (now - self._began)

    def is_long(self) -> bool:
        """Return whether the run has gone on for so long that its end is worth a checkpoint."""
        return self._clock() - self._began >= FIRST_S

    def note_begin(self) -> None:
        """Note that a checkpoint begins, or could not begin and is tried again after the same time."""
        # Also if it could not begin, for lack of room: the drive is asked again only after the same pause.
        self._last = self._clock()
        self._beside.clear()

    def note_step(self, seconds: float, *, is_beside: bool) -> None:
        """Note a step.

        Args:
            seconds: how long it took.
            is_beside: whether a checkpoint was on its way meanwhile.
        """
        steps = self._beside if is_beside else self._plain
        steps.append(seconds)

    def note_end(self, waited_s: float, written_s: float) -> None:
        """Note that a checkpoint is whole, and what it cost.

        Its cost is how long training waited for it, and how much longer the steps took while it was written. It cannot
        have cost more than the wait and the time of the writing.

        Args:
            waited_s: seconds that training waited between two steps. Waits within a step are part of the step's
                seconds.
            written_s: seconds from its beginning until it was whole.
        """
        # Without plain steps to compare with, all of the writing counts as cost, which is the most that it can be.
        most = waited_s + written_s
        if self._plain:
            # The median, because single steps may have waited for something else, such as an evaluation.
            usual_s = statistics.median(self._plain)
            slowed_s = sum(self._beside) - len(self._beside) * usual_s
            most = min(most, waited_s + max(0.0, slowed_s))
        # The last one stands for the next, since the state is as large and the drive the same.
        self.cost_s = most
        self._spent_s += most


def first_seconds(cost_s: float) -> float:
    """Return the seconds from a run's beginning to its first checkpoint, if that costs so much."""
    return max(FIRST_S, cost_s / SHARE)


def every_seconds(cost_s: float) -> float:
    """Return the seconds between two checkpoints, if each costs so much."""
    return max(EVERY_S, cost_s / SHARE)


def unmeasured_seconds(num_bytes: int) -> float:
    """Return how long so many bytes take on a drive that nobody measured."""
    return num_bytes / UNMEASURED_BYTES_PER_S


def format_about(seconds: float) -> str:
    """Return seconds of a plan in words, in whole minutes or half hours."""
    minutes = round(seconds / 60)
    return f"{minutes} minutes" if minutes < 120 else f"{round(seconds / 1800) / 2:g} hours"
