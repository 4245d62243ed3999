"""The plan of a run: what lies where, how long a step takes, what bounds it, and which one change would help most.

Nothing is reserved and no GPU is needed: the model is a skeleton, the machine a set of rates.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from megatier.config import ModelConfig, RunConfig
from megatier.engine.activation import Activations
from megatier.errors import PlanError, mib
from megatier.models.decoder import Unit, build_skeleton
from megatier.models.weights import resolve
from megatier.schedule.forecast import HOST_SECONDS, Forecast, forecast
from megatier.schedule.placement import Budgets, Placement, bytes_per_element, place
from megatier.schedule.rates import Rates
from megatier.schedule.timeline import Access
from megatier.schedule.trace import TraceEvent
from megatier.store.tier import Kind, Phase, Tier
from megatier.train.memory import ActivationBytes, activation_bytes
from megatier.train.workload import Workload, read_model_config

REPEATED = 0.7
"""Share of a layer's forward that its backward repeats under recompute: the last product is not needed again, and
compiled layers repeat cheap things alone."""
CHEAP = 0.15
"""Share of a layer's forward that is norms and products of elements, which a compiled layer repeats first."""
HIDDEN = 1.05
"""A step counts as bound by compute while it takes at most this many times as long as compute."""
TIMES_MAX = 4096
"""Times the present tokens that are tried for N*."""
HALVINGS = 4
"""Of the last doubling, to narrow N* down to 3 %."""
SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, slots=True)
class Change:
    """One thing changed, and what it would do."""

    what: str
    tokens_per_s: float
    gain: float
    """Tokens a second over those of the plan."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A run on a machine.

    Attributes:
        num_parameters: all of them.
        tokens: of a step.
        budgets: bytes per tier.
        accesses: the order in which a step uses its units.
        placement: homes and slots.
        state_bytes: per tier and kind.
        activations: GPU memory beside the budget, estimated.
        forecast: of a step.
        compute_seconds: of a step, if nothing else took time.
        hidden_at: N*, the tokens of a step from which all but compute is hidden; None: none that was tried.
        changes: what would help, the best first.
    """

    num_parameters: int
    tokens: int
    budgets: Budgets
    accesses: tuple[Access, ...]
    placement: Placement
    state_bytes: Mapping[tuple[Tier, Kind], int]
    activations: ActivationBytes
    forecast: Forecast
    compute_seconds: float
    hidden_at: int | None
    changes: tuple[Change, ...]

    @property
    def tokens_per_s(self) -> float:
        """Of the whole run."""
        return self.tokens / self.forecast.seconds

    @property
    def attainment(self) -> float:
        """Compute alone over the step."""
        return self.compute_seconds / self.forecast.seconds

    @property
    def written_bytes_per_step(self) -> float:
        """To NVMe."""
        return self.forecast.moved_bytes.get("ram_to_nvme", 0.0)

    @property
    def written_bytes_per_day(self) -> float:
        """To NVMe, if the run goes on: what wears a drive."""
        return self.written_bytes_per_step / self.forecast.seconds * SECONDS_PER_DAY

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        made = self.forecast
        return {
            "num_parameters": self.num_parameters,
            "tokens_per_step": self.tokens,
            "seconds": made.seconds,
            "tokens_per_s": self.tokens_per_s,
            "attainment": self.attainment,
            "bound_by": made.bound_by,
            "hidden_at_tokens": self.hidden_at,
            "budget_bytes": dataclasses.asdict(self.budgets),
            "state_bytes": {f"{tier} {kind}": size for (tier, kind), size in self.state_bytes.items()},
            "other_bytes": {str(tier): size for tier, size in self.placement.other_bytes.items()},
            "activation_bytes": dataclasses.asdict(self.activations) | {"peak": self.activations.peak},
            "homes": {f"{unit} {kind}": str(tier) for (unit, kind), tier in self.placement.homes.items()},
            "streamed": list(self.placement.streamed),
            "busy_seconds": {lane: seconds for lane, seconds in made.busy_seconds.items() if seconds},
            "alone_seconds": {lane: seconds for lane, seconds in made.alone_seconds.items() if seconds},
            "moved_bytes": dict(made.moved_bytes),
            "written_bytes_per_day": self.written_bytes_per_day,
            "changes": [dataclasses.asdict(change) for change in self.changes],
        }

    def events(self) -> list[TraceEvent]:
        """The forecast as a trace, for the picture."""
        return [
            TraceEvent(span.lane, span.name, int(span.start * 1e9), int(span.end * 1e9))
            for span in self.forecast.spans
            if span.lane != "host"
        ]


