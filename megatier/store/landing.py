"""Landing: the end of a copy to RAM through a ring of pinned pieces.

The device finishes such a copy before its bytes are in RAM, because a host thread copies them from the ring to RAM.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatier.store.stream_clock import StreamSpan
from megatier.workers import Task


class Landing:
    """The end of one copy to RAM, as a `Completion`."""

    def __init__(self, began_ns: int, tasks: Sequence[Task[int]], on_device: StreamSpan | None) -> None:
        """Follow a copy that has started.

        Args:
            began_ns: its start, in time.perf_counter_ns.
            tasks: copy its pieces from the ring, in order. Each returns the time of its end.
            on_device: the device's part of the copy; None: there is no CUDA device.
        """
        self._began_ns = began_ns
        self._tasks = tuple(tasks)
        self._on_device = on_device

    def wait(self) -> None:
        """Block until the bytes are in RAM. If the device failed, raise its error, at each call."""
        # All tasks have ended before an error is raised, so that nothing writes to the target any more.
        for task in self._tasks:
            task.wait()
        for task in self._tasks:
            task.result()

    def wait_on_stream(self) -> None:
        """Let the current stream wait for the device's part of the copy. The bytes are in RAM only later."""
        if self._on_device is None:
            self.wait()
        else:
            self._on_device.wait_on_stream()

    def done(self) -> bool:
        """Return whether the copy has ended or failed. This does not ask the device."""
        return all(task.done() for task in self._tasks)

    def span_ns(self) -> tuple[int, int]:
        """Return the start and the end of the copy, on the host's clock, once `wait` has returned."""
        began_ns = self._began_ns if self._on_device is None else self._on_device.span_ns()[0]
        return began_ns, self._tasks[-1].result()
