"""Draws a step as an SVG with one row for each lane, and stalls coloured by what compute waited for.

The module also reads back what `write_trace` wrote, and adds up how long each lane was busy.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatier.errors import ConfigError
from megatier.files import read_regular
from megatier.report.metrics import format_seconds, format_share
from megatier.report.svg import LETTER, TRACK, WIDTH, Point, bar, grid_line, page, text, ticks
from megatier.trace.events import STEP_EVENT, Account, ByName, TraceEvent, account, busy_seconds

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
LANE_NAME_MAX = 15
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

        # Less than that would be written as 1.0.
        return f"{mean:.1f}" if mean >= 1.05 else ""


def read_trace(path: Path) -> dict[int, list[TraceEvent]]:
    """Return events by step, in the order of the file that `write_trace` wrote.

    Raises:
        ConfigError: the file cannot be read, or is no such trace.
    """
    try:
        rows = json.loads(read_regular(path).decode("utf-8"))["traceEvents"]
        # The viewers' format names a lane in a record of its own, and spans have its number.
        lanes = {row["tid"]: str(row["args"]["name"]) for row in rows if row["ph"] == "M"}
        steps: dict[int, list[TraceEvent]] = {}
        for row in rows:
            if row["ph"] == "X":
                step = int(row["args"]["step"])
                event = _event(lanes[row["tid"]], row)
                steps.setdefault(step, []).append(event)
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
    lanes = {_row_lane(event) for event in events if event.lane != STEP_EVENT}
    uses = []
    for lane in in_row_order(lanes):
        uses.append(LaneUse(lane, busy.get(lane, 0.0), span_seconds.get(lane, 0.0)))
    return uses


def in_row_order(lanes: Iterable[str]) -> list[str]:
    """Return lanes in the order of their rows."""

    # By name where the picture knows no order: a set has another order in each process.
    def place(lane: str) -> tuple[int, str]:
        number = LANES.index(lane) if lane in LANES else len(LANES)
        return number, lane

    return sorted(lanes, key=place)


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
    parts = [text(16, 48, _summary(seconds, spent)), *legend]

    for right, name in zip(FIGURES_RIGHT, ("busy", "share", "at once"), strict=True):
        parts.append(text(right, top - 6, name, "end"))
    bottom = top
    for use in uses:
        parts += _row(events, use, colours, bottom + ROW / 2)
        bottom += ROW

    # The axis goes over the rows, whose spans would cover its lines.
    parts += _axis(seconds, top, bottom)
    return page(bottom + 36, title, parts)


def _summary(seconds: float, spent: Account) -> str:
    """Return the step in one line: how long it took, and what compute did."""
    busy = format_share(spent.compute_seconds, seconds)
    stalled_seconds = sum(spent.stall_seconds.values())
    stalled = format_seconds(stalled_seconds)
    host = format_seconds(spent.host_seconds)
    return f"{format_seconds(seconds)} in all; compute busy {busy}, stalled {stalled}, host {host}"


def account_of(events: Iterable[TraceEvent]) -> Account:
    """Return where the time of a step went; it adds up to `step_seconds`."""
    events = list(events)
    return account(events, *_window(events))


def _row(events: Sequence[TraceEvent], use: LaneUse, colours: Mapping[str, str], middle: float) -> Iterator[str]:
    """Yield name, spans and figures of a lane."""
    yield text(LEFT - 10, middle + 4, use.lane, "end", LANE_NAME_MAX)
    yield bar(LEFT, middle - BAR / 2, PLOT, BAR, TRACK)

    # Spans of a colour are one path, so that thousands of them stay a small file.
    # Stalls come last in `colours`, so nothing covers them.
    spans_of = _spans(events, use.lane)
    for label, colour in colours.items():
        if label not in spans_of:
            continue
        merged = _merge_spans(spans_of[label], GAP_MIN)
        lines = [f"M{left:.1f} {middle:g}H{right:.1f}" for left, right in merged]
        path = "".join(lines)
        yield f'<path d="{path}" stroke="{colour}" stroke-width="{BAR}"/>'

    busy = format_seconds(use.busy_seconds)
    share = format_share(use.busy_seconds, step_seconds(events))
    figures = (busy, share, use.at_once)
    for right, figure in zip(FIGURES_RIGHT, figures, strict=True):
        yield text(right, middle + 4, figure, "end")


def _spans(events: Sequence[TraceEvent], lane: str) -> dict[str, list[Point]]:
    """Return the spans of a lane in pixels, by their label."""
    start_ns, end_ns = _window(events)
    scale = PLOT / max(end_ns - start_ns, 1)
    spans: dict[str, list[Point]] = defaultdict(list)
    for event in events:
        if _row_lane(event) != lane:
            continue

        # Work may begin under the step before, or end under the next one.
        began_ns = min(max(event.start_ns, start_ns), end_ns)
        ended_ns = min(max(event.end_ns, start_ns), end_ns)
        left = (began_ns - start_ns) * scale
        right = (ended_ns - start_ns) * scale
        right = max(right, left + GAP_MIN)
        spans[_label(event)].append((LEFT + left, LEFT + right))
    return spans


def _axis(seconds: float, top: int, bottom: int) -> Iterator[str]:
    """Yield ticks at round times, as lines across all rows with their time below."""
    if not seconds:
        return
    unit, per_second = ("s", 1) if seconds >= 1 else ("ms", 1000)
    for tick in ticks(seconds):
        x = LEFT + PLOT * tick / seconds
        time = f"{tick * per_second:g} {unit}"
        yield grid_line(x, top, bottom + 4)
        yield text(x, bottom + 20, time, "middle")


def _legend(colours: Mapping[str, str], stalls: ByName) -> tuple[list[str], int]:
    """Return a square and a name for each colour, in as many lines as they need, and the y at which the rows begin."""
    parts = []
    x = 16.0
    y = 74
    for label, colour in colours.items():
        name = label
        if label.startswith(STALL):
            seconds = stalls.get(label.removeprefix(STALL), 0.0)
            name = f"{label} {format_seconds(seconds)}"

        # SVG breaks no lines, and no viewer tells how wide its letters are: `LETTER` is at most.
        width = 18 + LETTER * len(name) + 18
        if x + width > WIDTH:
            x = 16.0
            y += 20
        parts += [bar(x, y - 10, 12, 12, colour), text(x + 18, y, name)]
        x += width

    return parts, y + 32


def _colours(events: Sequence[TraceEvent]) -> dict[str, str]:
    """Return colours by label, for the labels that there are; stalls come last."""
    labels = {_label(event) for event in events if event.lane != STEP_EVENT}
    colours = {}
    for label, colour in COLOURS.items():
        if label in labels:
            colours[label] = colour

    # In an order of their own: a set has another one in each process, and pictures of two steps are compared.
    causes = {event.cause for event in events if event.lane == "stall"}
    for cause in in_row_order(causes):
        colours[STALL + cause] = STALL_COLOURS.get(cause, STALL_COLOUR_OTHER)
    colours[IDLE] = TRACK
    return colours


def _label(event: TraceEvent) -> str:
    """Return the label that gives a span its colour."""
    if event.lane == "stall":
        return STALL + event.cause
    if event.lane == "compute":
        # Compute is named "unit phase group", and the name of a unit may have spaces.
        phase = event.name.split(" ")[-2:-1]
        return phase[0] if phase and phase[0] in COLOURS else "compute"
    if event.lane.startswith("update"):
        return "update"
    return "transfer" if "_to_" in event.lane else "other"


def _event(lane: str, row: Mapping[str, Any]) -> TraceEvent:
    """Return a span of the file, whose times are microseconds.

    Raises:
        ValueError: it ends before it begins.
    """
    # Rounded, because the thousands of a nanosecond in a float are noise.
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
    whole = [event for event in events if event.lane == STEP_EVENT]

    # A trace that was cut has spans of a step whose own event is not in it.
    counted = whole or events
    starts_ns = [event.start_ns for event in counted]
    ends_ns = [event.end_ns for event in counted]
    return min(starts_ns, default=0), max(ends_ns, default=0)


def _merge_spans(spans: Iterable[Point], gap: float) -> list[Point]:
    """Return the union of (start, end) spans, in order; those less than a gap apart become one."""
    merged: list[Point] = []
    for start, end in sorted(spans):
        if not merged or start - merged[-1][1] > gap:
            merged.append((start, end))
            continue

        # A span may lie within the one before, which then ends later.
        first, last = merged[-1]
        merged[-1] = first, max(last, end)
    return merged
