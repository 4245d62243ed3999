"""Queues, each of which does its work in order, on a thread of its own.

A queue works on its items strictly in order, on one thread. For each item it waits for the transfers that the item
depends on, or lets its CUDA stream wait for them, and then starts the item's move. It does not wait for a native batch
or for a stream, so several moves of one queue may be in flight.

Why no queue of the store waits for ever: an item is submitted after all transfers that it depends on, so these waits
cannot form a circle, and starting a move of the store waits for no other item. The player's own queues start work that
does wait for items: `play/player.py` proves that these waits form no circle either.
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
    """The work that a queue is at, as another thread sees it."""

    name: str
    """The name of the queue."""
    num_begun: int
    """The number of items that the thread has begun so far."""
    current: tuple[Transfer, int] | None
    """The item that the thread is at, and since when, in time.perf_counter_ns."""
    in_flight: tuple[Transfer, ...]
    """The moves that were started and have not ended, oldest first. A copy on a stream is among them until the thread
    looks the next time."""
    num_waiting: int
    """The number of items that wait for the thread."""


class Queue:
    """Does work in the order in which it was submitted, on one thread."""

    def __init__(self, name: str, clock: StreamClock | None = None) -> None:
        """Start the thread.

        Args:
            name: name of the queue, for messages and the trace.
            clock: the clock of the CUDA device. With one, the items run under a stream of the queue's own.
        """
        self.name = name
        """The name of the queue."""
        self._clock = clock
        self._stream = torch.cuda.Stream() if clock is not None else None

        # A thread begins on the first GPU, which belongs to another process if several share the machine.
        self._gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        # The queue has no bound. Items may wait for compute, so a thread that computes must never wait for room here.
        self._items: SimpleQueue[tuple[Transfer, Callable[[], Completion | None]] | None] = SimpleQueue()

        self._is_open = True
        self._gate = threading.Lock()
        """Held while an item or the end is put, so that no item is put behind the end."""
        self._num_begun = 0
        self._current: tuple[Transfer, int] | None = None
        self._in_flight: deque[Transfer] = deque()
        """The moves that were started. The thread alone changes the list; some may have ended since it last looked."""
        # The thread is a daemon, since one that hangs in a drive must not keep the process from ending.
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
        """Append a move. The thread calls `start` once all transfers that the move depends on come before it.

        Args:
            key: the block that it moves, for the trace.
            num_bytes: the bytes that it moves.
            start: begins the move. It returns a completion to wait on; or None if the move is over, or lies on the
                stream.
            requires: transfers that bring the bytes. If one failed, this move is not started and fails with its error.
            follows: transfers that still use the target. It does not matter how they end.

        Raises:
            ClosedError: the queue was closed.
        """
        transfer = Transfer(self.name, key, num_bytes, requires, follows)
        # Another thread may close the store between the question and the answer. A move behind the end of all items,
        # which no thread takes, would be waited for without end.
        with self._gate:
            if not self._is_open:
                raise ClosedError(f"{key} is not moved by {self.name}: the store was closed. Open it anew.")
            self._items.put((transfer, start))
        return transfer

    def settle(self) -> None:
        """Block until every move that was submitted so far has ended, well or not."""
        self.submit("all before", 0, self._end_all).wait_for_end()

    def _end_all(self) -> None:
        """Wait for all moves in flight. This runs as an item, because only the thread may walk over its list."""
        for transfer in self._in_flight:
            transfer.wait_for_end()

    def state(self) -> QueueState:
        """Return the item and the moves that it is at now. Asking waits for nothing that can hang."""
        # The list is copied first, in one step of the interpreter, because the thread may change it meanwhile.
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
        """Let the thread finish what was submitted, and join it. Safe to call twice."""
        with self._gate:
            self._is_open = False
            self._items.put(None)
        self._thread.join()
        if self._stream is not None:
            self._stream.synchronize()

    def _run(self) -> None:
        """Work on the items, one after the other, until `close`. This is the body of the thread."""
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
                # Something else ended this item, such as a SystemExit in this thread. Raised in the thread that waits,
                # it would end that one, so it becomes an error of megatier.
                except BaseException as error:  # noqa: BLE001 - no failure of a move: who waits was not interrupted
                    broken_off = StepAbandonedError(f"{transfer.key} on queue {self.name} was broken off by {error!r}")
                    broken_off.__cause__ = error
                    transfer.fail(broken_off)
                self._current = None

                # While the thread waits for the next item, it must not keep the memory that this one moved.
                del item, transfer, start

    def _start(self, transfer: Transfer, start: Callable[[], Completion | None]) -> None:
        """Order an item behind all that it depends on, start its move and note it."""
        # No stream can hold a native thread back, so without a stream this thread itself waits.
        tier = Tier.RAM if self._stream is None else Tier.GPU

        # `follows` comes first. An item whose bytes did not come is over at once, and the next move into its slot may
        # wait for this item alone. So this item must come after the slot's earlier users even if it fails.
        for dependency in transfer.follows:
            dependency.wait_before_use(tier, raises=False)
        for dependency in transfer.requires:
            dependency.wait_before_use(tier)

        began_ns = time.perf_counter_ns()
        started = self._record()
        completion = start()

        # A move without a completion lies on the stream between two events, or is over if there is no stream.
        ended = self._record() if completion is None else None
        if self._clock is not None and started is not None and ended is not None:
            completion = StreamSpan(self._clock, started, ended)

        # Only the front is cleared, so that an item costs little. Moves end nearly in order, and a reader of the list
        # asks each of them whether it has ended.
        while self._in_flight and self._in_flight[0].done():
            self._in_flight.popleft()
        self._in_flight.append(transfer)
        transfer.note_start(completion, (began_ns, time.perf_counter_ns()))

    def _record(self) -> torch.cuda.Event | None:
        """Return an event at the present point of the queue's stream, if it has one."""
        if self._stream is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event
