"""Makes the choices that a config leaves open, before the run begins: by the machine, and by the planner if it can.

The planner can choose if `megatier bench` has measured the machine, and for several ranks the links between them.
"""

from __future__ import annotations

from rich.console import Console
from transformers import PretrainedConfig, PreTrainedModel

from megatier.config.schema import RunConfig
from megatier.config.text import format_options
from megatier.data.image_packs import positions_of
from megatier.engine.head import can_fuse
from megatier.errors import ConfigError, PlanError
from megatier.guards.weight_changes import check_evaluates
from megatier.models.decoder import check_document_boundaries
from megatier.models.limits import has_position_table, max_positions
from megatier.planner.changes import find_hidden_tokens
from megatier.planner.prediction import Prediction
from megatier.planner.search import Choice, search
from megatier.report.console import say
from megatier.report.metrics import format_range
from megatier.setup.setup import Setup

WITHOUT_FLEX = "model.attention is {}, not flex_attention, because {}"


def fit_positions(config: RunConfig, given: frozenset[str], model: PretrainedConfig) -> RunConfig:
    """Return the config with sequences that are no longer than the model was made for, unless their length is given.

    Args:
        config: the run.
        given: dotted names of the settings that stay as they are.
        model: Hugging Face's config of its model.
    """
    most = max_positions(model)

    # A length that somebody gave is no default to be changed. If it is too long for a table, `check_positions` refuses
    # it.
    if most is None or config.data.sequence_length <= most or "data.sequence_length" in given:
        return config
    return config.changed({"data.sequence_length": most})


def check_positions(config: RunConfig, model: PreTrainedModel) -> None:
    """Refuse sequences that are longer than the model's table of positions.

    Raises:
        ConfigError: names the length that can be taken.
    """
    length = config.data.sequence_length
    most = max_positions(model.config)
    # Positions that are computed have no last one: then there is a note alone (`describe_positions`).
    if most is not None and length > most and has_position_table(model):
        raise ConfigError(
            f"data.sequence_length is {length}, but the model looks up positions in a table of {most} "
            f"(max_position_embeddings). Set data.sequence_length to {most} or less."
        )


def check_model(config: RunConfig, model: PreTrainedModel) -> None:
    """Refuse a model that cannot be trained or evaluated as the config says.

    Raises:
        ConfigError, UnsupportedModelError: names what to change.
    """
    check_positions(config, model)
    data = config.data
    if data.is_apart:
        if data.images:
            positions_of(model)
        check_document_boundaries(model)

    # The last evaluation comes when the run is over, which is too late to find that the model cannot be evaluated.
    if data.holds_out:
        check_evaluates(model)


def settle_choices(setup: Setup) -> Setup:
    """Return a run with the choices that its model decides, as the run directory records them.

    A loss that cannot be fused with the model's head is not, with a warning (`engine.head`).

    Raises:
        ConfigError, UnsupportedModelError: the model cannot be trained or evaluated so.
    """
    check_model(setup.config, setup.model)
    if not setup.config.model.fused_loss:
        return setup
    return setup.changed({"model.fused_loss": can_fuse(setup.model, setup.units)})


def keep_budgets(setup: Setup) -> Setup:
    """Return a run whose config has its budgets, if it makes savepoints: from these it goes on with the same ones."""
    # A savepoint is the run's own block files. Budgets of another day would place other state there.
    if not setup.config.output.savepoint_every:
        return setup
    # With their sizes, since what is free on a drive changes from day to day.
    mounts = tuple(f"{mount.directory}:{mount.num_bytes}" for mount in setup.machine.mounts)
    return setup.changed(
        {
            "tiers.gpu": setup.budgets.gpu,
            "tiers.ram": setup.budgets.ram,
            "tiers.nvme": mounts,
        }
    )


def plan_choices(setup: Setup, given: frozenset[str], console: Console) -> tuple[RunConfig, Prediction | None]:
    """Return the config with the settings that make the simulated step shortest, and the step that they should make.

    If nothing fits by estimate the config stays as it is, and the run itself says what is short.

    Args:
        setup: the run.
        given: dotted names of the settings that stay as they are.
        console: what a person sees.

    Returns:
        The config, and the planned step; None if the machine was not measured or nothing fits.
    """
    config, machine = setup.config, setup.machine

    # Settings chosen by rates that nobody measured would be chosen by chance.
    if not machine.is_measured:
        if not machine.assumed or machine.device.type == "cuda":
            command = "megatier bench" if machine.world.num_ranks == 1 else "torchrun ... -m megatier bench"
            say(console, f"`{command}` would measure this machine and let the planner choose what is not given")
        return config, None

    setup = setup.with_tower()
    try:
        choice = search(setup, given)
    except PlanError as error:
        # An estimate must not refuse a run that may fit. The session counts the bytes, and refuses what does not.
        console.print(f"no plan fits by estimate, so the settings stay as they are: {error}", highlight=False)
        return config, None

    # As options of the command line, so that they can be given to another run as they are.
    settings = format_options(choice.settings)
    prediction = Prediction(choice)
    planned = f"planned, {choice.seconds:.3g} s a step{format_range(prediction.seconds_range)}"
    say(console, f"{planned}: {settings}" if settings else planned)
    _describe_hidden(console, choice, config.train.batch * config.data.sequence_length)
    return config.changed(choice.settings), prediction


def _describe_hidden(console: Console, choice: Choice, tokens: int) -> None:
    """Say from how many tokens a step on the drives cost nothing (N*), if state spills."""
    if not choice.forecast.moved_bytes.get("ram_to_nvme"):
        return
    least = find_hidden_tokens(choice.trial, choice.placement, tokens)
    if least is None:
        return

    # `find_hidden_tokens` tries no fewer tokens than the run has, so the true N* may be below that.
    text = f"from N* = {least:,} tokens a step on; this run has {tokens:,}"
    if least == tokens:
        text = f"at this run's {tokens:,} tokens a step"
    say(console, f"all but compute is hidden {text}")
