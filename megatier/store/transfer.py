"""Transfers and queues: the asynchronous lanes between tiers.

CUDA streams and events are made here alone, and so are the threads of all lanes.

Where it stands: hop 2 (RAM slot -> GPU slot) and hop 4 (gradients -> RAM slot) of a byte's journey.

A signal handler may raise (Ctrl-C, the watchdog) wherever the training thread runs Python code, the standard library's
too. There `Event`, `Condition` and `Queue` take and give back their lock, which such an interrupt leaves locked for
ever. So latches and queues are native ones here, and a `threading.Lock` is held by `with` alone.

A queue runs its items strictly in order on one worker thread. An item first orders itself behind the transfers it
depends on, then starts its move: a native batch (NVMe), a copy on a CUDA stream, or, without a GPU, a memory copy in
place. The worker does not wait for a batch or a stream, so several moves of a queue are in flight.

On a CUDA device, a queue with a stream waits for a copy without the host: `order` makes the stream wait on the event.
Bytes that the host or a native thread touches next need `wait`.

Why queues come to their end: an item is submitted after all that it comes after or behind, so these waits close no
circle. The starts of the store's own moves wait for no item; the player proves the same of its lanes (`Player.begin`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from megatier import _native
from megatier.errors import MegatierError, StepAbandonedError
from megatier.store.progress import Completion, QueueState
from megatier.tier import Tier

LOG_TRANSFERS_MAX = 1 << 17
"""Transfers kept for a trace that nobody takes; the oldest go first."""
FAILURES = (MegatierError, OSError, RuntimeError)
"""The errors with which a move can fail: ours, the system's, CUDA's."""


class Transfer:
    """One move on one queue: a future that any thread may wait on, any number of times.

    Attributes:
        queue: name of the queue.
        key: the block that it moves.
        num_bytes: how many bytes.
        after: transfers that bring its bytes; empty once it has started.
        behind: transfers that still use its target; empty once it has started.
    """

    __slots__ = ("_completion", "_error", "_issued", "_span", "after", "behind", "key", "num_bytes", "queue")

    def __init__(
        self,
        queue_name: str,
        key: str,
        num_bytes: int,
        after: Sequence[Transfer] = (),
        behind: Sequence[Transfer] = (),
    ) -> None:
        """Only Queue.submit and `mark` make one."""
        self.queue = queue_name
        self.key = key
        self.num_bytes = num_bytes
        self.after = tuple(after)
        self.behind = tuple(behind)
        self._issued = _native.Latch()
        self._completion: Completion | None = None
        self._error: Exception | None = None
        """The error that kept the move from starting."""
        self._span = (0, 0)

    def wait(self) -> float:
        """Block, GIL free, until the bytes are there. Returns the seconds the move took.

        Raises:
            TransferError, IntegrityError: this move, or one it depends on, failed.
        """
        self._wait_issued()
        if self._completion is not None:
            # A completion says every time how the move ended, so no error is kept here: it may be one that a signal
            # handler raises (Ctrl-C, the watchdog), which concerns this wait alone.
            self._completion.wait()
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

    def order_for(self, tier: Tier, *, fails: bool = True) -> None:
        """Call `order` if the bytes are touched on the gpu next, `wait` if the host touches them.

        Args:
            tier: the place where the bytes are touched next.
            fails: raise the error of a move that failed; False: how it ended does not matter.
        """
        try:
            self.order() if tier is Tier.GPU else self.wait()
        except FAILURES:
            # An error that is not the move's (a signal handler raised it in the wait) is never swallowed.
            if fails or not self.failed():
                raise

    def over(self) -> bool:
        """Block until the move has ended, well (True) or not (False)."""
        self.order_for(Tier.RAM, fails=False)
        return not self.failed()

    def issued(self, timeout_s: float) -> bool:
        """True once the move has started, or failed; waits at most timeout_s for it."""
        return self._issued.wait(timeout_s)

    def done(self) -> bool:
        """True if wait() would return, or raise, at once."""
        return self._issued.is_set() and (self._completion is None or self._completion.done())

    def seen_done(self) -> bool:
        """Like done(), but it never asks CUDA, since whoever asks a device that hangs may be held up as well."""
        return not isinstance(self._completion, StreamSpan) and self.done()

    def failed(self) -> bool:
        """True if the move ended in an error; never blocks."""
        if not self.done():
            return False
        try:
            self.wait()
        except FAILURES:
            return True
        return False

    def span_ns(self) -> tuple[int, int]:
        """Start and end of the move, in time.perf_counter_ns, after wait(); until then, of the item that started it."""
        return self._span

    def _wait_issued(self) -> None:
        self._issued.wait()
        if self._error is not None:
            raise self._error

    def _finish(self, completion: Completion | None, span: tuple[int, int]) -> None:
        """Note that the move has started."""
        # The latch comes last: whoever sees it set reads the fields without a lock.
        self._completion = completion
        self._span = span
        self.after = self.behind = ()  # else every transfer of a run would hang together in one chain
        self._issued.set()

    def _fail(self, error: Exception) -> None:
        """Note that the move has not started, and why; the latch comes last here too."""
        self._error = error
        self.after = self.behind = ()
        self._issued.set()


class StreamSpan:
    """Work enqueued on a CUDA stream, between two events."""

    def __init__(self, clock: StreamClock, started: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        """Take two events that are recorded already."""
        self._clock = clock
        self._started = started
        self._ended = ended

    def wait(self) -> None:
        """Block the host until the stream is past the work."""
        self._ended.synchronize()

    def order(self) -> None:
        """Let the current stream wait; the host goes on."""
        torch.cuda.current_stream().wait_event(self._ended)

    def done(self) -> bool:
        """True if the stream is past the work."""
        return bool(self._ended.query())

    def span_ns(self) -> tuple[int, int]:
        """Start and end, taken on the device, on the host's clock."""
        return self._clock.host_ns(self._started), self._clock.host_ns(self._ended)


