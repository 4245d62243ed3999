"""The picture of a step: an SVG with one row for each lane, and stalls coloured by what compute waited for.

The module also reads back what `write_trace` wrote, and adds up how long each lane was busy.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatier.errors import ConfigError
from megatier.files import read_regular
from megatier.report.metrics import format_seconds, format_share
from megatier.report.svg import LETTER, TRACK, WIDTH, bar, grid_line, page, text, ticks
from megatier.trace.events import STEP, Account, TraceEvent, account, busy_seconds

LANES = (
    "nvme_to_ram",
    "nvme_to_gpu",
    "ram_to_gpu",
    "state_to_gpu",
    "compute",
    "gpu_to_ram",
    "state_to_ram",
    "ram_to_nvme",
    "update",
    "update_gpu",
)
"""Rows from top to bottom: towards compute, then away from it. Other lanes come after these."""

LEFT = 130
PLOT = 830
"""Pixels: where the time axis begins, and how long it is."""
FIGURES_RIGHT = (1056, 1122, 1184)
"""Pixels at which the columns busy, share and at once end."""
ROW = 30
BAR = 20
NAME_MAX = 15
"""Characters of a row's name."""
GAP_MIN = 0.3
"""Pixels. Spans of a colour that are closer together are drawn as one, so that thousands stay a small file. A shorter
span is drawn this long, so that none vanishes. The figures at the end of each row count every nanosecond."""

COLOURS = {
    "forward": "#2f6fb5",
    "backward": "#ee8a22",
    "compute": "#5b6470",
    "transfer": "#7e97b0",
    "update": "#2f9e55",
    "other": "#a3a3a3",
}
STALL_COLOURS = {
    "nvme_to_ram": "#d00000",
    "nvme_to_gpu": "#8a5a00",
    "ram_to_gpu": "#c4006e",
    "state_to_gpu": "#ffa3b5",
    "gpu_to_ram": "#ff3b1f",
    "state_to_ram": "#a8556f",
    "ram_to_nvme": "#ff5c8a",
    "update": "#7a0a2a",
    "update_gpu": "#4a0d3f",
}
"""Colours by cause, the same in every picture, so that two steps can be compared. The frequent ones differ most."""
STALL_COLOUR_OTHER = "#ff70d0"
IDLE = "idle"
"""The label of the ground: what is not drawn there."""
STALL = "stall: "
"""Stands before the cause in the legend."""


@dataclass(frozen=True, slots=True)
class LaneUse:
    """The time of a lane in a step."""

    lane: str
    """The lane."""
    busy_seconds: float
    """Time with at least one span."""
    span_seconds: float
    """Lengths of all spans: more than busy_seconds if several were under way at once."""

    @property
    def at_once(self) -> str:
        """The mean number of spans under way while the lane was busy, as text; empty if it was one."""
        mean = self.span_seconds / self.busy_seconds if self.busy_seconds else 1.0
        return f"{mean:.1f}" if mean >= 1.05 else ""


