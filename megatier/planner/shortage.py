"""What a run that does not fit would need: the nearest refusal, the least machine, and the changes that would do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from megatier.errors import ConfigError, PlanError, UnsupportedModelError, mib
from megatier.optimizers import MOMENTS
from megatier.setup.setup import Setup
from megatier.tier import Tier

Settings = dict[str, Any]
"""Settings by dotted name, as on the command line."""
Place = Callable[[Setup], object]
"""Places a run; raises PlanError if it does not fit."""

SLICES = (2, 4, 8, 16, 32)
"""Numbers of slices that are tried."""
NARROWER: tuple[Settings, ...] = (
    *({"train.moments": name} for name in MOMENTS[1:]),
    {"train.optimizer": "muon"},
)
"""Settings with which a parameter takes fewer bytes than with AdamW's moments in fp32. They change numbers."""
STEP_BYTES = 1 << 30
"""Budgets are raised in whole steps of this."""


def nearest(refusals: Sequence[PlanError]) -> PlanError:
    """Return the refusal of which the fewest bytes are missing, in RAM or on drives if there is such a one.

    Where a GPU is too small for a candidate, other candidates take less of it, and no budget can be raised.
    """
    buyable = [short for short in refusals if short.tier in (Tier.RAM, Tier.NVME)]
    return min(buyable or refusals, key=lambda short: short.needed_bytes - short.had_bytes)


def with_ways(short: PlanError, setup: Setup, place: Place) -> PlanError:
    """Return a refusal that also says what would do: a larger machine, slices, or narrower state.

    Args:
        short: the refusal.
        setup: the run that was refused.
        place: tries it in another way.
    """
    ways = list(_ways(setup, place))
    if not ways:
        return short
    words = f"{', '.join(ways[:-1])} or {ways[-1]}" if len(ways) > 1 else ways[0]
    return PlanError(short.what, short.needed_bytes, short.had_bytes, f"{short.remedy} It fits {words}.", short.tier)


def _ways(setup: Setup, place: Place) -> Iterator[str]:
    """Yield the ways in which the run fits."""
    if more := _least_machine(setup, place):
        yield f"with {more}"

    config = setup.config
    train = config.train
    counts = [count for count in SLICES if count > train.slices and train.batch % (train.groups * count) == 0]
    tried = [{"train.slices": count} for count in counts if config.can_slice]
    if found := next((way for way in tried if _fits(setup, way, place)), None):
        yield f"with train.slices {found['train.slices']}"

    narrower = NARROWER if train.optimizer == "adamw" and train.moments == "fp32" else ()
    for settings in narrower:
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
            if short.tier not in set(Tier):
                return ""
            tier = Tier(short.tier)
            missing = max(1, -(-(short.needed_bytes - short.had_bytes) // STEP_BYTES)) * STEP_BYTES
            more[tier] = more.get(tier, 0) + missing
            budgets = replace(setup.budgets, **{str(tier): getattr(setup.budgets, tier) + missing})
            setup = replace(setup, budgets=budgets)
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
