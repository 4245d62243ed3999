"""What a config leaves open, chosen before the run begins: by the machine, and by the planner where it was measured."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console
from transformers import PreTrainedModel

from megatier.config import RunConfig
from megatier.engine.head import can_fuse
from megatier.errors import PlanError
from megatier.models.decoder import find_units
from megatier.schedule.forecast import Forecast
from megatier.schedule.placement import Budgets
from megatier.store.blockfile import budget_bytes
from megatier.train.plan import hidden_at
from megatier.train.probe import cached_rates
from megatier.train.search import Choice, changed, search
from megatier.train.session import budgets_of, choose_device, compiles
from megatier.train.trial import skeleton_of


def fix_choices(config: RunConfig) -> RunConfig:
    """The config with numeric choices that machine and model decide: the run directory records what was chosen.

    A loss that cannot be fused with the model's head is not, with a warning (`engine.head`).
    With savepoints also the budgets: from one a run goes on with those that it began with.
    """
    tiers = config.tiers
    chosen = compiles(config.model, choose_device(tiers))
    if config.output.savepoint_every:
        gpu, ram = budgets_of(tiers, choose_device(tiers))
        mounts = tuple(f"{mount.directory}:{budget_bytes(mount)}" for mount in tiers.mounts)
        tiers = replace(tiers, gpu=gpu, ram=ram, nvme=mounts)
    return with_true_loss(replace(config, model=replace(config.model, compile=chosen), tiers=tiers))


def with_true_loss(config: RunConfig, model: PreTrainedModel | None = None) -> RunConfig:
    """The config with `model.fused_loss` as it will be; the skeleton is built where it is not given.

    Raises:
        UnsupportedModelError, ConfigError: see `skeleton_of`, `find_units`.
    """
    if not config.model.fused_loss:
        return config
    model = model or skeleton_of(config.model)
    fused = can_fuse(model, find_units(model))
    return replace(config, model=replace(config.model, fused_loss=fused))


def plan_choices(config: RunConfig, given: frozenset[str], console: Console) -> tuple[RunConfig, Forecast | None]:
    """The config with the settings that make the simulated step shortest, where `megatier bench` measured the machine.

    And the step that they should make. Where nothing fits by estimate the config stays as it is: the run itself says
    what is short.
    """
    device = choose_device(config.tiers)
    rates = cached_rates([mount.directory for mount in config.tiers.mounts], device.type)
    if rates is None:
        if device.type == "cuda":
            console.print("`megatier bench` would measure this machine and let the planner choose what is not given")
        return config, None
    gpu, ram = budgets_of(config.tiers, device)
    budgets = Budgets(gpu, ram, sum(budget_bytes(mount) for mount in config.tiers.mounts))
    compiled = compiles(config.model, device)
    try:
        choice = search(skeleton_of(config.model), config, rates, budgets, compiles=compiled, fixed=given)
    except PlanError as error:
        console.print(f"no plan fits by estimate, so the settings stay as they are: {error}", highlight=False)
        return config, None
    words = "".join(f" --{name} {value}" for name, value in choice.settings.items())
    said = f"planned, {choice.seconds:.3g} s a step{':' * bool(words)}{words}"
    console.print(said, markup=False, highlight=False, soft_wrap=True)
    _describe_hidden(console, choice, config.train.batch * config.data.sequence_length)
    return changed(config, choice.settings), choice.forecast


def _describe_hidden(console: Console, choice: Choice, tokens: int) -> None:
    """N*, where state spills: more tokens a step cost the drives nothing."""
    if not choice.forecast.moved_bytes.get("ram_to_nvme"):
        return
    least = hidden_at(choice.trial, choice.placement, tokens)
    if least is None:
        return
    text = f"from N* = {least:,} tokens a step on; this run has {tokens:,}"
    if least == tokens:
        text = f"at this run's {tokens:,} tokens a step"
    console.print(f"all but compute is hidden {text}", highlight=False, soft_wrap=True)
