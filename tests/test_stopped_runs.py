"""Runs that are killed, told to stop, or whose drive fails: they end in order, and say what they left."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crossed import some
from from_outside import FAULTS
from small_commands import all_records, command, leftovers, metrics
from warm_python import MEGATIER, Process, WarmPython

from megatier.cli import main
from megatier.drives import mounts


@pytest.fixture
def running(tmp_path: Path, python: WarmPython) -> Iterator[Process]:
    """A run of many steps, past its second, with its state on NVMe."""
    settings = {"train.steps": 100_000, "tiers.state": "nvme", "tiers.nvme": f"{tmp_path}:16MiB"}
    words = command(tmp_path, settings)
    with python.start([MEGATIER, *words]) as process:
        path, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
        while not path.exists() or path.read_text().count('"loss"') < 2:
            assert process.is_running, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield process


def test_train_killed_leaves_blocks_that_clean_removes_and_a_run_that_it_mentions(
    running: Process, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["clean", str(tmp_path), "--yes"]) == 0
    assert re.search(r"megatier-\w+: stays, a run uses it\n", capsys.readouterr().out)
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert len(list(leftovers(tmp_path))) == 3, "its block directory, the lock in there, and the run's lock"
    assert main(["clean", str(tmp_path), "--yes"]) == 0
    output = capsys.readouterr().out
    assert re.search(rf"megatier-\w+: .* ago, of the run {tmp_path}/run, begun [-\d]+ [\d:]+, removed\n", output)
    assert f"{tmp_path / 'run'}: a killed run" in output
    assert list(leftovers(tmp_path)) == [tmp_path / "run" / "lock"]
    assert metrics(tmp_path)


def test_resume_after_a_kill_has_the_budget_that_its_old_block_files_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def free(_: Path) -> int:
        return (16 << 20) - sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("blocks"))

    monkeypatch.setattr(mounts, "free_bytes", free)
    settings = {"tiers.nvme": tmp_path, "tiers.state": "nvme", "train.steps": 1, "output.export": False}
    assert main(command(tmp_path, {**settings, "output.checkpoint_every": 1})) == 0

    # What a kill leaves in a run that takes much of the drive.
    run_id = (tmp_path / "run" / "run-id").read_text().partition(" ")[0]
    left = tmp_path / f"megatier-{run_id}"
    left.mkdir(mode=0o700)
    (left / "lock").touch(mode=0o600)
    (left / "blocks").touch(mode=0o600)
    (left / "blocks").write_bytes(b"x" * (12 << 20))
    assert main(["resume", str(tmp_path / "run"), "--train.steps=2", "--accept-changes"]) == 0

    begins = [record for record in all_records(tmp_path) if "tiers" in record]
    before, after = (tier["budget_bytes"] for record in begins for tier in record["tiers"] if tier["tier"] == "nvme")
    assert after == before == pytest.approx(0.9 * (16 << 20), abs=1)
    assert list(leftovers(tmp_path)) == []


@pytest.mark.parametrize("ending", some([signal.SIGTERM, signal.SIGINT], by=2), ids=["terminate", "interrupt"])
def test_train_told_to_stop_ends_with_a_checkpoint_and_a_second_run_is_refused_before(
    ending: signal.Signals, running: Process, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(list(leftovers(tmp_path))) == 3, "its block directory, the lock in there, and the run's lock"
    assert main(command(tmp_path)) == 2
    assert "is in use by another run" in capsys.readouterr().err
    running.send_signal(ending)
    output, errors = running.communicate(timeout=60)
    assert (running.returncode, errors) == (0, "")
    assert "stopping after this step, with a checkpoint; once more to stop at once" in output
    assert list(leftovers(tmp_path)) == []
    last = [record["step"] for record in metrics(tmp_path)][-1]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step-{last:08d}"]
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "config.yaml",
        "numbers.json",
        "run-id",
        "metrics.jsonl",
        "data",
        "checkpoints",
    }
    assert main(["resume", str(tmp_path / "run"), f"--train.steps={last + 1}", "--accept-changes"]) == 0
    assert [record["step"] for record in metrics(tmp_path) if "loss" in record] == list(range(1, last + 2))


def test_train_told_to_stop_twice_ends_at_once(running: Process, tmp_path: Path) -> None:
    running.send_signal(signal.SIGINT)
    running.send_signal(signal.SIGTERM)
    _, errors = running.communicate(timeout=60)
    assert (running.returncode, errors) == (130, "megatier: interrupted.\n")
    assert list(leftovers(tmp_path)) == []


@pytest.mark.parametrize(
    "numbers",
    [pytest.param((signal.SIGINT,), marks=pytest.mark.slow), (signal.SIGTERM, signal.SIGINT)],
    ids=["one", "both"],
)
def test_train_told_to_stop_twenty_times_ends_in_order(
    numbers: tuple[signal.Signals, ...], running: Process, tmp_path: Path
) -> None:
    for number in itertools.islice(itertools.cycle(numbers), 20):
        running.send_signal(number)
        time.sleep(0.01)
    _, errors = running.communicate(timeout=60)
    assert (running.returncode, errors) in [(0, ""), (130, "megatier: interrupted.\n")]
    assert running.returncode == 130 or len(numbers) == 1
    assert list(leftovers(tmp_path)) == []


def test_train_told_to_stop_while_it_cleans_up_goes_on_with_that(tmp_path: Path, python: WarmPython) -> None:
    """Every line of the cleaning up and of Python's own end brings another signal."""
    words = command(tmp_path, {"tiers.state": "nvme", "tiers.nvme": f"{tmp_path}:16MiB"})
    done = python.run(["-c", SIGNALLED, *words])
    assert (done.returncode, done.stderr) == (130, "megatier: interrupted.\n")
    assert list(leftovers(tmp_path)) == []


