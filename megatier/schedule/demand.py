"""Demand: the bytes that the placement says the passes so far had to move, per queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import replace

from megatier.schedule.placement import Placement
from megatier.schedule.sizes import Policy, UnitSpec
from megatier.schedule.timeline import Timeline, demanded_bytes, gradient_bytes, update_bytes


class Demand:
    """Counts passes, but for activations, streamed state, speculation and updates outside of a pass.

    Attributes:
        moved: bytes per queue.
    """

    def __init__(self, units: Sequence[UnitSpec], placement: Placement, policy: Policy) -> None:
        """Nothing yet."""
        self._sizes = {unit.name: replace(unit, activation_bytes=0) for unit in units}
        """Activations are counted one by one: not every use of a unit has a backward."""
        self._placement, self._policy = placement, policy
        self.moved: Counter[str] = Counter()

    def add(self, timeline: Timeline, *, trains: bool) -> None:
        """A pass begins, with a backward or without."""
        used = self._trained_in(timeline, trains)
        updated = [update.unit for update in timeline.updates] if self._policy.deferred else used
        self.moved.update(
            demanded_bytes(timeline, self._placement, self._sizes, self._policy, gradients=used, updated=updated)
        )

    def end(self, timeline: Timeline, final: Set[str], *, trains: bool) -> None:
        """A pass has ended. Units that it left out have no gradient, and in the immediate mode no update.

        Args:
            timeline: as it was planned.
            final: units that have a gradient.
            trains: whether it had a backward.
        """
        for name in self._trained_in(timeline, trains) - final:
            self.moved.subtract(gradient_bytes(self._sizes[name], self._placement, self._policy))
            if not self._policy.deferred:
                self.moved.subtract(update_bytes(self._sizes[name], self._placement, self._policy))

    def _trained_in(self, timeline: Timeline, trains: bool) -> frozenset[str]:
        used = {access.unit for access in timeline.accesses} if trains else set()
        return frozenset(self._placement.grad_homes) & used
