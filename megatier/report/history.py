"""Reads the history of a run: `metrics.jsonl` as typed records, process by process.

Several processes have worked on a run that was stopped or killed and resumed. Each begins with an opening record (what
lies where, what the planner expects) and counts moved bytes from 0.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from megatier.errors import ConfigError
from megatier.files import open_regular
from megatier.report.figures import RankWork, SlowestRank, StepReport, TierState
from megatier.trace.events import ByName

FIGURE_MAX = 1e18
"""Bound of bytes, seconds, tokens and steps. A larger figure is damage, and sums of smaller ones stay finite."""
T = TypeVar("T")
Record = Mapping[str, Any]
"""A line of the file, or a part of one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """A step as the planner forecast it."""

    seconds: float
    """Seconds of the step."""
    bound_by: str
    """The lane that bounds it."""
    busy_seconds: ByName = field(default_factory=dict)
    """Seconds that each lane is busy."""
    moved_bytes: ByName = field(default_factory=dict)
    """Bytes that each queue moves."""
    seconds_range: tuple[float, float]
    """Shortest and longest seconds, as the drives waver."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStart:
    """The record with which a process begins to train."""

    step: int
    """The last step before it; 0: the run begins."""
    time: str
    """UTC, as ISO 8601."""
    device: str
    """The name of the GPU, or `cpu`."""
    num_parameters: int
    """The parameters of the model."""
    homes: Mapping[str, Mapping[str, str]]
    """Tier by unit and kind, in forward order. A gradient that waits nowhere has `slot`."""
    streamed: tuple[str, ...]
    """The units that stream."""
    speculative: tuple[str, ...]
    """The units that are updated in the backward."""
    tiers: tuple[TierState, ...]
    """The bytes in each tier."""
    expected: Expected | None
    """The planned step; None if the machine was not measured."""
    flops_per_s: float | None = None
    """Floating point operations a second of the products that `megatier bench` measured; None: it did not."""
    changes: tuple[str, ...] = ()
    """Changes of numbers since the step, all of which the user accepted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherRank(RankWork):
    """The work of a rank other than the first in a step."""

    rank: int
    host: str
    moved_bytes: ByName
    """Bytes per queue since the step before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step(StepReport):
    """A step that ended. Figures that older versions did not write are None, or empty."""

    skipped: str | None = None
    """Why the step was skipped; None: it was not."""
    moved_bytes: ByName
    """Bytes per queue since the step before."""
    demanded_bytes: ByName
    """The same, as the placement demands them."""
    resident_bytes: float | None = None
    gpu_bytes: float | None = None
    other_ranks: tuple[OtherRank, ...]
    """The ranks but the first; empty if one process trained alone."""
    time: str = ""
    """UTC of its end, as ISO 8601; empty if it is not on file."""


Work = OtherRank | Step
"""What one rank did in a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Corrected:
    """The prediction of a step after the run had measured its drives."""

    step: int
    """The step after which it was made."""
    seconds: float
    planned_bytes_per_s: float
    """Bytes a second of the drives while they are busy, as planned."""
    measured_bytes_per_s: float
    """Bytes a second of the drives while they are busy, as measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A checkpoint or savepoint that was written."""

    step: int
    num_bytes: float
    """Bytes that were written; what a savepoint keeps in place is not among them."""
    seconds: float
    paused_seconds: float
    """Seconds that training waited."""


@dataclass(kw_only=True, slots=True)
class History:
    """A run, in the order of its file."""

    openings: list[RunStart] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    heldout: list[tuple[int, float]] = field(default_factory=list)
    """Steps and losses of evaluations."""
    corrections: list[Corrected] = field(default_factory=list)
    checkpoints: list[Saved] = field(default_factory=list)
    savepoints: list[Saved] = field(default_factory=list)
    outcome: str = ""
    """`whole`, `early` or `stopped`; empty if the last process goes on, or was killed or ended by an error."""
    why: str = ""
    """Why the run ended early; empty if it did not."""
    moved_bytes: ByName = field(default_factory=dict)
    """Bytes per queue of the last process, as far as they are on file."""
    demanded_bytes: ByName = field(default_factory=dict)
    """Bytes per queue of the last process, as the placement demands them."""
    others_moved_bytes: Mapping[int, ByName] = field(default_factory=dict)
    """Bytes per queue of the last process of each rank but the first."""
    is_cut: bool = False
    """Whether the file ends in half a line, which is left out."""

    def add(self, record: Record) -> None:
        """Take the next record; one of a kind that is not known here is passed over.

        Raises:
            ValueError, TypeError, KeyError, AttributeError, OverflowError: it is none of ours.
        """
        # By type, since True is an int for Python.
        step = record["step"]
        if type(step) is not int or not 0 <= step < FIGURE_MAX:
            raise ValueError(step)

        if record.get("run") == "begins":
            expected = record["expected"]
            plan = None if expected is None else _read_expected(expected)
            self.openings.append(_read(RunStart, record, step=step, expected=plan))
            self.outcome = ""
            self.why = ""

            # A new process counts its bytes from 0.
            self.moved_bytes = {}
            self.demanded_bytes = {}
            self.others_moved_bytes = {}
        elif "run" in record:
            self.outcome = _text(record["run"])
            self.why = _text(record.get("why", ""))
            self.moved_bytes = _amounts(record.get("moved_bytes", {}))
            self.demanded_bytes = _amounts(record.get("demanded_bytes", {}))
        # Records have no field for their kind in files of older versions, so they are told apart by what they hold.
        elif "loss" in record:
            self._add_step(step, record)
        elif "heldout_loss" in record:
            self.heldout.append((step, float(record["heldout_loss"])))
        elif "correction" in record:
            self.corrections.append(_read(Corrected, record["correction"], step=step))
        elif "checkpoint_bytes" in record:
            self.checkpoints.append(_read_saved(step, record, "checkpoint"))
        elif "savepoint_bytes" in record:
            self.savepoints.append(_read_saved(step, record, "savepoint"))

    def _add_step(self, step: int, record: Record) -> None:
        """Take the record of a step, which has sums since its process began, so that a lost record loses no bytes."""
        moved = _amounts(record.get("moved_bytes", {}))
        demanded = _amounts(record.get("demanded_bytes", {}))
        others_moved = {}
        others = []
        for told in record.get("other_ranks", ()):
            rank = _count(told["rank"])
            others_moved[rank] = _amounts(told.get("moved_bytes", {}))
            grown = _grown(self.others_moved_bytes.get(rank, {}), others_moved[rank])
            others.append(_read(OtherRank, told, moved_bytes=grown))

        norm = record.get("grad_norm")
        step_report = _read(
            Step,
            record,
            step=step,
            loss=float(record["loss"]),
            grad_norm=None if norm is None else float(norm),
            moved_bytes=_grown(self.moved_bytes, moved),
            demanded_bytes=_grown(self.demanded_bytes, demanded),
            other_ranks=tuple(others),
        )

        # Last, because a line that was cut raises above, and must leave these sums as they were.
        self.steps.append(step_report)
        self.others_moved_bytes = others_moved
        self.moved_bytes = moved
        self.demanded_bytes = demanded


