"""Searches for the settings with the shortest step: groups, slices, activations, kept attention, and where state lies.

The search goes through trials in the order of their compute, the simplest first among equals, and ends when compute
alone takes longer than the best step so far. It skips nothing that could be better: a trial with the placement of an
earlier one is the same step, and one whose lower bound exceeds the best step is slower. Groups, slices and the saved
share change the order of sums, so they are numeric choices, which are fixed for a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from typing import Any

from megatier.config.schema import RunConfig
from megatier.errors import PlanError
from megatier.forecast.forecast import Forecast
from megatier.forecast.jobs import ComputeSeconds
from megatier.hardware import readable_bytes
from megatier.planner.shortage import Settings, add_remedies, find_nearest
from megatier.planner.trial import Trial, advise_parts
from megatier.schedule.placement import Placement
from megatier.setup.setup import Setup
from megatier.tier import Activations

GROUPS_SEARCHED = (1, 2, 4, 8)
"""Numbers of groups for each rank."""
SLICES_SEARCHED = (1, 2, 4, 8)
"""Numbers of slices for each group."""
POLICIES_SEARCHED = tuple(policy.value for policy in Activations)
"""Activation policies, from the one that recomputes least."""
SHARES_SEARCHED = (0.8, 0.5, 0.15, 0.0)
"""Saved shares. 0 goes with the policies that save only a layer's input, all others go with `keep`."""
KEPT_ATTENTION_SETTING = "train.kept_attention"
TILE_SETTING = "model.tile_tokens"
TILE_TOKENS = 16_384
"""Tokens of a tile. Each tile adds to the gradients of all its weights, so smaller tiles are slow."""
LEAST_GAIN_OF_TILES = 0.03
"""If a run fits without tiles, they must save this share of a step to be chosen."""
OFFLOAD_ATTENTION_SETTING = "train.offload_attention"
STREAMED_SHARES_SEARCHED = (0.0, 0.3, 0.5, 0.6)
"""Shares of the parameters at home in RAM whose units stream (`tiers.streamed_share`)."""
GENERATIONS_SEARCHED = (1, 2)
"""Generations of units that spill. Two let updates run in the backward."""
GPU_MARGIN = 0.06
"""Share of the GPU that stays free, because activations are estimated. No measured run was further off."""
LEAST_GAIN = 0.005
"""More groups, slices or streaming must save this share of a step to be chosen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The settings that were chosen, and the forecast of a step with them."""

    settings: Settings
    """The settings."""
    trial: Trial
    """The run with these settings."""
    placement: Placement
    """Homes and slots."""
    forecast: Forecast
    """The simulated step."""

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.forecast.seconds

    @property
    def seconds_range(self) -> tuple[float, float]:
        """Seconds of a step with drives at their fastest and slowest. This takes two more simulations."""
        return self.trial.seconds_range(self.placement, self.forecast)


def search(setup: Setup, fixed: frozenset[str] = frozenset()) -> Choice:
    """Find the fastest settings that fit.

    Args:
        setup: the run, with all settings that are not searched. train.batch stays. The budget of the GPU counts only if
            the size of its memory is not known.
        fixed: dotted names of the settings that stay as they are.

    Raises:
        PlanError: no trial fits. The error is that of the trial which is nearest to fitting.
        UnsupportedModelError: the model cannot be streamed.
    """
    config = setup.config
    is_open = TILE_SETTING not in fixed and config.model.tile_tokens is None

    # A sequence that is no longer than a tile would be one tile, which saves nothing.
    can_cut = is_open and config.data.sequence_length > TILE_TOKENS
    whole: Choice | None = None
    try:
        whole = _search_settings(setup, fixed)
    except PlanError:
        if not can_cut:
            raise
    if whole is not None and not can_cut:
        return whole

    # Tiles recompute products and change bits. So they are chosen only for long sequences, if nothing fits without
    # them or if the memory that they free saves more time than they cost.
    try:
        cut = _search_settings(setup.changed({TILE_SETTING: TILE_TOKENS}), fixed)
    except PlanError:
        if whole is None:
            raise
        return whole
    if whole is not None and cut.seconds > whole.seconds * (1 - LEAST_GAIN_OF_TILES):
        return whole
    return replace(cut, settings={TILE_SETTING: TILE_TOKENS, **cut.settings})


