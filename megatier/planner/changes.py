"""Finds what would make a step faster: single changes, each tried alone.

It also finds N*, the number of tokens a step from which compute hides everything else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megatier.config.schema import TrainConfig
from megatier.errors import PlanError
from megatier.forecast.jobs import HOST_SECONDS
from megatier.planner.trial import Trial
from megatier.schedule.placement import Placement

HIDDEN_RATIO = 1.05
"""A step counts as bound by compute if it takes at most this many times as long as compute alone."""
TIMES_MAX = 4096
"""N* is searched up to this multiple of the present tokens."""
HALVINGS = 4
"""Bisections of the last doubling, which give N* within 3 %."""


@dataclass(frozen=True, slots=True)
class Change:
    """A single change of the run, and its effect."""

    what: str
    """The change in words."""
    tokens_per_s: float
    """Tokens a second with the change."""
    gain: float
    """Relative gain in tokens a second."""


@dataclass(frozen=True, slots=True)
class _Variant:
    """A trial with one thing changed."""

    what: str
    """The change in words."""
    trial: Trial
    times: int = 1
    """The tokens of a step, as a multiple of those before."""


def find_hidden_tokens(trial: Trial, placement: Placement, tokens: int) -> int | None:
    """Return N*, about the fewest tokens a step with which compute hides everything else.

    More tokens never hide less, so the tokens are doubled until all is hidden, and the last doubling is bisected.

    Args:
        trial: the run.
        placement: its homes and slots, which stay.
        tokens: tokens of a step now.

    Returns:
        N*; None if `TIMES_MAX` times the tokens are not enough.
    """

    def is_hidden(times: float) -> bool:
        tried = trial.with_tokens(times)
        return tried.forecast(placement).seconds <= HIDDEN_RATIO * (tried.compute_seconds + HOST_SECONDS)

    times = 1.0
    while not is_hidden(times):
        # N* may be thousands of times as many, and each try is a simulation, so the tokens are doubled.
        times *= 2
        if times > TIMES_MAX:
            return None

    # Half as many tokens were too few, so N* lies between the two.
    low = times / 2
    high = times
    for _ in range(HALVINGS if times > 1 else 0):
        middle = (low + high) / 2
        if is_hidden(middle):
            high = middle
        else:
            low = middle
    return math.ceil(tokens * high)


def find_helpful_changes(
    trial: Trial, placement: Placement, train: TrainConfig, tokens: int, step_seconds: float
) -> tuple[Change, ...]:
    """Return the changes that would help, the best first.

    Args:
        trial: the run.
        placement: its homes and slots.
        train: its batch and groups, for the words.
        tokens: tokens of a step.
        step_seconds: seconds of a step without a change.
    """
    tokens_per_s = tokens / step_seconds
    changes = []
    for variant in _list_variants(trial, placement, train):
        try:
            # State is placed again, because a change of memory or activations may move it.
            forecast = variant.trial.forecast(variant.trial.placed())
        except PlanError:
            # There would be more state on the GPU than activations leave room for.
            continue
        rate = tokens * variant.times / forecast.seconds
        changes.append(Change(variant.what, rate, rate / tokens_per_s - 1))

    return tuple(sorted(changes, key=lambda change: -change.gain))


def _list_variants(trial: Trial, placement: Placement, train: TrainConfig) -> list[_Variant]:
    """Return the changes to try."""
    budgets = trial.budgets
    # Budgets are whole bytes, so a quarter more is taken in whole numbers.
    more_ram = replace(budgets, ram=budgets.ram * 5 // 4)
    more_gpu = replace(budgets, gpu=budgets.gpu * 5 // 4)
    batch = 2 * train.batch
    groups = 2 * train.groups
    variants = [
        _Variant(f"twice the tokens in a group (batch {batch})", trial.with_tokens(2), 2),
        _Variant(f"twice the groups (batch {batch}, groups {groups})", trial.with_groups(2), 2),
    ]
    # With unified memory one of the two would only take from the other.
    if trial.rates.unified_bytes is None:
        variants += [
            _Variant("a quarter more RAM", replace(trial, budgets=more_ram)),
            _Variant("a quarter more GPU memory for state", replace(trial, budgets=more_gpu)),
        ]

    policy = trial.work.policy
    on_cpu = any(placement.update_queue(unit) != "update_gpu" for unit in placement.grad_homes)
    if on_cpu and policy.deferred and not policy.speculates:
        # One generation is valid, one is written, and a savepoint may keep another one.
        count = 2 + policy.savepoints
        work = replace(trial.work, policy=replace(policy, generations=count))
        change = f"updates in the backward (tiers.generations {count})"
        variants.append(_Variant(change, replace(trial, work=work)))

    if drives := trial.rates.drives:
        rates = replace(trial.rates, drives=(*drives, drives[0]))
        variants.append(_Variant("one more drive", replace(trial, rates=rates)))
    return variants
