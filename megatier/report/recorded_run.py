"""Reads a run as its directory records it, and computes figures over its steps."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from megatier.config.schema import RunConfig
from megatier.report.history import History, RunStart, Step, Work
from megatier.report.metrics import format_count, format_seconds
from megatier.report.svg import Point
from megatier.trace.events import ByName, TraceEvent

LINE_SMOOTHING = 0.9
"""Weight of a point in a smoothed line, against that of the next one."""

NO_STEP = "No step is on file yet."
OLDER = "The run was recorded by an older version of megatier, which did not write this."
"""What a section says instead of its figures."""

Amounts = Callable[[Work], ByName]
"""Gives amounts of a step by name, such as the bytes that each queue moved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRun:
    """A run as its directory records it."""

    directory: Path
    """The run directory."""
    config: RunConfig
    """The resolved config."""
    history: History
    """The records of `metrics.jsonl`."""
    trace: Mapping[int, Sequence[TraceEvent]]
    """The events of the last steps, by the number of the step."""

    @property
    def opening(self) -> RunStart | None:
        """The opening record of the last process; None if an older version wrote none."""
        return self.history.openings[-1] if self.history.openings else None

    @property
    def steps(self) -> Sequence[Step]:
        """All steps that are on file."""
        return self.history.steps

    @property
    def steady(self) -> Sequence[Step]:
        """The steps without the first one of each process, which learns the order of units; else all steps."""
        # A run of an older version has no opening records, and began with step 1.
        first = {opening.step + 1 for opening in self.history.openings} or {1}
        return [step for step in self.steps if step.step not in first] or self.steps

    def points(self, figure: Callable[[Step], float | None], scale: float = 1.0) -> list[Point]:
        """Return a figure over the steps.

        Args:
            figure: the figure of a step; None: the step lacks it.
            scale: the unit that figures are divided by.

        Returns:
            Steps and figures, nan for a figure that a step lacks.
        """
        points: list[Point] = []
        for step in self.steps:
            # Older records lack figures, and a gap in a line says so better than a 0.
            value = figure(step)
            points.append((step.step, math.nan if value is None else value / scale))
        return points

    def tokens_at(self, step: float) -> str:
        """Return the tokens of all steps up to this one, as people read them."""
        return format_count(sum(step_report.tokens for step_report in self.steps if step_report.step <= step))

    def time_at(self, step: float) -> str:
        """Return the time from the beginning of the run to the end of a step; that of its steps if no clock is on file.

        The first and the last step of a run that was stopped in between may be days apart.
        """
        steps = [each for each in self.steps if each.step <= step]
        if not steps:
            return "0 ms"
        openings = self.history.openings
        began = openings[0].time if openings else ""
        try:
            ended = datetime.fromisoformat(steps[-1].time)
            passed = ended - datetime.fromisoformat(began)
        except (ValueError, TypeError):
            # No time on file, or only one of the two with a zone.
            return format_seconds(sum(each.seconds + each.compile_seconds for each in steps))

        # The clock of a host may have been set back in between.
        return format_seconds(max(0.0, passed.total_seconds()))


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Return the running mean of points, in which each one counts `LINE_SMOOTHING` times as much as the next."""
    means = []
    total = 0.0
    count = 0.0
    for step, value in points:
        if math.isfinite(value):
            total = LINE_SMOOTHING * total + value
            count = LINE_SMOOTHING * count + 1.0

        # Divided by the weights so far, so that the line does not begin near 0.
        means.append((step, total / count if count else math.nan))
    return means


def tokens_per_s(step: Step) -> float:
    """Return the tokens a second of a step."""
    return step.tokens / step.seconds if step.seconds > 0 else 0.0


def amount_of(amounts: Amounts, name: str) -> Callable[[Step], float]:
    """Return a function that gives the amount of one name, 0 for a step that lacks it."""
    return lambda step: amounts(step).get(name, 0.0)


def by_rank(steps: Iterable[Step]) -> dict[str, list[Work]]:
    """Return the work of each rank in the steps, by its name; empty if one process trained alone."""
    works: dict[str, list[Work]] = defaultdict(list)
    for step in steps:
        # The record of a step is that of the first rank, with the others in it.
        if step.other_ranks:
            works["rank 0"].append(step)
        for other in step.other_ranks:
            works[f"rank {other.rank} on {other.host}"].append(other)
    return works


def behind_of(steps: Iterable[Step]) -> dict[str, list[float]]:
    """Return by how many seconds each rank that was ever the slowest was behind the fastest, most often first."""
    behind: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        slowest = step.slowest_rank
        if slowest is not None:
            name = f"rank {slowest.rank} on {slowest.host}"
            seconds = slowest.seconds - slowest.least_seconds
            behind[name].append(seconds)

    # The sort is stable, so of two that were the slowest equally often the one that was so first comes first.
    often = sorted(behind.items(), key=lambda rank: -len(rank[1]))
    return dict(often)


def totals_of(steps: Iterable[Work], amounts: Amounts) -> Counter[str]:
    """Return the sums of all steps, by name."""
    total: Counter[str] = Counter()
    for step in steps:
        for name, amount in amounts(step).items():
            total[name] += amount  # type: ignore[assignment]  # Counter of floats
    return total


def use_of_compute(opening: RunStart, tokens_per_s: float) -> tuple[str, str, str]:
    """Return the operations of the model a second, six a parameter and token, and what share of the machine's that is.

    Attention, and what is computed twice, do not count.

    Returns:
        The name of the figure, the figure, and a remark.
    """
    # A product and a sum for each parameter, in the forward and twice in the backward.
    flops = 6 * opening.num_parameters * tokens_per_s
    if opening.flops_per_s:
        measured = opening.flops_per_s / 1e12
        share = f"{flops / opening.flops_per_s:.0%}"
        return "MFU", share, f"of the {measured:.3g} TFLOP/s that `megatier bench` measured"

    written = f"{flops / 1e9:.3g} GFLOP/s"
    if flops >= 1e12:
        written = f"{flops / 1e12:.3g} TFLOP/s"
    return "compute", written, "six operations a parameter and token"