def _search_settings(setup: Setup, fixed: frozenset[str]) -> Choice:
    """Find the fastest settings that fit, with the tiles of tokens that the config has; see `search`."""
    best: Choice | None = None
    refused: list[tuple[PlanError, Settings]] = []
    # Compute and placement of the trials so far, since a forecast depends on nothing else. Mappings have no hash.
    seen: list[tuple[ComputeSeconds, Placement]] = []
    # The settings that fit, without the one that offloads attention.
    that_fit: set[tuple[tuple[str, Any], ...]] = set()

    # The sort is stable, so among trials with equal compute the simplest comes first.
    for settings, wanted in sorted(_list_trials(setup, fixed), key=lambda pair: pair[1].compute_seconds):
        limit = float("inf") if best is None else best.seconds * (1 - LEAST_GAIN)

        # Trials are sorted by compute, so none of those that follow can be faster.
        if wanted.compute_seconds >= limit:
            break

        # Attention is offloaded only if it has no room on the GPU, so that link and RAM have less to do.
        others = tuple((name, value) for name, value in settings.items() if name != OFFLOAD_ATTENTION_SETTING)
        if settings.get(OFFLOAD_ATTENTION_SETTING) and others in that_fit:
            continue

        try:
            trial = wanted if "tiers.gpu" in fixed else _fit_gpu_budget(wanted)
            placement = trial.placed()
        except PlanError as error:
            # If nothing fits, the search raises the error that was nearest to fitting.
            refused.append((error, settings))
            continue

        that_fit.add(others)

        # Different settings may lead to equal homes and compute, and so to equal forecasts.
        if (trial.seconds, placement) in seen:
            continue
        seen.append((trial.seconds, placement))

        # The lower bound takes a fraction of the time of a simulation.
        if best is not None and trial.least_seconds(placement) >= limit:
            continue

        forecast = trial.forecast(placement)
        if forecast.seconds < limit:
            chosen = {**settings, "tiers.gpu": trial.budgets.gpu}
            best = Choice(
                settings={name: value for name, value in chosen.items() if name not in fixed},
                trial=trial,
                placement=placement,
                forecast=forecast,
            )

    if best is None:
        raise _make_refusal(refused, setup, fixed)
    return best


def _make_refusal(refused: Sequence[tuple[PlanError, Settings]], setup: Setup, fixed: frozenset[str]) -> PlanError:
    """Return the error of the candidate that is nearest to fitting, with remedies.

    Args:
        refused: the errors of all candidates, each with its settings.
        setup: the run that is searched.
        fixed: as for `search`.
    """
    short = find_nearest([error for error, _ in refused])
    settings = next(settings for error, settings in refused if error is short)
    candidate = setup.changed(settings)

    def place(other: Setup) -> object:
        trial = Trial.of(other)
        if "tiers.gpu" not in fixed:
            trial = _fit_gpu_budget(trial)
        return trial.placed()

    advised = advise_parts(short, candidate)
    return add_remedies(advised, candidate, place)


def _list_trials(setup: Setup, fixed: frozenset[str]) -> Iterator[tuple[Settings, Trial]]:
    """Yield a trial for each distinct combination of settings that the batch allows, the simplest first."""
    for computed in _combine_computed(setup, fixed):
        trial = Trial.of(setup.changed(computed))
        present = trial.work.policy

        # The place of state changes the policy alone, so the skeleton is not read again.
        for placed in _combine_placed(setup, fixed, defers=present.deferred):
            # The fields of the policy have the names of these settings.
            fields = {name.removeprefix("tiers."): value for name, value in placed.items()}
            policy = replace(present, **fields)
            work = replace(trial.work, policy=policy)
            yield computed | placed, replace(trial, work=work)


