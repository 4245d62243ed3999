"""`megatier trace`: draws one step of a run, and says how long each lane was busy."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatier.checkpoint.run_directory import TRACE_FILE
from megatier.cli.output import write_text
from megatier.errors import ConfigError
from megatier.report.console import say
from megatier.report.metrics import format_seconds, format_share
from megatier.report.picture import LaneUse, account_of, draw, lane_uses, read_trace, step_seconds
from megatier.report.report import figure_table
from megatier.trace.events import Account, TraceEvent


def run(argv: Sequence[str]) -> int:
    """Draw the picture and print the table; returns 0 when the file is written."""
    parser = argparse.ArgumentParser(
        prog="megatier trace",
        description="Draw one step of a run that was trained with --output.trace true: what each lane did, and when "
        "and why compute waited.",
        epilog="example: megatier trace runs/megatier --output step.svg",
    )
    parser.add_argument(
        "trace", type=Path, metavar="RUN_OR_TRACE_JSON", help="output.directory of a run, or a trace.json"
    )
    parser.add_argument("--step", type=int, metavar="N", help="number of the step (default: the last one in the trace)")
    parser.add_argument(
        "--output", type=Path, metavar="FILE.svg", help="file to write (default: step-N.svg next to the trace)"
    )
    options = parser.parse_args(argv)

    # Other names would do as well, but whoever names a PNG expects one.
    if options.output is not None and options.output.suffix != ".svg":
        raise ConfigError(f"--output {options.output}: the picture is an SVG. Name a file that ends in .svg.")

    # A trace may have been copied from the machine that made it, without the run.
    path: Path = options.trace / TRACE_FILE if options.trace.is_dir() else options.trace
    steps = read_trace(path)
    step, events = _choose(path, steps, options.step)
    output: Path = options.output or path.with_name(f"step-{step}.svg")
    picture = draw(events, f"{path.resolve().parent.name}, step {step}")
    write_text(output, picture, "--output FILE.svg")

    console = Console()
    console.print(_table(step, step_seconds(events), lane_uses(events), account_of(events)))
    say(console, f"picture written to {output}")
    return 0


def _choose(path: Path, steps: dict[int, list[TraceEvent]], step: int | None) -> tuple[int, list[TraceEvent]]:
    """Return the number and the events of the step that was asked for, or of the last one."""
    if not steps:
        raise ConfigError(f"{path} holds no step. Train with --output.trace true for at least one step.")

    chosen = max(steps) if step is None else step
    if chosen not in steps:
        there = ", ".join(str(number) for number in sorted(steps))
        raise ConfigError(f"{path} has no step {chosen}; it holds the last steps of the run: {there}.")
    return chosen, steps[chosen]


def _table(step: int, seconds: float, uses: Iterable[LaneUse], spent: Account) -> Table:
    """Return a table of the busy time of each lane, then of what compute was at in all of the step, longest first.

    Each has its share of the step.
    """
    table = figure_table(f"step {step}: {format_seconds(seconds)}", "lane", "busy", "share", "at once")
    for use in uses:
        figures = format_seconds(use.busy_seconds), format_share(use.busy_seconds, seconds), use.at_once
        table.add_row(escape(use.lane), *figures)

    table.add_section()

    # Lanes work beside each other and beside compute, so their times add up to more than the step. These are what the
    # step is made of.
    stalls = {f"stall: {cause}": stalled for cause, stalled in spent.stall_seconds.items()}
    causes = {
        "compute alone": spent.compute_seconds,
        **stalls,
        "host": spent.host_seconds,
    }

    # Most steps compile nothing, and a row of zeros would only ask for an explanation.
    if spent.compile_seconds:
        causes["compiler"] = spent.compile_seconds
    for cause, lasted in sorted(causes.items(), key=lambda item: -item[1]):
        table.add_row(escape(cause), format_seconds(lasted), format_share(lasted, seconds))
    return table
