"""Finds what a run that does not fit would need: the least machine, and the changes that would do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from megatier.errors import ConfigError, PlanError, UnsupportedModelError, mib
from megatier.optimizers import MOMENT_FORMATS
from megatier.setup.setup import Setup
from megatier.tier import Tier

Settings = dict[str, Any]
"""Settings by dotted name, as on the command line."""
Place = Callable[[Setup], object]
"""Places a run; raises PlanError if it does not fit."""

SLICES_TRIED = (2, 4, 8, 16, 32)
"""Numbers of slices that are tried."""
NARROWER: tuple[Settings, ...] = (
    *({"train.moments": name} for name in MOMENT_FORMATS[1:]),
    {"train.optimizer": "muon"},
)
"""Settings with which a parameter takes fewer bytes than with AdamW's moments in fp32. They change numbers."""
STEP_BYTES = 1 << 30
"""Budgets are raised in whole steps of this."""


def find_nearest(refusals: Sequence[PlanError]) -> PlanError:
    """Return the refusal of which the fewest bytes are missing, in RAM or on drives if there is such a one.

    Where a GPU is too small for a candidate, other candidates take less of it, and no budget can be raised.
    """
    # RAM and drives can be added to a machine, unlike memory of a GPU.
    buyable = [short for short in refusals if short.tier in (Tier.RAM, Tier.NVME)]
    return min(buyable or refusals, key=_missing_bytes)


def _missing_bytes(short: PlanError) -> int:
    """Return how much more would have been needed."""
    return short.needed_bytes - short.had_bytes


def add_remedies(short: PlanError, setup: Setup, place: Place) -> PlanError:
    """Return a refusal that also says what would do: a larger machine, slices, or narrower state.

    Args:
        short: the refusal.
        setup: the run that was refused.
        place: tries it in another way.
    """
    ways = list(_find_remedies(setup, place))
    if not ways:
        return short
    *others, words = ways
    if others:
        words = f"{', '.join(others)} or {words}"
    remedy = f"{short.remedy} It fits {words}."
    return PlanError(short.what, short.needed_bytes, short.had_bytes, remedy, short.tier)


def _find_remedies(setup: Setup, place: Place) -> Iterator[str]:
    """Yield the ways in which the run fits."""
    # A larger machine comes first, because it changes no number of the run.
    if more := _least_machine(setup, place):
        yield f"with {more}"

    train = setup.config.train
    for count in SLICES_TRIED if setup.config.can_slice else ():
        # The fewest that fit are named alone.
        is_allowed = count > train.slices and train.batch % (train.groups * count) == 0
        if is_allowed and _fits(setup, {"train.slices": count}, place):
            yield f"with train.slices {count}"
            break

    # All other state is no wider than what is tried here.
    has_usual_state = train.optimizer == "adamw" and train.moments == "fp32"
    for settings in NARROWER if has_usual_state else ():
        if _fits(setup, settings, place):
            ((name, value),) = settings.items()
            yield f"with {name} {value}"


def _least_machine(setup: Setup, place: Place) -> str:
    """Return the budgets that are missing, in words; empty if none would do."""
    more: dict[Tier, int] = {}

    # Each budget is raised by what is said of it; what is short then is the next one, or the same once more.
    for _ in range(3 * len(Tier)):
        try:
            place(setup)
        except PlanError as short:
            # Without a tier it is GPU memory for activations that is short, and no budget raises that.
            if short.tier not in set(Tier):
                return ""
            tier = Tier(short.tier)
            num_steps = max(1, math.ceil(_missing_bytes(short) / STEP_BYTES))
            missing = num_steps * STEP_BYTES
            more[tier] = more.get(tier, 0) + missing

            # In whole steps, since nobody adds a few bytes, and each try places the whole model.
            raised = {str(tier): getattr(setup.budgets, tier) + missing}
            setup = replace(setup, budgets=replace(setup.budgets, **raised))
        else:
            names = {
                Tier.GPU: "GPU memory",
                Tier.RAM: "RAM",
                Tier.NVME: "NVMe",
            }
            return " and ".join(f"{mib(size)} more {names[tier]}" for tier, size in more.items())
    return ""


def _fits(setup: Setup, settings: Settings, place: Place) -> bool:
    """Return whether the run fits with some settings changed."""
    try:
        place(setup.changed(settings))
    except (ConfigError, UnsupportedModelError, PlanError):
        return False
    return True
