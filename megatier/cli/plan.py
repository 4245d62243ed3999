"""`megatier plan`: says whether a run fits, where everything goes, how long a step takes, and what would help."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from megatier.cli.output import json_text, print_json, write_text
from megatier.config import file as config_file
from megatier.config import text as config_text
from megatier.config.remarks import list_remarks
from megatier.config.schema import RunConfig
from megatier.errors import ConfigError
from megatier.hardware import mount_of
from megatier.measure.probe import io_threads
from megatier.report.console import say
from megatier.report.figures import NO_GPU
from megatier.report.plan_text import links_assumption, make_tables, rates_assumption, write_sentences
from megatier.schedule.budgets import Budgets
from megatier.schedule.rates import ASSUMED, Rates
from megatier.schedule.rates_file import as_dict, read_rates
from megatier.schedule.world import World
from megatier.session.paths import check_paths

if TYPE_CHECKING:
    from megatier.planner.plan import Plan
    from megatier.setup.machine import Machine


def run(argv: Sequence[str]) -> int:
    """Print the plan; returns 0 if the run fits."""
    # What the parser does not know are settings, which the sections of the config take or refuse.
    options, overrides = _parser().parse_known_args(argv)
    loaded, given = config_file.load_given(options.config, overrides)
    world = World(options.ranks, options.hosts)

    # As `megatier train` does under torchrun (`train.shared_setup.plan_setup`).
    if world.num_ranks > 1 and "train.groups" not in given:
        loaded = replace(loaded, train=replace(loaded.train, groups=world.num_ranks))

    here = options.machine is None
    elsewhere = None if here else _elsewhere(loaded, options.machine, searches=options.search)

    # Remarks go past stdout, which may be read as JSON.
    console = Console(stderr=True)
    if here:
        # A run with such texts would be refused, whatever fits.
        check_paths(loaded, partial(say, console))
    say(console, f"{options.config}: loading PyTorch and transformers")
    with _pausing_collector():
        planned = _make_plan(loaded, given, world, elsewhere, searches=options.search)
    for remark in list_remarks(loaded.changed(planned.chosen)):
        say(console, remark)

    # Asked before anything is written, since it may refuse the directory of the run.
    taken = planned.plan.space.described(loaded.output, here=here)

    document = _document(planned, loaded, world)
    _write_files(options, document, planned.plan)
    if options.json:
        print_json(document)
        return 0

    console = Console()
    _print_tables(console, planned, here=here)
    _print_sentences(console, planned, loaded, taken)
    _print_assumptions(console, planned, loaded, world, here=here, searches=options.search)
    return 0


def _document(planned: Planned, loaded: RunConfig, world: World) -> dict[str, Any]:
    """Return the plan as one document for JSON."""
    rates = planned.machine.rates
    figures = as_dict(rates)
    assumed = {name: figures[name] for name in planned.machine.assumed}
    assumed |= {name: ASSUMED[name] for name in rates.assumed(world)}

    threads, _ = io_threads(loaded.tiers.io_threads, rates)
    return planned.plan.as_dict() | {
        "chosen": planned.chosen,
        "assumed_rates": assumed,
        "io_threads": threads if loaded.tiers.nvme else None,
    }


def _write_files(options: argparse.Namespace, document: Mapping[str, Any], plan: Plan) -> None:
    """Write the plan, and its picture, where the user wants them."""
    if options.output is not None:
        write_text(options.output, json_text(document), "--output FILE.json")
    if options.picture is not None:
        from megatier.report.picture import draw

        picture = draw(plan.events(), f"{options.config.name}, as planned")
        write_text(options.picture, picture, "--picture FILE.svg")


def _print_tables(console: Console, planned: Planned, *, here: bool) -> None:
    """Print the choice, and the tables of the plan."""
    if planned.chosen:
        say(console, f"chosen: {config_text.format_options(planned.chosen)}")
    if here and planned.machine.device.type == "cpu":
        say(console, NO_GPU)
    for table in make_tables(planned.plan):
        console.print(table)


def _print_sentences(console: Console, planned: Planned, loaded: RunConfig, taken: str) -> None:
    """Print what the plan says in words.

    Args:
        console: what a person sees.
        planned: the plan.
        loaded: the run.
        taken: what it needs to save, in words.
    """
    if loaded.tiers.nvme:
        threads, why = io_threads(loaded.tiers.io_threads, planned.machine.rates)
        say(console, f"NVMe: {threads} I/O threads each way, {why}.")

    # How many steps epochs are is for the text to say, which a plan does not read.
    steps = None if loaded.train.epochs is not None else loaded.train.steps
    sentences = write_sentences(planned.plan, steps, taken)
    console.print(*sentences, sep="\n", markup=False, highlight=False)


def _print_assumptions(
    console: Console, planned: Planned, loaded: RunConfig, world: World, *, here: bool, searches: bool
) -> None:
    """Say which rates nobody has measured."""
    rates, assumed = planned.machine.rates, planned.machine.assumed
    if assumed:
        said = rates_assumption(rates, assumed, loaded.tiers.nvme, searches=searches)
        say(console, said)
    if names := rates.assumed(world):
        sentence = links_assumption(names, world, here=here)
        say(console, sentence)


def _parser() -> argparse.ArgumentParser:
    """Return the words that the command takes."""
    parser = argparse.ArgumentParser(
        prog="megatier plan",
        usage="%(prog)s [options] CONFIG.yaml [--section.key VALUE ...]",
        description="Say before a run what it needs and how fast it will be: where everything lies, how long a step "
        "takes, what bounds it, and which single change would help most. For this machine the plan takes the same "
        "defaults as `megatier train` and chooses the same settings. It loads no weights and reserves no memory.",
        epilog="example: megatier plan run.yaml (for another machine add --machine h200.yaml --tiers.gpu 83GiB "
        "--tiers.ram 80GiB)",
    )
    add = parser.add_argument
    add("config", type=Path, metavar="CONFIG.yaml", help="config of the run; settings on the command line win")
    add(
        "--machine",
        type=Path,
        metavar="FILE.yaml",
        help="rates of another machine, such as examples/machines/h200.yaml (default: those that `megatier bench` "
        "measured here, or round figures for what it has not measured)",
    )
    add(
        "--search",
        action="store_true",
        help="choose the fastest settings, also with --machine or if this machine was not measured: groups, "
        "slices, activations, saved and streamed share, kept and offloaded attention, tiles, tiers.generations and "
        "tiers.gpu, as far as the file and the command line leave them open",
    )
    add(
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help="plan for N ranks, which share the state (default: 1). Each has a GPU; tiers.ram, tiers.nvme and the "
        "machine's other rates are those of a host",
    )
    add("--hosts", type=int, default=1, metavar="N", help="hosts over which the ranks are spread evenly (default: 1)")
    add("--output", type=Path, metavar="FILE.json", help="also write the plan as JSON")
    add("--picture", type=Path, metavar="FILE.svg", help="also draw the step as planned")
    add("--json", action="store_true", help="print the plan as one JSON document, and nothing else")
    return parser


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and what it was made for."""

    plan: Plan
    machine: Machine
    chosen: Mapping[str, Any]
    """The settings that were chosen for the run, by dotted name."""


