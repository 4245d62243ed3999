"""Measures how long the thread that computes has waited, so that one knows how long it has worked.

On a GPU the host works ahead: it runs Python and enqueues what the device does later. A step is as long as the longer
of the two. So what the host's work costs shows nowhere else until it is the longer one.
"""

from __future__ import annotations

import time
from types import TracebackType


class HostWait:
    """Counts the time inside of it, as a context. Contexts may be nested.

    Threads: one computes at a time: with CUDA autograd's own thread in the backward, for which the other one waits.
    """

    def __init__(self) -> None:
        """Begin before anybody has waited."""
        self.ns = 0
        """Nanoseconds so far."""
        self._depth = 0
        self._began_ns = 0

    def restart(self) -> None:
        """Count from 0, outside of all contexts."""
        self.ns = self._depth = 0

    def __enter__(self) -> None:
        # Of nested contexts the outermost alone counts, since its time holds that of the others.
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
"""That of this process."""
