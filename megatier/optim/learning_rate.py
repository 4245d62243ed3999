"""Computes the learning rate of each step: warm-up, then constant, linear or cosine, or constant then linear."""

from __future__ import annotations

import math


def learning_rate(
    step: int, *, peak: float, schedule: str, warmup: int, decay: int, steps: int, minimum_ratio: float
) -> float:
    """Return the learning rate of step 1 to `steps`.

    Args:
        step: 1, 2, ...
        peak: the rate at the end of the warm-up.
        schedule: `constant`, `linear`, `cosine` or `wsd` (warm-up, stable, decay).
        warmup: the number of first steps, in which the rate rises linearly.
        decay: the number of last steps, in which `wsd` falls linearly.
        steps: the number of steps of the run.
        minimum_ratio: the fraction of the peak that all schedules but `constant` would reach one step after the last.
    """
    if step <= warmup:
        return peak * step / warmup
    last_at_peak = max(warmup, steps - decay) if schedule == "wsd" else warmup
    if schedule == "constant" or step <= last_at_peak:
        return peak

    # The first step of the decay still has the peak rate.
    steps_since = step - last_at_peak - 1
    share = steps_since / max(1, steps - last_at_peak)

    # From 0 at the peak to 1 one step after the last.
    fall = 0.5 * (1 - math.cos(math.pi * share)) if schedule == "cosine" else share
    return peak * (1 - (1 - minimum_ratio) * fall)
