"""Runs that are killed go on bit by bit, wherever the kill hits and whatever the tiers are afterwards."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

KILLED_RUNS = Path(__file__).parent / "killed_runs.py"


def check_killed_runs(folder: Path, seed: int, count: int) -> None:
    """Kill runs at `count` places; every one goes on to the end of the run that nobody stopped."""
    sys.stdout.write(f"seed {seed}\n")
    words = [sys.executable, str(KILLED_RUNS), str(folder), str(seed), str(count)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60 + 30 * count)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    whole = found["whole"]
    assert whole["checkpoints"] == ["step-00000004", "step-00000006"]
    for run in found["runs"]:
        assert run["killed"] == -signal.SIGKILL, run
        assert run["resumed"] == 0, (run, done.stderr)
        assert not run["left"] or not run["went_on_with_nvme"], "block files of the kill are taken over"
        assert {key: run[key] for key in whole} == whole, run
    assert len(found["runs"]) == count


def test_run_killed_at_twenty_places_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    check_killed_runs(tmp_path, seed=20261121, count=20)


@pytest.mark.slow
def test_run_killed_at_two_hundred_places_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    check_killed_runs(tmp_path, seed=7, count=200)
