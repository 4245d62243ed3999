"""The choices that a config leaves open, made before the run begins: by the machine, and by the planner if it can.

The planner can choose if `megatier bench` has measured the machine, and for several ranks the links between them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from rich.console import Console
from transformers import PreTrainedModel

from megatier.config.schema import RunConfig, TiersConfig
from megatier.config.text import options
from megatier.drives.mounts import budget_bytes
from megatier.engine.head import can_fuse
from megatier.errors import ConfigError, PlanError
from megatier.measure.probe import cached_rates
from megatier.models.decoder import find_units
from megatier.models.limits import has_position_table, max_positions
from megatier.planner.plan import hidden_at
from megatier.planner.prediction import Prediction
from megatier.planner.search import Choice, search
from megatier.planner.trial import changed
from megatier.report.metrics import wavering
from megatier.schedule.rates import Rates, World
from megatier.schedule.sizes import Budgets
from megatier.setup.attention import with_kernel
from megatier.setup.machine import budgets_of, choose_device, compiles
from megatier.setup.skeleton import skeleton_of
from megatier.train.outlet import say

WITHOUT_FLEX = "model.attention is {}, not flex_attention, because {}"


def fix_choices(
    config: RunConfig,
    given: frozenset[str] = frozenset(),
    model: PreTrainedModel | None = None,
    console: Console | None = None,
) -> RunConfig:
    """Return the config with the numeric choices that machine and model decide, as the run directory records them.

    A loss that cannot be fused with the model's head is not, with a warning (`engine.head`). With savepoints the
    budgets are fixed too, because a run goes on from a savepoint with those that it began with.

    Args:
        config: the run.
        given: dotted names of the settings that stay as they are.
        model: its skeleton, if it was built already.
        console: what a person sees, who is told if a GPU does not take its fastest attention; None: nobody sees.

    Raises:
        ConfigError: sequences are longer than the model's table of positions.
    """
    model = model or skeleton_of(config.model)

    # The kernel of attention depends on how long sequences are. A skeleton serves for any kernel here.
    config, why = with_kernel(fit_positions(config, given, model))
    if why and console is not None:
        say(console, WITHOUT_FLEX.format(config.model.attention, why))

    tiers = config.tiers
    chosen = compiles(config.model, choose_device(tiers))
    if config.output.savepoint_every:
        gpu, ram = budgets_of(tiers, choose_device(tiers))
        mounts = tuple(f"{mount.directory}:{budget_bytes(mount)}" for mount in tiers.mounts)
        tiers = replace(tiers, gpu=gpu, ram=ram, nvme=mounts)
    return with_true_loss(replace(config, model=replace(config.model, compile=chosen), tiers=tiers), model)


def with_true_loss(config: RunConfig, model: PreTrainedModel | None = None) -> RunConfig:
    """Return the config with `model.fused_loss` as it will be.

    Args:
        config: the run.
        model: its skeleton; None: it is built here.

    Raises:
        UnsupportedModelError, ConfigError: see `skeleton_of`, `find_units`.
    """
    if not config.model.fused_loss:
        return config
    model = model or skeleton_of(config.model)
    fused = can_fuse(model, find_units(model))
    return replace(config, model=replace(config.model, fused_loss=fused))


def fit_positions(config: RunConfig, given: frozenset[str], model: PreTrainedModel) -> RunConfig:
    """Return the config with sequences that are no longer than the model was made for, unless their length is given.

    Raises:
        ConfigError: it is given, and the model has a table of positions that ends before.
    """
    length = config.data.sequence_length
    most = max_positions(model)
    if most is None or length <= most:
        return config
    if "data.sequence_length" not in given:
        return replace(config, data=replace(config.data, sequence_length=most))
    if has_position_table(model):
        raise ConfigError(
            f"data.sequence_length is {length}, but the model looks up positions in a table of {most} "
            f"(max_position_embeddings). Set data.sequence_length to {most} or less."
        )
    return config


def plan_choices(
    config: RunConfig, given: frozenset[str], budgets: Budgets, world: World, console: Console
) -> tuple[RunConfig, Prediction | None]:
    """Return the config with the settings that make the simulated step shortest, and the step that they should make.

    If nothing fits by estimate the config stays as it is, and the run itself says what is short.

    Args:
        config: the run.
        given: dotted names of the settings that stay as they are.
        budgets: the least bytes of each tier that any host has, and any GPU.
        world: the ranks of the run.
        console: what a person sees.

    Returns:
        The config, and the planned step; None if the machine was not measured or nothing fits.
    """
    device = choose_device(config.tiers)
    rates = rates_here(config.tiers, device)

    # Settings chosen by rates that nobody measured would be chosen by chance.
    if rates is None or rates.assumed(world):
        if rates is not None or device.type == "cuda":
            command = "megatier bench" if world.ranks == 1 else "torchrun ... -m megatier bench"
            say(console, f"`{command}` would measure this machine and let the planner choose what is not given")
        return config, None

    compiled = compiles(config.model, device)
    model = skeleton_of(config.model)
    try:
        choice = search(model, config, rates, budgets, compiles=compiled, fixed=given, world=world)
    except PlanError as error:
        # An estimate must not refuse a run that may fit. The session counts the bytes, and refuses what does not.
        console.print(f"no plan fits by estimate, so the settings stay as they are: {error}", highlight=False)
        return config, None

    words = options(choice.settings)
    prediction = Prediction.of(choice)
    said = f"planned, {choice.seconds:.3g} s a step{wavering(prediction.seconds_range)}{': ' * bool(words)}{words}"
    console.print(said, markup=False, highlight=False, soft_wrap=True)
    _describe_hidden(console, choice, config.train.batch * config.data.sequence_length)
    return changed(config, choice.settings), prediction


def rates_here(tiers: TiersConfig, device: torch.device) -> Rates | None:
    """Return what `megatier bench` measured on this machine with a run's mounts; None if it did not."""
    return cached_rates([mount.directory for mount in tiers.mounts], device.type)


def budgets_here(tiers: TiersConfig, device: torch.device) -> Budgets:
    """Return the bytes of each tier that a run begun now would have: as they are set, or from the machine.

    Raises:
        ConfigError: more RAM than there is, or a mount cannot be used.
    """
    gpu, ram = budgets_of(tiers, device)
    return Budgets(gpu, ram, sum(budget_bytes(mount) for mount in tiers.mounts))


def _describe_hidden(console: Console, choice: Choice, tokens: int) -> None:
    """Say from how many tokens a step on the drives cost nothing (N*), if state spills."""
    if not choice.forecast.moved_bytes.get("ram_to_nvme"):
        return
    least = hidden_at(choice.trial, choice.placement, tokens)
    if least is None:
        return

    # `hidden_at` tries no fewer tokens than the run has, so the true N* may be below that.
    text = f"from N* = {least:,} tokens a step on; this run has {tokens:,}"
    if least == tokens:
        text = f"at this run's {tokens:,} tokens a step"
    console.print(f"all but compute is hidden {text}", highlight=False, soft_wrap=True)
