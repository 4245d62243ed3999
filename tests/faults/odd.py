"""Whole runs on drives and clocks that are odd but lose nothing, in one process with the shim preloaded.

Usage: odd.py FOLDER. Writes JSON: per oddity of ODDITIES the exit code, the message and the run's outcome.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import torch
from small_commands import EVERY_TWO, command, outcome

from megatier.cli import main

ODDITIES = {"short": "read write", "late": "read write", "jump": "clock"}


def run(folder: Path, op: str, kind: str) -> dict[str, Any]:
    folder.mkdir()
    settings = {"tiers.state": "nvme", "tiers.nvme": f"{folder}:32MiB", "tiers.io_threads": 4}
    words = command(folder, {**EVERY_TWO, **settings})
    os.environ.update(FAULT_OP=op, FAULT_KIND=kind, FAULT_PATH="/blocks")
    with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(io.StringIO()):
        code = main(words)
    os.environ.update(FAULT_OP="")
    return {"code": code, "errors": errors.getvalue(), "outcome": outcome(folder / "run")}


if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump({kind: run(Path(sys.argv[1]) / kind, op, kind) for kind, op in ODDITIES.items()}, sys.stdout)
