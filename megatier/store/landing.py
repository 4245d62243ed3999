"""Landing: the end of a copy to RAM that goes through a ring of page-locked pieces.

The device is through with such a copy before its bytes are there: a host thread takes them from the ring to RAM.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatier.store.stream_clock import StreamSpan
from megatier.workers import Task


class Landing:
    """The end of one copy to RAM, as a `Completion`."""

    def __init__(self, began_ns: int, tasks: Sequence[Task[int]], on_device: StreamSpan | None) -> None:
        """Take a copy that was started.

        Args:
            began_ns: when that was, in time.perf_counter_ns.
            tasks: take its pieces from the ring, in order; each gives the time when it was through.
            on_device: what the device does of it; None: there is no CUDA device, and that is over.
        """
        self._began_ns = began_ns
        self._tasks = tuple(tasks)
        self._on_device = on_device

    def wait(self) -> None:
        """Block until the bytes are in RAM. If the device failed, raise its error, every time."""
        # All are waited for before the first error is raised: nothing writes to the target any more then.
        for task in self._tasks:
            task.wait()
        for task in self._tasks:
            task.result()

    def wait_on_stream(self) -> None:
        """Let the current stream wait until the device is through with the copy. Its bytes are in RAM only later."""
        if self._on_device is None:
            self.wait()
        else:
            self._on_device.wait_on_stream()

    def done(self) -> bool:
        """Return whether the bytes are in RAM, or never will be. This asks no device."""
        return all(task.done() for task in self._tasks)

    def span_ns(self) -> tuple[int, int]:
        """Return the start and the end of the copy, on the host's clock, once `wait` has returned."""
        began_ns = self._began_ns if self._on_device is None else self._on_device.span_ns()[0]
        return began_ns, self._tasks[-1].result()
