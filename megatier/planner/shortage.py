"""Finds remedies for a run that does not fit: a larger machine, or settings with which it fits.

The planner adds them to its errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from megatier.byte_counts import format_bytes
from megatier.errors import ConfigError, PlanError, UnsupportedModelError
from megatier.optimizers import MOMENT_FORMATS
from megatier.setup.setup import Setup
from megatier.tier import Tier

Settings = dict[str, Any]
"""Settings by dotted name, as on the command line."""
Place = Callable[[Setup], object]
"""Places a run, and raises PlanError if it does not fit."""

SLICES_TRIED = (2, 4, 8, 16, 32)
"""Numbers of slices that are tried."""
NARROWER: tuple[Settings, ...] = (
    *({"train.moments": name} for name in MOMENT_FORMATS[1:]),
    {"train.optimizer": "muon"},
)
"""Settings with less state for each parameter than AdamW with moments in fp32. They change numbers."""
STEP_BYTES = 1 << 30
"""Budgets are raised in multiples of this."""


def find_nearest(refusals: Sequence[PlanError]) -> PlanError:
    """Return the error with the fewest missing bytes, preferably of RAM or drives.

    If a GPU is too small for one candidate, other candidates take less of it.
    """
    # RAM and drives can be added to a machine, and GPU memory cannot.
    buyable = [short for short in refusals if short.tier in (Tier.RAM, Tier.NVME)]
    return min(buyable or refusals, key=_missing_bytes)


def _missing_bytes(short: PlanError) -> int:
    """Return the bytes that are missing."""
    return short.needed_bytes - short.had_bytes


def add_remedies(short: PlanError, setup: Setup, place: Place) -> PlanError:
    """Return an error with all remedies that help: a larger machine, slices, or less state.

    Args:
        short: the error.
        setup: the run that was refused.
        place: tries a variant of the run.
    """
    ways = list(_find_remedies(setup, place))
    if not ways:
        return short
    *others, remedies = ways
    if others:
        remedies = f"{', '.join(others)} or {remedies}"
    remedy = f"{short.remedy} It fits {remedies}."
    return PlanError(short.what, short.needed_bytes, short.had_bytes, remedy, short.tier)


def _find_remedies(setup: Setup, place: Place) -> Iterator[str]:
    """Yield the changes with which the run fits, in words."""
    # A larger machine comes first, because it changes no numbers.
    if more := _least_machine(setup, place):
        yield f"with {more}"

    train = setup.config.train
    for count in SLICES_TRIED if setup.config.can_slice else ():
        # Only the smallest number that fits is named.
        is_allowed = count > train.slices and train.batch % (train.groups * count) == 0
        if is_allowed and _fits(setup, {"train.slices": count}, place):
            yield f"with train.slices {count}"
            break

    # Any other state is as small as those tried here.
    has_usual_state = train.optimizer == "adamw" and train.moments == "fp32"
    for settings in NARROWER if has_usual_state else ():
        if _fits(setup, settings, place):
            ((name, value),) = settings.items()
            yield f"with {name} {value}"


def _least_machine(setup: Setup, place: Place) -> str:
    """Return by how much budgets have to be raised, in words; empty if that does not help."""
    more: dict[Tier, int] = {}

    # Each error names one budget, which is raised by what is missing. Then the next one is short, or the same again.
    for _ in range(3 * len(Tier)):
        try:
            place(setup)
        except PlanError as short:
            # An error without a tier is about GPU memory for activations, which no budget raises.
            if short.tier not in set(Tier):
                return ""
            tier = Tier(short.tier)
            num_steps = max(1, math.ceil(_missing_bytes(short) / STEP_BYTES))
            missing = num_steps * STEP_BYTES
            more[tier] = more.get(tier, 0) + missing

            # Large steps keep the number of tries low, and nobody adds a few bytes to a machine.
            raised = {str(tier): getattr(setup.budgets, tier) + missing}
            setup = replace(setup, budgets=replace(setup.budgets, **raised))
        else:
            names = {
                Tier.GPU: "GPU memory",
                Tier.RAM: "RAM",
                Tier.NVME: "NVMe",
            }
            return " and ".join(f"{format_bytes(size)} more {names[tier]}" for tier, size in more.items())
    return ""


def _fits(setup: Setup, settings: Settings, place: Place) -> bool:
    """Return whether the run fits with other settings."""
    try:
        place(setup.changed(settings))
    except (ConfigError, UnsupportedModelError, PlanError):
        return False
    return True
