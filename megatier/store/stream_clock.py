"""The clock of CUDA streams, mapped to the host's clock.

A CUDA event has the device time at which its stream has passed a point. One event with a known host time maps all
others to the host's clock. So a trace shows moves on streams, moves of native threads and compute on one time axis.
"""

from __future__ import annotations

import time

import torch


class StreamClock:
    """A map from CUDA events to the host's clock, by one event with a known host time."""

    def __init__(self) -> None:
        """Record the event with a known host time. This waits for the device once."""
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

        # The host reads its clock right after the device has passed the event.
        self._event.synchronize()
        self._ns = time.perf_counter_ns()

    def now(self) -> StreamSpan:
        """Return the present point of the current stream, as work without length."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return StreamSpan(self, event, event)

    def host_ns(self, event: torch.cuda.Event) -> int:
        """Return the host time, in nanoseconds, at which an event was passed."""
        # CUDA gives milliseconds in fp32, which an hour after the start of the clock have steps of 0.25 ms.
        return self._ns + int(self._event.elapsed_time(event) * 1e6)


class StreamSpan:
    """Work that was enqueued on a CUDA stream between two events."""

    def __init__(self, clock: StreamClock, started: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        """Use two events that are recorded already."""
        self._clock = clock
        self._started = started
        self._ended = ended

    def wait(self) -> None:
        """Block the host until the stream is past the work."""
        self._ended.synchronize()

    def wait_on_stream(self) -> None:
        """Let the current stream wait for the work. The host goes on."""
        torch.cuda.current_stream().wait_event(self._ended)

    def done(self) -> bool:
        """Return whether the stream is past the work."""
        return bool(self._ended.query())

    def span_ns(self) -> tuple[int, int]:
        """Return the start and the end of the work, as measured on the device, on the host's clock."""
        return self._clock.host_ns(self._started), self._clock.host_ns(self._ended)


class Instant:
    """A moment of compute: on a CUDA device the time when the stream gets here, otherwise now."""

    __slots__ = ("_clock", "_event", "_ns")

    def __init__(self, clock: StreamClock | None) -> None:
        """Record the moment on the current stream."""
        self._clock = clock
        self._ns = time.perf_counter_ns()

        # With a device, compute is only enqueued, so an event records when the device gets here.
        self._event = None
        if clock is not None:
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def passed(self) -> bool:
        """Return whether `ns` would not block."""
        return self._event is None or bool(self._event.query())

    def ns(self) -> int:
        """Return the moment in time.perf_counter_ns. This blocks until the device has passed it."""
        if self._clock is None or self._event is None:
            return self._ns

        # CUDA only knows the time of an event that the stream has passed.
        self._event.synchronize()
        return self._clock.host_ns(self._event)
