"""Counts the accesses of a pass that are over. Loads and fed updates wait on it."""

from __future__ import annotations

import threading

from megatier import _native
from megatier.errors import StepAbandonedError

GIVEN_UP = "the step was given up (cancel, close or an error before); the first error says why"
"""Said by whatever waited for something that will not come."""


class Gate:
    """A counter that threads wait on: how many accesses compute has released in this pass. It only grows."""

    def __init__(self) -> None:
        """Start at 0."""
        self._count = 0
        self._is_abandoned = False
        self._waiting: list[tuple[int, _native.Latch]] = []
        """One entry for each thread that waits: the count that it waits for, and how it is woken."""
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
        """Let everyone pass who waits for at most `count`."""
        with self._lock:
            self._count = count
            self._wake()

    def wait_for(self, count: int) -> None:
        """Block until the counter reaches `count`.

        Raises:
            StepAbandonedError: the gate was abandoned.
        """
        # A native latch, since an interrupt could leave a lock of the standard library locked.
        entry = count, _native.Latch()
        with self._lock:
            self._waiting.append(entry)
            self._wake()  # the count may have been reached already, or the gate abandoned

        try:
            entry[1].wait()
        finally:
            # How it ended is asked under the lock. The next pass resets the gate only when nobody waits any more, so
            # this is the gate of the pass that was waited for.
            with self._lock:
                self._waiting.remove(entry)
                is_abandoned = self._is_abandoned

        if is_abandoned:
            raise StepAbandonedError(GIVEN_UP)

    def reset(self) -> None:
        """Go back to 0. Nobody may be waiting."""
        with self._lock:
            self._count = 0
            self._is_abandoned = False

    def abandon(self) -> None:
        """Wake everyone with an error: the step will not go on."""
        with self._lock:
            self._is_abandoned = True
            self._wake()

    def _wake(self) -> None:
        """Wake everyone who waits no longer. The caller holds the lock."""
        # A thread that waits leaves the list by itself. An interrupt between the count and a latch loses nothing: the
        # next call sets all that are due, and after an interrupt the step is abandoned.
        for count, latch in self._waiting:
            if self._is_abandoned or count <= self._count:
                latch.set()
