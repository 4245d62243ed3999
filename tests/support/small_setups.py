"""Runs of tests, described once: on this machine, or on one that nobody can look at."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedModel

from megatier.config.output_section import OutputConfig
from megatier.config.schema import OF_LOOP, ModelConfig, NumericsConfig, RunConfig, TiersConfig, TrainConfig
from megatier.schedule.budgets import Budgets
from megatier.schedule.rates import Rates
from megatier.schedule.world import ONE_PROCESS, World
from megatier.setup.machine import Machine
from megatier.setup.setup import Setup
from megatier.setup.skeleton import skeleton_of

ROUND = Rates(
    drives=(),
    to_gpu_bytes_per_s=1e10,
    to_ram_bytes_per_s=1e10,
    update_parameters_per_s=1e9,
    memory_bytes_per_s=1e11,
    gpu_update_parameters_per_s=1e10,
    flops_per_s=1e12,
)
"""Rates of a machine of which only sizes are asked."""
NOTHING = Budgets(0, 0, 0)


def sections(
    model: ModelConfig,
    tiers: TiersConfig,
    train: TrainConfig,
    numerics: NumericsConfig,
    tokens: int,
    *,
    savepoints: bool = False,
) -> RunConfig:
    """The config of a test that makes its own batches, of so many tokens a sequence."""
    data = replace(OF_LOOP, sequence_length=tokens)
    output = OutputConfig(savepoint_every=int(savepoints))
    return RunConfig(model=model, data=data, tiers=tiers, train=train, numerics=numerics, output=output)


def elsewhere(
    config: RunConfig,
    rates: Rates = ROUND,
    budgets: Budgets = NOTHING,
    *,
    compiles: bool = True,
    world: World = ONE_PROCESS,
    model: PreTrainedModel | None = None,
) -> Setup:
    """A run on a machine with these rates and budgets of a host; without a skeleton it is made of the config."""
    config = config.changed({"model.compile": compiles})
    machine = Machine.elsewhere(config.tiers, rates, budgets, world)
    return Setup.of(config, model or skeleton_of(config.model), machine)
