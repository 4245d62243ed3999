"""The search for the settings that make a step shortest: groups, slices, activations, state, streaming, generations.

Trials are taken in the order of their compute, the simplest first where that is equal, and the search ends when compute
alone takes longer than the best step found. A trial that is placed like an earlier one is the same step, and one whose
floor is above the best step is not simulated: what is left out cannot be better. Of the settings tried, groups, slices
and the saved share change the order of sums: numeric choices, fixed for a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from transformers import PreTrainedModel

from megatier.config import RunConfig
from megatier.errors import PlanError
from megatier.models.decoder import find_units
from megatier.schedule.placement import Budgets, Placement
from megatier.schedule.rates import Rates
from megatier.store.tier import Phase
from megatier.train.trial import Trial

GROUPS = (1, 2, 4, 8)
SLICES = (1, 2, 4, 8)
ACTIVATIONS = (("keep", 0.8), ("keep", 0.3), ("recompute", 0.0), ("offload", 0.0))
"""Policy and saved share. With a share of 0 a compiled layer saves its inputs alone."""
STREAMED = (0.0, 0.3, 0.5, 0.6)
GENERATIONS = (1, 2)
MARGIN = 0.02
"""Share of the GPU left free, since activations are estimated."""
WORTH = 0.005
"""Share of a step that more groups, slices or streaming must save to be chosen."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Settings, and the step that they make."""

    settings: Mapping[str, Any]
    """By dotted name, as on the command line."""
    seconds: float
    tokens_per_s: float


def search(model: PreTrainedModel, config: RunConfig, rates: Rates, budgets: Budgets, *, compiles: bool) -> Choice:
    """The fastest settings that fit.

    Args:
        model: a skeleton.
        config: all that is not searched; train.batch counts the sequences of a step.
        rates: the machine's.
        budgets: bytes of each tier; that of the GPU counts only where its memory is not known.
        compiles: whether layers are compiled.

    Raises:
        PlanError: nothing that was tried fits; the error of the last one.
        UnsupportedModelError: the model cannot be streamed.
    """
    trials = _trials(model, config, rates, budgets, compiles=compiles)
    tokens = config.train.batch * config.data.sequence_length
    best: Choice | None = None
    refused: PlanError | None = None
    seen: list[tuple[Mapping[tuple[str, Phase], float], Placement]] = []
    """Compute and placement of the trials so far: all that a forecast depends on."""
    for settings, wanted in sorted(trials, key=lambda one: one[1].compute_seconds):
        limit = best.seconds * (1 - WORTH) if best is not None else float("inf")
        if wanted.compute_seconds >= limit:
            break
        try:
            trial = _fitted(wanted)
            placement = trial.placed()
        except PlanError as error:
            refused = error
            continue
        if (trial.seconds, placement) in seen:
            continue
        seen.append((trial.seconds, placement))
        if best is not None and trial.floor(placement) >= limit:
            continue
        seconds = trial.forecast(placement).seconds
        if seconds < limit:
            best = Choice({**settings, "tiers.gpu": trial.budgets.gpu}, seconds, tokens / seconds)
    if best is None:
        assert refused is not None, "there is at least one trial"
        raise refused
    return best


def _trials(
    model: PreTrainedModel, config: RunConfig, rates: Rates, budgets: Budgets, *, compiles: bool
) -> Iterator[tuple[dict[str, Any], Trial]]:
    """Every combination that the batch allows and that differs from the others, the simplest first."""
    units = find_units(model)
    defers, state = config.train.clip is not None, config.tiers.state
    shares = STREAMED if defers and "ram" in state and "gpu" not in state else (0.0,)
    generations = GENERATIONS if defers and "nvme" in state and budgets.nvme else (1,)
    for groups, slices, (activations, saved) in product(GROUPS, SLICES, ACTIVATIONS):
        if config.train.batch % (groups * slices) or (slices > 1 and saved) or (saved and not compiles):
            continue
        settings = {
            "train.groups": groups,
            "train.slices": slices,
            "train.activations": activations,
            "model.saved_share": saved,
        }
        trial = Trial.of(model, units, changed(config, settings), rates, budgets, compiles=compiles)
        for share, number in product(shares, generations):
            work = replace(trial.work, policy=replace(trial.work.policy, streamed_share=share, generations=number))
            moves = {"tiers.streamed_share": share, "tiers.generations": number}
            yield settings | moves, replace(trial, work=work)


def changed(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """The config with settings such as those of a choice."""
    for name, value in settings.items():
        section, key = name.split(".")
        config = replace(config, **{section: replace(getattr(config, section), **{key: value})})
    return config


def _fitted(trial: Trial) -> Trial:
    """With all GPU memory that activations leave as the budget of slots and state."""
    if trial.gpu_bytes is None:
        return trial
    left = int(trial.gpu_bytes * (1 - MARGIN) - trial.activations.peak)
    if left <= 0:
        needed, had = round(trial.activations.peak), round(trial.gpu_bytes)
        raise PlanError("GPU memory for activations", needed, had, "An estimate. Train on fewer tokens a step.")
    return replace(trial, budgets=replace(trial.budgets, gpu=left))
