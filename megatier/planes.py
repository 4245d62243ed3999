"""Planes of state, as the queues pass them to the optimizer, and the protocol of its work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from megatier.tier import Kind

Elements = tuple[int, int]
"""A run of a unit's elements: the first one, and one past the last."""

Planes = Mapping[Kind, Tensor]
"""The plane of each kind of state, as uint8."""


class Work(Protocol):
    """Work of native threads."""

    def wait(self) -> bool:
        """Block until it is done."""

    def done(self) -> bool:
        """Return whether wait() would not block."""

    def span_ns(self) -> tuple[int, int]:
        """Return the start and end, in time.perf_counter_ns."""


Apply = Callable[[str, Elements, Planes, Tensor, Planes], Work | None]
"""A function that begins AdamW on a run of a unit's elements. Its arguments are the unit, the run, the planes to write,
the gradient, and the planes to read for kinds that are not updated in place. It returns the work to wait for, or None
if the work is done, or enqueued on the GPU."""
