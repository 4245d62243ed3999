"""A queue: it does its work in order, on a thread of its own.

For each item the thread waits for the transfers that the item depends on, or lets its CUDA stream wait for them, and
then starts the item's move. It does not wait until the move is over, so several moves of one queue may be in flight.

Queues of the store do not deadlock. An item is submitted after all transfers that it depends on, so waits form no
cycle, and starting a move waits for no other item. Work on the player's queues does wait for items; `play/player.py`
proves that these waits form no cycle either.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from megatier.errors import ClosedError, StepAbandonedError
from megatier.store.stream_clock import StreamClock, StreamSpan
from megatier.store.transfer import Completion, Transfer
from megatier.tier import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueState:
    """The state of a queue, as another thread sees it."""

    name: str
    """The name of the queue."""
    num_begun: int
    """The number of items that the thread has begun."""
    current: tuple[Transfer, int] | None
    """The current item of the thread, and when it began, in time.perf_counter_ns; None: the thread is idle."""
    in_flight: tuple[Transfer, ...]
    """The moves that have started and not ended, oldest first. A copy on a stream may be listed for longer."""
    num_waiting: int
    """The number of items that wait for the thread."""


class Queue:
    """A queue of work, which one thread does in the order of submission."""

    def __init__(self, name: str, clock: StreamClock | None = None) -> None:
        """Start the thread.

        Args:
            name: name of the queue, for messages and the trace.
            clock: the clock of the CUDA device. With it, the items run on a stream of the queue's own.
        """
        self.name = name
        """The name of the queue."""
        self._clock = clock
        self._stream = torch.cuda.Stream() if clock is not None else None

        # A new thread uses GPU 0, which may belong to another process.
        self._gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        # The queue has no bound. Items may wait for compute, so compute must not wait for room here.
        self._items: SimpleQueue[tuple[Transfer, Callable[[], Completion | None]] | None] = SimpleQueue()

        self._is_open = True
        self._submit_lock = threading.Lock()
        """Held while an item or the end mark is put, so that no item comes after the end mark."""
        self._num_begun = 0
        self._current: tuple[Transfer, int] | None = None
        self._in_flight: deque[Transfer] = deque()
        """The moves that have started. Only the thread changes the list, which may have moves that have ended."""
        # A daemon, because a thread that hangs in a drive must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=f"megatier-{name}", daemon=True)
        self._thread.start()

    def submit(
        self,
        key: str,
        num_bytes: int,
        start: Callable[[], Completion | None],
        requires: Sequence[Transfer] = (),
        follows: Sequence[Transfer] = (),
    ) -> Transfer:
        """Append a move. The thread calls `start` when all transfers that the move depends on are ordered before it.

        Args:
            key: the key of the block, for the trace.
            num_bytes: the bytes that move.
            start: begins the move. It returns a completion to wait for, or None if the move is over or on the stream.
            requires: transfers that bring the bytes. If one fails, this move does not start, and fails with its error.
            follows: transfers that still use the target. It does not matter how they end.

        Raises:
            ClosedError: the queue was closed.
        """
        transfer = Transfer(self.name, key, num_bytes, requires, follows)
        # Another thread may be closing the store. A move behind the end mark would never start.
        with self._submit_lock:
            if not self._is_open:
                raise ClosedError(f"{key} is not moved by {self.name}: the store was closed. Open it anew.")
            self._items.put((transfer, start))
        return transfer

    def settle(self) -> None:
        """Block until all moves that were submitted so far have ended or failed."""
        self.submit("all before", 0, self._end_all).wait_for_end()

    def _end_all(self) -> None:
        """Wait for all moves in flight. This runs as an item, because only the thread may iterate over the list."""
        for transfer in self._in_flight:
            transfer.wait_for_end()

    def state(self) -> QueueState:
        """Return the current item and the moves in flight. This never blocks."""
        # Copying the list is atomic, and the thread may change it at any time.
        started = tuple(self._in_flight)
        in_flight = tuple(transfer for transfer in started if not transfer.seen_done())
        return QueueState(
            name=self.name,
            num_begun=self._num_begun,
            current=self._current,
            in_flight=in_flight,
            num_waiting=self._items.qsize(),
        )

    def close(self) -> None:
        """Let the thread finish all submitted items, and join it. Safe to call twice."""
        with self._submit_lock:
            self._is_open = False
            self._items.put(None)
        self._thread.join()
        if self._stream is not None:
            self._stream.synchronize()

    def _run(self) -> None:
        """Do the items until `close`. This is the body of the thread."""
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)
        own_stream = contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with own_stream:
            while (item := self._items.get()) is not None:
                transfer, start = item
                self._num_begun += 1
                self._current = transfer, time.perf_counter_ns()
                try:
                    self._start(transfer, start)
                except Exception as error:  # noqa: BLE001 - handed to every waiter; the thread must live on
                    transfer.fail(error)
                # For example a SystemExit in this thread. In the thread that waits it would end that one, so it becomes
                # an error of megatier.
                except BaseException as error:  # noqa: BLE001 - no failure of a move: who waits was not interrupted
                    broken_off = StepAbandonedError(f"{transfer.key} on queue {self.name} was broken off by {error!r}")
                    broken_off.__cause__ = error
                    transfer.fail(broken_off)
                self._current = None

                # While the thread waits, it must not keep the memory of this item alive.
                del item, transfer, start

    def _start(self, transfer: Transfer, start: Callable[[], Completion | None]) -> None:
        """Order an item behind all transfers that it depends on, start its move and note it."""
        # Native threads do not wait for streams, so without a stream this thread itself waits.
        tier = Tier.RAM if self._stream is None else Tier.GPU

        # `follows` comes first. If a required transfer has failed, this item is over at once, and the next move into
        # its slot may wait only for this item. So even then it has to come after the slot's earlier users.
        for dependency in transfer.follows:
            dependency.wait_before_use(tier, raises=False)
        for dependency in transfer.requires:
            dependency.wait_before_use(tier)

        began_ns = time.perf_counter_ns()
        started = self._record()
        completion = start()

        # A move without a completion is on the stream between two events, or over if there is no stream.
        ended = self._record() if completion is None else None
        if self._clock is not None and started is not None and ended is not None:
            completion = StreamSpan(self._clock, started, ended)

        # Only the front is cleared, because moves end almost in order and this has to be cheap.
        while self._in_flight and self._in_flight[0].done():
            self._in_flight.popleft()
        self._in_flight.append(transfer)
        transfer.note_start(completion, (began_ns, time.perf_counter_ns()))

    def _record(self) -> torch.cuda.Event | None:
        """Record an event on the queue's stream, if it has one, and return it."""
        if self._stream is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event
