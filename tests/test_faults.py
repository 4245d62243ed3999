"""Whole runs in which something goes wrong on the way; docs/reliability.md lists every fault."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from from_outside import FAULTS
from small_commands import EVERY_TWO, after_step, command, leftovers, outcome
from small_drive import NO_NAMESPACES
from warm_python import WarmPython

from megatier.cli import main

WHOLE_WITHIN_S = 60
CHECKPOINTS = ["step-00000002", "step-00000004", "step-00000006"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Losses and weights of the run that meets no fault."""
    folder = tmp_path_factory.mktemp("whole")
    assert main(command(folder, EVERY_TWO)) == 0
    return outcome(folder / "run")


def on_drive(folder: Path) -> dict[str, Any]:
    """Settings with the state on a drive."""
    return {**EVERY_TWO, "tiers.state": "nvme", "tiers.nvme": f"{folder}:32MiB"}


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())


# ---------------------------------------------------------------------- checkpoints that do not fit


def refusal(run: Path, code: int, remedy: str) -> str:
    """Pattern of the message that ends a run whose checkpoint is refused."""
    where = rf"in {run}/checkpoints\S* at byte \d+"
    return rf"megatier: error: \w+ a checkpoint failed {where}: {os.strerror(code)}\. {remedy}.*\n"


def test_train_checkpoint_on_a_drive_that_fills_up_ends_the_run_which_goes_on_once_there_is_room(
    tmp_path: Path, whole: dict[str, Any], python: WarmPython
) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    done = python.run([FAULTS / "full_drive.py", tmp_path, drive])
    if done.returncode == NO_NAMESPACES:
        pytest.skip("no mount namespaces for this user")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    before, after = found["before"], found["after"]
    assert (before["code"], before["checkpoints"]) == (2, CHECKPOINTS[:1])
    assert re.fullmatch(refusal(tmp_path / "run", errno.ENOSPC, "Free space"), before["errors"]), before["errors"]
    assert (after["code"], after["errors"], after["checkpoints"]) == (0, "", CHECKPOINTS[1:])
    assert found["outcome"] == whole


def test_train_whose_records_meet_a_full_drive_saves_its_last_step_elsewhere_and_goes_on_once_there_is_room(
    tmp_path: Path, python: WarmPython
) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    done = python.run([FAULTS / "full_records.py", tmp_path, drive])
    if done.returncode == NO_NAMESPACES:
        pytest.skip("no mount namespaces for this user")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    before, after = found["before"], found["after"]
    assert before["code"] == 2
    assert f"cannot write {drive}/run/metrics.jsonl: No space left on device. Free space" in before["errors"]
    (saved,) = before["checkpoints"]
    assert saved > "step-00000003"
    assert (after["code"], after["errors"]) == (0, "")

    # The record of that step alone is lost.
    settings = {"train.steps": 12, "output.checkpoint_every": 0}
    assert main(command(tmp_path, settings)) == 0
    whole = outcome(tmp_path / "run")
    del whole["losses"][int(saved[5:]) - 1]
    assert found["outcome"] == whole


def test_train_checkpoint_over_the_file_size_limit_ends_the_run_which_goes_on_without_it(
    tmp_path: Path, whole: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def lower_once_the_first_is_whole() -> None:
        deadline = time.monotonic() + WHOLE_WITHIN_S
        while checkpoints(tmp_path) != CHECKPOINTS[:1] and time.monotonic() < deadline:
            time.sleep(0.01)
        resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, hard))

    try:
        with after_step(4, lower_once_the_first_is_whole):
            assert main(command(tmp_path, EVERY_TWO)) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    errors = capsys.readouterr().err
    assert re.fullmatch(refusal(tmp_path / "run", errno.EFBIG, "Raise the file size limit"), errors), errors
    assert checkpoints(tmp_path) == CHECKPOINTS[:1]
    assert main(["resume", str(tmp_path / "run")]) == 0
    assert checkpoints(tmp_path) == CHECKPOINTS[1:]
    assert outcome(tmp_path / "run") == whole


# ---------------------------------------------------------------------- directories that are removed


def test_train_run_directory_removed_mid_run_ends_it_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with after_step(3, lambda: shutil.rmtree(tmp_path / "run")):
        assert main(command(tmp_path, {**on_drive(tmp_path), "output.checkpoint_every": 0})) == 2
    errors = capsys.readouterr().err
    assert re.fullmatch(rf"megatier: error: cannot read tokens from {tmp_path}/run/data/\S+: .*\n", errors), errors
    assert list(leftovers(tmp_path)) == []


def test_train_run_directory_renamed_mid_run_goes_on_from_its_last_checkpoint_where_it_is_now(
    tmp_path: Path, whole: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def rename() -> None:
        deadline = time.monotonic() + WHOLE_WITHIN_S
        while checkpoints(tmp_path) != CHECKPOINTS[:1] and time.monotonic() < deadline:
            time.sleep(0.01)
        (tmp_path / "run").rename(tmp_path / "moved")

    with after_step(3, rename):
        assert main(command(tmp_path, EVERY_TWO)) == 2
    assert "megatier: error: cannot read tokens from" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main(["resume", str(tmp_path / "moved")]) == 0
    assert outcome(tmp_path / "moved") == whole


def test_train_over_a_drive_that_is_unmounted_saves_nothing_below_and_goes_on_once_it_is_back(
    tmp_path: Path, python: WarmPython
) -> None:
    pytest.importorskip("datasets")
    mount = tmp_path / "mount"
    mount.mkdir()
    done = python.run([FAULTS / "gone_drive.py", tmp_path, mount])
    if done.returncode == NO_NAMESPACES:
        pytest.skip("no mount namespaces for this user")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["before"]["code"] == 2
    assert f"{mount}/run" in found["before"]["errors"]
    assert "The drive is gone; check that it is connected and mounted" in found["before"]["errors"]
    assert found["below"] == ["run", "run/checkpoints"]
    assert found["saved"] == CHECKPOINTS[:1]
    assert found["after"] == {"code": 0, "errors": ""}
    assert found["outcome"] == found["whole"]


def test_train_block_files_removed_mid_run_are_not_missed(tmp_path: Path, whole: dict[str, Any]) -> None:
    def remove() -> None:
        (directory,) = tmp_path.glob("megatier-*")
        shutil.rmtree(directory)

    with after_step(3, remove):
        assert main(command(tmp_path, on_drive(tmp_path))) == 0
    assert outcome(tmp_path / "run") == whole
    assert list(leftovers(tmp_path)) == []


# ---------------------------------------------------------------------- drives and clocks that are odd


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory, python: WarmPython) -> dict[str, dict[str, Any]]:
    """How each run of faults/odd.py ended, in one process."""
    done = python.run([FAULTS / "odd.py", tmp_path_factory.mktemp("odd")])
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("kind", ["short", "late", "jump"])
def test_train_transfers_that_are_short_or_out_of_order_and_clocks_that_jump_change_no_bit(
    kind: str, whole: dict[str, Any], odd: dict[str, dict[str, Any]]
) -> None:
    assert odd[kind] == {"code": 0, "errors": "", "outcome": whole}
