"""The section of a run's page that sets the plan against what happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

from megatier.byte_counts import format_bytes
from megatier.report.history import Expected
from megatier.report.html import note, table
from megatier.report.metrics import format_range, format_seconds
from megatier.report.picture import in_row_order
from megatier.report.recorded_run import NO_STEP, OLDER, RecordedRun, amount_of
from megatier.tier import QUEUES


def make_plan_table(run: RecordedRun) -> str:
    """Return a table of a step as the planner forecast it, and as it was."""
    if run.opening is None:
        return note(OLDER if run.steps else NO_STEP)
    expected = run.opening.expected
    if expected is None:
        return note("Nothing was planned: `megatier bench` measures the machine, and from then on `train` plans.")
    waver = format_range(expected.seconds_range)
    if not run.steps:
        planned = f"{format_seconds(expected.seconds)} a step{waver}"
        return note(f"Planned: {planned}, bound by {expected.bound_by}. {NO_STEP}")

    meaning = f"Bound by {expected.bound_by}, as planned. Measured: medians of all steps but each process's first."
    if waver:
        meaning += f" Planned{waver}."
    if run.history.corrections:
        # Each process makes a correction of its own, and that of the last one holds.
        correction = run.history.corrections[-1]
        planned_gb = correction.planned_bytes_per_s / 1e9
        measured_gb = correction.measured_bytes_per_s / 1e9
        meaning += (
            f" Step {correction.step:,} corrected the plan: drives that do {measured_gb:.3g} GB/s in this run, not "
            f"{planned_gb:.3g}, make it {format_seconds(correction.seconds)} a step; attainments after it are of that."
        )
    columns = ("", "planned", "measured", "measured to planned")
    return table(columns, _list_planned(run, expected)) + note(meaning)


def _list_planned(run: RecordedRun, expected: Expected) -> Iterator[tuple[str, str, str, str]]:
    """Yield the rows of that table: the step, its lanes, and what its queues move."""
    seconds = median(step.seconds for step in run.steady)
    yield _compare("a step", expected.seconds, seconds, format_seconds)

    # The host's work is in the forecast, and no trace measures it. Lanes with no work have no ratio.
    for lane in in_row_order(expected.busy_seconds.keys() - {"host"}):
        if busy := expected.busy_seconds[lane]:
            of_lane = amount_of(lambda step: step.busy_seconds, lane)
            measured = median(map(of_lane, run.steady))
            yield _compare(f"{lane} busy", busy, measured, format_seconds)

    for queue in QUEUES:
        if moved := expected.moved_bytes.get(queue):
            of_queue = amount_of(lambda step: step.moved_bytes, queue)
            measured = median(map(of_queue, run.steady))
            yield _compare(f"{queue} moves", moved, measured, format_bytes)


def _compare(name: str, planned: float, measured: float, form: Callable[[float], str]) -> tuple[str, str, str, str]:
    """Return a row of the table: planned, measured, and by how much the two differ."""
    # Where nothing is planned there is no share.
    more = f"{measured / planned - 1:+.1%}" if planned else "-"
    return name, form(planned), form(measured), more
