"""Transfers and queues: the asynchronous lanes between tiers. The only file with streams, events and threads.

A queue runs its items strictly in order on one worker thread. An item first orders itself behind the transfers it
depends on, then starts its move: a native batch (NVMe), a copy on a CUDA stream, or a memory copy in place where no
GPU is. The worker does not wait for a batch or a stream, so several moves of a queue are in flight.

On a CUDA device, waiting for a copy costs the host nothing: `order` makes a stream wait on the event.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from megatier.errors import StepAbandonedError

QUEUE_DEPTH_MAX = 4096
"""Items that may wait in one queue; a full one blocks its submitter. A bound, not a tuning value."""


class Completion(Protocol):
    """What a started move reports on."""

    def wait(self) -> None:
        """Block until the bytes are there; raise the typed error when they are not."""

    def done(self) -> bool:
        """True when wait() would not block."""

    def span_ns(self) -> tuple[int, int]:
        """Start and end, in time.perf_counter_ns."""


class Transfer:
    """One move on one queue: a future that any thread may wait on, any number of times."""

    __slots__ = ("_completion", "_error", "_issued", "_span", "after", "key", "num_bytes", "queue")

    def __init__(self, queue_name: str, key: str, num_bytes: int, after: Sequence[Transfer] = ()) -> None:
        """Made by Queue.submit and by `mark`."""
        self.queue, self.key, self.num_bytes = queue_name, key, num_bytes
        self.after: tuple[Transfer, ...] = tuple(after)
        self._issued = threading.Event()
        self._completion: Completion | None = None
        self._error: BaseException | None = None
        self._span = (0, 0)

    def wait(self) -> float:
        """Block, GIL free, until the bytes are there. Returns the seconds the move took.

        Raises:
            TransferError, IntegrityError: this move, or one it depends on, failed.
        """
        self._wait_issued()
        if self._completion is not None:
            try:
                self._completion.wait()
            except BaseException as error:
                self._error = error
                raise
            self._span = self._completion.span_ns()
        return (self._span[1] - self._span[0]) / 1e9

    def order(self) -> None:
        """Make what the current thread does next come after this move.

        On a CUDA copy the current stream waits on its event and the host does not; anything else is a plain wait.
        """
        self._wait_issued()
        if isinstance(self._completion, StreamSpan):
            self._completion.order()
        else:
            self.wait()

    def issued(self, timeout_s: float) -> bool:
        """True once the move has started, or failed; waits at most timeout_s for it."""
        return self._issued.wait(timeout_s)

    def done(self) -> bool:
        """True when wait() would return, or raise, at once."""
        return self._issued.is_set() and (self._completion is None or self._completion.done())

    def span_ns(self) -> tuple[int, int]:
        """Start and end of the move, in time.perf_counter_ns; only after wait()."""
        return self._span

    def _wait_issued(self) -> None:
        self._issued.wait()
        if self._error is not None:
            raise self._error

    def _finish(self, completion: Completion | None, span: tuple[int, int]) -> None:
        self._completion, self._span = completion, span
        self.after = ()  # else every transfer of a run would hang together in one chain
        self._issued.set()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self.after = ()
        self._issued.set()


class StreamSpan:
    """Work enqueued on a CUDA stream, between two events."""

    def __init__(self, clock: StreamClock, started: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        """Both events are recorded already."""
        self._clock, self._started, self._ended = clock, started, ended

    def wait(self) -> None:
        """Block the host until the stream is past the work."""
        self._ended.synchronize()

    def order(self) -> None:
        """Let the current stream wait; the host goes on."""
        torch.cuda.current_stream().wait_event(self._ended)

    def done(self) -> bool:
        """True when the stream is past the work."""
        return bool(self._ended.query())

    def span_ns(self) -> tuple[int, int]:
        """Device times on the host's clock."""
        return self._clock.host_ns(self._started), self._clock.host_ns(self._ended)


