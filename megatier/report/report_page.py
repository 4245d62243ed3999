"""The page of a run: one HTML file about everything in its directory. A section whose figures are missing says why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from megatier.byte_counts import format_bytes
from megatier.checkpoint.run_directory import (
    CHECKPOINT_FOLDER,
    CONFIG_FILE,
    METRICS_FILE,
    SAVEPOINT_FOLDER,
    TRACE_FILE,
    checkpoints,
    parse_step,
)
from megatier.config.file import load_saved, to_dict
from megatier.config.text import dump
from megatier.errors import ConfigError
from megatier.report import headline, over_steps, picture, placement_map
from megatier.report.history import History, Saved, read_history
from megatier.report.html import cards, details, note, page, row, section, table
from megatier.report.metrics import format_seconds
from megatier.report.plan_table import make_plan_table
from megatier.report.rank_tables import make_rank_tables
from megatier.report.recorded_run import NO_STEP, OLDER, RecordedRun

SAVED_SHOWN = 10
"""Number of checkpoints, and of savepoints, that are shown."""


def build(directory: Path) -> str:
    """Return the page of the run in a directory, which may be going on, killed, or resumed.

    Raises:
        ConfigError: there is no run, or a file of it is damaged.
    """
    config = directory / CONFIG_FILE
    metrics = directory / METRICS_FILE
    trace = directory / TRACE_FILE
    if not config.is_file():
        raise ConfigError(f"{directory} holds no run: {CONFIG_FILE} is missing. Give a run's output.directory.")

    # The config is there before the first step. A run without the others is young, and still has a page.
    run = RecordedRun(
        directory=directory,
        config=load_saved(config),
        history=read_history(metrics) if metrics.exists() else History(),
        trace=picture.read_trace(trace) if trace.exists() else {},
    )

    # What a run is at and its figures come first: they answer what most readers ask.
    parts = [note(headline.describe_status(run)), cards(headline.list_figures(run)), *_sections(run)]
    return page(f"run {directory.resolve().name}", parts)


def _sections(run: RecordedRun) -> Iterator[str]:
    """Yield the sections from top to bottom."""
    settings = dump(to_dict(run.config))
    yield section("Loss and throughput", over_steps.draw_course(run))
    yield section("The plan against what happened", make_plan_table(run))
    yield section("Memory", over_steps.draw_memory(run))
    yield section("What moved", over_steps.draw_moves(run))
    yield section("What compute waited for", over_steps.draw_stalls(run))
    yield section("Ranks", make_rank_tables(run))
    yield section("A step", _timeline(run))
    yield section("What lies where", _placement(run))
    yield section("Checkpoints and savepoints", _draw_saves(run))
    yield section("Settings", details(f"all settings, as in {CONFIG_FILE}", settings))


def _timeline(run: RecordedRun) -> str:
    """Return the picture of the last step of the trace."""
    if not run.trace:
        return note("No trace: a run writes that of its last steps when it ends, with output.trace: true.")
    # The first steps of a trace may be those that learn or compile.
    step = max(run.trace)
    drawn = picture.draw(run.trace[step], f"step {step:,}")
    return f'<div class="timeline wide">{drawn}</div>'


def _placement(run: RecordedRun) -> str:
    """Return the map of homes, and what it does not show."""
    opening = run.opening

    # Runs of older versions have no record of how they began.
    if opening is None:
        return note(OLDER if run.steps else NO_STEP)
    remarks = [f"Units in forward order: {len(opening.homes)}; a pointer over a block shows its name."]
    if opening.streamed:
        remarks.append(f"Units that stream their state through the GPU to be updated there: {len(opening.streamed)}.")
    if opening.speculative:
        remarks.append(f"Units with two generations, updated in the backward: {len(opening.speculative)}.")
    return placement_map.draw(opening) + note(" ".join(remarks))


def _draw_saves(run: RecordedRun) -> str:
    """Return tables of checkpoints and savepoints."""
    history = run.history
    checkpoint = _saved_table(history.checkpoints, "checkpoint", run.directory / CHECKPOINT_FOLDER)
    savepoint = _saved_table(history.savepoints, "savepoint", run.directory / SAVEPOINT_FOLDER)
    if checkpoint or savepoint:
        tables = filter(None, (checkpoint, savepoint))
        return row(*tables)
    output = run.config.output
    every = f"output.checkpoint_every is {output.checkpoint_every}, output.savepoint_every {output.savepoint_every}"
    return note(f"None was written: {every}.")


def _saved_table(saved: Sequence[Saved], kind: str, folder: Path) -> str:
    """Return a table of the last ones, and what all of them took; empty if there are none."""
    if not saved:
        return ""

    # Older ones go when newer ones are whole, so the table says which are left.
    kept = {parse_step(path) for path in checkpoints(folder)}
    rows = []
    for save in saved[-SAVED_SHOWN:]:
        written = format_bytes(save.num_bytes)
        took = format_seconds(save.seconds)
        waited = format_seconds(save.paused_seconds)
        still_there = "yes" if save.step in kept else "no"
        rows.append((f"{save.step:,}", written, took, waited, still_there))

    paused_seconds = sum(save.paused_seconds for save in saved)
    totals = f"{kind}s written: {len(saved)}, for which training waited {format_seconds(paused_seconds)} in all."
    if len(saved) > len(rows):
        totals += f" The last {SAVED_SHOWN} are shown."
    columns = (f"{kind} of step", "written", "in", "training waited", "still there")
    return table(columns, rows) + note(totals)
