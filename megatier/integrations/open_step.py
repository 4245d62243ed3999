"""The state of a user loop's open step."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True)
class OpenStep:
    """The step of a user's loop that is open. A new `OpenStep` means that no step is open."""

    num_groups: int = 0
    """Groups since the last step; 0: no step is open."""
    losses: list[Tensor] = field(default_factory=list)
    """The contribution of each forward to the step's loss."""
    norm: float | None = None
    """The norm of the gradients, once it was measured."""
    drop_cause: str = ""
    """Why this rank will drop the step at its next call; empty: it will not."""