@contextmanager
def _pausing_collector() -> Iterator[None]:
    """Switch the garbage collector off: while libraries load, it takes a sixth of a plan's time and finds nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _make_plan(
    loaded: RunConfig, given: frozenset[str], world: World, elsewhere: tuple[Rates, Budgets] | None, *, searches: bool
) -> Planned:
    """Return the plan of a run.

    Args:
        loaded: the run.
        given: dotted names of the settings that stay as they are.
        world: the ranks of the run.
        elsewhere: rates and budgets of another machine; None: this machine will run it, with the budgets and choices of
            `megatier train`.
        searches: whether settings are chosen, also if `megatier train` would choose none.
    """
    # Imported here because it loads torch: wrong arguments are refused without waiting for that.
    from megatier.planner.plan import make_plan
    from megatier.planner.search import search
    from megatier.setup.attention_choice import choose_kernel
    from megatier.setup.machine import Machine
    from megatier.setup.setup import Setup
    from megatier.setup.skeleton import model_config_of, skeleton_of
    from megatier.train.choices import fit_positions, settle_choices

    model_config = model_config_of(loaded.model)
    if elsewhere is None:
        # One process makes the plan, however many ranks the run will have.
        machine = replace(Machine.here(loaded.tiers), world=world)
    else:
        machine = Machine.elsewhere(loaded.tiers, *elsewhere, world)

    # The kernel depends on how long sequences are.
    loaded, _ = choose_kernel(fit_positions(loaded, given, model_config), model_config, machine)
    setup = settle_choices(Setup.of(loaded, skeleton_of(loaded.model, model_config), machine)).with_tower()

    # `megatier train` chooses settings only on a machine that was measured, and so does a plan of its run.
    chosen: Mapping[str, Any] = {}
    if searches or (elsewhere is None and machine.is_measured):
        chosen = search(setup, given).settings
    return Planned(make_plan(setup.changed(chosen)), machine, chosen)


def _elsewhere(loaded: RunConfig, machine: Path, *, searches: bool) -> tuple[Rates, Budgets]:
    """Return the rates of another machine, and the budgets of a run on it.

    Budgets have to be set, since nobody can look there. A search chooses tiers.gpu within the memory of that GPU.

    Raises:
        ConfigError: the file cannot be read, or a budget is not set.
    """
    rates = read_rates(machine)
    tiers = loaded.tiers
    if tiers.ram is None:
        raise ConfigError(
            "a plan for another machine needs its budget of RAM: set tiers.ram, such as --tiers.ram 96GiB."
        )
    gpu = tiers.gpu
    if gpu is None and searches and (left := rates.gpu_bytes_beside(tiers.ram)) is not None:
        gpu = round(left)
    if gpu is None:
        raise ConfigError(
            "a plan for another machine needs a budget of GPU memory: set tiers.gpu, such as --tiers.gpu 60GiB, or add "
            "--search, which chooses it if the file of --machine has gpu_bytes."
        )

    # What a mount without a size could hold over there is not known, so the directory of that name here stands for it.
    nvme = sum(
        mount_of(mount.directory).free_bytes if mount.num_bytes is None else mount.num_bytes for mount in tiers.mounts
    )
    return rates, Budgets(gpu, tiers.ram, nvme)