class StreamClock:
    """Maps CUDA events to the host's clock through one event whose host time is known."""

    def __init__(self) -> None:
        """Take the common moment; this waits once for the device."""
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()
        self._event.synchronize()
        self._ns = time.perf_counter_ns()

    def host_ns(self, event: torch.cuda.Event) -> int:
        """Host nanoseconds of an event that has passed."""
        return self._ns + int(self._event.elapsed_time(event) * 1e6)


class Queue:
    """An ordered asynchronous lane with one worker thread.

    Attributes:
        name: name of the lane.
    """

    def __init__(self, name: str, clock: StreamClock | None = None) -> None:
        """Start the worker.

        Args:
            name: name of the lane, for messages and the trace.
            clock: the clock of the CUDA device. With one, the items run under a stream of the queue's own.
        """
        self.name = name
        self._clock = clock
        self._stream = torch.cuda.Stream() if clock is not None else None
        # Items may wait for compute, so whoever computes must never wait for room: no bound but the moves of a pass.
        self._items: SimpleQueue[tuple[Transfer, Callable[[], Completion | None]] | None] = SimpleQueue()

        self._is_open = True
        self._num_begun = 0
        self._current: tuple[Transfer, int] | None = None
        self._in_flight: deque[Transfer] = deque()
        """Moves that were started. The worker alone changes it; some may have ended since it last looked."""
        self._thread = threading.Thread(target=self._run, name=f"megatier-{name}", daemon=True)
        self._thread.start()

    def submit(
        self,
        key: str,
        num_bytes: int,
        start: Callable[[], Completion | None],
        after: Sequence[Transfer] = (),
        behind: Sequence[Transfer] = (),
    ) -> Transfer:
        """Append a move. `start` runs on the worker once all it comes after are ordered before it.

        Args:
            key: block it moves, for the trace.
            num_bytes: bytes it moves.
            start: begins the move. It returns a completion to wait on; None if the move is over, or lies on the stream.
            after: transfers that bring the bytes. If one failed, this one fails with the same error, unstarted.
            behind: transfers that still use the target; how they end does not matter.
        """
        assert self._is_open, f"queue {self.name} is closed"
        transfer = Transfer(self.name, key, num_bytes, after, behind)
        self._items.put((transfer, start))
        return transfer

    def settle(self) -> None:
        """Block until all that was submitted so far has ended, well or not."""
        self.submit("all before", 0, self._end_all).over()

    def _end_all(self) -> None:
        """Wait for all moves in flight; an item, so that the worker itself walks over its list."""
        for transfer in self._in_flight:
            transfer.over()

    def state(self) -> QueueState:
        """The item and the moves that it is at just now; asking waits for nothing that can hang."""
        in_flight = tuple(transfer for transfer in tuple(self._in_flight) if not transfer.seen_done())
        return QueueState(self.name, self._num_begun, self._current, in_flight, self._items.qsize())

    def close(self) -> None:
        """Let the worker finish what was submitted, and join it. Safe to call twice."""
        self._is_open = False
        self._items.put(None)
        self._thread.join()
        if self._stream is not None:
            self._stream.synchronize()

    def _run(self) -> None:
        """Work on the items, one after the other, until `close`; the body of the worker thread."""
        context = torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()
        with context:
            while (item := self._items.get()) is not None:
                transfer, start = item
                self._num_begun += 1
                self._current = transfer, time.perf_counter_ns()
                try:
                    self._start(transfer, start)
                except Exception as error:  # noqa: BLE001 - handed to every waiter; the thread must live on
                    transfer._fail(error)
                # A SystemExit, say, of this thread: raised in whoever waits, it would end another thread than it meant.
                except BaseException as error:  # noqa: BLE001 - no failure of a move: who waits was not interrupted
                    broken_off = StepAbandonedError(f"{transfer.key} on queue {self.name} was broken off by {error!r}")
                    broken_off.__cause__ = error
                    transfer._fail(broken_off)
                self._current = None

    def _start(self, transfer: Transfer, start: Callable[[], Completion | None]) -> None:
        """Order an item behind all that it depends on, start its move and note it."""
        # `behind` comes first. An item whose bytes did not come is over at once, and whoever takes its slot next may
        # wait for this item alone. So the slot's earlier users have to come before it even then.
        tier = Tier.RAM if self._stream is None else Tier.GPU  # no stream can hold a native thread back
        for dependency in transfer.behind:
            dependency.order_for(tier, fails=False)
        for dependency in transfer.after:
            dependency.order_for(tier)

        began = time.perf_counter_ns()
        started = self._record()
        completion = start()
        ended = self._record() if completion is None else None
        if self._clock is not None and started is not None and ended is not None:
            completion = StreamSpan(self._clock, started, ended)

        while self._in_flight and self._in_flight[0].done():
            self._in_flight.popleft()
        self._in_flight.append(transfer)
        transfer._finish(completion, (began, time.perf_counter_ns()))

    def _record(self) -> torch.cuda.Event | None:
        """An event at the present point of the queue's stream, if it has one."""
        if self._stream is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event


