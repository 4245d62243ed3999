"""The time that the computing thread has waited. The rest of a step is the host's own work.

On a GPU the host runs ahead of the device: it executes Python and enqueues kernels. A step takes as long as the slower
of the two, so the host's work shows nowhere else until it is the slower one.
"""

from __future__ import annotations

import time
from types import TracebackType


class HostWait:
    """A timer for waits, used as a context. Contexts may be nested.

    Threads: one thread computes at a time. With CUDA that is autograd's thread in the backward, for which the other
    waits.
    """

    def __init__(self) -> None:
        """Begin at 0."""
        self.ns = 0
        """Nanoseconds so far."""
        self._depth = 0
        self._began_ns = 0

    def restart(self) -> None:
        """Count from 0, outside of all contexts."""
        self.ns = self._depth = 0

    def __enter__(self) -> None:
        # Only the outermost context counts, because its time includes that of the others.
        if not self._depth:
            self._began_ns = time.perf_counter_ns()
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self.ns += time.perf_counter_ns() - self._began_ns


HOST_WAIT = HostWait()
"""The timer of this process."""
