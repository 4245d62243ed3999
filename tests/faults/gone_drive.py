"""A run whose drive is unmounted after its third step, and that goes on once it is back.

Usage: gone_drive.py FOLDER MOUNT. The mount holds the run directory, and a directory of that name lies below it. Writes
JSON: exit code and message of the run before and after, what lay below the mount, the checkpoints on the drive, and the
outcomes of this run and of one that met no fault.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import torch
from small_commands import EVERY_TWO, after_step, command, outcome
from small_drive import NO_NAMESPACES, mount_small_drive

from megatier.cli import main

BIND, DETACH = 1 << 12, 2
WHOLE_WITHIN_S = 60


def run(words: list[str]) -> dict[str, Any]:
    with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(io.StringIO()):
        code = main(words)
    return {"code": code, "errors": errors.getvalue()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def both(folder: Path, mount: Path, drive: Path) -> dict[str, Any]:
    system = ctypes.CDLL(None)

    def bind() -> None:
        if system.mount(str(drive).encode(), str(mount).encode(), None, BIND, None):
            sys.exit(NO_NAMESPACES)

    def unmount() -> None:
        deadline = time.monotonic() + WHOLE_WITHIN_S
        while not (mount / "run/checkpoints/step-00000002").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        system.umount2(str(mount).encode(), DETACH)

    (mount / "run" / "checkpoints").mkdir(parents=True)
    bind()
    (folder / "rows").mkdir()
    (folder / "rows" / "0.jsonl").write_text(
        "".join(json.dumps({"text": f"{n * 7} and {n}"}) + "\n" for n in range(90))
    )
    # A stream reads nothing from the run directory on its way.
    stream = {"data.files": None, "data.dataset": str(folder / "rows"), "data.streaming": True, "data.holdout_rows": 9}
    settings = {**EVERY_TWO, **stream, "data.holdout_fraction": None, "output.directory": str(mount / "run")}
    with after_step(3, unmount):
        before = run(command(folder, settings))
    below = sorted(str(path.relative_to(mount)) for path in mount.rglob("*"))
    saved = names(drive / "run" / "checkpoints")
    bind()
    after = run(["resume", str(mount / "run")])
    found = outcome(mount / "run")
    whole = run(command(folder, {**settings, "output.directory": str(folder / "whole")}))
    assert whole["code"] == 0, whole
    whole = outcome(folder / "whole")
    return {"before": before, "below": below, "saved": saved, "after": after, "outcome": found, "whole": whole}


if __name__ == "__main__":
    at = Path(sys.argv[1]) / "drive"
    at.mkdir()
    mount_small_drive(str(at), "size=16m")
    torch.set_num_threads(1)
    json.dump(both(Path(sys.argv[1]), Path(sys.argv[2]), at), sys.stdout)
