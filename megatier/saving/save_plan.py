"""Plans what a run saves: how many checkpoints its drive has room for, and what one is expected to cost.

The trainer makes the plan before the first step, and `saves` follows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from megatier.byte_counts import format_bytes
from megatier.checkpoint.checkpoint import checkpoint_bytes
from megatier.checkpoint.checkpoint_clock import (
    SHARE,
    CheckpointClock,
    every_seconds,
    first_seconds,
    format_about,
    unmeasured_seconds,
)
from megatier.checkpoint.drive_space import DriveSpace
from megatier.checkpoint.run_directory import SAVEPOINT_FOLDER
from megatier.checkpoint.savepoint import check_savepoint_room
from megatier.config.output_section import OutputConfig
from megatier.forecast.forecast import Forecast
from megatier.planner.plan import checkpoint_seconds, pause_seconds
from megatier.session.session import Session
from megatier.tier import Tier


@dataclass(frozen=True, kw_only=True, slots=True)
class SavePlan:
    """What a run saves, as it is planned before the first step."""

    output: OutputConfig
    """The settings of what the run writes."""
    space: DriveSpace
    """The bytes that a checkpoint and the export take, and those that are free."""
    num_kept: int
    """Number of checkpoints that are kept; 0: none is written, unless the run is stopped or its export fails."""
    cost_s: float
    """Seconds for which a checkpoint is expected to hold training up."""
    is_done: bool
    """Whether all steps are done, so that only the export is left."""

    @classmethod
    def of(cls, output: OutputConfig, session: Session, expected: Forecast | None, *, is_done: bool) -> Self:
        """Plan what a run saves. The first rank looks at the drive for all ranks.

        Args:
            output: the run's output.
            session: the run, planned.
            expected: the planned step, if the machine was measured.
            is_done: whether only the export is left to do.

        Raises:
            CapacityError: the drive has too little room for what the settings ask for, or for the export.
            UnsupportedModelError: the model cannot be exported.
        """
        space = DriveSpace.of(output, session.model, session.whole_units)
        all_ranks = session.all_ranks

        # All ranks write into one directory, so one of them looks at its drive, and all of them get its error.
        num_kept = all_ranks.broadcast(lambda: _choose_num_kept(output, session, space, is_done=is_done))
        cost_s = estimate_cost(session, expected)
        return cls(
            output=output,
            space=space,
            num_kept=num_kept,
            cost_s=cost_s,
            is_done=is_done,
        )

    def describe_clock(self) -> str | None:
        """Say when checkpoints will be written by time; None if they are not."""
        if not self.output.saves_by_time or self.is_done:
            return None
        # No setting asks for these checkpoints, so a full drive only leaves them out.
        if not self.num_kept:
            export = " and the export" if self.output.export else ""
            needed = format_bytes(self.space.needed_bytes(1))
            free = format_bytes(self.space.free_bytes)
            return (
                f"No checkpoint is written: {self.space.directory} has {free} free, and two of them{export} take "
                f"{needed}. A kill loses everything that is trained from here on. Name an output.directory with more "
                "room."
            )

        last = "The last one is" if self.num_kept == 1 else f"The last {self.num_kept} are"
        first = format_about(first_seconds(self.cost_s))
        every = format_about(every_seconds(self.cost_s))
        best = ", and that of the lowest held-out loss" if self.output.load_best_model_at_end else ""
        return (
            f"A checkpoint ({format_bytes(self.space.checkpoint_bytes)}) is written after about {first}, then about "
            f"every {every}, for {SHARE * 100:.0f} % of the run's time at most. {last} kept{best}. "
            "output.checkpoint_every: 0 turns this off."
        )

    def start_clock(self) -> CheckpointClock | None:
        """Start the clock that says when a checkpoint is due; None if none is written by time."""
        return CheckpointClock(self.cost_s) if self.output.saves_by_time and self.num_kept else None


def estimate_cost(session: Session, expected: Forecast | None) -> float:
    """Return the seconds for which a checkpoint is expected to hold training up, as long as none was written.

    Args:
        session: the run, planned.
        expected: the planned step, if the machine was measured.
    """
    # The ranks of a host share its drives.
    local_size = session.all_ranks.local_size
    num_bytes = checkpoint_bytes(session.whole_units)
    spilled = local_size * session.placement.state_bytes.get(Tier.NVME, 0)
    rates = session.setup.machine.measured_rates
    drives = () if rates is None else rates.drives
    written_s = checkpoint_seconds(num_bytes, spilled, drives)
    # None means that the drive was not measured.
    if written_s is None:
        return unmeasured_seconds(num_bytes + spilled)
    return written_s if expected is None else pause_seconds(written_s, expected)


def _choose_num_kept(output: OutputConfig, session: Session, space: DriveSpace, *, is_done: bool) -> int:
    """Return how many checkpoints are kept, once it is clear that the drive has room for what the settings ask for."""
    # Only the export is left, so there has to be room for nothing else.
    if is_done:
        space.check(0)
        return output.keep_checkpoints

    num_kept = space.num_kept(output)

    # A setting asks for savepoints, so they are not left out for want of room.
    if output.savepoint_every:
        check_savepoint_room(session, Path(output.directory) / SAVEPOINT_FOLDER)
    return num_kept
