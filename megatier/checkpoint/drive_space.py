"""Room on the file system of a run's directory, for what it saves on its way and for the export at its end.

The room is asked for before the first step, because a run of days must not find out at its end that there is no place
for its model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from megatier.adapters.adapter_folder import export_trained_bytes
from megatier.byte_counts import format_bytes
from megatier.checkpoint.checkpoint import checkpoint_bytes
from megatier.checkpoint.run_directory import CHECKPOINT_FOLDER, checkpoints
from megatier.config.output_section import OutputConfig
from megatier.durable import free_bytes
from megatier.errors import CapacityError
from megatier.models.decoder import Unit
from megatier.setup.workload import COMPUTE_DTYPES

SPACE_REMEDY = "Free space there, or name another output.directory."
CHECKPOINT_SPACE_REMEDY = "Free space there, set a smaller output.keep_checkpoints, or name another output.directory."


def num_wanted(output: OutputConfig) -> int:
    """Return the number of checkpoints that a run keeps if its drive has room for them; 0: it writes none."""
    saves = output.saves_by_time or output.load_best_model_at_end or output.checkpoint_every not in ("auto", 0)
    return output.keep_checkpoints if saves else 0


@dataclass(frozen=True, slots=True)
class DriveSpace:
    """The bytes that a run writes to its directory."""

    directory: Path
    """The run directory."""
    checkpoint_bytes: int
    """Bytes of one checkpoint."""
    export_bytes: int
    """Bytes of the exported model; 0 if nothing is exported."""
    is_made: bool = True
    """Whether the run directory is there. Otherwise the directory in which it will be made is asked for its room."""
    keeps_best: bool = False
    """Whether the checkpoint of the lowest held-out loss is kept besides the last ones."""

    @classmethod
    def of(
        cls, output: OutputConfig, model: PreTrainedModel, units: tuple[Unit, ...], *, is_made: bool = True
    ) -> DriveSpace:
        """Return the room that a run needs.

        Args:
            output: the run's output.
            model: the skeleton.
            units: its units, with the shards of all ranks.
            is_made: whether the run directory is there.

        Raises:
            UnsupportedModelError: the model cannot be exported.
        """
        exported = 0
        if output.export:
            # By the layout that is written and not by parameters: some tensors stay in fp32.
            exported = export_trained_bytes(model, units, COMPUTE_DTYPES[output.export_dtype])
        return cls(
            Path(output.directory), checkpoint_bytes(units), exported, is_made, keeps_best=output.load_best_model_at_end
        )

    @property
    def free_bytes(self) -> int:
        """The bytes that are free on the drive now.

        Raises:
            TransferError: the drive is gone.
        """
        # A plan makes no directory. But a run directory that was made and is gone is an error of the drive.
        asked = self.directory.absolute()
        while not self.is_made and not asked.exists():
            asked = asked.parent

        return free_bytes(asked)

    def num_kept(self, output: OutputConfig) -> int:
        """Return how many checkpoints a run keeps, after a check that the drive has room for what it is told to save.

        Raises:
            CapacityError: there is less room.
        """
        # By time there are as many as the drive takes. There are none if it has no room for two of them, because the
        # new one has to be whole before the old one goes.
        count = num_wanted(output)
        if output.saves_by_time:
            count = self.num_that_fit(count)
        # The best one is asked for by name, and the newest one stays until the next is whole.
        if self.keeps_best:
            count = max(1, count)
        self.check(count)
        return count

    def described(self, output: OutputConfig, *, here: bool) -> str:
        """Return in words what a planned run needs, and what it does not get; empty if it saves nothing.

        Args:
            output: the run's output.
            here: whether this machine will run it, so that its drive is asked.

        Raises:
            CapacityError: the drive has less room than the run is told to save.
        """
        wanted = num_wanted(output)
        last = f"the export ({format_bytes(self.export_bytes)})" if self.export_bytes else ""
        if wanted:
            num_checkpoints = wanted + self.keeps_best
            plural = "s" if num_checkpoints > 1 else ""
            join = " or " if last else ""
            last = f"{num_checkpoints} checkpoint{plural}, then one more{join}{last}"
        if not last:
            return ""

        said = f"{self.directory} takes up to {format_bytes(self.needed_bytes(wanted))}: {last}."

        # Nobody can ask the drive of another machine.
        kept = self.num_kept(output) if here else wanted
        if kept < wanted:
            then = f"{kept} of the checkpoints will be kept" if kept else "no checkpoint will be written"
            free = format_bytes(self.free_bytes)
            said += f" Its drive has {free} free, so {then}. Name an output.directory with more room."
        return said

    def needed_bytes(self, num_kept: int) -> int:
        """Return the bytes that a run still takes if it keeps so many checkpoints."""
        missing = num_kept + self.keeps_best - self._num_present

        # The export comes when no checkpoint is on its way any more.
        at_the_end = max(0, missing) * self.checkpoint_bytes + self.export_bytes
        if not num_kept:
            return at_the_end

        # While a checkpoint is written there is one more than are kept.
        num_on_the_way = max(1, missing + 1)
        on_the_way = num_on_the_way * self.checkpoint_bytes
        return max(on_the_way, at_the_end)

    def check(self, num_kept: int) -> None:
        """Refuse a run that could not save what it is told to, or not export its model.

        Args:
            num_kept: number of checkpoints that it keeps.

        Raises:
            CapacityError: there is less room.
        """
        needed = self.needed_bytes(num_kept)
        free = self.free_bytes

        # The export first: if it alone does not fit, fewer checkpoints would be no remedy.
        if self.export_bytes > free:
            raise CapacityError(f"the export in {self.directory}", self.export_bytes, free, SPACE_REMEDY)
        if needed > free:
            purpose = f"{num_kept + self.keeps_best + 1} checkpoints in {self.directory / CHECKPOINT_FOLDER}"
            if self.export_bytes > self.checkpoint_bytes:
                purpose = f"{num_kept + self.keeps_best} checkpoints and the export in {self.directory}"
            raise CapacityError(purpose, needed, free, CHECKPOINT_SPACE_REMEDY)

    def num_that_fit(self, num_kept: int) -> int:
        """Return how many of so many checkpoints the drive takes, with one more on its way, and the export."""
        free = self.free_bytes
        for count in range(num_kept, 0, -1):
            if self.needed_bytes(count) <= free:
                return count
        return 0

    def takes_another(self, num_kept: int) -> bool:
        """Return whether there is room for one more checkpoint now, and later for the export."""
        # If there are as many as are kept, an older one goes when this one is whole, and leaves its room to the export.
        most_present = num_kept + self.keeps_best
        stays = self.checkpoint_bytes if self._num_present < most_present else 0

        # The export comes when the checkpoint is whole, so the larger of the two moments counts.
        needed = max(self.checkpoint_bytes, stays + self.export_bytes)
        return needed <= self.free_bytes

    @property
    def has_room_for_checkpoint(self) -> bool:
        """Whether there is room for one more checkpoint now."""
        return self.checkpoint_bytes <= self.free_bytes

    @property
    def _num_present(self) -> int:
        return len(checkpoints(self.directory / CHECKPOINT_FOLDER))
