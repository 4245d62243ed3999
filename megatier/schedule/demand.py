"""The demand of a run: the bytes that each queue had to move so far by the placement. Pure.

The player adds to it when it asks for moves. The store counts the bytes that really moved, and a run reports it if the
two differ.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from megatier.schedule.moves import Move, by_queue


class Demand:
    """The sum of all requested moves. Any thread may add some."""

    def __init__(self) -> None:
        """Begin at 0."""
        self._lock = threading.Lock()
        self._moved: Counter[str] = Counter()

    @property
    def moved(self) -> Counter[str]:
        """The requested bytes of each queue so far."""
        with self._lock:
            return self._moved.copy()

    def add(self, moves: Iterable[Move]) -> None:
        """Add requested moves."""
        # Summed before the lock is taken, because compute may wait for the lock.
        moved = by_queue(moves)
        with self._lock:
            self._moved.update(moved)

    def take_back(self, moves: Iterable[Move]) -> None:
        """Subtract moves that were requested and given up before they began."""
        moved = by_queue(moves)
        with self._lock:
            self._moved.subtract(moved)
