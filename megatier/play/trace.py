"""The trace of a pass: its transfers, compute, updates and stalls, on one clock.

Threads: the thread that computes calls `access`, `collect` and `take`; the lanes that update call `work`.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatier.errors import TransferError
from megatier.files import open_regular
from megatier.schedule.timeline import Access
from megatier.store.stream_clock import Instant
from megatier.store.transfer import Transfer

STALL_NS_MIN = 20_000
"""Waits shorter than this are the cost of asking, not a stall."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """One event on one lane, from its start to its end."""

    lane: str
    """The lane: a queue, `compute`, `update`, or `stall`."""
    name: str
    """The block or unit that it is about."""
    start_ns: int
    """Its start, in time.perf_counter_ns."""
    end_ns: int
    """Its end, in time.perf_counter_ns."""
    num_bytes: int = 0
    """The bytes that moved."""
    cause: str = ""
    """Of a stall: the queue or lane that compute waited for."""

    @property
    def seconds(self) -> float:
        """Seconds from its start to its end."""
        return (self.end_ns - self.start_ns) / 1e9


class Recorder:
    """Collects the events of a pass, and knows what each lane is at.

    Device times are read when they have passed, so that recording never blocks compute.
    """

    def __init__(self) -> None:
        """Begin with no events."""
        self.busy: dict[str, str] = {}
        """Per lane, the queue or wait that it is at now: the cause of a stall that waits for this lane. Each lane
        writes its own entry."""
        self._accesses: list[tuple[Access, str, Instant, Instant, Instant]] = []
        """Uses whose end the device may not have reached yet."""
        self._transfers: list[Transfer] = []
        """Moves of the store that had not ended when they were last looked at."""
        self._watched: list[Transfer] = []
        """Items of the player's lanes that had not ended when they were last looked at."""
        self._events: list[TraceEvent] = []

    def access(self, access: Access, cause: str, asked: Instant, entered: Instant, left: Instant) -> None:
        """Note one use of a unit: when compute asked, had the weights, and gave them back."""
        self._accesses.append((access, cause, asked, entered, left))

    def work(self, lane: str, unit: str, start_ns: int, end_ns: int) -> None:
        """Note what a lane of the host did from one time to another."""
        self._events.append(TraceEvent(lane=lane, name=unit, start_ns=start_ns, end_ns=end_ns))

    def watch(self, transfer: Transfer) -> None:
        """Note an item of one of the player's lanes: once it has ended, it is an event of this lane."""
        self._watched.append(transfer)

    def collect(self, transfers: Iterable[Transfer]) -> None:
        """Turn uses and moves that have ended into events, without waiting. Call it while the device is at work.

        A move that failed is left for `take`, which raises its error.
        """
        # So most of the work is done before the device is idle, and `take` finds little left to do.
        self._transfers += transfers
        accesses = self._accesses
        self._accesses = []
        for used in accesses:
            if used[-1].passed():
                self._note_access(*used)
            else:
                self._accesses.append(used)

        moves = self._transfers
        self._transfers = []
        for transfer in moves:
            if transfer.done() and not transfer.failed():
                self._note_transfer(transfer)
            else:
                self._transfers.append(transfer)

    def take(self, transfers: Iterable[Transfer]) -> list[TraceEvent]:
        """The events that ended since the last call, in the order of their starts. All others belong to the next call.

        It waits for compute alone, not for moves.

        Raises:
            TransferError, IntegrityError: a move of the store failed.
        """
        for used in self._accesses:
            self._note_access(*used)
        self._accesses = []

        moves = [*self._transfers, *transfers]
        self._transfers = []
        for transfer in moves:
            if transfer.done():
                self._note_transfer(transfer)
            else:
                self._transfers.append(transfer)

        watched = self._watched
        self._watched = []
        for transfer in watched:
            if not transfer.done():
                self._watched.append(transfer)
            elif transfer.over():  # an error is not raised here: whoever waits for an update has it
                self._note_transfer(transfer)

        events = self._events
        self._events = []
        return sorted(events, key=lambda event: event.start_ns)

    def _note_access(self, access: Access, cause: str, asked: Instant, entered: Instant, left: Instant) -> None:
        start_ns = asked.ns()
        middle_ns = entered.ns()
        end_ns = left.ns()
        if middle_ns - start_ns >= STALL_NS_MIN:
            stall = TraceEvent(lane="stall", name=access.unit, start_ns=start_ns, end_ns=middle_ns, cause=cause)
            self._events.append(stall)

        name = f"{access.unit} {access.phase} {access.group}"
        self._events.append(TraceEvent(lane="compute", name=name, start_ns=middle_ns, end_ns=end_ns))

    def _note_transfer(self, transfer: Transfer) -> None:
        transfer.wait()
        start_ns, end_ns = transfer.span_ns()
        self._events.append(
            TraceEvent(
                lane=transfer.queue,
                name=transfer.key,
                start_ns=start_ns,
                end_ns=end_ns,
                num_bytes=transfer.num_bytes,
            )
        )


def stall_seconds(events: Iterable[TraceEvent]) -> dict[str, float]:
    """Sum up the seconds that compute waited, by cause."""
    total: Counter[str] = Counter()
    for event in events:
        if event.lane == "stall":
            total[event.cause] += event.seconds  # type: ignore[assignment]  # Counter of floats
    return dict(total)


def busy_seconds(events: Iterable[TraceEvent]) -> dict[str, float]:
    """Sum up, by lane, the seconds with at least one event. Stalls are left out: compute does nothing in them."""
    total: dict[str, int] = {}
    until: dict[str, int] = {}

    # Events of a lane may overlap, since several moves of a queue are in flight. What was counted already is cut off.
    for event in sorted(events, key=lambda event: event.start_ns):
        lane = event.lane
        if lane != "stall":
            start_ns = max(event.start_ns, until.get(lane, event.start_ns))
            total[lane] = total.get(lane, 0) + max(0, event.end_ns - start_ns)
            until[lane] = max(event.end_ns, start_ns)
    return {lane: busy_ns / 1e9 for lane, busy_ns in total.items()}


def write_trace(path: Path, steps: Iterable[tuple[int, Iterable[TraceEvent]]]) -> None:
    """Write steps in the Chrome trace format, which Perfetto opens: one track per lane.

    Raises:
        TransferError: the drive is full or gone.
    """
    lanes: dict[str, int] = {}
    rows: list[dict[str, object]] = []
    for step, events in steps:
        for event in events:
            track = lanes.setdefault(event.lane, len(lanes))
            details = {"step": step, "bytes": event.num_bytes, "cause": event.cause}
            start = event.start_ns / 1e3
            length = (event.end_ns - event.start_ns) / 1e3
            row = {"ph": "X", "pid": 0, "tid": track, "ts": start, "dur": length, "name": event.name, "args": details}
            rows.append(row)

    names = [
        {"ph": "M", "pid": 0, "tid": track, "name": "thread_name", "args": {"name": lane}}
        for lane, track in lanes.items()
    ]

    try:
        with os.fdopen(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            file.write(json.dumps({"traceEvents": [*names, *rows]}).encode())
    except OSError as error:
        raise TransferError("writing the trace", "disk", str(path), 0, error.errno or 0) from error