SIGNALLED = """
import atexit, os, signal, sys
import megatier.cli
from megatier.session import session

close = session.Session.close

def kill(*_):
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)

def close_and_be_killed(self):
    sys.setprofile(kill)
    close(self)

def step(*_, **__):
    session.Session.close = close_and_be_killed
    kill()

def end():
    kill()
    sys.setprofile(None)

atexit.register(end)
session.Session.load = step
sys.exit(megatier.cli.main())
"""


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory, python: WarmPython) -> dict[str, dict[str, Any]]:
    """How each run of faults/run.py ended, in one process."""
    done = python.run([FAULTS / "run.py", tmp_path_factory.mktemp("runs")])
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("mode", ["deferred", "immediate", "speculative"])
@pytest.mark.parametrize(
    ("fault", "what", "code", "remedy"),
    [
        ("failing reads", "read", errno.EIO, "Check the drive"),
        ("failing writes", "write", errno.EIO, "Check the drive"),
        ("full", "write", errno.ENOSPC, "Free space on this drive"),
        ("read-only", "write", errno.EROFS, "A file system turns read-only when its drive fails"),
        ("gone", "(read|write)", errno.ENODEV, "The drive is gone; check that it is connected and mounted"),
    ],
)
def test_train_drive_that_fails_mid_run_stops_it_in_order(
    fault: str, what: str, code: int, remedy: str, mode: str, faults: dict[str, dict[str, Any]]
) -> None:
    found = faults[f"{fault}, {mode}"]
    where = rf"tier nvme, .*/{fault}/{mode}/drive/megatier-\w+/blocks at byte \d+"
    message = rf"megatier: error: {what} of block \S+ failed on {where}: {os.strerror(code)}\. {remedy}.*\n"
    assert re.fullmatch(message, found["message"]), found["message"]
    assert found["exit_code"] == 2
    assert found["steps"] in ([1, 2], [1, 2, 3])
    assert found["run"] == ["config.yaml", "data", "metrics.jsonl", "numbers.json", "run-id"]
    assert ("blocks" in found["left"]) is (fault in ("read-only", "gone")), "files that can be removed are"
    assert found["again"] == 0
