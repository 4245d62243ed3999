"""The search for the settings that make a step shortest: groups, slices, activations, state, streaming, generations.

Trials are taken in the order of their compute, the simplest first where that is equal, and the search ends when compute
alone takes longer than the best step found. A trial that is placed like an earlier one is the same step, and one whose
floor is above the best step is not simulated: what is left out cannot be better. Of the settings tried, groups, slices
and the saved share change the order of sums: numeric choices, fixed for a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from transformers import PreTrainedModel

from megatier.config.schema import RunConfig
from megatier.errors import PlanError
from megatier.models.experts import cut_units
from megatier.planner.trial import Trial, with_parts
from megatier.schedule.forecast import Forecast
from megatier.schedule.placement import Placement
from megatier.schedule.rates import Rates
from megatier.schedule.sizes import Budgets
from megatier.tier import Activations, Phase

GROUPS = (1, 2, 4, 8)
SLICES = (1, 2, 4, 8)
POLICIES = tuple(policy.value for policy in Activations)
SHARES = (0.8, 0.5, 0.15, 0.0)
"""Saved shares; 0 goes with the policies that save a layer's input alone, the others with `keep`."""
STREAMED = (0.0, 0.3, 0.5, 0.6)
GENERATIONS = (1, 2)
MARGIN = 0.06
"""Share of the GPU left free, since activations are estimated: no run that they were fitted to was further off."""
WORTH = 0.005
"""Share of a step that more groups, slices or streaming must save to be chosen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Settings, and the step that they make."""

    settings: Mapping[str, Any]
    """By dotted name, as on the command line."""
    trial: Trial
    placement: Placement
    forecast: Forecast
    tokens_per_s: float

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.forecast.seconds

    @property
    def seconds_range(self) -> tuple[float, float]:
        """Of a step, shortest and longest, as the drives waver; two more simulations."""
        return self.trial.seconds_range(self.placement, self.forecast)


def search(
    model: PreTrainedModel,
    config: RunConfig,
    rates: Rates,
    budgets: Budgets,
    *,
    compiles: bool,
    fixed: frozenset[str] = frozenset(),
) -> Choice:
    """The fastest settings that fit.

    Args:
        model: a skeleton.
        config: all that is not searched; train.batch counts the sequences of a step.
        rates: the machine's.
        budgets: bytes of each tier; that of the GPU counts only where its memory is not known.
        compiles: whether layers are compiled.
        fixed: dotted names of settings that stay as they are in the config.

    Raises:
        PlanError: nothing that was tried fits; the error of the last one.
        UnsupportedModelError: the model cannot be streamed.
    """
    trials = _trials(model, config, rates, budgets, compiles=compiles, fixed=fixed)
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
            trial = wanted if "tiers.gpu" in fixed else _fitted(wanted)
            placement = trial.placed()
        except PlanError as error:
            refused = error
            continue

        if (trial.seconds, placement) in seen:
            continue
        seen.append((trial.seconds, placement))
        if best is not None and trial.floor(placement) >= limit:
            continue

        made = trial.forecast(placement)
        if made.seconds < limit:
            chosen = {**settings, "tiers.gpu": trial.budgets.gpu}
            free = {name: value for name, value in chosen.items() if name not in fixed}
            best = Choice(
                settings=free, trial=trial, placement=placement, forecast=made, tokens_per_s=tokens / made.seconds
            )

    if best is None:
        assert refused is not None, "there is at least one trial"
        raise with_parts(refused, model, config, rates, budgets, compiles=compiles)
    return best


def _trials(
    model: PreTrainedModel, config: RunConfig, rates: Rates, budgets: Budgets, *, compiles: bool, fixed: frozenset[str]
) -> Iterator[tuple[dict[str, Any], Trial]]:
    """Every combination that the batch allows and that differs from the others, the simplest first."""
    units = cut_units(model, config.model.expert_parts)
    for computed in _computed(config, compiles, fixed):
        trial = Trial.of(model, units, changed(config, computed), rates, budgets, compiles=compiles)
        for placed in _placed(config, budgets, fixed, defers=trial.work.policy.deferred):
            names = {name.partition(".")[2]: value for name, value in placed.items()}
            work = replace(trial.work, policy=replace(trial.work.policy, **names))
            yield computed | placed, replace(trial, work=work)


def _computed(config: RunConfig, compiles: bool, fixed: frozenset[str]) -> Iterator[dict[str, Any]]:
    """Settings that change what is computed. A policy of activations, or a share, that is fixed goes with any other."""
    kinds = {"train.groups": GROUPS, "train.slices": SLICES, "train.activations": POLICIES, "model.saved_share": SHARES}
    is_free = fixed.isdisjoint({"train.activations", "model.saved_share"})
    for settings in _combined(config, kinds, fixed):
        groups, slices, policy, share = settings.values()
        if config.train.batch % (groups * slices) or (slices > 1 and not config.can_slice):
            continue
        if is_free and (
            Activations(policy).keeps_graph != (share > 0) or (share != SHARES[0] and share and not compiles)
        ):
            continue
        yield settings


def _placed(config: RunConfig, budgets: Budgets, fixed: frozenset[str], *, defers: bool) -> Iterator[dict[str, Any]]:
    """Settings that change where state lies and moves."""
    state = config.tiers.state
    streams = defers and "ram" in state and "gpu" not in state
    spills = defers and "nvme" in state and budgets.nvme > 0
    if config.output.savepoint_every:
        fixed |= {"tiers.generations"}

    kinds = {
        "tiers.streamed_share": STREAMED if streams else STREAMED[:1],
        "tiers.generations": GENERATIONS if spills else GENERATIONS[:1],
    }
    return _combined(config, kinds, fixed)


def _combined(config: RunConfig, kinds: Mapping[str, Sequence[Any]], fixed: frozenset[str]) -> Iterator[dict[str, Any]]:
    """All combinations of the values of settings; one that is fixed has its own value alone."""
    tried = [[_value(config, name)] if name in fixed else values for name, values in kinds.items()]
    return (dict(zip(kinds, values, strict=True)) for values in product(*tried))


def _value(config: RunConfig, name: str) -> Any:  # noqa: ANN401 - of any setting
    section, _, key = name.partition(".")
    return getattr(getattr(config, section), key)


def changed(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """The config with settings such as those of a choice."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    return replace(config, **{name: replace(getattr(config, name), **keys) for name, keys in sections.items()})


def _fitted(trial: Trial) -> Trial:
    """With all GPU memory that activations leave as the budget of slots and state."""
    if trial.gpu_bytes is None:
        return trial
    left = int(trial.gpu_bytes * (1 - MARGIN) - trial.activations.peak)
    if left <= 0:
        needed = round(trial.activations.peak)
        had = round(trial.gpu_bytes)
        raise PlanError("GPU memory for activations", needed, had, "An estimate. Train on fewer tokens a step.")
    return replace(trial, budgets=replace(trial.budgets, gpu=left))
