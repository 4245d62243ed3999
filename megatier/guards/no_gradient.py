"""Warns of a run that learns nothing: the gradients of its first steps are all 0, which no error would say.

Runs without torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

FIRST_STEPS = 3
"""Steps that are looked at. A step may have no gradient for a good reason, such as rewards that are all the same."""
REMARK = (
    f"the norm of the gradients was 0 in each of the first {FIRST_STEPS} steps, so no step has learnt anything yet. "
    "Look at the labels (are all of them -100?), at what is frozen or adapted (does the loss depend on any parameter "
    "that is trained?), and at the loss itself (is it a constant, as with rewards that are all the same?)."
)


def learns_nothing(norms: Sequence[float | None]) -> bool:
    """Return whether the first steps have no gradient.

    Args:
        norms: of all steps, in order, before clipping; None: not known.
    """
    return len(norms) >= FIRST_STEPS and all(norm == 0 for norm in norms[:FIRST_STEPS])


class FirstNorms:
    """The norms of the first steps of a process. It warns once if all of them are 0."""

    def __init__(self) -> None:
        """Begin before the first step."""
        self._norms: list[float] = []

    def add(self, norm: float) -> None:
        """Take the norm of a step, before clipping."""
        # A later step may have no gradient for a good reason, and the run has learnt something by then.
        if len(self._norms) == FIRST_STEPS:
            return
        self._norms.append(norm)
        if learns_nothing(self._norms):
            warnings.warn(REMARK, stacklevel=2)
