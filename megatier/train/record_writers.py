"""Writes a run's figures everywhere they go. If a drive takes none, the run ends in order, and not in a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from megatier.errors import MegatierError

Figures = Mapping[str, object]


class RecordWriters:
    """The writers of a run's records. Call it with the figures of a step, an evaluation or a save.

    An error is kept, because weeks of training must not be lost with one line. The loop looks for it after each step,
    and then saves the run before it ends. What could not be written is tried again with each record that follows.

    Attributes:
        error: why the last record is not written everywhere; None: it is.
    """

    def __init__(self, writers: Sequence[Callable[[Figures], None]] = ()) -> None:
        """Write nothing yet.

        Args:
            writers: each takes every record, and raises a MegatierError if it has written nothing of it.
        """
        self._writers = writers
        self._waiting: deque[tuple[Callable[[Figures], None], Figures]] = deque()
        """What is not written, and by whom."""
        self.error: MegatierError | None = None

    def __call__(self, figures: Figures) -> None:
        """Write a record after all that wait."""
        self._waiting.extend((write, figures) for write in self._writers)
        self.error = None
        try:
            while self._waiting:
                write, waiting = self._waiting[0]
                write(waiting)
                self._waiting.popleft()
        except MegatierError as error:
            self.error = error

    def check(self) -> None:
        """Raise the error of the last record, if there is one.

        Raises:
            MegatierError: it is not written.
        """
        if self.error is not None:
            raise self.error