@dataclass(frozen=True, slots=True)
class _Run:
    """What a forecast is made of."""

    work: Workload
    accesses: tuple[Access, ...]
    seconds: Mapping[tuple[str, Phase], float]
    budgets: Budgets
    rates: Rates

    def placed(self) -> Placement:
        return place(self.work.specs, self.budgets, self.work.policy)

    def forecast(self, placement: Placement | None = None) -> Forecast:
        where = self.placed() if placement is None else placement
        return forecast(self.accesses, self.seconds, self.work.specs, where, self.work.policy, self.rates)

    def times(self, tokens: float) -> _Run:
        """With so many times the tokens in each group."""
        return replace(self, seconds={use: seconds * tokens for use, seconds in self.seconds.items()})

    @property
    def compute_seconds(self) -> float:
        return sum(self.seconds.get((access.unit, access.phase), 0.0) for access in self.accesses)


def skeleton_of(config: ModelConfig) -> PreTrainedModel:
    """The model without its weights.

    Raises:
        UnsupportedModelError: transformers does not take its config, or it cannot be streamed.
    """
    folder = resolve(config.path) if config.path is not None else None
    return build_skeleton(read_model_config(config, folder), config.attention)


def make_plan(model: PreTrainedModel, config: RunConfig, rates: Rates, budgets: Budgets, *, compiles: bool) -> Plan:
    """Plan a run.

    Args:
        model: its skeleton.
        config: the run's settings.
        rates: the machine's.
        budgets: bytes of each tier.
        compiles: whether layers are compiled.

    Raises:
        PlanError: it does not fit; names what is short.
        UnsupportedModelError: the model cannot be streamed.
    """
    work = Workload.of(model, config.model, config.tiers, config.train, config.data.sequence_length)
    seconds = _compute_seconds(model, config, work, rates, compiles)
    run = _Run(work, _accesses(model, config, work), seconds, budgets, rates)
    placement = run.placed()
    activations = activation_bytes(model, config, work, compiles=compiles)
    _check_gpu(placement, activations, config.tiers.gpu_limit or rates.gpu_bytes)
    made = run.forecast(placement)
    sizes = {spec.name: spec.num_elements for spec in work.specs}
    state: Counter[tuple[Tier, Kind]] = Counter()
    for (name, kind), home in placement.homes.items():
        state[home, kind] += sizes[name] * bytes_per_element(kind, split=work.policy.split)
    tokens = config.train.batch * config.data.sequence_length
    return Plan(
        sum(tensor.num_elements for unit in work.units for tensor in unit.layout.tensors),
        tokens,
        budgets,
        run.accesses,
        placement,
        dict(state),
        activations,
        made,
        run.compute_seconds,
        _hidden_at(run, tokens),
        _changes(run, tokens, tokens / made.seconds),
    )


def _check_gpu(placement: Placement, activations: ActivationBytes, limit_bytes: float | None) -> None:
    arena = placement.state_bytes.get(Tier.GPU, 0) + placement.other_bytes.get(Tier.GPU, 0)
    if limit_bytes is not None and arena + activations.peak > limit_bytes:
        raise PlanError(
            f"GPU memory for activations beside {mib(arena)} of slots and state",
            round(activations.peak),
            max(0, round(limit_bytes) - arena),
            "An estimate. Lower tiers.gpu, the tokens of a group (train.groups) or of a slice (train.slices), or "
            "model.saved_share, or set train.activations to offload.",
        )


# ---------------------------------------------------------------------- the step


def _accesses(model: PreTrainedModel, config: RunConfig, work: Workload) -> tuple[Access, ...]:
    """The order in which a step uses its units: that of the modules. A fused loss makes the head's gradient at once."""
    head = _head(model)
    uses = [(unit.name, name) for unit in work.units for name in unit.module_names if name != head]
    uses += [(unit.name, head) for unit in work.units if head in unit.module_names]
    back = [use for use in reversed(uses) if use[1] != head or not config.model.fused_loss]
    steps = []
    for group in range(config.train.groups):
        steps += [Access(unit, Phase.FORWARD, group) for unit, _ in uses]
        steps += [Access(unit, Phase.BACKWARD, group) for unit, _ in back]
    return tuple(steps)


