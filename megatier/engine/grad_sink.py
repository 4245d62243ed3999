"""Defines the protocols by which the backward hands gradients over and has them measured; `play` implements them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class GradSink(Protocol):
    """The protocol of an object that takes gradients. It knows the tiers, and nodes do not."""

    def acquire_grad_buffer(self, unit: str, *, fits: bool = False) -> Tensor:
        """Return a uint8 buffer for a unit's gradient, in fp32 (several groups) or in the dtype of the weights.

        If `sums_in_buffer`, it holds the sum of the groups before.

        Args:
            unit: the unit.
            fits: whether the dtype of the weights holds this group's gradient without loss. If other ranks add it up,
                the buffer then has that dtype.
        """

    def submit_grad(self, unit: str, *, group: int) -> None:
        """Hand the buffer over, with a group's gradient in it."""

    def sums_in_buffer(self, unit: str) -> bool:
        """Return whether groups are summed in the buffer: it is at home on the GPU, or RAM has no room for sums."""


class GradMeter(Protocol):
    """The protocol of an object that measures final gradients, for their global norm."""

    def measure(self, unit: str, grad: Tensor) -> None:
        """Take the sums of squares of a final gradient, which is flat and in the dtype of the unit's weights."""
