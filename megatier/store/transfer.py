"""A transfer: a submitted move, as a future for which any thread can wait.

A queue (`queue`) starts the move of a transfer. Then the move goes on without the queue's thread, as a native batch
(NVMe) or as a copy on a CUDA stream. Without a GPU it is a memory copy that is over at once. The completion of the move
says how it ended.

There are two ways to wait, as for a CUDA event. `wait` blocks the host until the bytes are there. `wait_on_stream`
makes the current CUDA stream wait for a copy, and the host goes on. If the host or a native thread touches the bytes
next, call `wait`.

Latches are native for this reason: a signal handler (Ctrl-C, the watchdog) may raise wherever the training thread runs
Python code, even inside the standard library. `Event`, `Condition` and `Queue` there take and release a lock, and an
interrupt in between leaves it taken for ever. So threads wait at native latches and queues, and a `threading.Lock` is
only held in `with`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatier import _native
from megatier.errors import MegatierError
from megatier.owner import Owner
from megatier.store.landing import Landing
from megatier.store.stream_clock import StreamClock, StreamSpan
from megatier.tier import Tier

FAILURES = (MegatierError, OSError, RuntimeError)
"""The errors with which a move can fail: those of megatier, of the system and of CUDA."""


class Completion(Protocol):
    """The end of a move that has started."""

    def wait(self) -> None:
        """Block until the bytes are there. If the move failed, raise its error, at each call."""

    def done(self) -> bool:
        """Return whether `wait` would not block."""

    def span_ns(self) -> tuple[int, int]:
        """Return the start and the end of the move, in time.perf_counter_ns."""


class Transfer:
    """A move on a queue, as a future for which any thread may wait, any number of times."""

    __slots__ = (
        "_completion",
        "_error",
        "_owner",
        "_span",
        "_started",
        "follows",
        "key",
        "num_bytes",
        "queue",
        "requires",
    )

    def __init__(
        self,
        queue_name: str,
        key: str,
        num_bytes: int,
        requires: Sequence[Transfer] = (),
        follows: Sequence[Transfer] = (),
    ) -> None:
        """Begin before the move starts. Only `Queue.submit` and `compute_point` make a transfer."""
        self.queue = queue_name
        """The name of the queue."""
        self.key = key
        """The key of the block."""
        self.num_bytes = num_bytes
        """The number of bytes that it moves."""
        self.requires = tuple(requires)
        """The transfers that bring its bytes. It fails if one of them fails. Empty once the move has started."""
        self.follows = tuple(follows)
        """The transfers that still use its target, however they end. Empty once the move has started."""
        self._started = _native.Latch()
        """Set when the move has started, or has failed to start."""
        self._completion: Completion | None = None
        """The end of the move; None if it was over at its start."""
        self._error: Exception | None = None
        """The error that kept the move from starting."""
        self._span = (0, 0)
        self._owner = Owner("this move")

    def wait(self) -> float:
        """Block, with the GIL free, until the bytes are there. Return the seconds that the move took.

        Raises:
            TransferError, IntegrityError: this move failed, or a required one.
        """
        self._wait_for_start()
        if self._completion is not None:
            # The error is not stored, because a signal handler (Ctrl-C, the watchdog) may have raised it. The
            # completion says at each call how the move ended.
            self._completion.wait()
            self._span = self._completion.span_ns()

        start_ns, end_ns = self._span
        return (end_ns - start_ns) / 1e9

    def wait_on_stream(self) -> None:
        """Make the next work of the current thread come after this move.

        If the move is a copy on a CUDA stream, the current stream waits for it and the host goes on. For any other move
        this is `wait`. A copy to RAM through a ring may still be landing when the stream goes on. To read its bytes in
        RAM, call `wait_for_landing` too.
        """
        self._wait_for_start()
        if isinstance(self._completion, StreamSpan | Landing):
            self._completion.wait_on_stream()
        else:
            self.wait()

    def wait_for_landing(self) -> None:
        """Block until a copy through a ring is in RAM or has failed. For any other move, wait for its start.

        Raises:
            MegatierError, OSError, RuntimeError: the move failed.
        """
        self._wait_for_start()
        if isinstance(self._completion, Landing):
            self._completion.wait()

    def wait_before_use(self, tier: Tier, *, raises: bool = True) -> None:
        """Call `wait_on_stream` if the gpu uses the bytes next, and `wait` if the host does.

        Args:
            tier: where the bytes are used next.
            raises: whether to raise the error of a failed move. If False, it does not matter how the move ended.
        """
        try:
            if tier is Tier.GPU:
                self.wait_on_stream()
            else:
                self.wait()
        except FAILURES:
            # If the move did not fail, a signal handler has raised this error, which is passed on.
            if raises or not self.failed():
                raise

    def wait_for_end(self) -> bool:
        """Block until the move has ended. Return whether it has succeeded."""
        # An interrupt passes through, and says nothing about the move.
        self.wait_before_use(Tier.RAM, raises=False)
        return not self.failed()

    def has_started(self, timeout_s: float) -> bool:
        """Return whether the move has started or failed, after at most so many seconds."""
        return self._started.wait(timeout_s)

    def done(self) -> bool:
        """Return whether `wait` would return, or raise, at once."""
        # The completion is set before the latch, so it is final when the latch is set.
        if not self._started.is_set():
            return False
        return self._completion is None or self._completion.done()

    def seen_done(self) -> bool:
        """Return `done()`, or False for a copy on a stream, because asking CUDA may block if the device hangs."""
        return not isinstance(self._completion, StreamSpan) and self.done()

    def failed(self) -> bool:
        """Return whether the move has failed. This never blocks."""
        if not self.done():
            return False
        if self._error is not None:
            return True

        # The move is done, so this wait ends at once.
        try:
            self.wait()
        except FAILURES:
            return True
        return False

    def succeeded(self) -> bool:
        """Return whether the move has succeeded. This never blocks."""
        return self.done() and self.wait_for_end()

    def span_ns(self) -> tuple[int, int]:
        """Return the start and end of the move, in time.perf_counter_ns, once `wait` was called.

        Until then they are those of the item that started it.
        """
        return self._span

    def _wait_for_start(self) -> None:
        """Block until the move has started. Raise its error if it has failed to start."""
        # A forked child has no threads that could end a move.
        if not self._owner.is_here and not self.done():
            self._owner.check()
        self._started.wait()
        if self._error is not None:
            # Each raise of one object makes its traceback longer, which keeps the frames of all before alive.
            raise self._error.with_traceback(None)

    def note_start(self, completion: Completion | None, span: tuple[int, int]) -> None:
        """Note that the move has started."""
        # The latch is set last, because a thread that sees it set reads the other fields without a lock.
        self._completion = completion
        self._span = span

        # Transfers that are kept would keep those before them alive, and so all transfers of a run.
        self.requires = self.follows = ()
        self._started.set()

    def fail(self, error: Exception) -> None:
        """Note that the move could not start, and why."""
        # The latch is set last, as in `note_start`.
        self._error = error
        self.requires = self.follows = ()
        self._started.set()


def compute_point(clock: StreamClock | None, key: str) -> Transfer | None:
    """Return the present point of the current stream as a transfer, so that moves can come after it.

    None if there is no CUDA device, because compute is over then when its call returns.
    """
    if clock is None:
        return None
    point = Transfer("compute", key, 0)
    point.note_start(clock.now(), (0, 0))
    return point
