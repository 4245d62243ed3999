"""Sections of a run's page with figures over its steps: losses, memory, bytes, and what compute waited for."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from megatier.byte_counts import format_bytes
from megatier.report import chart
from megatier.report.chart import Line, Mark, Scale
from megatier.report.history import RunStart
from megatier.report.html import note, row, table
from megatier.report.metrics import format_seconds, format_share
from megatier.report.recorded_run import (
    NO_STEP,
    OLDER,
    RecordedRun,
    amount_of,
    smoothed,
    tokens_per_s,
    totals_of,
)
from megatier.tier import QUEUES, Tier

SMOOTHED_MIN = 30
"""Steps from which the loss has a smoothed line as well."""


def draw_course(run: RecordedRun) -> str:
    """Return loss and tokens a second over the steps, with what happened in between."""
    marks = _marks(run)
    scales = [Scale("tokens", run.tokens_at), Scale("time", run.time_at)]
    norms = Line("before clipping", run.points(lambda step: step.grad_norm))
    rates = Line("learning rate", run.points(lambda step: step.learning_rate))

    # A loss hardly ever comes near 0, and from there its course would be a level line.
    charts = row(
        chart.draw("loss", _losses(run), marks, scales, from_zero=False),
        chart.draw("tokens/s", _speeds(run), marks, scales),
        chart.draw("gradient norm", [norms], marks),
        chart.draw("learning rate", [rates], marks),
    )
    return charts or note(NO_STEP)


def _losses(run: RecordedRun) -> list[Line]:
    """Return the lines of the loss."""
    losses = run.points(lambda step: step.loss)
    lines = [Line("training", losses), Line("held-out", run.history.heldout)]
    if len(losses) >= SMOOTHED_MIN:
        lines.append(Line("training, smoothed", smoothed(losses)))
    return lines


def _speeds(run: RecordedRun) -> list[Line]:
    """Return the lines of tokens a second, as measured and as planned."""
    lines = [Line("measured", run.points(tokens_per_s))]
    expected = None if run.opening is None else run.opening.expected

    # A machine that was not measured has no plan to compare with.
    if expected is not None:
        planned = run.points(lambda step: step.tokens / expected.seconds)
        lines.append(Line("as planned", planned, is_dashed=True))
    return lines


def _marks(run: RecordedRun) -> list[Mark]:
    """Return the events of steps: where a process went on, and which were skipped."""
    later = run.history.openings[1:]
    skipped = [step for step in run.steps if step.skipped is not None]
    marks = [
        Mark("went on", [opening.step for opening in later], tone=7),
        Mark("skipped", [step.step for step in skipped], tone=3),
    ]

    # A mark without steps would stand in the legend all the same.
    return [mark for mark in marks if mark.steps]


def draw_memory(run: RecordedRun) -> str:
    """Return the bytes of the tiers, and the memory of the process over time."""
    if run.opening is None:
        return note(OLDER if run.steps else NO_STEP)
    bytes_by_tier: dict[str, int] = {}
    for tier in run.opening.tiers:
        bytes_by_tier[tier.tier] = tier.state_bytes + tier.other_bytes
    on_gpu = bytes_by_tier.get(Tier.GPU, 0)
    in_ram = bytes_by_tier.get(Tier.RAM, 0)

    # Without a GPU, RAM holds what stands for its memory.
    has_gpu = any(step.gpu_bytes for step in run.steps)
    tiers_in_ram = in_ram if has_gpu else in_ram + on_gpu
    lines = [
        Line("resident in RAM", run.points(lambda step: step.resident_bytes)),
        Line("of it tiers", run.points(lambda step: tiers_in_ram), is_dashed=True),
    ]
    if has_gpu:
        lines += [
            Line("on the GPU, held by torch", run.points(lambda step: step.gpu_bytes)),
            Line("of it the tier", run.points(lambda step: on_gpu), is_dashed=True),
        ]

    meaning = (
        "What a tier holds is reserved before the first step and stays: blocks pass through slots that are counted."
    )
    return row(_tiers(run.opening) + note(meaning), chart.draw_bytes("memory of the process", lines))


def _tiers(opening: RunStart) -> str:
    """Return a table of how full the tiers are."""
    rows = []
    for tier in opening.tiers:
        sizes = map(format_bytes, (tier.state_bytes, tier.other_bytes, tier.budget_bytes))

        # All of it is reserved at the start, whether it is in use or not.
        used_bytes = tier.state_bytes + tier.other_bytes
        share = format_share(used_bytes, tier.budget_bytes)
        rows.append((tier.tier, *sizes, share))
    return table(("tier", "state", "slots, gradients", "budget", "used"), rows)


def draw_moves(run: RecordedRun) -> str:
    """Return bytes per queue, moved and demanded."""
    if not run.steps:
        return note(NO_STEP)

    # Bytes are counted anew by each process, so those of the last one need a step of it.
    if run.opening is not None and run.steps[-1].step <= run.opening.step:
        return note("No step of the last process is on file yet.")
    moved = run.history.moved_bytes
    demanded = run.history.demanded_bytes
    if not moved:
        return note("Nothing moved: all state is at home on the GPU.")

    rows = []
    lines = []
    for queue in QUEUES:
        moved_bytes = moved.get(queue, 0.0)
        demanded_bytes = demanded.get(queue, 0.0)

        # Queues that this run has no use for are left out.
        if not moved_bytes and not demanded_bytes:
            continue
        of_queue = amount_of(lambda step: step.moved_bytes, queue)
        step_bytes = median(map(of_queue, run.steady))
        sizes = map(format_bytes, (step_bytes, moved_bytes, demanded_bytes))

        # To the byte: a rounded size would hide a small difference, which is a fault as well.
        excess_bytes = moved_bytes - demanded_bytes
        difference = f"{excess_bytes:+,.0f} B" if excess_bytes else "none"
        rows.append((queue, *sizes, difference))
        lines.append(Line(queue, run.points(of_queue)))

    columns = ("queue", "a step", "moved in all", "demanded", "difference")
    meaning = (
        "Bytes since the last process began; a step's are the median. What the placement says must move is demanded; "
        "a run that goes on or was cut off has some of it under way. Moves of an evaluation count to the next step."
    )
    return row(table(columns, rows) + note(meaning), chart.draw_bytes("bytes moved, a step", lines))


def draw_stalls(run: RecordedRun) -> str:
    """Return the time that compute waited, by cause."""
    if not run.steps:
        return note(NO_STEP)
    totals = totals_of(run.steady, lambda step: step.stall_seconds)
    if not totals:
        return note("Compute waited for nothing.")

    causes = sorted(totals, key=totals.__getitem__, reverse=True)
    seconds = sum(step.seconds for step in run.steady)
    rows = []
    longest = 0.0
    for cause in causes:
        of_step = [step.stall_seconds.get(cause, 0.0) for step in run.steady]
        longest = max(longest, *of_step)
        rows.append(_time_row(cause, totals[cause], seconds, max(of_step)))
    rows += _list_unstalled(run, seconds)

    # One unit for all causes, so that their lines can be compared.
    unit, scale = ("s", 1.0) if longest >= 1 else ("ms", 1e-3)
    lines = []
    for cause in causes:
        waited = amount_of(lambda step: step.stall_seconds, cause)
        lines.append(Line(cause, run.points(waited, scale)))
    columns = ("waited for", "in all", "share of the time", "longest in a step")
    meaning = f"The first step of each process, which learns the order of the units, is in the chart alone.{_host(run)}"
    return row(table(columns, rows) + note(meaning), chart.draw(f"stalled, {unit} a step", lines))


def _host(run: RecordedRun) -> str:
    """Return a sentence about what the host itself does in a step, if it does not compute and that is on file."""
    worked = [step.host_busy_seconds for step in run.steady if step.host_busy_seconds is not None]
    if not worked or run.opening is None or run.opening.device == "cpu":
        return ""
    a_step = format_seconds(median(worked))
    return f" The host worked for {a_step} a step (median). The table has what compute did not hide of it."


def _list_unstalled(run: RecordedRun, seconds: float) -> Iterator[tuple[str, str, str, str]]:
    """Yield the rest of compute's time, so that the table adds up to all of it, if that is on file."""
    besides = {
        "nothing: compute was busy": [step.compute_seconds for step in run.steady],
        "nothing: the host worked": [step.host_seconds for step in run.steady],
    }
    for name, of_step in besides.items():
        known = [lasted for lasted in of_step if lasted is not None]

        # The sum of some steps alone would be too little, beside stalls of all of them.
        if known and len(known) == len(of_step):
            yield _time_row(name, sum(known), seconds, max(known))


def _time_row(name: str, total: float, whole: float, longest: float) -> tuple[str, str, str, str]:
    """Return a row of the table of stalls, from seconds: in all, of all time, and longest in a step."""
    return name, format_seconds(total), format_share(total, whole), format_seconds(longest)
