"""Trial: a run with given settings on a given machine, as far as a forecast needs it.

If several ranks share the state, sizes, budgets and rates are those of one rank, which stands for all.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from transformers import PreTrainedModel

from megatier.compute.adapted import matrices_in, wrappers_in
from megatier.config.schema import RunConfig
from megatier.errors import PlanError, mib
from megatier.forecast.forecast import Forecast, floor, forecast
from megatier.forecast.jobs import UPDATE_BYTES, ComputeSeconds
from megatier.layout import Layout
from megatier.models.decoder import Unit
from megatier.planner.memory import ActivationBytes, activation_bytes, in_tiles, keeps_attention
from megatier.schedule.placement import Placement, place
from megatier.schedule.rates import Rates, World
from megatier.schedule.sizes import Budgets
from megatier.schedule.timeline import Access
from megatier.setup.attention_rule import BACKWARD, FLEX, efficiency
from megatier.setup.setup import Setup, advised
from megatier.setup.workload import Workload, head_width, hidden_width
from megatier.tier import Phase, Tier

REPEATED_AT = 0.0, 0.1, 0.15, 0.3, 0.5, 0.8, 1.0
REPEATED = 0.7, 0.6, 0.55, 0.39, 0.16, 0.03, 0.0
"""The part of a compiled layer's forward that its backward repeats, at these saved shares, measured on layers of 8B
shape. At 0, as under recompute, that is all but the last product."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A run with given settings on a machine."""

    work: Workload
    """Units and policy."""
    accesses: tuple[Access, ...]
    """The order in which a step uses its units."""
    seconds: ComputeSeconds
    """Seconds of compute of one use of a unit by one group, by unit and phase."""
    activations: ActivationBytes
    """Estimated GPU memory in addition to the budget."""
    budgets: Budgets
    """Bytes that each tier may use."""
    gpu_bytes: float | None
    """Bytes that the process may take of the GPU; None: not known."""
    rates: Rates
    """The machine's rates."""
    world: World
    """The ranks of the run."""

    @classmethod
    def of(cls, setup: Setup) -> Self:
        """Make a trial of a run."""
        config = setup.config
        world = setup.machine.world
        rates = setup.machine.rates.of_rank(world)
        head = _head(setup.model, setup.units)
        return cls(
            work=setup.work,
            accesses=_accesses(head, config, setup.work),
            seconds=_compute_seconds(setup, head, rates),
            activations=activation_bytes(setup),
            budgets=setup.budgets.of_rank(world),
            gpu_bytes=config.tiers.gpu_limit or rates.gpu_bytes,
            rates=rates,
            world=world,
        )

    def placed(self) -> Placement:
        """Choose where everything lies.

        Raises:
            PlanError: it does not fit, or leaves too little GPU memory for activations; names what is short.
        """
        placement = place(self.work.specs, self.budgets, self.work.policy)
        arena = placement.state_bytes.get(Tier.GPU, 0) + placement.other_bytes.get(Tier.GPU, 0)
        if self.gpu_bytes is not None and arena + self.activations.peak > self.gpu_bytes:
            raise PlanError(
                f"GPU memory for activations, next to {mib(arena)} of slots and state",
                round(self.activations.peak),
                max(0, round(self.gpu_bytes) - arena),
                "This is an estimate. Lower tiers.gpu or model.saved_share, raise train.groups or train.slices, or set "
                "train.activations to offload or train.kept_attention to false. Or cut layers by model.tile_tokens.",
            )

        return placement

    def forecast(self, placement: Placement) -> Forecast:
        """Simulate a step."""
        return forecast(self.accesses, self.seconds, self.work.specs, placement, self.work.policy, self.rates)

    def seconds_range(self, placement: Placement, made: Forecast) -> tuple[float, float]:
        """Return the seconds of a step with the fastest drives, and with the slowest; equal if that is not known.

        Args:
            placement: homes and slots.
            made: the forecast with the drives as they are in the median.
        """
        rates = [self.rates.fastest, self.rates.slowest]
        if not made.uses_drives or rates == [self.rates] * 2:
            return made.seconds, made.seconds

        # A step with faster drives may come out longer, since moves meet in another order. So the least and the
        # greatest are taken.
        seconds = [made.seconds, *(replace(self, rates=tried).forecast(placement).seconds for tried in rates)]
        return min(seconds), max(seconds)

    def floor(self, placement: Placement) -> float:
        """Return the seconds that the forecast of a step has at least."""
        return floor(self.accesses, self.seconds, self.work.specs, placement, self.work.policy, self.rates)

    def times(self, tokens: float) -> Self:
        """Return the trial with so many times the tokens in each group.

        Compute and offloaded activations grow with the tokens. Activations on the GPU are not counted anew.
        """
        specs = tuple(replace(spec, activation_bytes=round(spec.activation_bytes * tokens)) for spec in self.work.specs)
        seconds = {use: seconds * tokens for use, seconds in self.seconds.items()}
        return replace(self, work=replace(self.work, specs=specs), seconds=seconds)

    def with_groups(self, times: int) -> Self:
        """Return the trial with so many times the groups, of as many tokens each."""
        count = self.work.policy.groups
        accesses = (replace(use, group=use.group + count * turn) for turn in range(times) for use in self.accesses)
        policy = replace(self.work.policy, groups=count * times)
        return replace(self, work=replace(self.work, policy=policy), accesses=tuple(accesses))

    @property
    def compute_seconds(self) -> float:
        """Seconds of a step's compute, with nothing else going on."""
        # The sum is exact, so that as many tokens in more groups take as long.
        return math.fsum(self.seconds.get((access.unit, access.phase), 0.0) for access in self.accesses)


