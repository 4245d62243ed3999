"""Defines the optimizer, and the sums of its gradients, as the queues that update see them: two protocols.

The optimizer itself knows no tier. The queues bring it planes and gradients, and take the planes home.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from megatier.planes import Apply, Elements, Planes, Work


class GradientSums(Protocol):
    """The sums of a run's gradients over groups, as its queues need them."""

    def accumulate(self, unit: str, total: torch.Tensor, part: torch.Tensor, *, group: int) -> None:
        """Add one group's fp32 gradient to the sum in RAM.

        After the last group, the sum is rounded to the dtype of the unit's weights in place, and measured.
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
        """Add the gradients of several groups to an fp32 sum where they lie, in their order.

        After the last groups, the sum is rounded to the dtype of the unit's weights, and measured.

        Args:
            unit: its name.
            total: uint8, the sum if a step has more groups than these; in the end, the gradient.
            pieces: uint8 [groups, bytes], the gradients, in fp32 or in the dtype of the unit's weights.
            spare: uint8, room for an fp32 sum, if the gradients are in a narrower dtype.
            adds: whether there is a sum of groups before these.
            is_last: whether no groups come after them.
        """

    def check(self, unit: str) -> None:
        """Raise NonFiniteError when the unit's measured gradient is not finite."""


class Optimizer(Protocol):
    """The arithmetic of a run, as its queues need it."""

    @property
    def sums(self) -> GradientSums:
        """The sums of the gradients that it applies."""

    def apply(self, unit: str, elements: Elements, planes: Planes, grad: torch.Tensor, before: Planes) -> Work | None:
        """Begin AdamW on a run of a unit's elements, clipped as the last norm decided; see `Apply`."""

    def unclipped(self) -> Apply:
        """Return AdamW of the step that has begun, with a clip coefficient of 1."""

    def matrices(self, unit: str) -> Sequence[Elements]:
        """Return the runs of a unit's elements that are updated one at a time, on the device that computes.

        They have no gaps between them. There are none if any run of elements may be updated wherever it lies.
        """
