"""Counts the bytes that a run had to move so far, by queue, as the placement says. Pure.

The store counts the bytes that really moved. A run compares the two, and says so if they differ.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from megatier.schedule.moves import Move, by_queue


class Demand:
    """Adds up moves as they are asked for. Any thread may add some."""

    def __init__(self) -> None:
        """Begin with nothing asked for."""
        self._lock = threading.Lock()
        self._moved: Counter[str] = Counter()

    @property
    def moved(self) -> Counter[str]:
        """Bytes that each queue was asked to move so far."""
        with self._lock:
            return self._moved.copy()

    def add(self, moves: Iterable[Move]) -> None:
        """Count moves that are asked for."""
        # Added up before the lock is taken, which compute may be waiting for.
        moved = by_queue(moves)
        with self._lock:
            self._moved.update(moved)

    def take_back(self, moves: Iterable[Move]) -> None:
        """Count moves no longer, which were asked for and given up before they began."""
        moved = by_queue(moves)
        with self._lock:
            self._moved.subtract(moved)