def with_parts(short: PlanError, setup: Setup) -> PlanError:
    """Return a trial's refusal, which says so if more `model.expert_parts` would do (`setup.advised`)."""
    return advised(short, setup, lambda other: Trial.of(other).placed())


def _accesses(head: str, config: RunConfig, work: Workload) -> tuple[Access, ...]:
    """Return the order in which a step uses its units, which is that of the modules.

    A fused loss makes the head's gradient in the forward, so the backward does not use the head. Copies are lent to the
    backward too, which therefore does not use their unit. A backward ends at the first unit that is trained, or that
    trained copies may have been lent to.
    """
    uses = [(unit.name, name) for unit in work.units for name in unit.module_names if name != head]

    # The head runs after all layers, although its unit may come first: an embedding that is tied to it lies there too.
    uses += [(unit.name, head) for unit in work.units if head in unit.module_names]
    lent = {unit.name for unit in work.units if unit.is_lent}
    trained = {unit.name for unit in work.units if unit.layout.num_trained}
    if lent & trained:
        trained |= {unit.name for unit in work.units if unit.is_layer}
    first = next(index for index, (unit, _) in enumerate(uses) if unit in trained - lent)
    back = [use for use in reversed(uses[first:]) if use[0] not in lent]
    back = [use for use in back if use[1] != head or not config.model.fused_loss]

    steps = []
    for group in range(work.policy.groups):
        steps += [Access(unit, Phase.FORWARD, group) for unit, _ in uses]
        steps += [Access(unit, Phase.BACKWARD, group) for unit, _ in back]

    return tuple(steps)


def _compute_seconds(setup: Setup, head: str, rates: Rates) -> dict[tuple[str, Phase], float]:
    """Return the seconds of one use of a unit by one group, by unit and phase.

    The forward takes 2 FLOPs for each parameter and token, and those of attention. The backward takes twice as many,
    half of them for gradients of weights, which frozen ones do not have, and 2.5 times as many for attention. It runs
    tiles of tokens again as a whole, once more if an uncompiled forward runs again around them (which is left out where
    only sums follow: not counted), and adds up their gradients. Causal attention takes 2 x sequence x width FLOPs for
    each token in the forward, and twice that with a mask of all pairs, whose kernel also computes what is masked. A
    mask by blocks spares the more FLOPs the shorter documents are; that is not counted. Attention of compiled layers
    has the rate of its kernel (`setup.attention_rule`). Parameters with adapters of their own have gradients though
    they are frozen, and take time to be adapted.
    """
    model, config = setup.model, setup.config
    text = model.config.get_text_config()
    sequence = config.data.sequence_length
    tokens = setup.tokens
    experts, chosen = _experts(text)
    tiled = in_tiles(setup)
    adapted = wrappers_in(model)
    beside = matrices_in(model)
    width = head_width(text)
    pairs = (4 if config.has_mask else 2) * sequence * text.num_attention_heads * width
    kernel = config.model.attention
    rate = {p: rates.flops_per_s * (efficiency(kernel, width, sequence, p) if setup.compiles else 1.0) for p in Phase}
    seconds: dict[tuple[str, Phase], float] = {}

    def flops(layout: Layout, names: Container[str] | None = None, beside: Container[str] = ()) -> float:
        return _active_elements(layout, experts, chosen, names, beside=beside) * 2 * tokens

    for unit in setup.work.units:
        products = flops(unit.layout, beside=beside)
        idle = products - flops(unit.layout.trained, beside=beside)
        idle -= flops(unit.layout, adapted)
        if unit.is_layer or unit.experts is not None:
            # The modules of a unit share its FLOPs.
            uses = len(unit.module_names)
            attention = {p: pairs * tokens / rate[p] if unit.is_layer else 0.0 for p in Phase}
            repeated, again = _repeated(setup, unit)
            if tiled and products:
                inside = flops(unit.layout, tiled) / products
                runs_again = not (setup.compiles or setup.work.activations[unit.name].keeps_graph)
                repeated = (1 - inside) * repeated + inside * (1 + repeated * runs_again)
            forward = products / rates.flops_per_s
            backward = forward * (2 + repeated) - idle / rates.flops_per_s
            backward += attention[Phase.BACKWARD] * BACKWARD + attention[Phase.FORWARD] * again
            backward += _sum_seconds(unit, config, tokens, tiled, rates)
            adapting = _adapting_seconds(unit, config, adapted, rates)
            forward += adapting
            backward += 2 * adapting
            seconds[unit.name, Phase.FORWARD] = (forward + attention[Phase.FORWARD]) / uses
            seconds[unit.name, Phase.BACKWARD] = backward / uses
        elif head in unit.module_names:
            # An embedding that is tied to the head is a use of the same unit, and counts as one.
            fused = config.model.fused_loss
            each = products / rates.flops_per_s / len(unit.module_names)
            backward = each if idle else 2 * each
            seconds[unit.name, Phase.FORWARD] = each + backward if fused else each
            seconds[unit.name, Phase.BACKWARD] = 0.0 if fused else backward

    return seconds


