"""The head of a run's page: how far the run is, and its most asked-for figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import median

from megatier.checkpoint.run_directory import METRICS_FILE
from megatier.guards.no_gradient import REMARK, learns_nothing
from megatier.report.figures import NO_GPU
from megatier.report.history import RunStart
from megatier.report.metrics import format_count, format_seconds, format_share
from megatier.report.recorded_run import RecordedRun, tokens_per_s, totals_of, use_of_compute


def describe_status(run: RecordedRun) -> str:
    """Return how far the run is, what became of its processes, and what is unusual about it."""
    steps = run.steps
    last = steps[-1].step if steps else 0

    # A run that was killed writes no end, and neither does one that still runs.
    outcomes = {
        "whole": "The run is whole",
        "early": f"The run ended early, because {run.history.why}",
        "stopped": "The run was stopped",
    }
    outcome = outcomes.get(run.history.outcome, "The run goes on, or was killed or ended by an error")
    sentences = [f"{outcome}: step {last:,} of {run.config.train.steps:,}."]
    sentences += _processes(run.history.openings)

    if run.history.is_cut:
        sentences.append(f"The last line of {METRICS_FILE} is cut, as a kill may leave it, and is not shown.")
    if num_skipped := sum(step.skipped is not None for step in steps):
        sentences.append(f"Steps skipped because they were not finite: {num_skipped}.")
    if learns_nothing([step.grad_norm for step in steps]):
        # A warning begins with a small letter.
        sentences.append(f"{REMARK[0].upper()}{REMARK[1:]}")
    return " ".join(sentences)


def _processes(openings: Sequence[RunStart]) -> Iterator[str]:
    """Yield sentences about where the run went on, and with which changes."""
    if not openings:
        return
    began = openings[0].time.replace("T", " ")
    began = began.replace("+00:00", " UTC")
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
            changes = "; ".join(opening.changes)
            yield f"After step {opening.step:,} its numbers changed, as accepted: {changes}."


def list_figures(run: RecordedRun) -> Iterator[tuple[str, str, str]]:
    """Yield large figures with their names and a remark; those that are missing are left out."""
    yield "model", *_model(run)
    if not run.steps:
        return

    # Medians, because single steps wait for evaluations, checkpoints and other users of the machine.
    seconds = median(step.seconds for step in run.steady)
    speed = median(map(tokens_per_s, run.steady))
    total_seconds = sum(step.seconds for step in run.steps)
    yield "tokens/s", f"{speed:,.0f}", "median"
    yield "a step", format_seconds(seconds), f"median; {format_seconds(total_seconds)} in all"
    if compiled := [step.compile_seconds for step in run.steps if step.compile_seconds]:
        remark = f"in {len(compiled):,} of {len(run.steps):,} steps, and in the time of none"
        yield "compiled", format_seconds(sum(compiled)), remark

    opening = run.opening

    # Without the first steps, which learn the order and compile.
    attainments = [step.attainment for step in run.steady if step.attainment is not None]
    if attainments and opening is not None and opening.expected is not None:
        remark = f"bound by {opening.expected.bound_by}, as planned"
        yield "attainment", f"{median(attainments):.0%}", remark
    yield "compute waits", *_waits(run)

    last = run.steps[-1]
    yield "loss", f"{last.loss:.4f}", f"step {last.step:,}"
    if run.history.heldout:
        yield "held-out loss", *_heldout(run.history.heldout)
    num_tokens = sum(step.tokens for step in run.steps)
    yield "tokens seen", format_count(num_tokens), f"{format_count(last.tokens)} in the last step"
    if images := [step.images for step in run.steady if step.images is not None]:
        seen = sum(step.images or 0 for step in run.steps)
        rate = sum(images) / sum(step.seconds for step in run.steady)
        yield "images seen", format_count(seen), f"{rate:,.1f} a second, on the mean"
    if opening is not None:
        yield use_of_compute(opening, speed)


def _model(run: RecordedRun) -> tuple[str, str]:
    """Return the name of the model, and its size and dtype."""
    model = run.config.model
    name = (model.config or {}).get("model_type", "model")
    if model.path is not None:
        name = Path(model.path).name
    remark: str = model.compute_dtype
    if run.opening is not None:
        num_parameters = format_count(run.opening.num_parameters)
        remark = f"{num_parameters} parameters, {remark}"
    return str(name), remark


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
    last_step, last_loss = losses[-1]

    # NaN is neither less nor more than others, so it would be the best one where it comes first.
    comparable = []
    for step, loss in losses:
        if not math.isnan(loss):
            comparable.append((step, loss))
    best_step, best_loss = min(comparable or losses, key=itemgetter(1))

    remark = f"step {last_step:,}; best {best_loss:.4f} at step {best_step:,}"
    return f"{last_loss:.4f}", remark
