"""What the lanes that update need of the optimizer, which knows no tier."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from megatier.tier import Kind

Elements = tuple[int, int]
"""A run of a unit's elements: first, and one past the last."""


class Work(Protocol):
    """Something that native threads do."""

    def wait(self) -> bool:
        """Block until it is done."""

    def done(self) -> bool:
        """True when wait() would not block."""

    def span_ns(self) -> tuple[int, int]:
        """Start and end, in time.perf_counter_ns."""


Planes = Mapping[Kind, torch.Tensor]
"""uint8, of each kind of state."""

Apply = Callable[[str, Elements, Planes, torch.Tensor, Planes], Work | None]
"""Begins AdamW on a run of a unit's elements: planes, gradient, and the planes to read of kinds that are not updated in
place. None: done, or enqueued on the GPU."""


class Optimizer(Protocol):
    """The arithmetic of a run."""

    def apply(self, unit: str, elements: Elements, planes: Planes, grad: torch.Tensor, before: Planes) -> Work | None:
        """Begin AdamW on a run of a unit's elements, clipped as the last norm decided; see `Apply`."""

    def unclipped(self) -> Apply:
        """AdamW of the step that has begun, as it is if nothing is clipped."""

    def accumulate(self, unit: str, total: torch.Tensor, part: torch.Tensor, *, group: int) -> None:
        """Add one group's fp32 gradient in RAM; after the last, round to the compute dtype in place and measure."""

    def check(self, unit: str) -> None:
        """Raise NonFiniteError when the unit's measured gradient is not finite."""
