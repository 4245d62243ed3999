"""A run whose drive fills up while its checkpoints lie on another one, and that goes on once there is room.

Usage: full_records.py FOLDER DRIVE. The drive becomes a small file system, for the run's directory. Writes JSON: the
exit code, message and checkpoints of the run before and after, and its outcome.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.extend(str(room) for room in Path(__file__).parents[1].iterdir() if room.is_dir())
import torch
from full_drive import fill, run
from small_commands import after_step, command, outcome
from small_drive import mount_small_drive

STEPS = 12
FULL_AFTER = 3


def both(folder: Path, drive: Path) -> dict[str, Any]:
    """The run on a drive that is full from a step on, and the one that goes on from it."""
    checkpoints = folder / "elsewhere"
    checkpoints.mkdir()

    def harm() -> None:
        (drive / "run/checkpoints").symlink_to(checkpoints)
        fill(drive / "others")

    settings = {"train.steps": STEPS, "output.checkpoint_every": 0, "output.directory": str(drive / "run")}
    with after_step(FULL_AFTER, harm):
        before = run(command(folder, settings), checkpoints)
    (drive / "others").unlink()
    after = run(["resume", str(drive / "run")], checkpoints)
    return {"before": before, "after": after, "outcome": outcome(drive / "run")}


if __name__ == "__main__":
    mount_small_drive(sys.argv[2], "size=8m")
    torch.set_num_threads(1)
    json.dump(both(Path(sys.argv[1]), Path(sys.argv[2])), sys.stdout)