def read_trace(path: Path) -> dict[int, list[TraceEvent]]:
    """Return events by step, in the order of the file that `write_trace` wrote.

    Raises:
        ConfigError: the file cannot be read, or is no such trace.
    """
    try:
        rows = json.loads(read_regular(path).decode("utf-8"))["traceEvents"]
        lanes = {row["tid"]: str(row["args"]["name"]) for row in rows if row["ph"] == "M"}
        steps: dict[int, list[TraceEvent]] = {}
        for row in rows:
            if row["ph"] == "X":
                steps.setdefault(int(row["args"]["step"]), []).append(_event(lanes[row["tid"]], row))
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}. A run writes its trace when it ends, with --output.trace true."
        ) from error
    except (ValueError, OverflowError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no trace of megatier. Give a run directory, or the trace.json in it.") from error

    return steps


def step_seconds(events: Iterable[TraceEvent]) -> float:
    """Return the seconds of a whole step; of events without one, those from the first to the last; 0 without events."""
    start_ns, end_ns = _window(events)
    return (end_ns - start_ns) / 1e9


def lane_uses(events: Sequence[TraceEvent]) -> list[LaneUse]:
    """Return how each lane spent a step, in the order of the rows."""
    busy = busy_seconds(events)
    span_seconds = dict.fromkeys(busy, 0.0)
    for event in events:
        if event.lane in busy:
            span_seconds[event.lane] += event.seconds

    # Stalls are no lane of their own, because it is compute that waits.
    lanes = in_row_order({_row_lane(event) for event in events if event.lane != STEP})
    return [LaneUse(lane, busy.get(lane, 0.0), span_seconds.get(lane, 0.0)) for lane in lanes]


def in_row_order(lanes: Iterable[str]) -> list[str]:
    """Return lanes in the order of their rows."""
    return sorted(lanes, key=lambda lane: (LANES.index(lane) if lane in LANES else len(LANES), lane))


def draw(events: Sequence[TraceEvent], title: str) -> str:
    """Return a step as an SVG.

    Args:
        events: the events of one step, in any order.
        title: stands above the picture; a long one is cut.
    """
    uses = lane_uses(events)
    seconds = step_seconds(events)
    spent = account_of(events)
    colours = _colours(events)
    legend, top = _legend(colours, spent.stall_seconds)
    bottom = top + ROW * len(uses)
    parts = [text(16, 48, _summary(seconds, spent)), *legend]

    for right, name in zip(FIGURES_RIGHT, ("busy", "share", "at once"), strict=True):
        parts.append(text(right, top - 6, name, "end"))
    for index, use in enumerate(uses):
        parts += _row(events, use, colours, top + ROW * index + ROW / 2)
    return page(bottom + 36, title, [*parts, *_axis(seconds, top, bottom)])


def _summary(seconds: float, spent: Account) -> str:
    """Return the step in one line: how long it took, and what compute did."""
    stalled = sum(spent.stall_seconds.values())
    words = f"compute busy {format_share(spent.compute_seconds, seconds)}, stalled {format_seconds(stalled)}"
    return f"{format_seconds(seconds)} in all; {words}, host {format_seconds(spent.host_seconds)}"


def account_of(events: Iterable[TraceEvent]) -> Account:
    """Return where the time of a step went; it adds up to `step_seconds`."""
    events = list(events)
    return account(events, *_window(events))


def _row(events: Sequence[TraceEvent], use: LaneUse, colours: Mapping[str, str], middle: float) -> Iterator[str]:
    """Yield name, spans and figures of a lane."""
    start_ns, end_ns = _window(events)
    scale = PLOT / max(end_ns - start_ns, 1)

    # Spans of a colour are one path, so that thousands of them stay a small file.
    spans: dict[str, list[tuple[float, float]]] = {label: [] for label in colours}
    for event in events:
        if _row_lane(event) == use.lane:
            # Work may begin under the step before, or end under the next one.
            left, right = ((min(max(ns, start_ns), end_ns) - start_ns) * scale for ns in (event.start_ns, event.end_ns))
            spans[_label(event)].append((LEFT + left, LEFT + max(right, left + GAP_MIN)))

    yield text(LEFT - 10, middle + 4, use.lane, "end", NAME_MAX)
    yield bar(LEFT, middle - BAR / 2, PLOT, BAR, TRACK)

    # Stalls come last in `colours`, so nothing covers them.
    for label, found in spans.items():
        if found:
            path = "".join(f"M{left:.1f} {middle:g}H{right:.1f}" for left, right in _merged(found, GAP_MIN))
            yield f'<path d="{path}" stroke="{colours[label]}" stroke-width="{BAR}"/>'

    figures = format_seconds(use.busy_seconds), format_share(use.busy_seconds, step_seconds(events)), use.at_once
    for right, figure in zip(FIGURES_RIGHT, figures, strict=True):
        yield text(right, middle + 4, figure, "end")


def _axis(seconds: float, top: int, bottom: int) -> Iterator[str]:
    """Yield ticks at round times, as lines across all rows with their time below."""
    unit, per_second = ("s", 1) if seconds >= 1 else ("ms", 1000)
    for tick in ticks(seconds) if seconds else ():
        x = LEFT + PLOT * tick / seconds
        yield grid_line(x, top, bottom + 4)
        yield text(x, bottom + 20, f"{tick * per_second:g} {unit}", "middle")


def _legend(colours: Mapping[str, str], stalls: Mapping[str, float]) -> tuple[list[str], int]:
    """Return a square and a name for each colour, in as many lines as they need, and the y at which the rows begin."""
    parts = []
    x = 16.0
    y = 74
    for label, colour in colours.items():
        cause = label.removeprefix(STALL)
        name = label if label == cause else f"{label} {format_seconds(stalls.get(cause, 0.0))}"
        width = 18 + LETTER * len(name) + 18
        if x + width > WIDTH:
            x = 16.0
            y = y + 20
        parts += [bar(x, y - 10, 12, 12, colour), text(x + 18, y, name)]
        x += width

    return parts, y + 32


def _colours(events: Iterable[TraceEvent]) -> dict[str, str]:
    """Return colours by label, for the labels that there are; stalls come last."""
    events = list(events)
    labels = {_label(event) for event in events if event.lane != STEP}
    causes = in_row_order({event.cause for event in events if event.lane == "stall"})
    tones = {STALL + cause: STALL_COLOURS.get(cause, STALL_COLOUR_OTHER) for cause in causes}
    return {label: colour for label, colour in COLOURS.items() if label in labels} | tones | {IDLE: TRACK}


def _label(event: TraceEvent) -> str:
    """Return what gives a span its colour."""
    if event.lane == "stall":
        return STALL + event.cause
    if event.lane == "compute":
        phase = event.name.split(" ")[-2:-1]  # "unit phase group"
        return phase[0] if phase and phase[0] in COLOURS else "compute"
    if event.lane.startswith("update"):
        return "update"
    return "transfer" if "_to_" in event.lane else "other"


def _event(lane: str, row: Mapping[str, Any]) -> TraceEvent:
    """Return a span of the file, whose times are microseconds.

    Raises:
        ValueError: it ends before it begins.
    """
    start = round(row["ts"] * 1000)
    end = round((row["ts"] + row["dur"]) * 1000)
    if end < start:
        raise ValueError(row)
    details = row["args"]
    return TraceEvent(
        lane=lane,
        name=str(row["name"]),
        start_ns=start,
        end_ns=end,
        num_bytes=int(details["bytes"]),
        cause=str(details["cause"]),
    )


def _row_lane(event: TraceEvent) -> str:
    """Return the lane in whose row an event is drawn."""
    return "compute" if event.lane == "stall" else event.lane


def _window(events: Iterable[TraceEvent]) -> tuple[int, int]:
    """Return start and end of the step, or else of all events together, in nanoseconds; (0, 0) without events."""
    events = list(events)
    events = [event for event in events if event.lane == STEP] or events
    return min((event.start_ns for event in events), default=0), max((event.end_ns for event in events), default=0)


def _merged(spans: Iterable[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """Return the union of (start, end) spans, in order; those less than a gap apart become one."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start - merged[-1][1] <= gap:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged
