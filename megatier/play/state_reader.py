"""The reader of state for checkpoints, which works beside passes on the queue `checkpoint`."""

from __future__ import annotations

from collections.abc import Callable

from megatier.play.generations import Generations
from megatier.store.queue import Queue
from megatier.store.transfer import Transfer
from megatier.trace.recorder import Recorder


class StateReader:
    """The queue `checkpoint`, which reads state from its homes.

    It waits only for drives and copies, and never for an access. So updates may wait for it.
    """

    def __init__(self, generations: Generations, recorder: Recorder) -> None:
        """Start the queue.

        Args:
            generations: notes which generation is being read.
            recorder: records the queue's work.
        """
        self._generations = generations
        self._recorder = recorder
        self.queue = Queue("checkpoint")
        """The queue `checkpoint`."""
        self.is_closed = False
        """Whether the run is closing, so that work must not begin, or must stop soon."""

    def submit(
        self, name: str, work: Callable[[], None], before: Transfer | None = None, unit: str | None = None
    ) -> Transfer:
        """Append work to the queue. Call `Player.drain` first.

        Args:
            name: the name of the work in the trace.
            work: reads state, and stops soon when `is_closed`.
            before: earlier work of this queue. If it failed, this work fails with the same error and does not begin.
            unit: the unit that the work reads; None: none. No update changes its state before the work is over.
        """
        requires = [] if before is None else [before]
        transfer = self.queue.submit(name, 0, work, requires)
        self._recorder.watch(transfer)

        # No update was submitted since `drain`, so the work reads the valid generation.
        if unit is not None:
            self._generations.hold(unit, transfer)
        return transfer

    def close(self) -> None:
        """Stop the queue, after its current work has given up."""
        # The current work looks at this.
        self.is_closed = True
        self.queue.close()
