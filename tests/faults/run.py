"""Runs of `megatier train` on a drive that fails after their second step, in one process with the shim preloaded.

Usage: run.py DIRECTORY. Writes JSON: per fault the exit code, the message, the steps in metrics.jsonl, what is left on
the drive, and the exit code of the same run once the drive works again.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from small_commands import command, metrics

from megatier.cli import main
from megatier.report.metrics import MetricsLog

FAULTS = {
    "failing reads": ("read", errno.EIO),
    "failing writes": ("write", errno.EIO),
    "full": ("write", errno.ENOSPC),
    "read-only": ("write unlink", errno.EROFS),
    "gone": ("read write unlink", errno.ENODEV),
}
MODES: dict[str, dict[str, Any]] = {
    "deferred": {"train.clip": "1.0"},
    "immediate": {"train.clip": "null", "numerics.guard": "false"},
    "speculative": {"train.clip": "1e9", "tiers.generations": 2},
}


@contextlib.contextmanager
def fault_after_step(step: int, op: str, code: int) -> Iterator[None]:
    """From the record of a step on, transfers of every block file fail; see shim.c."""
    fault, real = {"FAULT_OP": op, "FAULT_KIND": str(code), "FAULT_PATH": "/blocks"}, MetricsLog.write

    def write(self: MetricsLog, record: Mapping[str, object]) -> None:
        real(self, record)
        if record["step"] == step:
            os.environ.update(fault)

    MetricsLog.write = write  # type: ignore[method-assign]
    try:
        yield
    finally:
        MetricsLog.write = real  # type: ignore[method-assign]
        for name in fault:
            os.environ.pop(name, None)


def run(folder: Path, mode: str, op: str, code: int) -> dict[str, Any]:
    drive = folder / "drive"
    drive.mkdir(parents=True)
    settings = {"tiers.state": "nvme", "tiers.nvme": f"{drive}:32MiB", "train.steps": 9, "output.export": False}
    words = command(folder, settings | MODES[mode])
    with contextlib.redirect_stderr(io.StringIO()) as errors, fault_after_step(2, op, code):
        exit_code = main(words)
    return {
        "exit_code": exit_code,
        "message": errors.getvalue(),
        "steps": [record["step"] for record in metrics(folder)],
        "run": sorted(path.name for path in (folder / "run").iterdir()),
        "left": sorted(path.name for path in drive.rglob("*")),
        "again": main([*words, f"--output.directory={folder}/again", "--train.steps=1"]),
    }


def each(directory: Path) -> dict[str, dict[str, Any]]:
    return {
        f"{name}, {mode}": run(directory / name / mode, mode, *fault)
        for name, fault in FAULTS.items()
        for mode in MODES
    }


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        found = each(Path(sys.argv[1]))
    json.dump(found, sys.stdout)
