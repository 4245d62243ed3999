"""The recorder of a pass: what each queue is doing now, and the events of what has ended.

The player and its queues report to it, and the watchdog and the trace read it. The thread that computes calls `access`,
`collect` and `take`, and the update queues call `work`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megatier.host_wait import HOST_WAIT
from megatier.schedule.timeline import Access
from megatier.store.stream_clock import Instant, StreamClock
from megatier.store.transfer import Transfer
from megatier.trace.events import TraceEvent, own_seconds

STALL_NS_MIN = 20_000
"""Shorter waits do not count as stalls, because asking takes as long."""

WAIT_SLICE_S = 0.001
"""Seconds between two looks of a waiting thread at what it waits for, to name the cause."""
STEP_END = "end of the step"
"""The name of a wait after the last use of a pass."""

Pause = tuple[str, Instant, Instant]
"""A wait of compute within a use: its cause, its start and its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """One use of a unit by compute."""

    access: Access
    """The access."""
    cause: str
    """What compute waited for longest before it; empty if it did not wait."""
    asked: Instant
    """The time at which compute asked for the weights."""
    entered: Instant
    """The time at which it got them."""
    ended: Instant
    """The time at which it gave them back."""
    pauses: list[Pause]
    """The waits of compute since the last use."""


class Recorder:
    """The events of a pass, and what each queue is doing.

    Device times are read when they have passed, so that recording never blocks compute.
    """

    def __init__(self, clock: StreamClock | None = None) -> None:
        """Begin with no events.

        Args:
            clock: the clock on which compute is timed; None without a CUDA device.
        """
        self._clock = clock
        self.busy: dict[str, str] = {}
        """What each queue is doing now, which is the cause of a stall that waits for it. Each queue's thread writes its
        own entry."""
        self._uses: list[_Use] = []
        """Uses whose end the device may not have reached yet."""
        self._pauses: list[Pause] = []
        """Waits of compute since the last use that was noted."""
        self._transfers: list[Transfer] = []
        """Moves of the store that had not ended when they were last looked at."""
        self._watched: list[Transfer] = []
        """Items of the player's queues that had not ended when they were last looked at."""
        self._events: list[TraceEvent] = []

    def access(self, access: Access, cause: str, asked: Instant, entered: Instant, ended: Instant) -> None:
        """Record a use of a unit.

        Args:
            access: the use.
            cause: what compute waited for longest; empty if it did not wait, so that the time is the host's.
            asked: the time at which compute asked for the weights.
            entered: the time at which it got them.
            ended: the time at which it gave them back.
        """
        # Times are read later, because on a GPU they are events, and reading them would wait for the device.
        use = _Use(
            access=access,
            cause=cause,
            asked=asked,
            entered=entered,
            ended=ended,
            pauses=self._pauses,
        )
        self._uses.append(use)
        self._pauses = []

    def pause(self, cause: str, asked: Instant, resumed: Instant) -> None:
        """Record a wait of compute in the current use or before the next one, from `asked` to `resumed`."""
        self._pauses.append((cause, asked, resumed))

    @contextmanager
    def waiting(self, cause: str = "") -> Iterator[Counter[str]]:
        """Record the time in this context as a wait of compute. Every wait of compute is in one, or in an access.

        Args:
            cause: what compute waits for, unless the block finds out more.

        Yields:
            Votes by cause, which the block may add. The cause with the most votes is recorded.
        """
        causes: Counter[str] = Counter()
        asked = Instant(self._clock)
        try:
            with HOST_WAIT:
                yield causes
        finally:
            self.pause(main_cause(causes) or cause, asked, Instant(self._clock))

    def cause_of(self, transfer: Transfer) -> str:
        """Return the queue or wait that delays a transfer."""
        # The cause is the first unfinished transfer that it waits for. The transfer forgets these when it starts, on
        # another thread, and then its own queue is the cause.
        waits_for = transfer.queue
        for other in (*transfer.requires, *transfer.follows):
            if not other.done():
                waits_for = other.queue
                break
        return self.busy.get(waits_for, waits_for)

    def wait_until_started(self, transfer: Transfer, causes: Counter[str]) -> None:
        """Wait until a transfer has started. Vote for its cause once in each slice of time."""
        if transfer.has_started(0.0):
            return

        # The first cause is read before the wait, because the transfer forgets it. A busy machine may wake this thread
        # late, so a wait of one slice may have lasted longer, and then needs a cause.
        began = time.perf_counter()
        first = self.cause_of(transfer)
        if transfer.has_started(WAIT_SLICE_S):
            if time.perf_counter() - began >= WAIT_SLICE_S:
                causes[first] += 1
            return

        causes[self.cause_of(transfer)] += 1
        while not transfer.has_started(WAIT_SLICE_S):
            causes[self.cause_of(transfer)] += 1

    def wait_until_done(self, transfer: Transfer) -> None:
        """Wait until a transfer is over, and record the wait of compute.

        Raises:
            MegatierError: the transfer failed.
        """
        if not transfer.done():
            with self.waiting() as causes:
                self.wait_until_started(transfer, causes)
                causes[self.cause_of(transfer)] += 1
                transfer.wait()

        # A transfer that was over before may have failed too.
        transfer.wait()

    def work(self, queue: str, unit: str, start_ns: int, end_ns: int) -> None:
        """Record the work of a queue from one time to another."""
        self._events.append(TraceEvent(lane=queue, name=unit, start_ns=start_ns, end_ns=end_ns))

    def watch(self, transfer: Transfer) -> None:
        """Watch an item of one of the player's queues, which becomes an event when it has ended."""
        self._watched.append(transfer)

    def collect(self, transfers: Iterable[Transfer]) -> None:
        """Make events of the uses and moves that have ended, without waiting. Call it while the device is busy.

        Failed moves are left for `take`, which raises their errors.
        """
        # This leaves little work to `take`, which runs while the device is idle.
        self._transfers += transfers
        uses = self._uses
        self._uses = []
        for use in uses:
            if use.ended.passed():
                self._note_use(use)
            else:
                self._uses.append(use)

        self._note_moves(lambda transfer: transfer.done() and not transfer.failed())

    def own_seconds(self) -> float:
        """Return the seconds of this rank's own work in the events since `take`, without waiting."""
        self.collect(())
        self._note_rest()
        return own_seconds(self._events)

    def take(self, transfers: Iterable[Transfer]) -> list[TraceEvent]:
        """Return the events that have ended since the last call, in the order of their starts.

        It waits for compute, but not for moves.

        Raises:
            TransferError, IntegrityError: a move of the store failed.
        """
        # The device may not have reached these points yet, so reading their times waits for it.
        for use in self._uses:
            self._note_use(use)
        self._uses = []
        self._note_rest()

        self._transfers += transfers
        self._note_moves(Transfer.done)
        watched = self._watched
        self._watched = []
        for transfer in watched:
            if not transfer.done():
                self._watched.append(transfer)
            elif transfer.wait_for_end():  # an error is not raised here: a wait for the update raises it
                self._note_transfer(transfer)

        # Queues may append at any time, so the list object stays the same.
        count = len(self._events)
        events = self._events[:count]
        del self._events[:count]
        return sorted(events, key=lambda event: event.start_ns)

    def drop(self, transfers: Iterable[Transfer]) -> None:
        """Drop the events of a pass that was given up. Moves that failed or are under way are left for `take`.

        Args:
            transfers: the moves since the last call of this, of `collect` or of `take`.
        """
        # Uses first, so that `collect` does not read their times.
        self._uses = []
        self._pauses = []
        self.collect(transfers)
        self._watched = [transfer for transfer in self._watched if not transfer.done()]
        self._events.clear()

    def _note_use(self, use: _Use) -> None:
        """Make events of a use, and of the waits of compute before and within it."""
        access = use.access
        name = f"{access.unit} {access.phase} {access.group}"
        from_ns = use.entered.ns()

        # The wait for the weights comes before the use, and so does its event.
        self._note_stall(access.unit, use.cause, use.asked.ns(), from_ns)
        for waits_for, begun, resumed in use.pauses:
            until_ns = begun.ns()
            is_long = self._note_stall(access.unit, waits_for, until_ns, resumed.ns())

            # Compute is idle in it, unless the wait is before the use.
            if is_long and until_ns >= from_ns:
                self.work("compute", name, from_ns, until_ns)
                from_ns = resumed.ns()
        self.work("compute", name, from_ns, use.ended.ns())

    def _note_rest(self) -> None:
        """Record the waits after the last use, at the end of the pass."""
        if self._uses:
            return

        # Then the step waits for its norm, or for updates.
        for cause, begun, resumed in self._pauses:
            self._note_stall(STEP_END, cause, begun.ns(), resumed.ns())
        self._pauses = []

    def _note_stall(self, unit: str, cause: str, start_ns: int, end_ns: int) -> bool:
        """Record a wait of compute as a stall, if it has a cause and is long enough. Return whether it was."""
        # Without a cause the time is the host's.
        is_long = cause != "" and end_ns - start_ns >= STALL_NS_MIN
        if is_long:
            stall = TraceEvent(
                lane="stall",
                name=unit,
                start_ns=start_ns,
                end_ns=end_ns,
                cause=cause,
            )
            self._events.append(stall)
        return is_long

    def _note_moves(self, has_ended: Callable[[Transfer], bool]) -> None:
        """Make events of the moves that have ended, and keep the others."""
        moves = self._transfers
        self._transfers = []
        for transfer in moves:
            if has_ended(transfer):
                self._note_transfer(transfer)
            else:
                self._transfers.append(transfer)

    def _note_transfer(self, transfer: Transfer) -> None:
        # The transfer is over, so this only raises its error if it failed.
        transfer.wait()

        start_ns, end_ns = transfer.span_ns()
        self._events.append(
            TraceEvent(
                lane=transfer.queue,
                name=transfer.key,
                start_ns=start_ns,
                end_ns=end_ns,
                num_bytes=transfer.num_bytes,
            )
        )


def main_cause(causes: Counter[str]) -> str:
    """Return the cause with the most votes; empty if there are none."""
    return causes.most_common(1)[0][0] if causes else ""
