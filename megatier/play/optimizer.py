"""The optimizer as the lanes that update see it: a protocol. The optimizer itself knows no tier."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from megatier.tier import Kind

Elements = tuple[int, int]
"""A run of a unit's elements: first, and one past the last."""


class Work(Protocol):
    """A piece of work that native threads do."""

    def wait(self) -> bool:
        """Block until it is done."""

    def done(self) -> bool:
        """True when wait() would not block."""

    def span_ns(self) -> tuple[int, int]:
        """Start and end, in time.perf_counter_ns."""


Planes = Mapping[Kind, torch.Tensor]
"""For each kind of state, its plane as uint8."""

Apply = Callable[[str, Elements, Planes, torch.Tensor, Planes], Work | None]
"""Begins AdamW on a run of a unit's elements. It takes the unit, the run, the planes to write, the gradient, and the
planes to read for kinds that are not updated in place. It gives the work to wait for; None if that is done already, or
enqueued on the GPU."""


class Optimizer(Protocol):
    """The arithmetic of a run."""

    def apply(self, unit: str, elements: Elements, planes: Planes, grad: torch.Tensor, before: Planes) -> Work | None:
        """Begin AdamW on a run of a unit's elements, clipped as the last norm decided; see `Apply`."""

    def unclipped(self) -> Apply:
        """AdamW of the step that has begun, with a clip coefficient of 1."""

    def accumulate(self, unit: str, total: torch.Tensor, part: torch.Tensor, *, group: int) -> None:
        """Add one group's fp32 gradient in RAM; after the last, round to the compute dtype in place and measure."""

    def check(self, unit: str) -> None:
        """Raise NonFiniteError when the unit's measured gradient is not finite."""
