"""Reads state for checkpoints while passes go on, on the queue `checkpoint`."""

from __future__ import annotations

from collections.abc import Callable

from megatier.play.generations import Generations
from megatier.store.queue import Queue
from megatier.store.transfer import Transfer
from megatier.trace.recorder import Recorder


class StateReader:
    """Reads state where that is at home, on a queue of its own.

    It waits for drives and copies alone, never for an access. So updates may wait for it.
    """

    def __init__(self, generations: Generations, recorder: Recorder) -> None:
        """Start the queue.

        Args:
            generations: remembers who reads which.
            recorder: notes the queue's work.
        """
        self._generations = generations
        self._recorder = recorder
        self.queue = Queue("checkpoint")
        """The queue."""
        self.is_closed = False
        """The run ends: work that has not begun shall not begin, and long work shall stop half-way."""

    def submit(
        self, name: str, work: Callable[[], None], before: Transfer | None = None, unit: str | None = None
    ) -> Transfer:
        """Work on the queue. Call `Player.drain` first.

        Args:
            name: names the work in the trace.
            work: reads state, and gives up soon when `is_closed`.
            before: work of this queue; if it failed, this one fails with the same error, undone.
            unit: the unit that it reads, if it reads one; no update changes that unit's state before the work is over.
        """
        requires = [] if before is None else [before]
        transfer = self.queue.submit(name, 0, work, requires)
        self._recorder.watch(transfer)

        # No update was submitted since `drain`, so the generation that holds is still the one that the work reads.
        if unit is not None:
            self._generations.hold(unit, transfer)
        return transfer

    def close(self) -> None:
        """Stop the queue, when the work that it is at has given up."""
        # Before the join: it is what the work looks at.
        self.is_closed = True
        self.queue.close()
