"""Savepoints over ranks: the bits of a run that was never stopped, whole on all ranks or not there."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from from_outside import FAULTS
from rank_pool import POOL, free_port
from savepoint_runs import ended_after
from small_commands import command, metrics
from small_commands import outcome as outcome_of
from test_checkpoint_savepoint import refuse
from test_ranks_faults import ranks
from warm_python import WarmPython

from megatier import durable
from megatier.checkpoint import chunkfile
from megatier.checkpoint.chunkfile import CRC_BYTES
from megatier.checkpoint.savepoint import save_savepoint
from megatier.cli import main
from megatier.private import PrivateDirectory
from megatier.saving import saves
from megatier.session.session import Session

TIERS: dict[str, dict[str, Any]] = {
    "nvme": {"tiers.state": "nvme", "tiers.ram": "24MiB"},
    "nvme, three": {"tiers.state": "nvme", "tiers.ram": "24MiB", "tiers.generations": 3},
    "all": {"tiers.state": "gpu,ram,nvme", "tiers.ram": "13MiB"},
    "ram": {"tiers.state": "ram", "tiers.ram": "64MiB", "tiers.generations": 1, "tiers.nvme": None},
}


def slow(*cases: Any) -> list[Any]:
    """Cases that the default run leaves out."""
    return [pytest.param(*(case if type(case) is tuple else (case,)), marks=pytest.mark.slow) for case in cases]


def words_of(folder: Path, tiers: str, **more: Any) -> list[str]:
    """A run in `folder/run`, whose units are so large that each of two ranks has some of every layer."""
    (folder / "drive").mkdir(parents=True, exist_ok=True)
    settings = {
        "model.config.hidden_size": 128,
        "model.config.intermediate_size": 256,
        "model.config.attention_dropout": 0.1,
        "output.export_dtype": "fp32",
        "output.savepoint_every": 2,
        "tiers.generations": 2,
        "tiers.gpu": "8MiB",
        "tiers.nvme": f"{folder / 'drive'}:256MiB",
        "train.clip": 1.65,  # some steps clip, some do not
        "train.groups": 4,
        "train.steps": 5,
        **TIERS[tiers],
        **more,
    }
    return command(folder, settings)


def run(words: list[str]) -> tuple[int, str]:
    """Run a command on this rank: its exit code, and what it says."""
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(said):
        code = main(words)
    return code, said.getvalue()


def run_until(step: int, words: list[str]) -> tuple[int, str]:
    """The same, with an error of the first rank after a step."""
    with ended_after(step):
        return run(words)


def ended(function: Any, size: int, *arguments: Any) -> list[str]:
    """Run something that fails, and return what each rank says."""
    found = POOL.run(function, size, *arguments)

    # A run that fails leaves its process groups to the end of the process.
    POOL.close()
    assert [code for code, _ in found] == [2] * size, found
    return [said for _, said in found]


def go_on(folder: Path, size: int = 2) -> str:
    """Go on to the end, and return what the first rank says."""
    found = POOL.run(run, size, ["resume", str(folder / "run")])
    assert [code for code, _ in found] == [0] * size, found
    said: str = found[0][1]
    return said


def savepoints(folder: Path) -> list[str]:
    """Everything in the folder of savepoints."""
    return sorted(path.name for path in (folder / "run" / "savepoints").iterdir())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process comes to that makes no savepoint and is never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    ((code, said),) = POOL.run(run, 1, words_of(folder, "ram", **{"output.savepoint_every": 0}))
    assert code == 0, said
    return outcome_of(folder / "run")


@pytest.mark.parametrize(
    ("tiers", "size"), [("all", 4), *slow(("nvme", 2), ("ram", 2), ("nvme, three", 2), ("nvme", 4), ("all", 2))]
)
def test_run_on_ranks_that_ended_goes_on_from_its_savepoint_to_the_same_bits(
    tiers: str, size: int, tmp_path: Path, whole: dict[str, Any]
) -> None:
    said = ended(run_until, size, 5, words_of(tmp_path, tiers))[0]
    assert len(re.findall(r"│ +0\.0 %", said)) == {"all": 0}.get(tiers, 2), "state lies where it shall"
    assert savepoints(tmp_path) == ["step-00000004"]
    parts = sorted(path.name for path in (tmp_path / "run/savepoints/step-00000004").iterdir())
    assert parts == ["manifest.json", *(f"rank-{rank}" for rank in range(size))]
    assert "savepoint step-00000004: weights and moments in place" in go_on(tmp_path, size)
    assert outcome_of(tmp_path / "run") == whole
    assert list((tmp_path / "drive").iterdir()) == []
    assert not (tmp_path / "run/savepoints").exists()


def test_savepoint_of_ranks_is_gone_on_from_twice(tmp_path: Path, whole: dict[str, Any]) -> None:
    ended(run_until, 2, 3, words_of(tmp_path, "nvme"))
    ended(run_until, 2, 3, ["resume", str(tmp_path / "run")])
    assert "savepoint step-00000002: weights and moments in place" in go_on(tmp_path)
    assert outcome_of(tmp_path / "run") == whole


# ---------------------------------------------------------------------- what ends it

FAULTS_OF_DRIVES: dict[str, tuple[int, Any, str, Any, str]] = {
    "full": (1, chunkfile, "create", lambda _: os.open("/dev/full", os.O_WRONLY), "No space left on device"),
    "block files": (1, os, "fsync", refuse, "synchronising failed on tier nvme.*Check the drive"),
    "mark": (1, PrivateDirectory, "mark", refuse, "marking failed on tier nvme.*Check the drive"),
    "manifest": (0, json, "dumps", refuse, "writing a savepoint failed in "),
    "name": (0, Path, "rename", refuse, "writing a savepoint failed in .*Check the drive"),
    "folder": (0, durable, "sync_tree", refuse, "writing a savepoint failed in .*Check the drive"),
}


def run_on_a_drive_that_fails(fault: str, at: int, words: list[str]) -> tuple[int, str]:
    """Run a command; the drive of one rank refuses the savepoint of a step."""
    rank, *place, _ = FAULTS_OF_DRIVES[fault]

    def save(session: Session, folder: Path, step: int, state: Mapping[str, Any]) -> int:
        with pytest.MonkeyPatch.context() as patch:
            if step == at and os.environ["RANK"] == str(rank):
                patch.setattr(*place)
            return save_savepoint(session, folder, step, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saves, "save_savepoint", save)
        return run(words)


@pytest.mark.parametrize("fault", ["full", *slow("mark", "name", "block files", "manifest", "folder")])
def test_savepoint_that_the_drive_of_a_rank_refuses_ends_all_which_go_on_from_the_one_before(
    fault: str, tmp_path: Path, whole: dict[str, Any]
) -> None:
    first, second = ended(run_on_a_drive_that_fails, 2, fault, 4, words_of(tmp_path, "all"))
    for said in (first, second):
        assert re.search(FAULTS_OF_DRIVES[fault][-1], said), said
        assert "Traceback" not in said
    assert savepoints(tmp_path) == ["step-00000002"]
    assert "savepoint step-00000002: weights and moments in place" in go_on(tmp_path)
    assert outcome_of(tmp_path / "run") == whole


@pytest.mark.parametrize("fault", ["folder", *slow("mark", "full")])
def test_first_savepoint_that_the_drive_of_a_rank_refuses_leaves_no_block_files(fault: str, tmp_path: Path) -> None:
    ended(run_on_a_drive_that_fails, 2, fault, 2, words_of(tmp_path, "all"))
    assert savepoints(tmp_path) == []
    assert list((tmp_path / "drive").iterdir()) == []


@pytest.mark.parametrize(
    ("rank", "place", "last"),
    [
        (1, "mark", "step-00000002"),
        *slow((0, "name", "step-00000004"), (1, "write", "step-00000002"), (0, "mark", "step-00000002")),
    ],
)
def test_run_of_which_a_rank_is_killed_in_a_savepoint_goes_on_from_the_last_whole_one(
    rank: int, place: str, last: str, tmp_path: Path, whole: dict[str, Any], python: WarmPython
) -> None:
    words = words_of(tmp_path, "all")
    program: list[str | Path] = [FAULTS / "killed_rank.py", str(rank), place, *words]
    with ranks(python, [program, program]) as started:
        _, said = started[1 - rank].communicate()
        assert started[rank].wait() == -signal.SIGKILL
    assert re.search(rf"^megatier: error: rank {rank} on \S+ failed, .* its process ended without a word", said, re.M)
    assert f"savepoint {last}: weights and moments in place" in go_on(tmp_path)
    assert outcome_of(tmp_path / "run") == whole
    assert list((tmp_path / "drive").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "place", "saved"), [(1, "mark", "savepoint step-00000002"), (0, "checkpoint", "step-")]
)
def test_run_of_which_a_rank_is_killed_goes_on_by_itself_under_torchrun(
    rank: int, place: str, saved: str, tmp_path: Path, whole: dict[str, Any]
) -> None:
    every = {"output.checkpoint_every": 1, "output.savepoint_every": 0, "tiers.generations": 1}
    words = words_of(tmp_path, "all", **(every if place == "checkpoint" else {}))
    options = ["--nproc-per-node", "2", "--max-restarts", "1", "--master-port", str(free_port())]
    program: list[str | Path] = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *options,
        FAULTS / "killed_rank.py",
        str(rank),
        place,
        *words,
    ]
    done = subprocess.run(
        program, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert f"exitcode: -9) local_rank: {rank}" in done.stderr
    assert re.search(rf"^{saved}\S*: weights and moments in place", done.stdout, re.M), done.stdout
    assert outcome_of(tmp_path / "run") == whole
    assert list((tmp_path / "drive").iterdir()) == []


# ---------------------------------------------------------------------- other processes


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a run of two ranks with a checkpoint of step 3 and a savepoint of step 4."""
    folder = tmp_path_factory.mktemp("kept")
    ended(run_until, 2, 5, words_of(folder, "all", **{"output.checkpoint_every": 3}))
    yield folder


