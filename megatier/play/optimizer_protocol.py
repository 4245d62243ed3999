"""The protocols of the optimizer and of its gradient sums that the update queues call. `optim` implements them.

The optimizer knows no tiers. The queues bring planes and gradients, and take the planes home.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from megatier.planes import Apply, Elements, Planes, Work


class GroupSums(Protocol):
    """The sums of a run's gradients over groups."""

    def accumulate(self, unit: str, total: torch.Tensor, part: torch.Tensor, *, group: int) -> None:
        """Add one group's fp32 gradient to the sum in RAM.

        After the last group, round the sum to the dtype of the unit's weights in place, and measure it.
        """

    def sum_groups(
        self,
        unit: str,
        total: torch.Tensor,
        pieces: torch.Tensor,
        spare: torch.Tensor,
        *,
        adds: bool,
        is_last: bool,
    ) -> None:
        """Add the gradients of several groups to an fp32 sum, in the order of the groups.

        After the last groups, round the sum to the dtype of the unit's weights, and measure it.

        Args:
            unit: the name of the unit.
            total: uint8: the sum, if a step has more groups than these, and in the end the gradient.
            pieces: uint8 [groups, bytes]: the gradients, in fp32 or in the dtype of the unit's weights.
            spare: uint8: room for an fp32 sum, if the gradients have a narrower dtype.
            adds: whether there is a sum of earlier groups.
            is_last: whether these are the last groups.
        """

    def check(self, unit: str) -> None:
        """Raise NonFiniteError if the unit's measured gradient is not finite."""


class Optimizer(Protocol):
    """The arithmetic of a run's updates."""

    @property
    def sums(self) -> GroupSums:
        """The sums of the gradients that it applies."""

    def apply(self, unit: str, elements: Elements, planes: Planes, grad: torch.Tensor, before: Planes) -> Work | None:
        """Begin AdamW on a run of a unit's elements, with the clip coefficient of the last norm; see `Apply`."""

    def unclipped(self) -> Apply:
        """Return AdamW of the current step with a clip coefficient of 1."""

    def matrices(self, unit: str) -> Sequence[Elements]:
        """Return the runs of a unit's elements that are updated one at a time, on the device that computes.

        They have no gaps between them. The result is empty if any run may be updated wherever it lies.
        """