def _combine_computed(setup: Setup, fixed: frozenset[str]) -> Iterator[Settings]:
    """Yield the combinations of the settings that change what is computed.

    If the activation policy or the saved share is fixed, it is combined with every value of the other. Kept attention
    is tried where a backward would otherwise recompute attention.
    """
    config = setup.config
    kinds: dict[str, Sequence[Any]] = {
        "train.groups": [count * setup.machine.world.num_ranks for count in GROUPS_SEARCHED],
        "train.slices": SLICES_SEARCHED,
        "train.activations": POLICIES_SEARCHED,
        "model.saved_share": SHARES_SEARCHED,
    }
    is_free = fixed.isdisjoint({"train.activations", "model.saved_share"})
    for settings in _combine(config, kinds, fixed):
        groups, slices, policy, share = settings.values()
        activations = Activations(policy)
        if config.train.batch % (groups * slices) or (slices > 1 and not config.can_slice):
            continue

        # `keep` goes with shares above 0, and the other policies with 0.
        if is_free and activations.keeps_graph != (share > 0):
            continue

        # A layer that is not compiled saves all of its activations, whatever the share, so one share is enough.
        if is_free and not setup.compiles and share not in (0, SHARES_SEARCHED[0]):
            continue

        # A compiled layer with a share above 0 keeps attention by its share, so there is nothing to choose.
        repeats = share == 0 if setup.compiles else not activations.keeps_graph
        kept = {KEPT_ATTENTION_SETTING: (True, False)} if repeats else {}
        for attention in _combine(config, kept, fixed):
            # The output of attention stays on the GPU, or is offloaded with the input of its layer.
            can_leave = attention.get(KEPT_ATTENTION_SETTING) and activations.offloads_input
            offloaded = {OFFLOAD_ATTENTION_SETTING: (False, True)} if can_leave else {}
            for offload in _combine(config, offloaded, fixed):
                yield settings | attention | offload


def _combine_placed(setup: Setup, fixed: frozenset[str], *, defers: bool) -> Iterator[Settings]:
    """Return the combinations of the settings that change the place and the moves of state."""
    config = setup.config
    state = config.tiers.state
    streams = defers and "ram" in state and "gpu" not in state
    spills = defers and "nvme" in state and setup.budgets.nvme > 0

    # With savepoints one generation is kept, so two would let no update run ahead. The search leaves that alone.
    if config.output.savepoint_every:
        fixed |= {"tiers.generations"}

    kinds = {
        "tiers.streamed_share": STREAMED_SHARES_SEARCHED if streams else STREAMED_SHARES_SEARCHED[:1],
        "tiers.generations": GENERATIONS_SEARCHED if spills else GENERATIONS_SEARCHED[:1],
    }
    return _combine(config, kinds, fixed)


def _combine(config: RunConfig, kinds: Mapping[str, Sequence[Any]], fixed: frozenset[str]) -> Iterator[Settings]:
    """Yield all combinations of the values of settings. A fixed setting keeps its value."""
    tried: list[Sequence[Any]] = []
    for name, values in kinds.items():
        given = attrgetter(name)(config)
        tried.append([given] if name in fixed else values)
    for combination in product(*tried):
        yield dict(zip(kinds, combination, strict=True))


def _fit_gpu_budget(trial: Trial) -> Trial:
    """Return the trial with a GPU budget of all memory that activations leave.

    Raises:
        PlanError: activations leave no memory.
    """
    if trial.gpu_bytes is None:
        return trial

    left = int(trial.gpu_bytes * (1 - GPU_MARGIN) - trial.activations.peak)
    if left <= 0:
        needed = round(trial.activations.peak)
        had = round(trial.gpu_bytes)
        raise PlanError("GPU memory for activations", needed, had, "This is an estimate. Train on fewer tokens a step.")

    # Users copy the budget from the plan, so it is rounded to a short number.
    budgets = replace(trial.budgets, gpu=readable_bytes(left))
    return replace(trial, budgets=budgets)
