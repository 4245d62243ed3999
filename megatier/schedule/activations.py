"""Decides which offloaded activations come back to the GPU when. Pure.

The input of each unit leaves as the unit's forward begins, for its home in RAM or on NVMe. A backward wants them in the
opposite order, so each is asked for while the unit before it is worked on. Only the first unit of a backward asks for
its own.
"""

from __future__ import annotations

SPILLING_MAX = 2
"""Activations on their way from the GPU towards NVMe. The forward of the next one waits for the copy of the oldest one
to RAM: else drives that are slower than compute would leave activations on the GPU."""


class AwayActivations:
    """The units whose activations have left the GPU, or are on their way back."""

    def __init__(self) -> None:
        """Begin with nothing stashed."""
        self._stashed: list[str] = []
        """Units with an activation at home, the last one last."""
        self._fetched: set[str] = set()
        """Units whose activation was asked for, and not used yet."""

    def stash(self, unit: str) -> None:
        """Note that the activation of a unit leaves the GPU."""
        self._stashed.append(unit)

    def fetch(self, unit: str) -> list[str]:
        """Return the units whose activations are asked for now, because the backward has come to a unit."""
        # The activation is on its way already, unless the backward comes to units in another order than the forward's
        # reversed.
        asked = [] if unit in self._fetched else [unit]
        if asked:
            self._stashed.remove(unit)
        self._fetched.discard(unit)

        # One unit ahead, and no more: the RAM of further slots saves as many bytes if another activation is at home
        # there (docs/decisions/0034).
        if self._stashed:
            asked.append(self._stashed.pop())
            self._fetched.add(asked[-1])
        return asked
