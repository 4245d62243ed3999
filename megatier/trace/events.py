"""The events of a trace: transfers, compute, updates and stalls on one clock, their sums, and the trace file."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatier.errors import TransferError
from megatier.files import open_regular

ByName = Mapping[str, float]
"""Seconds by lane or cause, or bytes by queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """An event in one row of the trace."""

    lane: str
    """The row of the trace: a queue, `compute`, or `stall`."""
    name: str
    """The block or unit that it is about."""
    start_ns: int
    """Its start, in time.perf_counter_ns."""
    end_ns: int
    """Its end, in time.perf_counter_ns."""
    num_bytes: int = 0
    """The bytes that moved."""
    cause: str = ""
    """What compute waited for, if the event is a stall: a queue, or a wait with a name of its own."""

    @property
    def seconds(self) -> float:
        """Seconds from its start to its end."""
        return (self.end_ns - self.start_ns) / 1e9


COMPILER = "compiler"
"""The cause of a wait for torch's compiler, which is no part of a step: it comes once."""
STEP_EVENT = "step"
"""The lane of the event that is a whole step, as it is printed: from its first row of text to its end."""


def stall_seconds(events: Iterable[TraceEvent]) -> dict[str, float]:
    """Sum up the seconds that compute waited, by cause."""
    total: Counter[str] = Counter()
    for event in events:
        if event.lane == "stall":
            total[event.cause] += event.seconds  # type: ignore[assignment]  # Counter of floats
    return dict(total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """An account of a step's time: at each moment compute was busy, or waited for one cause, or the host worked.

    The three add up to the whole step, from which the compiler's time is left out.
    """

    compute_seconds: float
    """Seconds in which compute was busy."""
    stall_seconds: ByName
    """Seconds that compute waited, by cause."""
    host_seconds: float
    """Seconds of neither: the host prepares the step, enqueues compute, or ends the step."""
    compile_seconds: float
    """Seconds besides, in which compute waited for the compiler."""


def account(events: Iterable[TraceEvent], start_ns: int, end_ns: int) -> Account:
    """Return an account of compute from one time to another. Of waits that overlap the first counts."""
    stalled: Counter[str] = Counter()
    busy = waits = 0
    until = until_busy = start_ns
    relevant = [event for event in events if event.lane in ("compute", "stall")]
    relevant.sort(key=lambda event: event.start_ns)
    for event in relevant:
        # An event may outlast the step, whose account ends where the step does.
        stop = min(event.end_ns, end_ns)
        start_busy = max(event.start_ns, until_busy)
        busy += max(0, stop - start_busy)
        until_busy = max(until_busy, stop)
        if event.lane == "stall":
            # Two threads may wait at once, and the step has that time only once.
            start = max(event.start_ns, until)
            lasted = max(0, stop - start)
            until = max(until, stop)
            waits += lasted
            stalled[event.cause] += lasted

    # In `busy` is every moment with compute or a wait.
    compiled = stalled.pop(COMPILER, 0)
    return Account(
        compute_seconds=(busy - waits) / 1e9,
        stall_seconds={cause: lasted / 1e9 for cause, lasted in stalled.items() if lasted},
        host_seconds=(end_ns - start_ns - busy) / 1e9,
        compile_seconds=compiled / 1e9,
    )


def own_seconds(events: Iterable[TraceEvent]) -> float:
    """Sum up the seconds that a rank took itself: those of compute, and of its waits for all but other ranks."""
    # The cause is empty where nothing was waited for, as in compute itself.
    return sum(e.seconds for e in events if e.lane in ("compute", "stall") and e.cause not in ("ranks", COMPILER))


def busy_seconds(events: Iterable[TraceEvent]) -> dict[str, float]:
    """Sum up, by lane, the seconds with at least one event. Stalls are left out: compute does nothing in them."""
    total: dict[str, int] = {}
    until: dict[str, int] = {}

    # Events of a lane may overlap, because several moves of a queue are in flight. What was counted already is cut off.
    by_start = sorted(events, key=lambda event: event.start_ns)
    for event in by_start:
        lane = event.lane

        # The event of the whole step is busy from its beginning to its end, which says nothing.
        if lane in ("stall", STEP_EVENT):
            continue

        counted_until = until.get(lane, event.start_ns)
        start_ns = max(event.start_ns, counted_until)
        lasted_ns = max(0, event.end_ns - start_ns)
        total[lane] = total.get(lane, 0) + lasted_ns
        until[lane] = max(event.end_ns, start_ns)
    return {lane: busy_ns / 1e9 for lane, busy_ns in total.items()}


def write_trace(path: Path, steps: Iterable[tuple[int, Iterable[TraceEvent]]]) -> None:
    """Write steps in the Chrome trace format, which Perfetto opens: one track per lane.

    Raises:
        TransferError: the drive is full or gone.
    """
    lanes: dict[str, int] = {}
    rows: list[dict[str, object]] = []
    arrows: list[dict[str, object]] = []
    for step, spans in steps:
        events = list(spans)
        for event in events:
            track = lanes.setdefault(event.lane, len(lanes))

            # The format counts microseconds.
            row = {
                "ph": "X",
                "pid": 0,
                "tid": track,
                "ts": event.start_ns / 1e3,
                "dur": (event.end_ns - event.start_ns) / 1e3,
                "name": event.name,
                "args": {"step": step, "bytes": event.num_bytes, "cause": event.cause},
            }
            rows.append(row)
        arrows += _flows(events, lanes, len(arrows))

    # Perfetto knows tracks by numbers, and this is where they get the names of lanes.
    names = []
    for lane, track in lanes.items():
        name = {"ph": "M", "pid": 0, "tid": track, "name": "thread_name", "args": {"name": lane}}
        names.append(name)

    content = json.dumps({"traceEvents": [*names, *arrows, *rows]})
    try:
        descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode())
    except OSError as error:
        raise TransferError("writing the trace", "disk", str(path), 0, error.errno or 0) from error


def _flows(events: Sequence[TraceEvent], lanes: Mapping[str, int], first: int) -> Iterator[dict[str, object]]:
    """Yield arrows from what compute waited for to the stall: the last event of that lane that the stall outlived."""
    stalls = [event for event in events if event.lane == "stall"]
    for number, stall in enumerate(stalls):
        cause = _cause_of(stall, events)
        if cause is None:
            continue

        flow = {
            "pid": 0,
            "id": first + number,
            "name": "waits for",
            "cat": "stall",
        }
        start = {"ph": "s", "tid": lanes[cause.lane], "ts": cause.start_ns / 1e3}
        end = {"ph": "f", "bp": "e", "tid": lanes["stall"], "ts": stall.end_ns / 1e3}
        yield flow | start
        yield flow | end


def _cause_of(stall: TraceEvent, events: Sequence[TraceEvent]) -> TraceEvent | None:
    """Return the event of a stall's cause that it waited for last; None if there is none."""
    # What begins after a wait is over was not waited for.
    began_before = [event for event in events if event.start_ns < stall.end_ns]
    of_cause = [event for event in began_before if event.lane == stall.cause]
    return max(
        of_cause,
        key=lambda event: min(event.end_ns, stall.end_ns),
        default=None,
    )
