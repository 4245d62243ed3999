"""A trial: one choice of settings on one machine, ready to be placed and forecast.

The planner makes many trials and takes the fastest. If several ranks share the state, a trial is that of one rank,
which stands for all: sizes, budgets and rates are its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from transformers import PreTrainedModel

from megatier.byte_counts import format_bytes
from megatier.config.schema import RunConfig
from megatier.errors import LESS_ACTIVATIONS, PlanError
from megatier.forecast.forecast import Forecast, forecast, least_step_seconds
from megatier.forecast.jobs import ComputeSeconds
from megatier.models.decoder import Unit
from megatier.planner.memory import ActivationBytes, activation_bytes
from megatier.planner.unit_seconds import unit_seconds
from megatier.schedule.budgets import Budgets
from megatier.schedule.placement import Placement, place
from megatier.schedule.rates import Rates
from megatier.schedule.timeline import Access
from megatier.schedule.world import World
from megatier.setup.setup import Setup, advise_expert_parts
from megatier.setup.workload import Workload
from megatier.tier import Phase, Tier


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A run with given settings on a given machine."""

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
    """Bytes of GPU memory that the process may take; None: not known."""
    rates: Rates
    """The machine's rates."""
    world: World
    """The ranks of the run."""

    @classmethod
    def of(cls, setup: Setup) -> Self:
        """Make a trial of a run."""
        config = setup.config
        world = setup.machine.world

        # The ranks of a host share its rates and budgets, so each has a part of them.
        rates = setup.machine.rates.of_rank(world)
        head = _find_head(setup.model, setup.units)
        return cls(
            work=setup.work,
            accesses=_list_accesses(head, config, setup.work),
            seconds=unit_seconds(setup, head, rates),
            activations=activation_bytes(setup),
            budgets=setup.budgets.of_rank(world),
            gpu_bytes=config.tiers.gpu_limit or rates.gpu_bytes_beside(setup.budgets.ram),
            rates=rates,
            world=world,
        )

    def placed(self) -> Placement:
        """Choose where everything lies.

        Raises:
            PlanError: the state does not fit, or leaves too little GPU memory for activations. It names what is short.
        """
        placement = place(self.work.specs, self.budgets, self.work.policy)

        # The arena is allocated when a run begins, so activations get what it leaves.
        arena = placement.state_bytes.get(Tier.GPU, 0) + placement.other_bytes.get(Tier.GPU, 0)
        if self.gpu_bytes is not None and arena + self.activations.peak > self.gpu_bytes:
            raise PlanError(
                f"GPU memory for activations, next to {format_bytes(arena)} of slots and state",
                round(self.activations.peak),
                max(0, round(self.gpu_bytes) - arena),
                f"This is an estimate. {LESS_ACTIVATIONS}",
            )

        return placement

    def forecast(self, placement: Placement) -> Forecast:
        """Simulate a step."""
        return forecast(self.accesses, self.seconds, self.work.specs, placement, self.work.policy, self.rates)

    def seconds_range(self, placement: Placement, forecast: Forecast) -> tuple[float, float]:
        """Return the seconds of a step with the drives at their fastest and at their slowest.

        The two are equal if the range was not measured.

        Args:
            placement: homes and slots.
            forecast: the forecast with drives at their median speed.
        """
        fastest = replace(self, rates=self.rates.fastest)
        slowest = replace(self, rates=self.rates.slowest)

        # Each simulation takes as long as the forecast itself, so it is skipped where it would return the same.
        is_measured = not fastest.rates == slowest.rates == self.rates
        if not (forecast.uses_drives and is_measured):
            return forecast.seconds, forecast.seconds

        # A step with faster drives may take longer, because moves meet in another order. So minimum and maximum are
        # taken.
        seconds = [forecast.seconds]
        seconds += [trial.forecast(placement).seconds for trial in (fastest, slowest)]
        return min(seconds), max(seconds)

    def least_seconds(self, placement: Placement) -> float:
        """Return a lower bound of the forecast of a step, in seconds."""
        return least_step_seconds(self.accesses, self.seconds, self.work.specs, placement, self.work.policy, self.rates)

    def with_tokens(self, times: float) -> Self:
        """Return the trial with `times` as many tokens in each group.

        Compute and offloaded activations grow with the tokens. Activations on the GPU are not estimated again.
        """
        specs = []
        for spec in self.work.specs:
            offloaded_bytes = round(spec.activation_bytes * times)
            specs.append(replace(spec, activation_bytes=offloaded_bytes))
        work = replace(self.work, specs=tuple(specs))
        seconds = {use: seconds * times for use, seconds in self.seconds.items()}
        return replace(self, work=work, seconds=seconds)

    def with_groups(self, times: int) -> Self:
        """Return the trial with `times` as many groups, each with as many tokens as before."""
        present = self.work.policy.groups
        groups = times * present
        accesses: list[Access] = []
        # Every group uses the units in the same order.
        for num_before in range(0, groups, present):
            for access in self.accesses:
                group = num_before + access.group
                accesses.append(replace(access, group=group))
        policy = replace(self.work.policy, groups=groups)
        work = replace(self.work, policy=policy)
        return replace(self, work=work, accesses=tuple(accesses))

    @property
    def compute_seconds(self) -> float:
        """Seconds of a step's compute alone."""
        # The sum is exact, so that the same tokens in more groups take equally long.
        return math.fsum(self.seconds.get((access.unit, access.phase), 0.0) for access in self.accesses)