def _compute_seconds(
    model: PreTrainedModel, config: RunConfig, work: Workload, rates: Rates, compiles: bool
) -> dict[tuple[str, Phase], float]:
    """Of one use by one group: 2 FLOPs a parameter and token forward, twice as many backward, and attention's.

    Causal attention: 2 x sequence x width FLOPs a token forward.
    """
    text = model.config.get_text_config()
    sequence = config.data.sequence_length
    tokens = work.rows * sequence
    head_width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    width = text.num_attention_heads * head_width
    head = _head(model)
    seconds: dict[tuple[str, Phase], float] = {}
    for unit in work.units:
        products = _active_elements(unit, text) * 2 * tokens
        if unit.is_layer:
            forward = (products + 2 * sequence * width * tokens) / rates.flops_per_s
            seconds[unit.name, Phase.FORWARD] = forward
            seconds[unit.name, Phase.BACKWARD] = forward * (2 + _repeated(config, work, unit, compiles))
        elif head in unit.module_names:
            fused = config.model.fused_loss
            seconds[unit.name, Phase.FORWARD] = products * (3 if fused else 1) / rates.flops_per_s
            seconds[unit.name, Phase.BACKWARD] = 0.0 if fused else 2 * products / rates.flops_per_s
    return seconds


def _repeated(config: RunConfig, work: Workload, unit: Unit, compiles: bool) -> float:
    """Share of the forward that the backward does again."""
    share = config.model.saved_share
    if work.activations[unit.name] is not Activations.KEEP or (compiles and not share):
        return REPEATED
    return CHEAP * (1 - share) if compiles else 0.0


def _active_elements(unit: Unit, text: Any) -> float:  # noqa: ANN401 - a config of any family
    """Elements of the unit's products that one token takes part in: of experts, those it is sent to."""
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None) or 0
    chosen = getattr(text, "num_experts_per_tok", None) or experts
    total = 0.0
    for tensor in unit.layout.tensors:
        if len(tensor.shape) < 2:
            continue
        is_expert = experts and len(tensor.shape) == 3 and tensor.shape[0] == experts
        total += math.prod(tensor.shape) * (chosen / experts if is_expert else 1.0)
    return total


def _head(model: PreTrainedModel) -> str:
    module = model.get_output_embeddings()
    return next((name for name, found in model.named_modules() if found is module), "")


# ---------------------------------------------------------------------- what if


def _hidden_at(run: _Run, tokens: int) -> int | None:
    """N*: about the fewest tokens a step that hide everything but compute; None where TIMES_MAX times do not.

    Doubled until all is hidden, then narrowed: more tokens never hide less.
    """
    placement = run.placed()

    def is_hidden(times: float) -> bool:
        tried = run.times(times)
        return tried.forecast(placement).seconds <= HIDDEN * (tried.compute_seconds + HOST_SECONDS)

    times = 1.0
    while not is_hidden(times):
        times *= 2
        if times > TIMES_MAX:
            return None
    low, high = times / 2, times
    for _ in range(HALVINGS if times > 1 else 0):
        middle = (low + high) / 2
        low, high = (low, middle) if is_hidden(middle) else (middle, high)
    return math.ceil(tokens * high)


def _changes(run: _Run, tokens: int, tokens_per_s: float) -> tuple[Change, ...]:
    """Each tried alone, the best first."""
    budgets = run.budgets
    tried: list[tuple[str, _Run, float]] = [
        ("twice the tokens in a group", run.times(2), 2),
        ("a quarter more RAM", replace(run, budgets=replace(budgets, ram=budgets.ram * 5 // 4)), 1),
        ("a quarter more GPU memory for state", replace(run, budgets=replace(budgets, gpu=budgets.gpu * 5 // 4)), 1),
    ]
    if run.rates.drives:
        drives = (*run.rates.drives, run.rates.drives[0])
        tried.append(("one more drive", replace(run, rates=replace(run.rates, drives=drives)), 1))
    changes = []
    for what, changed, times in tried:
        rate = tokens * times / changed.forecast().seconds
        changes.append(Change(what, rate, rate / tokens_per_s - 1))
    return tuple(sorted(changes, key=lambda change: -change.gain))
