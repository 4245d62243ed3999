"""The step of a user's loop that has begun and has not ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True)
class OpenStep:
    """The open step. A new one stands for no step: none of its groups has begun."""

    num_groups: int = 0
    """Groups since the last step, each with its first forward; 0: no step is open."""
    losses: list[Tensor] = field(default_factory=list)
    """What each forward adds to its loss."""
    norm: float | None = None
    """The norm of its gradients, once it was measured."""
    drop_cause: str = ""
    """Why this rank drops it at its next call; empty: it does not."""
