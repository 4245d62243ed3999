"""`megatier plan`: does a run fit, what goes where, how long a step takes, and what would help."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from megatier.checkpoint.pace import about, every_seconds
from megatier.cli.output import json_text, print_json, write_text
from megatier.config import file as config_file
from megatier.config.schema import RunConfig
from megatier.errors import ConfigError, mib
from megatier.hardware import device_for, mount_of
from megatier.measure.probe import cached_rates, io_threads
from megatier.report.metrics import format_count, format_seconds, format_share, wavering
from megatier.schedule.rates import Rates, read_rates
from megatier.schedule.sizes import Budgets

if TYPE_CHECKING:
    from megatier.planner.plan import Plan


def run(argv: Sequence[str]) -> int:
    """Print the plan; 0 when the run fits."""
    parser = argparse.ArgumentParser(
        prog="megatier plan",
        usage="%(prog)s [options] CONFIG.yaml [--section.key VALUE ...]",
        description="Say what a run needs and how fast it will be, before it runs: what lies where, seconds a step, "
        "what bounds it, and which one change would help most. On this machine it takes the defaults of `megatier "
        "train` and chooses what is left open as that does. Reserves nothing.",
        epilog="example: megatier plan run.yaml (here), or megatier plan run.yaml --machine h200.yaml --tiers.gpu "
        "83GiB --tiers.ram 80GiB (elsewhere)",
    )
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml", help="the run's; settings on the command line win")
    parser.add_argument(
        "--machine",
        type=Path,
        metavar="FILE.yaml",
        help="the machine's rates, such as examples/machines/h200.yaml (default: what `megatier bench` measured here)",
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="with --machine, too, first choose the settings that make the step shortest: groups, slices, activations, "
        "saved and streamed share, generations and tiers.gpu, as far as neither file nor command line gives them",
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="also write the plan as JSON")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="also draw the step as planned")
    parser.add_argument("--json", action="store_true", help="print the plan as one JSON document, and nothing else")
    options, overrides = parser.parse_known_args(argv)
    loaded, given = config_file.load(options.config, overrides), config_file.given(options.config, overrides)
    rates = read_rates(options.machine) if options.machine is not None else _measured(loaded)
    console = Console(quiet=options.json)
    with _nothing_collected():
        from megatier.report.picture import draw  # loads torch: only once the arguments are known to be right

        plan, chosen = _planned(loaded, given, rates, here=options.machine is None, searches=options.search)
    threads, why = io_threads(loaded.tiers.io_threads, rates)
    document = plan.as_dict() | {"chosen": chosen, "io_threads": threads if loaded.tiers.nvme else None}
    if options.output is not None:
        write_text(options.output, json_text(document), "--output FILE.json")
    if options.picture is not None:
        picture = draw(plan.events(), f"{options.config.name}, as planned")
        write_text(options.picture, picture, "--picture FILE.svg")
    if options.json:
        print_json(document)
    if chosen:
        words = " ".join(f"--{name} {value}" for name, value in chosen.items())
        console.print(f"chosen: {words}", markup=False, highlight=False, soft_wrap=True)
    for table in (_bytes_table(plan), _time_table(plan), _change_table(plan)):
        console.print(table)
    if loaded.tiers.nvme:
        console.print(f"NVMe: {threads} I/O threads each way, {why}.", highlight=False, soft_wrap=True)
    console.print(*_sentences(plan), sep="\n", markup=False, highlight=False)
    return 0


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Looking for garbage while libraries load takes a sixth of a plan's time, and finds none."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _planned(
    loaded: RunConfig, given: frozenset[str], rates: Rates, *, here: bool, searches: bool
) -> tuple[Plan, Mapping[str, Any]]:
    """The plan of a run, and the settings that were chosen for it, by dotted name.

    Args:
        loaded: the run.
        given: dotted names of the settings that stay as they are.
        rates: the machine's.
        here: this machine will run it: budgets and choices are then those of `megatier train`.
        searches: choose on another machine too.
    """
    from megatier.planner.plan import make_plan
    from megatier.planner.search import changed, search
    from megatier.session.machine import choose_device, compiles
    from megatier.session.skeleton import skeleton_of
    from megatier.train.choices import budgets_here, fix_choices, with_true_loss

    model = skeleton_of(loaded.model)
    if here:
        device = choose_device(loaded.tiers)
        loaded = fix_choices(loaded, model)
        budgets, compiled = budgets_here(loaded.tiers, device), compiles(loaded.model, device)
    else:
        loaded = with_true_loss(loaded, model)
        budgets, compiled = _budgets(loaded, rates.gpu_bytes if searches else None), _compiles(loaded)
    chosen: Mapping[str, Any] = {}
    if here or searches:
        chosen = search(model, loaded, rates, budgets, compiles=compiled, fixed=given).settings
        loaded = changed(loaded, chosen)
        budgets = replace(budgets, gpu=chosen.get("tiers.gpu", budgets.gpu))
    return make_plan(model, loaded, rates, budgets, compiles=compiled), chosen


def _measured(loaded: RunConfig) -> Rates:
    """What `megatier bench` measured on this machine."""
    directories = [mount.directory for mount in loaded.tiers.mounts]
    found = cached_rates(directories, device_for(loaded.tiers.device))
    if found is None:
        words = f" --nvme {','.join(loaded.tiers.nvme)}" if loaded.tiers.nvme else ""
        raise ConfigError(
            f"nothing was measured on this machine with these drives. Run `megatier bench{words}` first, or describe a "
            "machine with --machine FILE.yaml."
        )
    return found


def _budgets(loaded: RunConfig, free_gpu: float | None) -> Budgets:
    """Of another machine: as set, since nobody can look. A search chooses within `free_gpu` bytes."""
    tiers = loaded.tiers
    gpu = round(free_gpu) if tiers.gpu is None and free_gpu is not None else tiers.gpu
    if gpu is None or tiers.ram is None:
        raise ConfigError(
            "a plan for another machine needs both budgets: set tiers.gpu and tiers.ram, such as --tiers.gpu 60GiB."
        )
    nvme = sum(
        mount_of(mount.directory).free_bytes if mount.num_bytes is None else mount.num_bytes for mount in tiers.mounts
    )
    return Budgets(gpu, tiers.ram, nvme)


def _compiles(loaded: RunConfig) -> bool:
    """On another machine: as set; by default where a GPU computes."""
    return loaded.tiers.device != "cpu" if loaded.model.compile is None else loaded.model.compile


def _bytes_table(plan: Plan) -> Table:
    """What lies where."""
    from megatier.tier import STATE_KINDS, Tier

    table = Table("tier", title="state, and slots, gradients and activations (other)", title_justify="left")
    for name in (*STATE_KINDS, "other", "in all", "budget"):
        table.add_column(str(name), justify="right")
    budgets = {Tier.GPU: plan.budgets.gpu, Tier.RAM: plan.budgets.ram, Tier.NVME: plan.budgets.nvme}
    for tier, budget in budgets.items():
        kinds = [plan.state_bytes.get((tier, kind), 0) for kind in STATE_KINDS]
        other = plan.placement.other_bytes.get(tier, 0)
        total = plan.placement.state_bytes.get(tier, 0) + other
        table.add_row(str(tier), *(mib(size) if size else "-" for size in (*kinds, other, total, budget)))
    return table


def _time_table(plan: Plan) -> Table:
    """How long each lane is busy, and would be alone."""
    made = plan.forecast
    waver = wavering(plan.seconds_range)
    title = f"a step: {format_seconds(made.seconds)}{waver}, {format_count(plan.tokens_per_s)} tokens/s"
    table = Table("lane", title=title, title_justify="left")
    for name in ("moves", "alone", "busy", "share"):
        table.add_column(name, justify="right")
    for lane, alone in made.alone_seconds.items():
        if not alone:
            continue
        moved = made.moved_bytes.get(lane, 0)
        busy = made.busy_seconds[lane]
        figures = format_seconds(alone), format_seconds(busy), format_share(busy, made.seconds)
        table.add_row(lane, mib(round(moved)) if moved else "-", *figures)
    return table


def _change_table(plan: Plan) -> Table:
    table = Table("one change", title="what would help", title_justify="left")
    for name in ("tokens/s", "gain"):
        table.add_column(name, justify="right")
    for change in plan.changes:
        table.add_row(change.what, format_count(change.tokens_per_s), f"{change.gain:+.1%}")
    return table


def _sentences(plan: Plan) -> Iterator[str]:
    from megatier.tier import Tier

    trained = f", {format_count(plan.num_trained)} of them trained" if plan.num_trained < plan.num_parameters else ""
    yield f"{format_count(plan.num_parameters)} parameters{trained}, {format_count(plan.tokens)} tokens a step."
    yield f"Bound by {plan.forecast.bound_by}; compute alone takes {plan.attainment:.0%} of the step."
    beside = mib(round(plan.activations.peak))
    yield f"Beside tiers.gpu the GPU holds about {beside} of activations, loss and libraries."
    if plan.mask_bytes:
        yield (
            f"Of that {mib(plan.mask_bytes)} and more are the mask that keeps documents apart; what it masks is "
            "computed too. model.attention flex_attention has a mask by blocks and skips them."
        )
    if plan.placement.streamed:
        yield f"{len(plan.placement.streamed)} units stream their state through the GPU."
    if count := list(plan.placement.grad_homes.values()).count(Tier.NVME):
        yield _spilled_gradients(count, plan)
    if plan.hidden_at is not None:
        yield f"From {format_count(plan.hidden_at)} tokens a step on all but compute is hidden, if activations fit."
    yield f"A checkpoint has {mib(plan.checkpoint_bytes)}{_writing(plan)}."
    if plan.generation_bytes:
        sizes = [f"{mib(size)} ({use})" for use, size in plan.generation_bytes.items()]
        yield f"By tiers.generations NVMe holds {', '.join(sizes)}."
        words = "" if plan.savepoint_seconds is None else f" and takes {format_seconds(plan.savepoint_seconds)}"
        yield f"A savepoint writes {mib(plan.savepoint_bytes)}{words}: the rest stays where it lies on NVMe."
    if plan.written_bytes_per_step:
        day = mib(round(plan.written_bytes_per_day))
        yield f"NVMe takes {mib(round(plan.written_bytes_per_step))} of writes a step, {day} a day."


def _spilled_gradients(count: int, plan: Plan) -> str:
    """What gradients of so many units cost on NVMe, and what spares that."""
    words, remedy = "Gradients", "and so do train.clip null and numerics.guard off."
    if plan.placement.sums_on_gpu:
        words, remedy = "Sums of groups", "and so does train.groups 1; fewer groups make it less."
    size = mib(plan.spilled_gradient_bytes)
    return (
        f"{words} of {count} units lie on NVMe, because RAM is too short for them: {size} more written a step, and as "
        f"much read. More tiers.ram spares that, {remedy}"
    )


def _writing(plan: Plan) -> str:
    """How long a checkpoint takes, where a drive is known."""
    if plan.checkpoint_seconds is None or plan.checkpoint_pause_seconds is None:
        return ""
    seconds, pause = format_seconds(plan.checkpoint_seconds), format_seconds(plan.checkpoint_pause_seconds)
    apart = about(every_seconds(plan.checkpoint_pause_seconds))
    return f" and is written in {seconds}, of which training waits {pause}; by time one is due every {apart} or so"
