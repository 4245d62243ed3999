"""Defines the protocols by which the backward hands over the gradients of units, and measures them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class GradSink(Protocol):
    """The protocol of an object that takes gradients. It knows the tiers; nodes do not."""

    def acquire_grad_buffer(self, unit: str, *, fits: bool = False) -> Tensor:
        """Ask for a buffer, uint8, for elements in fp32 (several groups) or in the dtype of the weights.

        If `sums_in_buffer`, it has the sum of the groups before.

        Args:
            unit: the unit.
            fits: whether the dtype of the weights holds a group's gradient without loss. If other ranks add it up, the
                buffer is for elements of that dtype then.
        """

    def submit_grad(self, unit: str, *, group: int) -> None:
        """Hand the buffer over, with a group's gradient in it."""

    def sums_in_buffer(self, unit: str) -> bool:
        """Return whether groups are added up in the buffer: it is at home on the GPU, or RAM is too short for sums."""


class GradMeter(Protocol):
    """The protocol of an object that measures final gradients, for their global norm."""

    def measure(self, unit: str, grad: Tensor) -> None:
        """Note the sums of squares of a final gradient, which is flat and in the dtype of the unit's weights."""
