"""When a run that was not told how often writes a checkpoint: by the clock, and by what the ones before have cost.

A checkpoint changes no number of a run, so the clock decides nothing but how much is lost to a kill. Of the time that a
run has taken so far, checkpoints may have cost one part in fifty; those that cost little come by the clock alone, since
each writes the whole state to a drive that wears.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

SHARE = 0.02
"""Of a run's time, what its checkpoints may cost."""
FIRST_S = 300.0
"""The first checkpoint comes no sooner."""
EVERY_S = 1800.0
"""Between two of them is no less."""
UNMEASURED_BYTES_PER_S = 1e9
"""What a drive takes that nobody measured."""
STEPS = 16
"""Steps without a checkpoint beside them that say how long one takes."""


class Pace:
    """What the checkpoints of one process have cost, and so when the next one may begin. From one thread."""

    def __init__(self, cost_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """The clock begins.

        Args:
            cost_s: seconds that a checkpoint is expected to cost, before one was written.
            clock: seconds, from anywhere.
        """
        self.cost_s = cost_s
        """Of the next one: what the last one cost."""
        self._clock = clock
        self._began = clock()
        self._last: float | None = None
        self._spent_s = 0.0
        self._plain: deque[float] = deque(maxlen=STEPS)
        self._beside: list[float] = []

    def is_due(self) -> bool:
        """Whether a checkpoint may begin now."""
        now = self._clock()
        waited = now - self._began >= FIRST_S if self._last is None else now - self._last >= EVERY_S
        return waited and self._spent_s + self.cost_s <= SHARE * (now - self._began)

    def is_long(self) -> bool:
        """Whether the run has gone on for so long that its end is worth a checkpoint."""
        return self._clock() - self._began >= FIRST_S

    def begin(self) -> None:
        """A checkpoint begins, or could not: the next one is tried when as much time is over again."""
        self._last = self._clock()
        self._beside.clear()

    def step(self, seconds: float, *, is_beside: bool) -> None:
        """A step took so long; a checkpoint was on its way beside it, or not."""
        (self._beside if is_beside else self._plain).append(seconds)

    def end(self, waited_s: float, written_s: float) -> None:
        """A checkpoint is whole.

        What it cost is how long training waited for it, and how much longer the steps beside it took than others. It
        cannot have cost more than the wait and the time that it was written.

        Args:
            waited_s: seconds that training waited between two steps; what it waited within a step is in the step's own.
            written_s: seconds from its beginning until it was whole.
        """
        most = waited_s + written_s
        if self._plain:
            slowed_s = sum(self._beside) - len(self._beside) * statistics.median(self._plain)
            most = min(most, waited_s + max(0.0, slowed_s))
        self.cost_s = most
        self._spent_s += most


def first_seconds(cost_s: float) -> float:
    """From a run's beginning to its first checkpoint, if that costs so much."""
    return max(FIRST_S, cost_s / SHARE)


def every_seconds(cost_s: float) -> float:
    """Between two checkpoints, if each costs so much."""
    return max(EVERY_S, cost_s / SHARE)


def unmeasured_seconds(num_bytes: int) -> float:
    """How long so many bytes are written to a drive that nobody measured."""
    return num_bytes / UNMEASURED_BYTES_PER_S


def about(seconds: float) -> str:
    """Seconds of a plan, in whole minutes or half hours."""
    minutes = round(seconds / 60)
    return f"{minutes} minutes" if minutes < 120 else f"{round(seconds / 1800) / 2:g} hours"
