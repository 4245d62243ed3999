"""The history of a run: `metrics.jsonl` as typed records, process by process.

Several processes have worked on a run that was stopped or killed and resumed. Each begins with an opening record (what
lies where, what the planner expects) and counts moved bytes from 0.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatier.errors import ConfigError
from megatier.files import open_regular
from megatier.report.figures import SlowestRank, TierState

FIGURE_MAX = 1e18
"""Bound of bytes, seconds, tokens and steps. A larger figure is damage, and sums of smaller ones stay finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """A step as the planner forecast it."""

    seconds: float
    """Seconds of the step."""
    bound_by: str
    """The lane that bounds it."""
    busy_seconds: Mapping[str, float]
    """Seconds that each lane is busy."""
    moved_bytes: Mapping[str, float]
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
class RankWork:
    """What one rank did in a step, by lane, cause or queue."""

    compute_seconds: float | None
    """Seconds in which compute was busy."""
    stall_seconds: Mapping[str, float]
    host_seconds: float | None
    """Seconds in which compute was not busy and waited for nothing."""
    busy_seconds: Mapping[str, float]
    moved_bytes: Mapping[str, float]
    """Bytes per queue since the step before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherRank(RankWork):
    """What a rank other than the first did in a step."""

    rank: int
    host: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Step(RankWork):
    """A step that ended, and the first rank's work. Figures that older versions did not write are None, or empty."""

    step: int
    loss: float
    tokens: float
    seconds: float
    """Seconds of the step without those of the compiler."""
    compile_seconds: float
    host_busy_seconds: float | None
    """Seconds in which the host worked, whether or not compute hid it."""
    attainment: float | None
    skipped: str | None
    """Why the step was left out; None: it was not."""
    demanded_bytes: Mapping[str, float]
    """Bytes per queue since the step before, as the placement demands them."""
    resident_bytes: float | None
    gpu_bytes: float | None
    slowest: SlowestRank | None
    """The slowest of the ranks; None: one process trained alone."""
    others: tuple[OtherRank, ...]
    """The ranks but the first; empty if one process trained alone."""
    learning_rate: float | None
    grad_norm: float | None
    time: str
    """UTC of its end, as ISO 8601; empty if it is not on file."""


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
    """`whole` or `stopped`; empty if the last process goes on, or was killed or ended by an error."""
    moved_bytes: Mapping[str, float] = field(default_factory=dict)
    """Bytes per queue of the last process, as far as they are on file."""
    demanded_bytes: Mapping[str, float] = field(default_factory=dict)
    """Bytes per queue of the last process, as the placement demands them."""
    others_moved_bytes: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Bytes per queue of the last process of each rank but the first."""
    is_cut: bool = False
    """Whether the file ends in half a line, which is left out."""

    def add(self, record: Mapping[str, Any]) -> None:
        """Take the next record; one of a kind that is not known here is passed over.

        Raises:
            ValueError, TypeError, KeyError, AttributeError, OverflowError: it is none of ours.
        """
        # By type, since True is an int for Python.
        step = record["step"]
        if type(step) is not int or not 0 <= step < FIGURE_MAX:
            raise ValueError(step)

        if record.get("run") == "begins":
            self.openings.append(_opening(step, record))
            self.outcome = ""

            # A new process counts its bytes from 0.
            self.moved_bytes = {}
            self.demanded_bytes = {}
            self.others_moved_bytes = {}
        elif "run" in record:
            self.outcome = _text(record["run"])
            self.moved_bytes = _amounts(record, "moved_bytes")
            self.demanded_bytes = _amounts(record, "demanded_bytes")
        elif "loss" in record:
            self._add_step(step, record)
        elif "heldout_loss" in record:
            self.heldout.append((step, float(record["heldout_loss"])))
        elif "correction" in record:
            names = ("seconds", "planned_bytes_per_s", "measured_bytes_per_s")
            figures = {name: _figure(record["correction"][name]) for name in names}
            self.corrections.append(Corrected(step=step, **figures))
        elif "checkpoint_bytes" in record:
            self.checkpoints.append(_saved(step, record, "checkpoint"))
        elif "savepoint_bytes" in record:
            self.savepoints.append(_saved(step, record, "savepoint"))

    def _add_step(self, step: int, record: Mapping[str, Any]) -> None:
        """Take the record of a step, which has sums since its process began, so that a lost record loses no bytes."""
        moved = _amounts(record, "moved_bytes")
        demanded = _amounts(record, "demanded_bytes")
        grown = _grown(self.moved_bytes, moved)
        grown_demanded = _grown(self.demanded_bytes, demanded)

        told = record.get("other_ranks", ())
        others = tuple(_other(found, self.others_moved_bytes) for found in told)
        self.steps.append(_step(step, record, grown, grown_demanded, others))

        # Last, because a line that was cut raises above, and must leave these sums as they were.
        self.others_moved_bytes = {_rank(found): _amounts(found, "moved_bytes") for found in told}
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


def _opening(step: int, record: Mapping[str, Any]) -> RunStart:
    """Return an opening record; this and what follows raises what `History.add` does."""
    expected = record["expected"]
    homes = {}
    for unit, kinds in record["homes"].items():
        homes[unit] = {kind: _text(tier) for kind, tier in kinds.items()}
    return RunStart(
        step=step,
        time=_text(record["time"]),
        device=_text(record["device"]),
        num_parameters=round(_figure(record["num_parameters"])),
        homes=homes,
        streamed=_texts(record["streamed"]),
        speculative=_texts(record["speculative"]),
        tiers=tuple(map(_tier, record["tiers"])),
        expected=None if expected is None else _expected(expected),
        # Older versions wrote neither of these.
        flops_per_s=_optional(record.get("flops_per_s")),
        changes=_texts(record.get("changes", ())),
    )


def _tier(found: Mapping[str, Any]) -> TierState:
    sizes = {name: round(_figure(found[name])) for name in ("state_bytes", "other_bytes", "budget_bytes")}
    return TierState(tier=_text(found["tier"]), **sizes)


def _expected(found: Mapping[str, Any]) -> Expected:
    lanes = _amounts(found, "busy_seconds")
    queues = _amounts(found, "moved_bytes")
    if not (seconds := _figure(found["seconds"])):
        raise ValueError(found)

    # Older versions wrote no range.
    low, high = map(_figure, found.get("seconds_range", (seconds, seconds)))
    return Expected(
        seconds=seconds,
        bound_by=_text(found["bound_by"]),
        busy_seconds=lanes,
        moved_bytes=queues,
        seconds_range=(low, high),
    )


def _step(
    step: int,
    record: Mapping[str, Any],
    moved: Mapping[str, float],
    demanded: Mapping[str, float],
    others: tuple[OtherRank, ...],
) -> Step:
    skipped = record.get("skipped")
    slowest = record.get("slowest_rank")
    return Step(
        step=step,
        loss=float(record["loss"]),
        tokens=_figure(record["tokens"]),
        seconds=_figure(record["seconds"]),
        compile_seconds=_figure(record.get("compile_seconds", 0.0)),
        host_busy_seconds=_optional(record.get("host_busy_seconds")),
        attainment=_optional(record.get("attainment")),
        skipped=None if skipped is None else _text(skipped),
        compute_seconds=_optional(record.get("compute_seconds")),
        stall_seconds=_amounts(record, "stall_seconds"),
        host_seconds=_optional(record.get("host_seconds")),
        busy_seconds=_amounts(record, "busy_seconds"),
        moved_bytes=moved,
        demanded_bytes=demanded,
        resident_bytes=_optional(record.get("resident_bytes")),
        gpu_bytes=_optional(record.get("gpu_bytes")),
        slowest=None if slowest is None else _slowest(slowest),
        others=others,
        learning_rate=_optional(record.get("learning_rate")),
        grad_norm=None if record.get("grad_norm") is None else float(record["grad_norm"]),
        time=_text(record.get("time", "")),
    )


def _other(found: Mapping[str, Any], before: Mapping[int, Mapping[str, float]]) -> OtherRank:
    """Return the work of a rank, from what each had moved before."""
    rank = _rank(found)
    return OtherRank(
        rank=rank,
        host=_text(found["host"]),
        compute_seconds=_optional(found.get("compute_seconds")),
        stall_seconds=_amounts(found, "stall_seconds"),
        host_seconds=_optional(found.get("host_seconds")),
        busy_seconds=_amounts(found, "busy_seconds"),
        moved_bytes=_grown(before.get(rank, {}), _amounts(found, "moved_bytes")),
    )


def _rank(found: Mapping[str, Any]) -> int:
    return round(_figure(found["rank"]))


def _slowest(found: Mapping[str, Any]) -> SlowestRank:
    return SlowestRank(
        rank=_rank(found),
        host=_text(found["host"]),
        seconds=_figure(found["seconds"]),
        least_seconds=_figure(found["least_seconds"]),
    )


def _saved(step: int, record: Mapping[str, Any], what: str) -> Saved:
    num_bytes = _figure(record[f"{what}_bytes"])
    seconds = _figure(record[f"{what}_seconds"])

    # Training waits for a savepoint all the time, so there is no pause of its own on file.
    paused = _figure(record.get(f"{what}_pause_seconds", seconds))
    return Saved(step=step, num_bytes=num_bytes, seconds=seconds, paused_seconds=paused)


def _amounts(record: Mapping[str, Any], name: str) -> dict[str, float]:
    """Return figures by name; empty if an older version did not write them."""
    return {key: _figure(value) for key, value in record.get(name, {}).items()}


def _optional(value: object) -> float | None:
    return None if value is None else _figure(value)


def _figure(value: object) -> float:
    """Return a figure, which may be anything but a loss: a loss may be any number."""
    # True is an int for Python, and NaN is not at least 0.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < FIGURE_MAX:
        raise ValueError(value)
    return float(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _texts(values: Iterable[object]) -> tuple[str, ...]:
    return tuple(map(_text, values))


def _grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return what came to each queue between two records.

    If there is less than before, a process began without an opening record and counted from 0.
    """
    began = any(after.get(queue, 0.0) < size for queue, size in before.items())
    if began:
        return dict(after)
    return {queue: size - before.get(queue, 0.0) for queue, size in after.items()}