def advise_parts(short: PlanError, setup: Setup) -> PlanError:
    """Return the error of a trial, with a remedy if more `model.expert_parts` would help."""
    return advise_expert_parts(short, setup, lambda other: Trial.of(other).placed())


def _list_accesses(head: str, config: RunConfig, work: Workload) -> tuple[Access, ...]:
    """Return the order in which a step uses its units, which is the order of the modules.

    If the loss is fused, the backward leaves out the head, whose gradient is made in the forward. It also leaves out
    units whose weights are lent as copies, since it uses the same copies. It ends at the first unit that is trained, or
    that trained copies may have been lent to.
    """
    uses: list[tuple[Unit, str]] = []
    of_head: list[tuple[Unit, str]] = []
    for unit in work.units:
        for name in unit.module_names:
            kind = of_head if name == head else uses
            kind.append((unit, name))

    # The head runs last, although its unit comes first if it is tied to the embedding.
    uses += of_head

    # Nothing before the first unit that is trained needs a gradient.
    with_gradient = _trained_or_lent_to(work.units)
    first = next(index for index, (unit, _) in enumerate(uses) if unit.name in with_gradient)
    backward = []
    for unit, module_name in reversed(uses[first:]):
        is_done_in_forward = module_name == head and config.model.fused_loss
        if not (unit.is_lent or is_done_in_forward):
            backward.append(unit)

    accesses = []
    for group in range(work.policy.groups):
        accesses += [Access(unit.name, Phase.FORWARD, group) for unit, _ in uses]
        accesses += [Access(unit.name, Phase.BACKWARD, group) for unit in backward]
    return tuple(accesses)


def _trained_or_lent_to(units: Sequence[Unit]) -> set[str]:
    """Return the names of the units that are trained, or that use trained copies which were lent to them."""
    trained = [unit for unit in units if unit.layout.num_trained]
    names = {unit.name for unit in trained if not unit.is_lent}

    # Nobody knows which layers use a copy, so if one is trained all layers count.
    if any(unit.is_lent for unit in trained):
        layers = [unit for unit in units if unit.is_layer]
        names.update(layer.name for layer in layers if not layer.is_lent)
    return names


def _find_head(model: PreTrainedModel, units: Sequence[Unit]) -> str:
    """Return the name of the module that computes logits; empty if no unit has it."""
    head = model.get_output_embeddings()
    for unit in reversed(units):
        for name in reversed(unit.module_names):
            if model.get_submodule(name) is head:
                return name
    return ""