def _sum_seconds(unit: Unit, config: RunConfig, tokens: int, tiled: Container[str], rates: Rates) -> float:
    """Return the seconds in which a group's tiles of tokens write the gradients of their weights, and add them up.

    Each tile writes a gradient of each of its weights. It is read, and so is the sum in fp32, which is written again.
    """
    if config.model.tile_tokens is None:
        return 0.0
    trained = [tensor for tensor in unit.layout.trained.tensors if tensor.name in tiled]
    tiles = config.train.slices * math.ceil(tokens / config.train.slices / config.model.tile_tokens)
    num_bytes = sum(tensor.num_elements for tensor in trained) * (8 + 2 * unit.layout.schema.grad_width)

    # AdamW on the GPU is bound by the memory of the GPU as well.
    return tiles * num_bytes / (rates.gpu_update_parameters_per_s * UPDATE_BYTES)


def _adapting_seconds(unit: Unit, config: RunConfig, adapted: Container[str], rates: Rates) -> float:
    """Return the seconds in which the parameters of a unit are adapted, which the memory of the GPU bounds.

    PEFT makes each sum twice, and each time reads the parameter and writes as much. The backward makes them again, and
    reads and writes as much for the gradients of the adapters.
    """
    num_elements = sum(tensor.num_elements for tensor in unit.layout.tensors if tensor.name in adapted)
    num_bytes = config.train.slices * 4 * num_elements * unit.layout.schema.grad_width
    return num_bytes / (rates.gpu_update_parameters_per_s * UPDATE_BYTES)


def _repeated(setup: Setup, unit: Unit) -> tuple[float, float]:
    """Return the share of the forward that the backward repeats: of its products, and of attention.

    The compiler saves first what saves most FLOPs for each byte. It counts 4 x sequence FLOPs for an element of
    attention, and 2 x hidden size for one of a product. Flex attention is always saved, if anything is.
    """
    config = setup.config
    share = setup.saved_share if setup.work.activations[unit.name].keeps_graph else 0.0
    products = float(np.interp(share, REPEATED_AT, REPEATED))
    if keeps_attention(setup, unit):
        return products, 0.0
    if not share:
        return products, 1.0

    is_first = config.model.attention == FLEX or 2 * config.data.sequence_length > hidden_width(setup.model)
    return products, 0.0 if setup.compiles and is_first else products


def _experts(text: Any) -> tuple[int, float]:  # noqa: ANN401 - a config of any family
    """Return a layer's number of experts, and the share of them to which one token is sent; 0 and 1 without experts."""
    # Families have several names for the number.
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((number for name in names if (number := getattr(text, name, None))), 0)
    chosen = getattr(text, "num_experts_per_tok", None) or experts
    return experts, chosen / experts if experts else 1.0


def _active_elements(
    layout: Layout, experts: int, chosen: float, names: Container[str] | None = None, *, beside: Container[str] = ()
) -> float:
    """Return the elements of a unit's matrices with which one token is multiplied: of experts those it is sent to.

    With names, only matrices that have one of them count. Those that stand beside do not.
    """
    total = 0.0
    for tensor in layout.tensors:
        if len(tensor.shape) < 2 or tensor.name in beside or (names is not None and tensor.name not in names):
            continue
        is_expert = experts and len(tensor.shape) == 3 and tensor.parameter_shape[0] == experts
        total += tensor.num_parameters * (chosen if is_expert else 1.0)
    return total


def _head(model: PreTrainedModel, units: Sequence[Unit]) -> str:
    """Return the name of the module that makes logits; empty if no unit has it."""
    head = model.get_output_embeddings()
    names = (name for unit in reversed(units) for name in reversed(unit.module_names))
    return next((name for name in names if model.get_submodule(name) is head), "")
