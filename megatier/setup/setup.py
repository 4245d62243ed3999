"""A setup describes a run once: config, model, machine, budgets, units and their sizes.

The planner tries variants of it, a session opens it, and the trainers pass it on. It allocates and moves nothing. What
the config leaves to the machine or the model is decided here or in its parts, once for each run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from transformers import PreTrainedModel

from megatier.config.schema import RunConfig
from megatier.data.image_sample import sample_images
from megatier.errors import DataError, PlanError, UnsupportedModelError
from megatier.models.decoder import Unit
from megatier.models.expert_units import cut_units, max_expert_parts
from megatier.ranks.ranks import Ranks, check_groups
from megatier.schedule.budgets import Budgets
from megatier.schedule.slots import GPU_SLOTS
from megatier.setup.machine import Machine, should_compile
from megatier.setup.tower import Tower
from megatier.setup.workload import COMPUTE_DTYPES, Workload

OF_SKELETON = ("path", "config", "frozen", "lora", "attention")
"""Settings of the model that its skeleton is built from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """A run on a machine, before it is opened. `of` makes one, and `with_config` makes variants of it."""

    config: RunConfig
    """The settings. `model.compile` is true or false here."""
    model: PreTrainedModel
    """The skeleton."""
    machine: Machine
    """The machine that runs."""
    budgets: Budgets
    """Bytes of each tier of a host, and of each GPU: those of the machine, unless a later config sets others."""
    units: tuple[Unit, ...]
    """All units of the model, without their schemas."""
    work: Workload
    """The sizes of everything that the run keeps and moves."""
    tower: Tower = field(default_factory=Tower)
    """What images take, once `with_tower` has measured it."""

    @classmethod
    def of(cls, config: RunConfig, model: PreTrainedModel, machine: Machine) -> Self:
        """Describe a run.

        Args:
            config: the run; its budgets are those of the machine.
            model: its skeleton (`skeleton.open_model`, `models.decoder.build_skeleton`).
            machine: the one that runs.

        Raises:
            ConfigError: the ranks cannot share the groups equally, or the experts cannot be cut so.
            UnsupportedModelError: the model cannot be streamed.
        """
        # This comes first, because it needs nothing but the config.
        check_groups(config.train.groups, machine.world.num_ranks)

        # From here on the config says whether the run compiles.
        config = config.changed({"model.compile": should_compile(config.model, machine)})
        units = cut_units(model, config.model.expert_parts)
        return cls(
            config=config,
            model=model,
            machine=machine,
            budgets=machine.budgets,
            units=units,
            work=Workload.of(config, model, units, machine.world),
        )

    @classmethod
    def here(cls, config: RunConfig, model: PreTrainedModel, ranks: Ranks | None = None) -> Self:
        """Describe a run on this machine; see `of` and `Machine.here`."""
        return cls.of(config, model, Machine.here(config.tiers, ranks=ranks))

    def with_config(self, config: RunConfig) -> Self:
        """Return the same run with another config. Only what differs is decided again.

        Raises:
            ConfigError, UnsupportedModelError: as for `of`.
        """
        before = self.config

        # The skeleton is kept, because building one takes seconds. A change of what it is built from is a fault of the
        # caller, and not of the user.
        for name in OF_SKELETON:
            assert getattr(before.model, name) == getattr(config.model, name), name
        check_groups(config.train.groups, self.machine.world.num_ranks)

        # If a CPU takes bf16 products in fp32 the run is not compiled, so the dtype counts as well.
        decided = (before.model.compile, before.model.compute_dtype)
        if (config.model.compile, config.model.compute_dtype) != decided:
            config = config.changed({"model.compile": should_compile(config.model, self.machine)})

        units = self.units

        # Cutting units walks over all modules, and a search tries many configs.
        if config.model.expert_parts != before.model.expert_parts:
            units = cut_units(self.model, config.model.expert_parts)
        return replace(
            self,
            config=config,
            budgets=self._budgets_with(config),
            units=units,
            work=Workload.of(config, self.model, units, self.machine.world),
        )

    def with_tower(self) -> Self:
        """Return the same run with what its images take, measured on the first conversations of its files.

        Plans need neither the data nor its processor. If one is missing, the tower says why nothing is known.
        """
        config = self.config
        if not config.data.images:
            return self
        try:
            sample = sample_images(config)
            dtype = COMPUTE_DTYPES[config.model.compute_dtype]
            tower = Tower() if sample is None else Tower.of(self.model, self.units, sample, dtype)
        except (DataError, UnsupportedModelError) as error:
            tower = Tower(missing=str(error))
        return replace(self, tower=tower)

    def _budgets_with(self, config: RunConfig) -> Budgets:
        """Return the budgets with those that another config sets."""
        # A budget that the config leaves open or does not change stays as the machine or a search has set it.
        budgets = self.budgets
        for tier in ("gpu", "ram"):
            num_bytes = getattr(config.tiers, tier)
            if num_bytes is not None and num_bytes != getattr(self.config.tiers, tier):
                budgets = replace(budgets, **{tier: num_bytes})
        return budgets

    def changed(self, settings: Mapping[str, Any]) -> Self:
        """Return the same run with other settings, each under its dotted name; see `with_config`."""
        return self.with_config(self.config.changed(settings))

    @property
    def compiles(self) -> bool:
        """Whether layers and loss are compiled."""
        return bool(self.config.model.compile)

    @property
    def saved_share(self) -> float:
        """The share of its activations that a layer saves if it keeps its graph."""
        return self.config.model.saved_share if self.compiles else 1.0

    @property
    def item_bytes(self) -> int:
        """Bytes of one number in the compute dtype."""
        return COMPUTE_DTYPES[self.config.model.compute_dtype].itemsize

    @property
    def tokens(self) -> int:
        """Tokens of one group."""
        return self.work.rows * self.config.data.sequence_length


def advise_expert_parts(short: PlanError, setup: Setup, place: Callable[[Setup], object]) -> PlanError:
    """Return an error with a remedy if more `model.expert_parts` would help, and otherwise the error itself.

    Args:
        short: the error.
        setup: the run that was refused.
        place: tries a run, and raises PlanError if something is short.
    """
    # More parts make the largest unit smaller. Only slots gain by that, since they are as large as that unit.
    if not short.what.startswith(GPU_SLOTS):
        return short

    # Powers of two are few, and one of them is at most twice the smallest number that helps.
    most = max_expert_parts(setup.model)
    numbers = {2**power for power in range(most.bit_length())} | {most}
    for parts in sorted(numbers):
        if parts > setup.config.model.expert_parts and _fits_slots(setup, parts, place):
            remedy = f"{short.remedy} Or set model.expert_parts to {parts}: then slots take part of a layer's experts."
            return PlanError(short.what, short.needed_bytes, short.had_bytes, remedy)

    return short


def _fits_slots(setup: Setup, parts: int, place: Callable[[Setup], object]) -> bool:
    """Return whether every unit fits into its slots with this number of parts. Something else may still be short."""
    try:
        place(setup.changed({"model.expert_parts": parts}))
    # Some experts cannot be cut into this number of parts, or at all.
    except UnsupportedModelError:
        return False
    except PlanError as short:
        return not short.what.startswith(GPU_SLOTS)
    return True