@pytest.mark.parametrize("size", [1, *slow(4)])
def test_savepoint_of_two_ranks_is_refused_by_other_numbers_with_what_to_do(size: int, kept: Path) -> None:
    for said in ended(run, size, ["resume", str(kept / "run")]):
        assert f"(ranks: 2, hosts: 1; now ranks: {size}, hosts: 1). Start as many as there were." in said
        assert "Without it (move that folder away) the run goes on from" in said
    assert savepoints(kept) == ["step-00000004"]
    assert len(list((kept / "drive").glob("*/savepoint"))) == 2


def test_savepoint_of_ranks_says_the_bytes_of_all(kept: Path) -> None:
    files = [path for path in (kept / "run/savepoints/step-00000004").glob("rank-*/**/*") if path.is_file()]
    said = [record["savepoint_bytes"] for record in metrics(kept) if "savepoint_bytes" in record]
    assert said[-1] == sum(path.stat().st_size - CRC_BYTES for path in files)


def test_savepoint_that_one_rank_finds_damaged_is_refused_by_all(kept: Path) -> None:
    path = next((kept / "run/savepoints/step-00000004/rank-1").glob("state/**/c/0"))
    raw = path.read_bytes()
    path.write_bytes(bytes([raw[0] ^ 1]) + raw[1:])
    first, second = ended(run, 2, ["resume", str(kept / "run")])
    path.write_bytes(raw)
    assert first.splitlines()[-1] == second.splitlines()[-1]
    assert "rank-1/state" in first
    assert "is damaged: its checksum" in first


def test_run_whose_savepoint_is_moved_away_goes_on_with_another_number_of_ranks(
    kept: Path, tmp_path: Path, whole: dict[str, Any]
) -> None:
    shutil.move(kept / "run/savepoints/step-00000004", tmp_path / "away")
    assert "step-00000003: weights and moments in place" in go_on(kept, 4)
    assert outcome_of(kept / "run") == whole
