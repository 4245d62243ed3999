"""Decides when the next checkpoint of a run is due, if `output.checkpoint_every` is `auto`.

A checkpoint changes no number of a run, so this decides only how much work a kill would lose. Checkpoints may take a
fiftieth of the time of a run. Cheap ones still come no more often than every half hour, because each writes the whole
state to a drive, which wears it.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

SHARE = 0.02
"""The share of a run's time that its checkpoints may take."""
FIRST_S = 300.0
"""Seconds before the first checkpoint, at least."""
EVERY_S = 1800.0
"""Seconds between two checkpoints, at least."""
UNMEASURED_BYTES_PER_S = 1e9
"""Assumed speed of a drive that nobody measured."""
USUAL_STEPS = 16
"""The number of steps, none of them beside a checkpoint, whose median is the usual time of a step."""


class CheckpointClock:
    """Says when the next checkpoint of this process may begin. Use it from one thread.

    Attributes:
        cost_s: seconds that the next checkpoint is expected to cost: as many as the last one.
    """

    def __init__(self, cost_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the clock.

        Args:
            cost_s: seconds that a checkpoint is expected to cost, before one was written.
            clock: gives seconds, counted from anywhere.
        """
        self.cost_s = cost_s

        # The default is monotonic, because a host may set its time of day back.
        self._clock = clock
        self._began = clock()
        self._last: float | None = None
        """When the last checkpoint began or was put off; None: there was none."""
        self._spent_s = 0.0
        """Seconds that all checkpoints so far have cost."""
        self._plain: deque[float] = deque(maxlen=USUAL_STEPS)
        """Seconds of the last steps during which no checkpoint was written."""
        self._beside: list[float] = []
        """Seconds of the steps during which the current checkpoint was written."""

    def is_due(self) -> bool:
        """Return whether a checkpoint may begin now."""
        now = self._clock()
        since = self._began if self._last is None else self._last

        # The first one comes early, because most runs that fail do so soon, and until then nothing is saved.
        pause_s = FIRST_S if self._last is None else EVERY_S
        if now - since < pause_s:
            return False

        # The next one must keep within the share too, so an expensive one comes later.
        return self._spent_s + self.cost_s <= SHARE * (now - self._began)

    def is_long(self) -> bool:
        """Return whether the run has gone on for so long that its end is worth a checkpoint."""
        return self._clock() - self._began >= FIRST_S

    def note_begin(self) -> None:
        """Take note that a checkpoint begins, or that it is put off because the drive has no room."""
        self._last = self._clock()
        self._beside.clear()

    def note_step(self, seconds: float, *, is_beside: bool) -> None:
        """Take note of a step.

        Args:
            seconds: the time that it took.
            is_beside: whether a checkpoint was written meanwhile.
        """
        steps = self._beside if is_beside else self._plain
        steps.append(seconds)

    def note_end(self, waited_s: float, written_s: float) -> None:
        """Take note that a checkpoint is whole, and work out what it cost.

        A checkpoint costs the time for which training waited, and the time by which steps were slower meanwhile. It
        cannot cost more than the wait and the writing together.

        Args:
            waited_s: seconds for which training waited between two steps. Waits within a step are in its own seconds.
            written_s: seconds from the beginning of the checkpoint until it was whole.
        """
        # If there are no steps to compare with, all of the writing counts, which is the most that it can be.
        most = waited_s + written_s
        if self._plain:
            # The median leaves out single steps that waited for something else, such as an evaluation.
            usual_s = statistics.median(self._plain)
            slowed_s = sum(self._beside) - len(self._beside) * usual_s
            most = min(most, waited_s + max(0.0, slowed_s))
        # The next checkpoint is expected to cost as much, since it is as large and goes to the same drive.
        self.cost_s = most
        self._spent_s += most


def first_seconds(cost_s: float) -> float:
    """Return the seconds after which a run writes its first checkpoint, if one costs `cost_s`."""
    return max(FIRST_S, cost_s / SHARE)


def every_seconds(cost_s: float) -> float:
    """Return the seconds between two checkpoints, if each costs `cost_s`."""
    return max(EVERY_S, cost_s / SHARE)


def unmeasured_seconds(num_bytes: int) -> float:
    """Return the assumed seconds of writing `num_bytes` to a drive that was not measured."""
    return num_bytes / UNMEASURED_BYTES_PER_S


def format_about(seconds: float) -> str:
    """Return a rough duration in words, such as "90 minutes" or "2.5 hours"."""
    minutes = round(seconds / 60)
    return f"{minutes} minutes" if minutes < 120 else f"{round(seconds / 1800) / 2:g} hours"
