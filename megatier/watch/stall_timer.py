"""Decides how long a run may make no progress before it counts as stalled. The watchdog's thread calls it."""

from __future__ import annotations

STALL_MULTIPLE = 4
"""A stall lasts this many times as long as a step is predicted to take, or as the longest pause so far."""


class StallTimer:
    """Measures how long a run has made no progress.

    Attributes:
        expected_s: the predicted seconds of a step; 0: not known.
        quiet_s: the seconds since the last progress.
    """

    def __init__(self, least_s: float, expected_s: float) -> None:
        """Begin with no progress seen.

        Args:
            least_s: the seconds that a stall lasts at least.
            expected_s: the predicted seconds of a step; 0: not known.
        """
        self._least_s = least_s
        self._longest_s = 0.0
        self.expected_s = expected_s
        self._seen: object = None
        self.quiet_s = 0.0

    def observe(self, seen: object, seconds: float) -> bool:
        """Take note of the progress that the watchdog sees now, and return whether the run has stalled.

        Args:
            seen: differs from the value before if there was progress; None: nothing has to move on now.
            seconds: the seconds since the last call.
        """
        if seen is None or seen != self._seen:
            # The run went on after this pause, so a pause of this length is no stall.
            self._longest_s = max(self._longest_s, self.quiet_s)
            self._seen = seen
            self.quiet_s = 0.0
            return False
        self.quiet_s += seconds
        usual_s = max(self._longest_s, self.expected_s)
        return self.quiet_s >= max(self._least_s, STALL_MULTIPLE * usual_s)
