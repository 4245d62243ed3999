"""The live panel of a run: the course of its loss, what bounds a step, how busy lanes are."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from megatier.report.figures import StepReport
from megatier.report.metrics import format_seconds, format_share
from megatier.report.picture import in_row_order

WIDTH = 32
"""Characters of a bar and of the course of the loss; even, because pairs of points are merged."""
LEVELS = "▁▂▃▄▅▆▇█"
"""Characters of a course from the least to the most."""


class Course:
    """The course of a figure over a whole run, in fewer than WIDTH points.

    Attributes:
        points: means of equally many values each.
    """

    def __init__(self) -> None:
        """Begin without points."""
        self.points: list[float] = []
        self._waiting: list[float] = []
        """Values of the next point."""
        self._values_per_point = 1

    def add(self, value: float) -> None:
        """Take the next value; one that is not finite leaves no mark."""
        if not math.isfinite(value):
            return
        self._waiting.append(value)
        if len(self._waiting) < self._values_per_point:
            return

        self.points.append(math.fsum(self._waiting) / len(self._waiting))
        self._waiting.clear()

        # When the line is full two points become one, so a run of any length fits.
        if len(self.points) == WIDTH:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [(first + second) / 2 for first, second in pairs]
            self._values_per_point *= 2


def sparkline(points: Sequence[float]) -> str:
    """Return points as characters whose heights go from the least to the most."""
    low = min(points, default=0.0)
    high = max(points, default=0.0)
    scale = (len(LEVELS) - 1) / (high - low) if high > low else 0.0
    return "".join(LEVELS[round((point - low) * scale)] for point in points)


def bound_of(report: StepReport) -> str:
    """Return what bounds a step: as planned, else the cause that compute waited longest for, if it waited for long."""
    if report.attainment is not None:
        return f"{report.bound_by}, attainment {report.attainment:.0%}"
    return report.main_stall or "compute"


def panel(
    report: StepReport, num_steps: int, seconds_left: float, losses: Course, compile_seconds: float = 0.0
) -> RenderableType:
    """Return the panel after a finished step.

    Args:
        report: the step.
        num_steps: number of the last step.
        seconds_left: seconds until then.
        losses: losses of the steps so far.
        compile_seconds: seconds that the steps so far waited for the compiler.
    """
    grid = Table.grid(*(Column(no_wrap=True) for _ in range(3)), padding=(0, 2))
    norm = "" if report.gradient_norm is None else f"  norm {report.gradient_norm:.3f}"
    speed = f"{report.num_tokens / report.seconds:,.0f}" if report.seconds > 0 else "-"
    _row(grid, "step", _bar(report.step, num_steps), f"{report.step}/{num_steps}  ETA {format_seconds(seconds_left)}")
    _row(grid, "loss", Text(sparkline(losses.points)), f"{report.loss:.4f}  lr {report.learning_rate:.2e}{norm}")
    _row(grid, "tokens/s", Text(speed), f"{report.seconds:.3f} s/step")
    stalled = report.stalled_seconds
    shares = f"{format_seconds(stalled)}, {format_share(stalled, report.seconds)}"
    spent = f"stalled {shares}, host {format_share(report.host_seconds, report.seconds)}"
    _row(grid, "bound by", Text(bound_of(report)), spent)
    if compile_seconds:
        _row(grid, "compiled", Text(format_seconds(compile_seconds)), "so far, which counts in no step")

    if (slowest := report.slowest) is not None:
        words = f"{format_seconds(slowest.seconds)} itself, the fastest {format_seconds(slowest.least_seconds)}"
        _row(grid, "slowest", Text(f"rank {slowest.rank} on {slowest.host}"), words)

    # The bars are those of the first rank. What the slowest one does stands beside them.
    for lane in in_row_order(report.busy_seconds):
        # Work that began under the step before counts for this one, so a lane may be busy for longer than the step.
        busy = min(report.busy_seconds[lane], report.seconds)
        words = f"busy {format_share(busy, report.seconds)}"
        if slowest is not None and report.slowest_busy_seconds:
            other = min(report.slowest_busy_seconds.get(lane, 0.0), report.seconds)
            words += f", rank {slowest.rank} {format_share(other, report.seconds)}"
        _row(grid, lane, _bar(busy, report.seconds), words)
    return grid


def _bar(part: float, whole: float) -> ProgressBar:
    return ProgressBar(total=whole or 1, completed=min(part, whole), width=WIDTH)


def _row(grid: Table, name: str, shown: RenderableType, figures: str) -> None:
    grid.add_row(Text(name, style="dim"), shown, Text(figures))