QUEUES = ("nvme_to_ram", "nvme_to_gpu", "ram_to_gpu", "gpu_to_ram", "ram_to_nvme", "state_to_gpu", "state_to_ram")
"""The lanes between tiers. Between RAM and the GPU, state has two of its own: it yields to what compute waits for."""
PIECE_BYTES = 128 << 20
"""Copies between RAM and the GPU go piece by piece, one of a lane enqueued at a time: those of one direction run in the
order in which they were enqueued, on any stream, so a long row of them would hold up one that compute waits for."""


class Lanes:
    """The queues between the tiers, the bytes that moved on each, and a log for the trace.

    Threads: one at a time submits and takes the log; the store's lock sees to that.

    Attributes:
        clock: maps device times to the host's; None without a CUDA device.
        queues: every queue, by name.
        moved_bytes: bytes submitted per queue since the start.
    """

    def __init__(self, device: torch.device) -> None:
        """Start the workers."""
        self.clock = StreamClock() if device.type == "cuda" else None
        self.moved_bytes: Counter[str] = Counter()
        self.queues = {name: Queue(name, self.clock if "gpu" in name or "state" in name else None) for name in QUEUES}
        self._log: deque[Transfer] = deque(maxlen=LOG_TRANSFERS_MAX)
        self._pieces: dict[str, torch.cuda.Event] = {}
        """The last piece of each lane, read and set by that lane's worker alone."""

    def submit(
        self,
        queue: str,
        key: str,
        num_bytes: int,
        start: Callable[[], Completion | None],
        after: Sequence[Transfer] = (),
        behind: Sequence[Transfer] = (),
    ) -> Transfer:
        """Append a move to a queue; see Queue.submit. A move of 0 bytes is neither counted nor logged."""
        transfer = self.queues[queue].submit(key, num_bytes, start, after, behind)
        if num_bytes:
            self.moved_bytes[queue] += num_bytes
            self._log.append(transfer)
        return transfer

    # HOP 2/6: RAM slot -> GPU slot
    def to_gpu(
        self,
        key: str,
        target: torch.Tensor,
        source: torch.Tensor,
        after: Sequence[Transfer] = (),
        behind: Sequence[Transfer] = (),
        *,
        queue: str = "ram_to_gpu",
    ) -> Transfer:
        """Copy uint8 [n] in RAM to uint8 [n] on the GPU."""
        return self.submit(queue, key, source.numel(), lambda: self.copy(queue, target, source), after, behind)

    # HOP 4/6: gradient in a GPU slot -> RAM slot
    def to_ram(
        self,
        key: str,
        target: torch.Tensor,
        source: torch.Tensor,
        after: Sequence[Transfer] = (),
        behind: Sequence[Transfer] = (),
        *,
        queue: str = "gpu_to_ram",
    ) -> Transfer:
        """Copy uint8 [n] on the GPU to uint8 [n] in RAM."""
        return self.submit(queue, key, source.numel(), lambda: self.copy(queue, target, source), after, behind)

    def take_log(self) -> list[Transfer]:
        """Transfers submitted since the last call."""
        log = self._log
        self._log = deque(maxlen=LOG_TRANSFERS_MAX)
        return list(log)

    def close(self) -> None:
        """Finish every move that was submitted, and stop the workers."""
        for lane in self.queues.values():
            lane.close()

    def copy(self, queue: str, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy on the lane whose worker calls it."""
        if self.clock is None:
            _native.copy(target.data_ptr(), source.data_ptr(), source.numel())
            return

        # One piece at a time: the piece before is over, on the device, before the next is enqueued (`PIECE_BYTES`).
        for start in range(0, source.numel(), PIECE_BYTES):
            if (before := self._pieces.get(queue)) is not None:
                before.synchronize()
            stop = min(start + PIECE_BYTES, source.numel())
            target[start:stop].copy_(source[start:stop], non_blocking=True)
            self._pieces[queue] = torch.cuda.current_stream().record_event()

        # The caching allocator must not hand the memory out before the copy is over.
        for tensor in (target, source):
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream())


def mark(clock: StreamClock | None, key: str) -> Transfer | None:
    """The present point of the current stream, for others to order behind; None where compute is synchronous."""
    if clock is None:
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    transfer = Transfer("compute", key, 0)
    transfer._finish(StreamSpan(clock, event, event), (0, 0))
    return transfer


class Instant:
    """A moment of compute: on a CUDA device when its stream gets here, elsewhere now."""

    __slots__ = ("_clock", "_event", "_ns")

    def __init__(self, clock: StreamClock | None) -> None:
        """Take it on the current stream."""
        self._clock = clock
        self._ns = time.perf_counter_ns()
        self._event = None
        if clock is not None:
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def passed(self) -> bool:
        """True if `ns` would not block."""
        return self._event is None or bool(self._event.query())

    def ns(self) -> int:
        """When it was, in time.perf_counter_ns; blocks until the device has passed it."""
        if self._clock is None or self._event is None:
            return self._ns
        self._event.synchronize()
        return self._clock.host_ns(self._event)