def read_history(path: Path) -> History:
    """Return the run that a `metrics.jsonl` records, without half a line at its end, which a killed process leaves.

    Raises:
        ConfigError: it cannot be read, or a line is no record of a run.
    """
    history = History()
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    history.add(json.loads(line))
                except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
                    # Only the last line can lack its end: a process was killed while it wrote.
                    if not line.endswith(b"\n"):
                        history.is_cut = True
                        break
                    raise ConfigError(
                        f"{path}, line {number}: this is no record of a run. Remove that line."
                    ) from error
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}. Give the directory of a run that has begun."
        ) from error

    return history


def read_what_there_is(path: Path) -> History:
    """Return the run that a file records; empty if there is no file, or a damaged one."""
    try:
        return read_history(path)
    except ConfigError:
        return History()


# ---------------------------------------------------------------------- reading


def _read(kind: type[T], record: Record, **made: Any) -> T:  # noqa: ANN401 - fields of any type
    """Return a record of a kind: each field as `FIELD_READERS` reads its type, or its default if the file has none.

    This and what follows raises what `History.add` does.

    Args:
        kind: a dataclass of typed fields.
        record: what is on file.
        made: the fields that are not read so.
    """
    types = _types(kind)  # type: ignore[arg-type]  # mypy knows no hash of a type variable
    fields = dict(made)
    for name in types.keys() - made:
        # A field that was not measured is None, and its default says the same.
        value = record.get(name)
        if value is not None:
            read = FIELD_READERS[types[name]]
            fields[name] = read(value)
    return kind(**fields)


@cache
def _types(kind: type) -> dict[str, Any]:
    # Looked up once for a kind, since a run has a record for each of its steps.
    return get_type_hints(kind)


def _read_expected(record: Record) -> Expected:
    # The page divides by it.
    seconds = _figure(record["seconds"])
    if not seconds:
        raise ValueError(record)

    # Older versions wrote no range.
    ends = record.get("seconds_range", (seconds, seconds))
    low, high = map(_figure, ends)
    return _read(Expected, record, seconds_range=(low, high))


def _read_saved(step: int, record: Record, kind: str) -> Saved:
    num_bytes = _figure(record[f"{kind}_bytes"])
    seconds = _figure(record[f"{kind}_seconds"])

    # Training waits for a savepoint all the time, so there is no pause of its own on file.
    paused = _figure(record.get(f"{kind}_pause_seconds", seconds))
    return Saved(
        step=step,
        num_bytes=num_bytes,
        seconds=seconds,
        paused_seconds=paused,
    )


def _amounts(record: Record) -> dict[str, float]:
    return {name: _figure(value) for name, value in record.items()}


def _figure(value: object) -> float:
    """Return a figure, which may be anything but a loss: a loss may be any number."""
    # True is an int for Python, and NaN is not at least 0.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < FIGURE_MAX:
        raise ValueError(value)
    return float(value)


def _count(value: object) -> int:
    return round(_figure(value))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _texts(values: Iterable[object]) -> tuple[str, ...]:
    return tuple(map(_text, values))


def _homes(record: Record) -> dict[str, dict[str, str]]:
    return {unit: {kind: _text(tier) for kind, tier in kinds.items()} for unit, kinds in record.items()}


FIELD_READERS: dict[Any, Callable[[Any], object]] = {
    int: _count,
    float: _figure,
    str: _text,
    float | None: _figure,
    str | None: _text,
    tuple[str, ...]: _texts,
    ByName: _amounts,
    Mapping[str, Mapping[str, str]]: _homes,
    SlowestRank | None: partial(_read, SlowestRank),
    tuple[TierState, ...]: lambda tiers: tuple(_read(TierState, tier) for tier in tiers),
}
"""Readers of the types that fields have."""


def _grown(before: ByName, after: ByName) -> dict[str, float]:
    """Return the bytes that came to each queue between two records.

    If there is less than before, a process began without an opening record and counted from 0.
    """
    # Sums never shrink within a process.
    shrunk = [queue for queue, size in before.items() if after.get(queue, 0.0) < size]
    if shrunk:
        return dict(after)
    grown = {}
    for queue, size in after.items():
        grown[queue] = size - before.get(queue, 0.0)
    return grown
