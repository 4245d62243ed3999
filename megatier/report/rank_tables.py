"""The section of a run's page about its ranks: which the others waited for, and what each did in a step."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from megatier.byte_counts import format_bytes
from megatier.report.html import note, table
from megatier.report.metrics import format_seconds, format_share
from megatier.report.picture import in_row_order
from megatier.report.recorded_run import Amounts, RecordedRun, behind_of, by_rank, totals_of

RANKS_SHOWN = 8
"""Number of the slowest ranks that are shown."""


def make_rank_tables(run: RecordedRun) -> str:
    """Return which ranks the others waited for, and what each of them waited for, did and moved in a step."""
    behind = behind_of(run.steady)
    if not behind:
        return note("One process trained alone.")

    num_steps = sum(map(len, behind.values()))
    slowest = []
    # Those that were the slowest most often come first (`behind_of`).
    for name, seconds in list(behind.items())[:RANKS_SHOWN]:
        share = format_share(len(seconds), num_steps)
        slowest.append((name, share, format_seconds(median(seconds))))
    meaning = (
        "All ranks end a step together. The slowest one takes longest itself: it computes, or waits for its own "
        "lanes, while the others wait for it. Below are medians of a step, for each rank."
    )
    return (
        table(("slowest", "share of the steps", "longer than the fastest, median"), slowest)
        + note(meaning)
        + _by_rank(run, "waited for", lambda work: work.stall_seconds, format_seconds)
        + _by_rank(run, "busy", lambda work: work.busy_seconds, format_seconds)
        + _by_rank(run, "moved", lambda work: work.moved_bytes, format_bytes)
    )


def _by_rank(run: RecordedRun, title: str, amounts: Amounts, form: Callable[[float], str]) -> str:
    """Return a table of what each rank has of some amounts in a step; empty if no rank has any, or none is on file."""
    works_of = by_rank(run.steady)
    names: set[str] = set()
    for works in works_of.values():
        names |= totals_of(works, amounts).keys()
    if not names:
        return ""

    columns = in_row_order(names)
    rows = []
    for rank, works in works_of.items():
        # A step in which a rank has no amount of a name counts as 0.
        medians = [median(amounts(work).get(name, 0.0) for work in works) for name in columns]
        rows.append((rank, *map(form, medians)))
    return table((title, *columns), rows)
