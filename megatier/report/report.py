"""The report of a run as text: live progress, where the state lies, and what moved.

Plain figures come in, and everything goes out through the console that the caller gives.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from megatier.byte_counts import format_bytes
from megatier.report.figures import QueueBytes, SlowestRank, StepReport, TierState
from megatier.report.metrics import format_seconds, format_share
from megatier.report.panel import WIDTH, Course, draw_panel, images_a_second, tokens_a_second

SPEED_SMOOTHING = 0.9
"""Weight of the past in seconds per step, from which the time left follows."""

REDRAW_SECONDS = 0.1
"""Seconds between two panels, at least."""
LINE_SECONDS = 5.0
"""Seconds between two plain lines, at least."""


class Progress:
    """Shows steps as they end: in a live panel on a terminal, else in a line every few seconds at most.

    The first and the last step always get their line. Use it as a context; the panel stays when it closes.
    """

    def __init__(self, console: Console, num_steps: int, line_seconds: float = LINE_SECONDS) -> None:
        """Prepare; nothing is drawn before the first step.

        Args:
            console: where to draw.
            num_steps: number of the last step.
            line_seconds: seconds between two plain lines, at least.
        """
        self._console = console
        self._num_steps = num_steps
        self._line_seconds = line_seconds
        # Drawn where a step ends, and by no thread, which would draw while the run prints.
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._num_reports = 0
        self._seconds_per_step = 0.0
        self._compile_seconds = 0.0
        self._losses = Course()
        self._last: StepReport | None = None
        self._is_shown = False
        """Whether the last step was shown."""
        self._shown_at = -math.inf

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, report: StepReport) -> None:
        """Show a finished step, unless the last one was shown just now."""
        self._num_reports += 1

        # Before the pause is looked at: the course of the loss and the time left have every step, also those that are
        # not drawn.
        self._losses.add(report.loss)
        self._compile_seconds += report.compile_seconds

        # The first step of a process learns the order of units, so its time says little about the next one.
        past = SPEED_SMOOTHING if self._num_reports > 2 else 0.0
        self._seconds_per_step = past * self._seconds_per_step + (1 - past) * report.seconds
        steps_left = self._num_steps - report.step
        seconds_left = self._seconds_per_step * steps_left

        # The first and the last step are always shown, however soon the last one comes.
        now = time.monotonic()
        pause = self._line_seconds if self._live is None else REDRAW_SECONDS
        self._last = report
        self._is_shown = False
        if steps_left > 0 and now - self._shown_at < pause:
            return

        self._shown_at = now
        self._show(report, seconds_left)

    def end(self, why: str) -> None:
        """Show the last step with why no other one comes, and say so in a line of its own too."""
        # A line says nothing new of a step that has one, and the panel says why.
        if self._last is not None and (self._live is not None or not self._is_shown):
            self._show(self._last, 0.0, why)
        self.note(why)

    def _show(self, report: StepReport, seconds_left: float, why: str = "") -> None:
        """Show a step, and in the panel why it is the last one."""
        self._is_shown = True
        if self._live is None:
            self.note(format_step(report, self._num_steps, seconds_left))
            return
        drawn = draw_panel(report, self._num_steps, seconds_left, self._losses, self._compile_seconds, why)
        self._live.update(drawn, refresh=True)

    def note(self, text: str) -> None:
        """Print a line of its own, above the panel if there is one."""
        # Without markup, which rich would see in a path with brackets.
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class WorkBar:
    """Shows how far a long piece of work is: a bar on a terminal, else a line every few seconds.

    Use it as a context. Work that ends sooner than the first line leaves nothing behind.
    """

    def __init__(
        self,
        console: Console,
        name: str,
        total: float | None,
        form: Callable[[float], str],
        line_seconds: float = LINE_SECONDS,
    ) -> None:
        """Begin at nothing.

        Args:
            console: where to draw.
            name: the work, such as "weights in place".
            total: all that there is to do; None: nobody knows.
            form: writes an amount, such as 3 << 20 as "3.0 MiB".
            line_seconds: seconds between two plain lines, at least, and before the first one.
        """
        self._console = console
        self._name = name
        self._total = total
        self._form = form
        self._line_seconds = line_seconds
        self._done = 0.0
        self._shown_at = time.monotonic()
        self._bar: Bar | None = None
        if console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(WIDTH),
                TextColumn("{task.fields[shown]}"),
                TimeRemainingColumn(),
            )

            # No thread that refreshes it: one would draw while the caller prints.
            self._bar = Bar(*columns, console=console, auto_refresh=False, transient=True)
            self._bar.add_task(name, total=total, shown="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, amount: float) -> None:
        """Note that so much more is done, and show it if the last picture is old."""
        self._done += amount
        now = time.monotonic()
        pause = self._line_seconds if self._bar is None else REDRAW_SECONDS
        if now - self._shown_at < pause:
            return

        self._shown_at = now
        shown = self._form(self._done)
        if self._total is not None:
            shown += f" of {self._form(self._total)}"
        if self._bar is None:
            self._console.print(
                f"{self._name}: {shown}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
            return
        task = self._bar.task_ids[0]
        self._bar.update(
            task,
            completed=self._done,
            shown=shown,
            refresh=True,
        )


def format_step(report: StepReport, num_steps: int, seconds_left: float) -> str:
    """Return a step as one line."""
    figures = _figures(report, num_steps, seconds_left)
    return "  ".join(f"{name} {value}" for name, value in figures)


def print_placement(console: Console, tiers: Sequence[TierState], num_ranks: int = 1) -> None:
    """Print a table of what lies where: bytes of state per tier, their share, what else is there, and the budget."""
    total = sum(tier.state_bytes for tier in tiers)
    others = sum(tier.other_bytes for tier in tiers)
    budgets = sum(tier.budget_bytes for tier in tiers)

    # The sum has the form of a tier, so that it is written like one.
    whole = TierState(
        tier="all",
        state_bytes=total,
        other_bytes=others,
        budget_bytes=budgets,
    )

    shared = f", of each of {num_ranks} ranks" if num_ranks > 1 else ""
    table = figure_table(f"what lies where{shared}", "tier", "state", "share", "slots, gradients", "budget")
    for tier in (*tiers, whole):
        if tier is whole:
            table.add_section()
        share = format_share(tier.state_bytes, total)
        table.add_row(
            tier.tier,
            format_bytes(tier.state_bytes),
            share,
            format_bytes(tier.other_bytes),
            format_bytes(tier.budget_bytes),
        )
    console.print(table)


def print_moves(console: Console, queues: Sequence[QueueBytes]) -> None:
    """Print a table of what moved, in bytes, and what the placement demands."""
    table = figure_table("what moved, in bytes", "queue", "moved", "demanded", "difference")
    for queue in queues:
        moved = f"{queue.moved_bytes:,}"
        demanded = f"{queue.demanded_bytes:,}"
        difference = queue.moved_bytes - queue.demanded_bytes

        # All bytes of it, because a difference is a fault, and one of a few bytes must be seen.
        written = f"{difference:+,}" if difference else "none"
        table.add_row(queue.queue, moved, demanded, written)
    console.print(table)


def _figures(report: StepReport, num_steps: int, seconds_left: float) -> Iterator[tuple[str, str]]:
    """Yield name and value of everything worth showing of a step."""
    yield "step", f"{report.step}/{num_steps}"
    yield "loss", f"{report.loss:.4f}"
    yield "lr", f"{report.learning_rate:.2e}"
    if report.grad_norm is not None:
        yield "norm", f"{report.grad_norm:.3f}"

    yield "tokens/s", tokens_a_second(report)
    if report.images is not None:
        yield "images/s", images_a_second(report)
    if report.attainment is not None:
        yield "attainment", f"{report.attainment:.0%} ({report.bound_by})"
    yield "ETA", format_seconds(seconds_left)

    if report.slowest_rank is not None:
        yield "slowest", _slowest(report.slowest_rank)
    if report.compile_seconds:
        yield "compiled", format_seconds(report.compile_seconds)
    if report.main_stall is not None:
        share = format_share(report.stalled_seconds, report.seconds)
        yield "stalled", f"{share} ({report.main_stall})"


def _slowest(slowest: SlowestRank) -> str:
    """Return which rank the others waited for, and how long it and the fastest took themselves."""
    seconds = f"{format_seconds(slowest.seconds)}, fastest {format_seconds(slowest.least_seconds)}"
    return f"rank {slowest.rank} on {slowest.host} ({seconds})"


def figure_table(title: str, first: str, *others: str) -> Table:
    """Return a table whose first column holds names and whose others hold figures."""
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table
