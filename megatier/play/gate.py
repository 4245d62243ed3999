"""The gate of a pass: it counts the accesses that are over. Loads and updates that feed them wait for it."""

from __future__ import annotations

import threading

from megatier import _native
from megatier.errors import StepAbandonedError

GIVEN_UP = "the step was given up (cancel, close or an error before); the first error says why"
"""The error of a wait for something that will not come."""


class Gate:
    """The number of accesses that compute has left in this pass, for which threads can wait.

    It grows within a pass, and `reset` begins the next one.
    """

    def __init__(self) -> None:
        """Start at 0."""
        self._count = 0
        self._is_abandoned = False
        self._waiting: list[tuple[int, _native.Latch]] = []
        """For each waiting thread, the count that it waits for and the latch that wakes it."""
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """The number of accesses that are over."""
        return self._count

    @property
    def wanted(self) -> tuple[int, ...]:
        """The counts that threads wait for, lowest first."""
        with self._lock:
            return tuple(sorted(count for count, latch in self._waiting if not latch.is_set()))

    def open_to(self, count: int) -> None:
        """Raise the counter, and wake the threads that wait for at most `count`."""
        with self._lock:
            assert count >= self._count
            self._count = count
            self._wake()

    def wait_for(self, count: int) -> None:
        """Block until the counter reaches `count`.

        Raises:
            StepAbandonedError: the gate was abandoned.
        """
        # A native latch, because an interrupt could leave a lock of the standard library taken.
        entry = count, _native.Latch()
        with self._lock:
            self._waiting.append(entry)
            self._wake()  # the count may have been reached already, or the gate abandoned

        try:
            entry[1].wait()
        finally:
            # Read under the lock. The next pass resets the gate only when no thread waits, so this is still the pass of
            # this wait.
            with self._lock:
                self._waiting.remove(entry)
                is_abandoned = self._is_abandoned

        if is_abandoned:
            raise StepAbandonedError(GIVEN_UP)

    def reset(self) -> None:
        """Set the counter to 0. No thread may be waiting."""
        with self._lock:
            self._count = 0
            self._is_abandoned = False

    def abandon(self) -> None:
        """Wake all threads with an error, because the step does not go on."""
        with self._lock:
            self._is_abandoned = True
            self._wake()

    def _wake(self) -> None:
        """Wake the threads whose wait is over. The caller holds the lock."""
        # A waiting thread removes its entry itself. An interrupt between the count and a latch loses nothing, because
        # the next call sets all due latches, and the step is abandoned after an interrupt.
        for count, latch in self._waiting:
            if self._is_abandoned or count <= self._count:
                latch.set()
