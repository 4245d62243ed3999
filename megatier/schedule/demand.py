"""Demand: the bytes that a run had to move so far, by queue, as the placement says.

The store counts the bytes that really moved. A run compares the two, and says so if they differ.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Set

from megatier.schedule.moves import Move, Moves, by_lane
from megatier.schedule.placement import Placement
from megatier.schedule.sizes import Policy
from megatier.schedule.timeline import Timeline


class Demand:
    """Adds up moves as they are asked for. Any thread may add some.

    A pass is added as a whole when it begins. Activations, streamed state, speculative updates and updates outside of a
    pass are added one by one, because nobody knows beforehand how many there will be.

    Attributes:
        moves: says what each part of a step moves.
    """

    def __init__(self, moves: Moves, placement: Placement, policy: Policy) -> None:
        """Begin with nothing asked for.

        Args:
            moves: says what each part of a step moves.
            placement: has the units that are trained.
            policy: whether updates wait for the norm.
        """
        self.moves = moves
        self._trained = frozenset(placement.grad_homes)
        self._deferred = policy.deferred
        self._lock = threading.Lock()
        self._moved: Counter[str] = Counter()

    @property
    def moved(self) -> Counter[str]:
        """Bytes that each queue was asked to move so far."""
        with self._lock:
            return self._moved.copy()

    def add(self, moves: Iterable[Move]) -> None:
        """Count moves that are asked for."""
        moved = by_lane(moves)
        with self._lock:
            self._moved.update(moved)

    def begin_pass(self, timeline: Timeline, *, trains: bool) -> None:
        """Count a pass that begins.

        Args:
            timeline: the pass as it is planned.
            trains: whether it has a backward.
        """
        used = self._trained_in(timeline, trains)

        # In the deferred mode a pass updates what the timeline says; in the immediate mode each unit that it trains.
        updated = [update.unit for update in timeline.updates] if self._deferred else used
        self.add(self.moves.of_pass(timeline, gradients=used, updated=updated))

    def end_pass(self, timeline: Timeline, final: Set[str], *, trains: bool) -> None:
        """Take off what a pass that has ended did not ask for.

        Units that it left out have no gradient, and in the immediate mode no update.

        Args:
            timeline: the pass as it was planned.
            final: units that have a gradient.
            trains: whether it had a backward.
        """
        for unit in self._trained_in(timeline, trains) - final:
            moved = by_lane(self.moves.gradients(unit))
            if not self._deferred:
                moved.update(by_lane(self.moves.update(unit)))

            with self._lock:
                self._moved.subtract(moved)

    def _trained_in(self, timeline: Timeline, trains: bool) -> frozenset[str]:
        """The units that a pass trains."""
        used = {access.unit for access in timeline.accesses} if trains else set()
        return self._trained & used