class StreamClock:
    """Maps CUDA events to the host's clock through one event whose host time is known."""

    def __init__(self) -> None:
        """Waits once for the device."""
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()
        self._event.synchronize()
        self._ns = time.perf_counter_ns()

    def host_ns(self, event: torch.cuda.Event) -> int:
        """Host nanoseconds of an event that has passed."""
        return self._ns + int(self._event.elapsed_time(event) * 1e6)


class Queue:
    """An ordered asynchronous lane with one worker thread."""

    def __init__(self, name: str, clock: StreamClock | None = None) -> None:
        """Start the worker. With a clock (a CUDA device is there) the items run under a stream of the queue's own."""
        self.name = name
        self._clock = clock
        self._stream = torch.cuda.Stream() if clock is not None else None
        self._items: queue.Queue[tuple[Transfer, Callable[[], Completion | None]] | None] = queue.Queue(QUEUE_DEPTH_MAX)
        self._thread = threading.Thread(target=self._run, name=f"megatier-{name}", daemon=True)
        self._thread.start()

    def submit(
        self, key: str, num_bytes: int, start: Callable[[], Completion | None], after: Sequence[Transfer] = ()
    ) -> Transfer:
        """Append a move. `start` runs on the worker once all of `after` are ordered before it.

        Args:
            key: block it moves, for the trace.
            num_bytes: bytes it moves.
            start: begins the move; returns what to wait on, or None when the move is over (or lies on the stream).
            after: transfers that must come first. If one failed, this one fails with the same error, unstarted.
        """
        transfer = Transfer(self.name, key, num_bytes, after)
        self._items.put((transfer, start))
        return transfer

    def close(self) -> None:
        """Let the worker finish what was submitted, and join it."""
        self._items.put(None)
        self._thread.join()

    def _run(self) -> None:
        context = torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()
        with context:
            while (item := self._items.get()) is not None:
                transfer, start = item
                try:
                    self._start(transfer, start)
                except BaseException as error:  # noqa: BLE001 - handed to every waiter; the thread must live on
                    transfer._fail(error)

    def _start(self, transfer: Transfer, start: Callable[[], Completion | None]) -> None:
        for dependency in transfer.after:
            dependency.order()
        began = time.perf_counter_ns()
        started = self._record()
        completion = start()
        if completion is None and self._clock is not None and started is not None:
            ended = self._record()
            assert ended is not None
            completion = StreamSpan(self._clock, started, ended)
        transfer._finish(completion, (began, time.perf_counter_ns()))

    def _record(self) -> torch.cuda.Event | None:
        if self._stream is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event


def mark(clock: StreamClock | None, key: str) -> Transfer | None:
    """The present point of the current stream, for others to order behind; None where compute is synchronous."""
    if clock is None:
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    transfer = Transfer("compute", key, 0)
    transfer._finish(StreamSpan(clock, event, event), (0, 0))
    return transfer


class Gate:
    """A counter that only grows and that threads wait on: how many accesses compute has released."""

    def __init__(self) -> None:
        """Starts at 0."""
        self._count = 0
        self._failed = False
        self._condition = threading.Condition()

    def open_to(self, count: int) -> None:
        """Let everyone pass who waits for at most `count`."""
        with self._condition:
            self._count = count
            self._condition.notify_all()

    def wait_for(self, count: int) -> None:
        """Block until the counter reaches `count`, or raise StepAbandonedError when the gate was broken."""
        with self._condition:
            self._condition.wait_for(lambda: self._failed or self._count >= count)
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


class Instant:
    """A moment of compute: on a CUDA device when its stream gets here, elsewhere now."""

    __slots__ = ("_clock", "_event", "_ns")

    def __init__(self, clock: StreamClock | None) -> None:
        """Taken on the current stream."""
        self._clock, self._ns, self._event = clock, time.perf_counter_ns(), None
        if clock is not None:
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def ns(self) -> int:
        """In time.perf_counter_ns; blocks until the device has passed it."""
        if self._clock is None or self._event is None:
            return self._ns
        self._event.synchronize()
        return self._clock.host_ns(self._event)
