"""The held-out losses of a run so far: which one is the lowest, and for how long none was better.

They decide when a run ends early, and which checkpoint has its best model. They are a part of a run's state, so a run
that is resumed decides as if it had never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from megatier.errors import CheckpointError


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The best evaluation so far, and the number of those since that were not better."""

    step: int | None = None
    """The step of the lowest held-out loss; None: there is none yet."""
    loss: float | None = None
    """That loss."""
    num_worse: int = 0
    """Evaluations in a row, up to now, that were not better by more than the threshold."""

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Self:
        """Return what a checkpoint notes; nothing if it is of an older version.

        Raises:
            CheckpointError: what is there is of another type.
        """
        noted = stored.get("best", {})
        try:
            best = cls(**noted)
        except TypeError as error:
            raise CheckpointError(f"the checkpoint is damaged: best is {str(noted)[:100]!r}.") from error

        # By type and not by isinstance, because True is no number of a step.
        types = type(best.step), type(best.loss), type(best.num_worse)
        if types not in ((int, float, int), (type(None), type(None), int)):
            raise CheckpointError(f"the checkpoint is damaged: best is {str(noted)[:100]!r}.")
        return best

    def after(self, step: int, loss: float, threshold: float = 0.0) -> Self:
        """Return the best evaluation after one more.

        As in Hugging Face's `EarlyStoppingCallback`, the threshold decides which evaluation counts as better, and not
        which one is the best.

        Args:
            step: the step that it followed.
            loss: its held-out loss.
            threshold: how much lower than the lowest one before a loss has to be to count as better.
        """
        before = math.inf if self.loss is None else self.loss

        # NaN is not less than any loss, so it is never the best one. An infinite loss is none either.
        is_better = before - loss > threshold
        num_worse = 0 if is_better else self.num_worse + 1
        if loss < before:
            return type(self)(step=step, loss=loss, num_worse=num_worse)
        return type(self)(step=self.step, loss=self.loss, num_worse=num_worse)

    def is_over(self, patience: int | None) -> bool:
        """Return whether as many evaluations in a row were not better as the patience allows; None: never."""
        return patience is not None and self.num_worse >= patience

    def why_over(self) -> str:
        """Return in words why a run ends early."""
        plural = "s" if self.num_worse > 1 else ""
        evaluations = f"{self.num_worse} evaluation{plural}"
        if self.step is None:
            return f"{evaluations} gave no loss that is a number"

        # With a threshold the lowest loss may be that of the last evaluation, which was lower, and not by enough.
        return (
            f"{evaluations} did not lower the held-out loss enough: the lowest is {self.loss:.4f}, of step {self.step}"
        )
