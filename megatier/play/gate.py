"""The gate: counts the accesses of a pass that are over; loads and fed updates wait on it."""

from __future__ import annotations

import threading

from megatier.errors import StepAbandonedError


class Gate:
    """A counter that only grows and that threads wait on: how many accesses compute has released."""

    def __init__(self) -> None:
        """Starts at 0."""
        self._count = 0
        self._failed = False
        self._wanted: list[int] = []
        self._condition = threading.Condition()

    @property
    def count(self) -> int:
        """Accesses that are over."""
        return self._count

    @property
    def wanted(self) -> tuple[int, ...]:
        """The counts that somebody waits for, lowest first."""
        return tuple(sorted(self._wanted))

    def open_to(self, count: int) -> None:
        """Let everyone pass who waits for at most `count`."""
        with self._condition:
            self._count = count
            self._condition.notify_all()

    def wait_for(self, count: int) -> None:
        """Block until the counter reaches `count`, or raise StepAbandonedError when the gate was broken."""
        with self._condition:
            self._wanted.append(count)
            try:
                self._condition.wait_for(lambda: self._failed or self._count >= count)
            finally:
                self._wanted.remove(count)
            if self._failed:
                raise StepAbandonedError("the step was abandoned")

    def reset(self) -> None:
        """Back to 0. Nobody may be waiting."""
        with self._condition:
            self._count, self._failed = 0, False

    def abandon(self) -> None:
        """Wake everyone with an error: the step will not go on."""
        with self._condition:
            self._failed = True
            self._condition.notify_all()
