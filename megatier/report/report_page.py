"""The page of a run: one HTML file about everything in its directory. A section whose figures are missing says why."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

from megatier.checkpoint.run_directory import (
    CHECKPOINT_FOLDER,
    CONFIG_FILE,
    METRICS_FILE,
    SAVEPOINT_FOLDER,
    TRACE_FILE,
    checkpoints,
    step_of,
)
from megatier.config.file import load_saved, to_dict
from megatier.config.text import dump
from megatier.errors import ConfigError, mib
from megatier.guards.no_gradient import REMARK, learns_nothing
from megatier.report import chart, picture, placement_map
from megatier.report.chart import Line, Mark, Scale
from megatier.report.figures import NO_GPU
from megatier.report.history import Expected, History, RunStart, Saved, read_history
from megatier.report.html import cards, details, note, page, row, section, table
from megatier.report.metrics import format_count, format_seconds, format_share, wavering
from megatier.report.picture import in_row_order
from megatier.report.recorded_run import (
    Amounts,
    RecordedRun,
    amount_of,
    behind_of,
    by_rank,
    smoothed,
    tokens_per_s,
    totals_of,
    use_of_compute,
)
from megatier.tier import QUEUES, Tier

RANKS_SHOWN = 8
"""Number of the slowest ranks that are shown."""
SMOOTHED_MIN = 30
"""Steps from which the loss has a smoothed line as well."""
SAVED_SHOWN = 10
"""Number of checkpoints, and of savepoints, that are shown."""
NO_STEP = "No step is on file yet."
OLDER = "The run was recorded by an older version of megatier, which did not write this."


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
    parts = [_status(run), cards(_figures(run)), *_sections(run)]
    return page(f"run {directory.resolve().name}", parts)


def _sections(run: RecordedRun) -> Iterator[str]:
    """Yield the sections from top to bottom."""
    settings = dump(to_dict(run.config))
    yield section("Loss and throughput", _course(run))
    yield section("The plan against what happened", _plan(run))
    yield section("Memory", _memory(run))
    yield section("What moved", _moves(run))
    yield section("What compute waited for", _stalls(run))
    yield section("Ranks", _ranks(run))
    yield section("A step", _timeline(run))
    yield section("What lies where", _placement(run))
    yield section("Checkpoints and savepoints", _saved(run))
    yield section("Settings", details(f"all settings, as in {CONFIG_FILE}", settings))


# ---------------------------------------------------------------------- at the top


def _status(run: RecordedRun) -> str:
    """Return how far the run is, what became of its processes, and what is unusual about it."""
    steps = run.steps
    last = steps[-1].step if steps else 0
    outcomes = {"whole": "The run is whole", "stopped": "The run was stopped"}
    said = outcomes.get(run.history.outcome, "The run goes on, or was killed or ended by an error")
    words = [f"{said}: step {last:,} of {run.config.train.steps:,}."]
    words += _processes(run.history.openings)

    if run.history.is_cut:
        words.append(f"The last line of {METRICS_FILE} is cut, as a kill may leave it, and is not shown.")
    if skipped := sum(step.skipped is not None for step in steps):
        words.append(f"Steps left out because they were not finite: {skipped}.")
    if learns_nothing([step.grad_norm for step in steps]):
        words.append(f"{REMARK[0].upper()}{REMARK[1:]}")
    return note(" ".join(words))


def _processes(openings: Sequence[RunStart]) -> Iterator[str]:
    """Yield sentences about where the run went on, and with which changes."""
    if not openings:
        return
    began = openings[0].time.replace("T", " ").replace("+00:00", " UTC")
    device = openings[-1].device
    yield f"On {device}, begun {began}."
    if device == "cpu":
        yield NO_GPU

    # A run on a machine that is taken away often has hundreds of processes.
    if later := openings[1:]:
        steps = ", ".join(f"{opening.step:,}" for opening in later[-5:])
        yield f"It went on after step {steps}."
    for opening in openings:
        if opening.changes:
            yield f"After step {opening.step:,} its numbers changed, as accepted: {'; '.join(opening.changes)}."


def _figures(run: RecordedRun) -> Iterator[tuple[str, str, str]]:
    """Yield large figures with their names and a remark; those that are missing are left out."""
    opening = run.opening
    yield "model", *_model(run)
    if not run.steps:
        return

    # Medians, because single steps wait for evaluations, checkpoints and other users of the machine.
    seconds = median(step.seconds for step in run.steady)
    speed = median(map(tokens_per_s, run.steady))
    in_all = sum(step.seconds for step in run.steps)
    yield "tokens/s", f"{speed:,.0f}", "median"
    yield "a step", format_seconds(seconds), f"median; {format_seconds(in_all)} in all"
    if compiled := [step.compile_seconds for step in run.steps if step.compile_seconds]:
        remark = f"in {len(compiled):,} of {len(run.steps):,} steps, and in the time of none"
        yield "compiled", format_seconds(sum(compiled)), remark

    attainments = [step.attainment for step in run.steady if step.attainment is not None]
    if attainments and opening is not None and opening.expected is not None:
        yield "attainment", f"{median(attainments):.0%}", f"bound by {opening.expected.bound_by}, as planned"
    yield "compute waits", *_waits(run)

    last = run.steps[-1]
    yield "loss", f"{last.loss:.4f}", f"step {last.step:,}"
    if run.history.heldout:
        yield "held-out loss", *_heldout(run.history.heldout)
    tokens = sum(step.tokens for step in run.steps)
    yield "tokens seen", format_count(tokens), f"{format_count(last.tokens)} in the last step"
    if opening is not None:
        yield use_of_compute(opening, speed)


def _model(run: RecordedRun) -> tuple[str, str]:
    """Return the name of the model, and its size and dtype."""
    model = run.config.model
    name = (model.config or {}).get("model_type", "model")
    if model.path is not None:
        name = Path(model.path).name
    words: str = model.compute_dtype
    if run.opening is not None:
        size = format_count(run.opening.num_parameters)
        words = f"{size} parameters, {words}"
    return str(name), words


def _waits(run: RecordedRun) -> tuple[str, str]:
    """Return the share of the time that compute waited, and for what most."""
    stalls = totals_of(run.steady, lambda step: step.stall_seconds)
    seconds = sum(step.seconds for step in run.steady)
    share = format_share(sum(stalls.values()), seconds)
    if not stalls:
        return share, ""
    most = max(stalls, key=stalls.__getitem__)
    return share, f"of the time, most for {most}"


def _heldout(losses: Sequence[tuple[int, float]]) -> tuple[str, str]:
    """Return the last loss of an evaluation, and the best one."""
    step, loss = losses[-1]

    # NaN is neither less nor more than others, so it would be the best one where it comes first.
    finite = [pair for pair in losses if not math.isnan(pair[1])]
    best, least = min(finite or losses, key=lambda pair: pair[1])
    return f"{loss:.4f}", f"step {step:,}; best {least:.4f} at step {best:,}"


# ---------------------------------------------------------------------- over steps


def _course(run: RecordedRun) -> str:
    """Return loss and tokens a second over the steps, with what happened in between."""
    losses = run.points(lambda step: step.loss)
    norms = run.points(lambda step: step.grad_norm)
    rates = run.points(lambda step: step.learning_rate)

    loss = [Line("training", losses), Line("held-out", run.history.heldout)]
    if len(losses) >= SMOOTHED_MIN:
        loss.append(Line("training, smoothed", smoothed(losses)))
    speed = [Line("measured", run.points(tokens_per_s))]
    expected = run.opening.expected if run.opening is not None else None
    if expected is not None:
        planned = run.points(lambda step: step.tokens / expected.seconds)
        speed.append(Line("as planned", planned, is_dashed=True))

    went_on = [opening.step for opening in run.history.openings[1:]]
    left_out = [step.step for step in run.steps if step.skipped is not None]
    marks = [Mark("went on", went_on, tone=7), Mark("left out", left_out, tone=3)]
    shown = [mark for mark in marks if mark.steps]
    scales = [Scale("tokens", run.tokens_at), Scale("time", run.time_at)]

    # A loss hardly ever comes near 0, and from there its course would be a level line.
    charts = row(
        chart.draw("loss", loss, shown, scales, from_zero=False),
        chart.draw("tokens/s", speed, shown, scales),
        chart.draw("gradient norm", [Line("before clipping", norms)], shown),
        chart.draw("learning rate", [Line("learning rate", rates)], shown),
    )
    return charts or note(NO_STEP)


def _memory(run: RecordedRun) -> str:
    """Return what the tiers hold, and what the process took over time."""
    if run.opening is None:
        return note(OLDER if run.steps else NO_STEP)
    held = {tier.tier: tier.state_bytes + tier.other_bytes for tier in run.opening.tiers}
    on_gpu = held.get(Tier.GPU, 0)
    in_ram = held.get(Tier.RAM, 0)

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

    words = "What a tier holds is reserved before the first step and stays: blocks pass through slots that are counted."
    return row(_tiers(run.opening) + note(words), chart.draw_bytes("memory of the process", lines))


def _tiers(opening: RunStart) -> str:
    """Return a table of how full the tiers are."""
    rows = []
    for tier in opening.tiers:
        sizes = map(mib, (tier.state_bytes, tier.other_bytes, tier.budget_bytes))
        used = format_share(tier.state_bytes + tier.other_bytes, tier.budget_bytes)
        rows.append((tier.tier, *sizes, used))
    return table(("tier", "state", "slots, gradients", "budget", "used"), rows)


def _moves(run: RecordedRun) -> str:
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
        in_all = moved.get(queue, 0.0)
        planned = demanded.get(queue, 0.0)
        if not in_all and not planned:
            continue
        a_step = median(step.moved_bytes.get(queue, 0.0) for step in run.steady)
        difference = in_all - planned
        written = f"{difference:+,.0f} B" if difference else "none"
        rows.append((queue, _size(a_step), _size(in_all), _size(planned), written))
        lines.append(Line(queue, run.points(amount_of(lambda step: step.moved_bytes, queue))))

    columns = ("queue", "a step", "moved in all", "demanded", "difference")
    words = (
        "Bytes since the last process began; a step's are the median. What the placement says must move is demanded; "
        "a run that goes on or was cut off has some of it under way. Moves of an evaluation count to the next step."
    )
    return row(table(columns, rows) + note(words), chart.draw_bytes("bytes moved, a step", lines))


def _size(num_bytes: float) -> str:
    """Return bytes, which medians and means may leave with a fraction."""
    return mib(round(num_bytes))


def _stalls(run: RecordedRun) -> str:
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
        worst = max(step.stall_seconds.get(cause, 0.0) for step in run.steady)
        longest = max(longest, worst)
        share = format_share(totals[cause], seconds)
        rows.append((cause, format_seconds(totals[cause]), share, format_seconds(worst)))
    rows += _unstalled(run, seconds)

    unit, scale = ("s", 1.0) if longest >= 1 else ("ms", 1e-3)
    lines = []
    for cause in causes:
        waited = amount_of(lambda step: step.stall_seconds, cause)
        lines.append(Line(cause, run.points(waited, scale)))
    columns = ("waited for", "in all", "share of the time", "longest in a step")
    words = f"The first step of each process, which learns the order of the units, is in the chart alone.{_host(run)}"
    return row(table(columns, rows) + note(words), chart.draw(f"stalled, {unit} a step", lines))


def _host(run: RecordedRun) -> str:
    """Return a sentence about what the host itself does in a step, if it does not compute and that is on file."""
    worked = [step.host_busy_seconds for step in run.steady if step.host_busy_seconds is not None]
    if not worked or run.opening is None or run.opening.device == "cpu":
        return ""
    a_step = format_seconds(median(worked))
    return f" The host worked for {a_step} a step (median). The table has what compute did not hide of it."


def _unstalled(run: RecordedRun, seconds: float) -> Iterator[tuple[str, str, str, str]]:
    """Yield what compute was at besides, so that the table adds up to all of the time, if that is on file."""
    compute = [step.compute_seconds for step in run.steady]
    host = [step.host_seconds for step in run.steady]
    for name, of_step in (("nothing: compute was busy", compute), ("nothing: the host worked", host)):
        known = [lasted for lasted in of_step if lasted is not None]

        # The sum of some steps alone would be too little, beside stalls of all of them.
        if not known or len(known) < len(of_step):
            continue
        total = sum(known)
        yield name, format_seconds(total), format_share(total, seconds), format_seconds(max(known))


def _ranks(run: RecordedRun) -> str:
    """Return which ranks the others waited for, and what each of them waited for, did and moved in a step."""
    behind = behind_of(run.steady)
    if not behind:
        return note("One process trained alone.")

    count = sum(map(len, behind.values()))
    often = []
    for name, seconds in list(behind.items())[:RANKS_SHOWN]:
        share = format_share(len(seconds), count)
        often.append((name, share, format_seconds(median(seconds))))
    words = (
        "All ranks end a step together. The slowest one takes longest itself: it computes, or waits for its own "
        "lanes, while the others wait for it. Below are medians of a step, for each rank."
    )
    return (
        table(("slowest", "share of the steps", "longer than the fastest, median"), often)
        + note(words)
        + _by_rank(run, "waited for", lambda work: work.stall_seconds, format_seconds)
        + _by_rank(run, "busy", lambda work: work.busy_seconds, format_seconds)
        + _by_rank(run, "moved", lambda work: work.moved_bytes, _size)
    )


def _by_rank(run: RecordedRun, title: str, amounts: Amounts, form: Callable[[float], str]) -> str:
    """Return a table of what each rank has of some amounts in a step; empty if no rank has any, or none is on file."""
    ranks = by_rank(run.steady)
    names: set[str] = set()
    for works in ranks.values():
        names |= totals_of(works, amounts).keys()
    if not names:
        return ""

    columns = in_row_order(names)
    rows = []
    for rank, works in ranks.items():
        medians = [median(amounts(work).get(name, 0.0) for work in works) for name in columns]
        rows.append((rank, *map(form, medians)))
    return table((title, *columns), rows)


# ---------------------------------------------------------------------- plan, step, placement


def _plan(run: RecordedRun) -> str:
    """Return a table of a step as the planner forecast it, and as it was."""
    if run.opening is None:
        return note(OLDER if run.steps else NO_STEP)
    expected = run.opening.expected
    if expected is None:
        return note("Nothing was planned: `megatier bench` measures the machine, and from then on `train` plans.")
    waver = wavering(expected.seconds_range)
    if not run.steps:
        planned = f"{format_seconds(expected.seconds)} a step{waver}"
        return note(f"Planned: {planned}, bound by {expected.bound_by}. {NO_STEP}")

    words = f"Bound by {expected.bound_by}, as planned. Measured: medians of all steps but each process's first."
    if waver:
        words += f" Planned{waver}."
    if run.history.corrections:
        made = run.history.corrections[-1]
        planned_gb = made.planned_bytes_per_s / 1e9
        measured_gb = made.measured_bytes_per_s / 1e9
        words += (
            f" Step {made.step:,} corrected the plan: drives that do {measured_gb:.3g} GB/s in this run, not "
            f"{planned_gb:.3g}, make it {format_seconds(made.seconds)} a step; attainments after it are of that."
        )
    return table(("", "planned", "measured", "measured to planned"), _planned(run, expected)) + note(words)


def _planned(run: RecordedRun, expected: Expected) -> Iterator[tuple[str, str, str, str]]:
    """Yield the rows of that table: the step, its lanes, and what its queues move."""
    seconds = median(step.seconds for step in run.steady)
    yield _compared("a step", expected.seconds, seconds, format_seconds)

    # The host's work is in the forecast, and no trace measures it.
    lanes = [lane for lane, planned in expected.busy_seconds.items() if planned and lane != "host"]
    for lane in in_row_order(lanes):
        busy = median(step.busy_seconds.get(lane, 0.0) for step in run.steady)
        yield _compared(f"{lane} busy", expected.busy_seconds[lane], busy, format_seconds)

    for queue in QUEUES:
        if planned := expected.moved_bytes.get(queue):
            moved = median(step.moved_bytes.get(queue, 0.0) for step in run.steady)
            yield _compared(f"{queue} moves", planned, moved, _size)


def _compared(name: str, planned: float, measured: float, form: Callable[[float], str]) -> tuple[str, str, str, str]:
    """Return a row of the table: planned, measured, and by how much the two differ."""
    more = f"{measured / planned - 1:+.1%}" if planned else "-"
    return name, form(planned), form(measured), more


def _timeline(run: RecordedRun) -> str:
    """Return the picture of the last step of the trace."""
    if not run.trace:
        return note("No trace: a run writes that of its last steps when it ends, with output.trace: true.")
    step = max(run.trace)
    drawn = picture.draw(run.trace[step], f"step {step:,}")
    return f'<div class="timeline wide">{drawn}</div>'


def _placement(run: RecordedRun) -> str:
    """Return the map of homes, and what it does not show."""
    opening = run.opening
    if opening is None:
        return note(OLDER if run.steps else NO_STEP)
    words = [f"Units in forward order: {len(opening.homes)}; a pointer over a block shows its name."]
    if opening.streamed:
        words.append(f"Units that stream their state through the GPU to be updated there: {len(opening.streamed)}.")
    if opening.speculative:
        words.append(f"Units with two generations, updated in the backward: {len(opening.speculative)}.")
    return placement_map.draw(opening) + note(" ".join(words))


def _saved(run: RecordedRun) -> str:
    """Return tables of checkpoints and savepoints."""
    history = run.history
    checkpoint = _saved_table(history.checkpoints, "checkpoint", run.directory / CHECKPOINT_FOLDER)
    savepoint = _saved_table(history.savepoints, "savepoint", run.directory / SAVEPOINT_FOLDER)
    tables = [found for found in (checkpoint, savepoint) if found]
    if tables:
        return row(*tables)
    output = run.config.output
    every = f"output.checkpoint_every is {output.checkpoint_every}, output.savepoint_every {output.savepoint_every}"
    return note(f"None was written: {every}.")


def _saved_table(saved: Sequence[Saved], what: str, folder: Path) -> str:
    """Return a table of the last ones, and what all of them took; empty if there are none."""
    if not saved:
        return ""

    # Older ones go when newer ones are whole, so the table says which are left.
    kept = {step_of(path) for path in checkpoints(folder)}
    rows = []
    for made in saved[-SAVED_SHOWN:]:
        took = format_seconds(made.seconds)
        waited = format_seconds(made.paused_seconds)
        is_there = "yes" if made.step in kept else "no"
        rows.append((f"{made.step:,}", _size(made.num_bytes), took, waited, is_there))

    paused = format_seconds(sum(made.paused_seconds for made in saved))
    words = f"{what}s written: {len(saved)}, for which training waited {paused} in all."
    if len(saved) > len(rows):
        words += f" The last {SAVED_SHOWN} are shown."
    return table((f"{what} of step", "written", "in", "training waited", "still there"), rows) + note(words)
