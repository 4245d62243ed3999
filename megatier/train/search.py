"""The search for the settings that make a step shortest: groups, slices, activations, state on the GPU, streaming.

A step has a floor that is cheap to count: compute, where the first group's forward lasts at least as long as AdamW on
the CPU. Trials are simulated in the order of their floors, and the search ends when the next floor is above the best
step found: what it leaves out cannot be better. Of the settings tried, groups, slices and the saved share change the
order of sums: numeric choices, fixed for a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from megatier.config import RunConfig
from megatier.errors import PlanError
from megatier.schedule.placement import Budgets, Placement
from megatier.schedule.rates import Rates
from megatier.store.tier import Phase, Tier
from megatier.train.trial import Trial

GROUPS = (1, 2, 4, 8)
SLICES = (1, 2, 4, 8)
ACTIVATIONS = (("keep", 0.8), ("keep", 0.3), ("recompute", 0.0), ("offload", 0.0))
"""Policy and saved share. With a share of 0 a compiled layer saves its inputs alone."""
STREAMED = (0.0, 0.3, 0.5, 0.6)
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
    """
    found: list[tuple[float, dict[str, Any], Trial, Placement]] = []
    refused: PlanError | None = None
    for settings, variant in _variants(config, compiles):
        try:
            trial = _fitted(Trial.of(model, variant, rates, budgets, compiles=compiles))
            placement = trial.placed()
        except PlanError as error:
            refused = error
            continue
        found.append((_floor(trial, placement), settings, trial, placement))
    if not found:
        assert refused is not None, "there is at least one trial"
        raise refused
    tokens = config.train.batch * config.data.sequence_length
    best: Choice | None = None
    for floor, settings, trial, placement in sorted(found, key=lambda one: one[0]):
        limit = float("inf") if best is None else best.seconds * (1 - WORTH)
        if floor >= limit:
            break
        seconds = trial.forecast(placement).seconds
        if seconds < limit:
            best = Choice({**settings, "tiers.gpu": trial.budgets.gpu}, seconds, tokens / seconds)
    assert best is not None
    return best


def _floor(trial: Trial, placement: Placement) -> float:
    """Seconds that a step takes at least."""
    forward = sum(
        trial.seconds.get((access.unit, access.phase), 0.0)
        for access in trial.accesses
        if access.phase is Phase.FORWARD and access.group == 0
    )
    if not trial.work.policy.deferred:
        return trial.compute_seconds
    elements = sum(spec.num_elements for spec in trial.work.specs if placement.updater(spec.name) is Tier.RAM)
    return trial.compute_seconds + max(0.0, elements / trial.rates.update_parameters_per_s - forward)


def _variants(config: RunConfig, compiles: bool) -> Iterator[tuple[dict[str, Any], RunConfig]]:
    """Every combination that the batch allows and that differs from the others."""
    is_streamed = config.train.clip is not None and "ram" in config.tiers.state and "gpu" not in config.tiers.state
    for groups in GROUPS:
        for slices in SLICES:
            for activations, share in ACTIVATIONS:
                if config.train.batch % (groups * slices) or (slices > 1 and share) or (share and not compiles):
                    continue
                for streamed in STREAMED if is_streamed else (0.0,):
                    settings = {
                        "train.groups": groups,
                        "train.slices": slices,
                        "train.activations": activations,
                        "model.saved_share": share,
                        "tiers.streamed_share": streamed,
                    }
                    yield settings, changed(config, settings)


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
