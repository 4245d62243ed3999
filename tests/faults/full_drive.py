"""A run whose drive is full while it writes its second checkpoint, and that goes on once there is room.

Usage: full_drive.py FOLDER DRIVE. The drive becomes a small file system, for the run's checkpoints alone: a step that
ends meanwhile finds room for its record. Writes JSON: the exit code, message and checkpoints of the run before and
after, and its outcome.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import torch
from small_commands import EVERY_TWO, command, outcome
from small_drive import mount_small_drive

from megatier.checkpoint.checkpoint_writer import CheckpointWriter
from megatier.cli import main
from megatier.store.transfer import Transfer

BLOCK_BYTES = 4096


def fill(path: Path) -> None:
    """Somebody else's file, until nothing is left."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(BLOCK_BYTES)):
            pass


def run(words: list[str], checkpoints: Path) -> dict[str, Any]:
    with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(io.StringIO()):
        code = main(words)
    return {"code": code, "errors": errors.getvalue(), "checkpoints": sorted(p.name for p in checkpoints.iterdir())}


def both(folder: Path, drive: Path) -> dict[str, Any]:
    """The run on a drive that is full for a while, and the one that goes on from it."""
    begin, finish, begun = CheckpointWriter._begin, CheckpointWriter._finish, list[int]()

    def begin_and_fill(self: CheckpointWriter) -> None:
        if not begun:
            self._folder.symlink_to(drive)
        begin(self)
        begun.append(self.step)
        if len(begun) == 2:  # that there is room was seen already
            fill(drive / "others")

    def finish_and_free(self: CheckpointWriter, last: Transfer) -> None:
        try:
            finish(self, last)
        finally:
            (drive / "others").unlink(missing_ok=True)

    CheckpointWriter._begin = begin_and_fill  # type: ignore[method-assign]
    CheckpointWriter._finish = finish_and_free  # type: ignore[method-assign]
    before = run(command(folder, EVERY_TWO), drive)
    after = run(["resume", str(folder / "run")], drive)
    return {"before": before, "after": after, "outcome": outcome(folder / "run")}


if __name__ == "__main__":
    mount_small_drive(sys.argv[2], "size=8m")
    torch.set_num_threads(1)
    json.dump(both(Path(sys.argv[1]), Path(sys.argv[2])), sys.stdout)
