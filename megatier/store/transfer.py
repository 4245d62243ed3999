"""Transfers: moves that were asked for, as futures that any thread may wait on.

A queue (`queue`) starts the move of a transfer, which then goes on without the queue's worker: as a native batch (NVMe)
or a copy on a CUDA stream. Without a GPU it is a memory copy, over at once. Its completion tells how the move ended.

On a CUDA device, a stream waits for a copy without the host: `order` makes it wait on the event. Bytes that the host or
a native thread touches next need `wait`.

A signal handler may raise (Ctrl-C, the watchdog) wherever the training thread runs Python code, the standard library's
too. There `Event`, `Condition` and `Queue` take and give back their lock, which such an interrupt leaves locked for
ever. So latches and queues are native ones here, and a `threading.Lock` is held by `with` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatier import _native
from megatier.errors import MegatierError
from megatier.store.stream_clock import StreamClock, StreamSpan
from megatier.tier import Tier

FAILURES = (MegatierError, OSError, RuntimeError)
"""The errors with which a move can fail: ours, the system's, CUDA's."""


class Completion(Protocol):
    """The end of a started move, as the one who moves reports it."""

    def wait(self) -> None:
        """Block until the bytes are there; raise the typed error when they are not, every time."""

    def done(self) -> bool:
        """True if wait() would not block."""

    def span_ns(self) -> tuple[int, int]:
        """Start and end, in time.perf_counter_ns."""


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
        """Only `Queue.submit` and `mark` make one."""
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


def mark(clock: StreamClock | None, key: str) -> Transfer | None:
    """The present point of the current stream, for others to order behind; None where compute is synchronous."""
    if clock is None:
        return None
    transfer = Transfer("compute", key, 0)
    transfer._finish(clock.now(), (0, 0))
    return transfer
