"""An update on the CPU that native threads are at, and the leases that it holds until it is over."""

from __future__ import annotations

import contextlib
import threading

from megatier.consistency import Consistency
from megatier.planes import Work
from megatier.store.transfer import FAILURES


class UpdateUnderWay:
    """AdamW under way on a unit in RAM. Its leases end when somebody has waited for it.

    The queue `update` goes on to the next unit meanwhile, so that the native threads never run dry.
    """

    def __init__(self, work: Work, leases: contextlib.ExitStack, consistency: Consistency) -> None:
        """Take over the work and its leases.

        Args:
            work: what the native threads do.
            leases: marks the state dirty and gives back what the work holds, when it is closed.
            consistency: the store's.
        """
        self._work = work
        self._leases = leases
        self._consistency = consistency
        self._lock = threading.Lock()
        self._error: Exception | None = None
        """The error of ending the leases, for everyone who waits."""

    def wait(self) -> None:
        """Block until it is done. Any thread may call it, any number of times."""
        self._work.wait()

        # The thread that waits first marks the state dirty and ends the leases, perhaps the training thread, which an
        # interrupt may stop half-way. All others wait at the lock until that is done, and get the same error.
        with self._lock:
            try:
                with self._consistency.call:
                    self._leases.close()
            except FAILURES as error:
                self._error = error
            if self._error is not None:
                raise self._error

    def done(self) -> bool:
        """Return whether wait() would not block."""
        return self._work.done()

    def span_ns(self) -> tuple[int, int]:
        """Return the start and end, in time.perf_counter_ns."""
        return self._work.span_ns()
