"""An update in RAM that native threads are running, with the leases that it holds until it is over."""

from __future__ import annotations

import contextlib
import threading

from megatier.consistency import Consistency
from megatier.planes import Work
from megatier.store.transfer import FAILURES


class UpdateUnderWay:
    """A running update of a unit in RAM. The first thread that waits for it releases its leases.

    The queue `update` goes on to the next unit meanwhile, so that the native threads are always busy.
    """

    def __init__(self, work: Work, leases: contextlib.ExitStack, consistency: Consistency) -> None:
        """Take over the work and its leases.

        Args:
            work: the work of the native threads.
            leases: a stack that marks the state dirty and releases the leases when it is closed.
            consistency: that of the store.
        """
        self._work = work
        self._leases = leases
        self._consistency = consistency
        self._lock = threading.Lock()
        self._error: Exception | None = None
        """The error of closing the leases, for all threads that wait."""

    def wait(self) -> None:
        """Block until the update is done. Any thread may call it, any number of times."""
        self._work.wait()

        # The first thread closes the leases, and all others wait at the lock and get the same error. It may be the
        # training thread, which an interrupt can stop, so this is a region.
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
