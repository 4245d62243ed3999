"""The patience of a watchdog: how long nothing may move on."""

from __future__ import annotations

MULTIPLE = 4
"""Nothing may move on for so many times the longest that it took so far, or the predicted step."""


class Patience:
    """The patience of a watchdog: a least time, and a multiple of the longest that it took before.

    Attributes:
        expected_s: seconds that it may take in any case; 0: not known.
        quiet_s: seconds since something moved on.
    """

    def __init__(self, least_s: float, expected_s: float) -> None:
        """Begin to look.

        Args:
            least_s: the least time.
            expected_s: seconds that it may take in any case; 0: not known.
        """
        self._least_s = least_s
        self._longest_s = 0.0
        self.expected_s = expected_s
        self._seen: object = None
        self.quiet_s = 0.0

    def ends(self, seen: object, seconds: float) -> bool:
        """Take the next look, and return whether everything was the same for too long.

        Args:
            seen: what is seen; None: nothing has to move on now.
            seconds: time since the last look.
        """
        if seen is None or seen != self._seen:
            # The run has moved on, so this much quiet was no stall, and that much again is none either.
            self._longest_s = max(self._longest_s, self.quiet_s)
            self._seen = seen
            self.quiet_s = 0.0
            return False
        self.quiet_s += seconds
        usual_s = max(self._longest_s, self.expected_s)
        return self.quiet_s >= max(self._least_s, MULTIPLE * usual_s)
