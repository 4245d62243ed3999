"""The setup of a run, which the first rank plans for all."""

from __future__ import annotations

from rich.console import Console

from megatier.config.schema import RunConfig
from megatier.models.weights import WeightReader
from megatier.planner.prediction import Prediction
from megatier.ranks.channel import SingleRank
from megatier.ranks.ranks import Ranks
from megatier.report.console import console_of, say
from megatier.setup.attention_choice import choose_kernel
from megatier.setup.machine import Machine
from megatier.setup.setup import Setup
from megatier.setup.skeleton import model_config_of, open_model
from megatier.train.choices import WITHOUT_FLEX, fit_positions, keep_budgets, plan_choices, settle_choices


def plan_setup(
    config: RunConfig, given: frozenset[str], machine: Machine, ranks: Ranks | None, console: Console
) -> tuple[Setup, WeightReader, Prediction | None]:
    """Return a run with the choices that it leaves open, the reader of its weights, and the step that is expected.

    The first rank plans for all, with what every rank and host has. Without a plan each rank computes one group, unless
    the config says otherwise, and no step is expected.

    Args:
        config: the run.
        given: dotted names of the settings that stay as they are.
        machine: the one that runs.
        ranks: the ranks of the run.
        console: what a person sees.

    Raises:
        ConfigError, UnsupportedModelError: the run cannot be planned or opened; the message says what to change.
    """
    # Each rank has one group then, which is what data parallelism usually means.
    if ranks is not None and "train.groups" not in given:
        config = config.changed({"train.groups": ranks.size})

    # The kernel of attention depends on how long sequences are.
    all_ranks = ranks or SingleRank()
    model_config = model_config_of(config.model)

    def fitted() -> tuple[RunConfig, str]:
        return choose_kernel(fit_positions(config, given, model_config), model_config, machine)

    chosen, why_not_flex = all_ranks.broadcast(fitted)
    if why_not_flex:
        say(console_of(ranks, console), WITHOUT_FLEX.format(chosen.model.attention, why_not_flex))

    # Each rank has its own skeleton, and the first one alone plans on it.
    model, reader = open_model(chosen, model_config)
    setup = settle_choices(Setup.of(chosen, model, machine))
    setup = keep_budgets(setup)
    planned, expected = all_ranks.broadcast(lambda: plan_choices(setup, given, console))
    return setup.with_config(planned), reader, expected
