"""The learning rate of each step: a linear warm-up, then constant, linear or cosine."""

from __future__ import annotations

import math


def learning_rate(step: int, *, peak: float, schedule: str, warmup: int, steps: int, minimum_ratio: float) -> float:
    """Return the learning rate of step 1 to `steps`.

    Args:
        step: 1, 2, ...
        peak: the rate at the end of the warm-up.
        schedule: `constant`, `linear` or `cosine`.
        warmup: steps in which the rate rises in a straight line.
        steps: steps of the whole run.
        minimum_ratio: the share of the peak to which `linear` and `cosine` would fall one step after the last.
    """
    if step <= warmup:
        return peak * step / warmup
    if schedule == "constant":
        return peak

    # The first step after the warm-up has the peak.
    steps_since = step - warmup - 1
    share = steps_since / max(1, steps - warmup)

    # From 0 at the peak to 1 one step after the last.
    fall = share if schedule == "linear" else 0.5 * (1 - math.cos(math.pi * share))
    return peak * (1 - (1 - minimum_ratio) * fall)
