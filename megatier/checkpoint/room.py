"""Room on the file system of a run's directory, for what it saves on its way and for the export at its end.

The room is asked for before the first step, because a run of days must not find out at its end that there is no place
for its model.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from megatier.checkpoint.checkpoint import checkpoint_bytes
from megatier.checkpoint.run_directory import CHECKPOINT_FOLDER, checkpoints
from megatier.config.schema import OutputConfig
from megatier.errors import CapacityError, TransferError
from megatier.models.export import export_bytes
from megatier.session.session import Session
from megatier.session.workload import COMPUTE_DTYPES

REMEDY = "Free space there, or name another output.directory."
REMEDY_OF_CHECKPOINTS = "Free space there, set a smaller output.keep_checkpoints, or name another output.directory."


@dataclass(frozen=True, slots=True)
class Room:
    """The bytes that a run writes to its directory."""

    directory: Path
    """The run directory."""
    checkpoint_bytes: int
    """Bytes of one checkpoint."""
    export_bytes: int
    """Bytes of the exported model; 0 if nothing is exported."""

    @classmethod
    def of(cls, output: OutputConfig, session: Session) -> Room:
        """Return the room that a planned run needs.

        Raises:
            UnsupportedModelError: the model cannot be exported.
        """
        exported = 0
        if output.export:
            exported = export_bytes(session.model, session.wholes, COMPUTE_DTYPES[output.export_dtype])
        return cls(Path(output.directory), checkpoint_bytes(session.wholes), exported)

    @property
    def free_bytes(self) -> int:
        """The bytes that are free on the drive now.

        Raises:
            TransferError: the drive is gone.
        """
        try:
            return shutil.disk_usage(self.directory).free
        except OSError as error:
            raise TransferError("asking for room", "disk", str(self.directory), 0, error.errno or 0) from error

    def needed_bytes(self, num_kept: int) -> int:
        """Return the bytes that a run still takes if it keeps so many checkpoints."""
        missing = num_kept - self._num_present

        # While a checkpoint is written there is one more than are kept. The export comes when that is over.
        on_its_way = max(1, missing + 1) * self.checkpoint_bytes if num_kept else 0
        return max(on_its_way, max(0, missing) * self.checkpoint_bytes + self.export_bytes)

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
            raise CapacityError(f"the export in {self.directory}", self.export_bytes, free, REMEDY)
        if needed > free:
            what = f"{num_kept + 1} checkpoints in {self.directory / CHECKPOINT_FOLDER}"
            if self.export_bytes > self.checkpoint_bytes:
                what = f"{num_kept} checkpoints and the export in {self.directory}"
            raise CapacityError(what, needed, free, REMEDY_OF_CHECKPOINTS)

    def num_that_fit(self, num_kept: int) -> int:
        """Return how many of so many checkpoints the drive takes, with one more on its way, and the export."""
        free = self.free_bytes
        return next((count for count in range(num_kept, 0, -1) if self.needed_bytes(count) <= free), 0)

    def takes_another(self, num_kept: int) -> bool:
        """Return whether there is room for one more checkpoint now, and later for the export."""
        # If there are as many as are kept, an older one goes when this one is whole, and leaves its room to the export.
        stays = max(0, min(num_kept, self._num_present + 1) - self._num_present) * self.checkpoint_bytes
        return max(self.checkpoint_bytes, stays + self.export_bytes) <= self.free_bytes

    @property
    def has_room_for_checkpoint(self) -> bool:
        """Whether there is room for one more checkpoint now."""
        return self.checkpoint_bytes <= self.free_bytes

    @property
    def _num_present(self) -> int:
        return len(checkpoints(self.directory / CHECKPOINT_FOLDER))
