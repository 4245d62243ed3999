"""Offloaded activations: when each one comes back to the GPU. Pure.

The input of each unit leaves for its home in RAM or on NVMe when the unit's forward begins. The backward needs them in
reverse order, so each is requested one unit ahead. Only the first unit of a backward requests its own.
`play/offload.py` moves them, and the forecast simulates that.
"""

from __future__ import annotations

SPILLING_MAX = 2
"""The most activations that move from the GPU towards NVMe at once. The next forward waits until the oldest one is in
RAM. Otherwise slow drives would let activations accumulate on the GPU."""


class AwayActivations:
    """The units whose activations have left the GPU, or are coming back."""

    def __init__(self) -> None:
        """Begin without activations."""
        self._stashed: list[str] = []
        """Units with an activation at home, in the order of the forward."""
        self._fetched: set[str] = set()
        """Units whose activation was requested and not used yet."""

    def stash(self, unit: str) -> None:
        """Note that the activation of a unit leaves the GPU."""
        self._stashed.append(unit)

    def fetch(self, unit: str) -> list[str]:
        """Return the units whose activations are requested when the backward comes to a unit."""
        # It was requested before, unless the backward is not in the reverse order of the forward.
        asked = [] if unit in self._fetched else [unit]
        if asked:
            self._stashed.remove(unit)
        self._fetched.discard(unit)

        # Only one unit ahead. RAM for more slots is better used for homes of activations (docs/decisions/0034).
        if self._stashed:
            asked.append(self._stashed.pop())
            self._fetched.add(asked[-1])
        return asked
