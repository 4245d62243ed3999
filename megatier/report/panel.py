"""Shows a run live: the course of its loss, what bounds a step, how busy lanes are."""

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

        mean = math.fsum(self._waiting) / len(self._waiting)
        self.points.append(mean)
        self._waiting.clear()

        # When the line is full two points become one, so a run of any length fits.
        if len(self.points) == WIDTH:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [(first + second) / 2 for first, second in pairs]
            self._values_per_point *= 2


def draw_sparkline(points: Sequence[float]) -> str:
    """Return points as characters whose heights go from the least to the most."""
    low = min(points, default=0.0)
    high = max(points, default=0.0)

    # Equal points have no range to scale by, and lie at the bottom.
    scale = 0.0
    if high > low:
        scale = (len(LEVELS) - 1) / (high - low)
    heights = [round((point - low) * scale) for point in points]
    return "".join(LEVELS[height] for height in heights)


def bound_of(report: StepReport) -> str:
    """Return the bound of a step: the planned one, else the cause of the longest waits, if they were long."""
    if report.attainment is not None:
        return f"{report.bound_by}, attainment {report.attainment:.0%}"
    return report.main_stall or "compute"


def draw_panel(
    report: StepReport,
    num_steps: int,
    seconds_left: float,
    losses: Course,
    compile_seconds: float = 0.0,
    why_over: str = "",
) -> RenderableType:
    """Return the panel after a finished step.

    Args:
        report: the step.
        num_steps: number of the last step.
        seconds_left: seconds until then.
        losses: losses of the steps so far.
        compile_seconds: seconds that the steps so far waited for the compiler.
        why_over: why the run ends before its last step; empty: it does not.
    """
    # A line that wraps would make the panel jump as its figures change.
    columns = [Column(no_wrap=True) for _ in range(3)]
    grid = Table.grid(*columns, padding=(0, 2))
    left = format_seconds(seconds_left)
    _row(grid, "step", _bar(report.step, num_steps), f"{report.step}/{num_steps}  ETA {left}")

    if why_over:
        _row(grid, "over", Text(why_over), "")

    figures = f"{report.loss:.4f}  lr {report.learning_rate:.2e}"
    if report.grad_norm is not None:
        figures += f"  norm {report.grad_norm:.3f}"
    course = draw_sparkline(losses.points)
    _row(grid, "loss", Text(course), figures)
    _row(grid, "tokens/s", Text(tokens_a_second(report)), f"{report.seconds:.3f} s/step")
    if report.images is not None:
        _row(grid, "images/s", Text(images_a_second(report)), f"{report.images:,.0f} in the step")

    stalled = report.stalled_seconds
    share = format_share(stalled, report.seconds)
    host = format_share(report.host_seconds or 0.0, report.seconds)
    figures = f"stalled {format_seconds(stalled)}, {share}, host {host}"
    _row(grid, "bound by", Text(bound_of(report)), figures)
    if compile_seconds:
        compiled = format_seconds(compile_seconds)
        _row(grid, "compiled", Text(compiled), "so far, which counts in no step")

    if (slowest := report.slowest_rank) is not None:
        seconds = format_seconds(slowest.seconds)
        least = format_seconds(slowest.least_seconds)

        # Shown as `Text`: to rich, a host's name with brackets would be markup.
        name = f"rank {slowest.rank} on {slowest.host}"
        _row(grid, "slowest", Text(name), f"{seconds} itself, the fastest {least}")

    for lane in in_row_order(report.busy_seconds):
        _lane_row(grid, lane, report)
    return grid


def tokens_a_second(report: StepReport) -> str:
    """Return the tokens a second of a step in words; "-" if its clock did not move."""
    if report.seconds <= 0:
        return "-"
    return f"{report.tokens / report.seconds:,.0f}"


def images_a_second(report: StepReport) -> str:
    """Return the images a second of a step in words; "-" if its clock did not move, or the run reads none."""
    if report.images is None or report.seconds <= 0:
        return "-"
    return f"{report.images / report.seconds:,.1f}"


def _lane_row(grid: Table, lane: str, report: StepReport) -> None:
    """Add how busy a lane was. The bar is that of the first rank; what the slowest one does stands beside it."""
    # Work that began under the step before counts for this one, so a lane may be busy for longer than the step.
    whole = report.seconds
    busy = min(report.busy_seconds[lane], whole)
    figures = f"busy {format_share(busy, whole)}"

    slowest = report.slowest_rank
    if slowest is not None and report.slowest_busy_seconds:
        seconds = min(whole, report.slowest_busy_seconds.get(lane, 0.0))
        share = format_share(seconds, whole)
        figures += f", rank {slowest.rank} {share}"
    _row(grid, lane, _bar(busy, whole), figures)


def _bar(part: float, whole: float) -> ProgressBar:
    # A bar whose whole is 0 is a finished one for rich, and this one has not begun.
    return ProgressBar(total=whole or 1, completed=min(part, whole), width=WIDTH)


def _row(grid: Table, name: str, shown: RenderableType, figures: str) -> None:
    grid.add_row(Text(name, style="dim"), shown, Text(figures))
