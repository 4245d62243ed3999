"""Savepoints: gone on from after any end, whole or not there, and refused where their manifest was harmed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from crossed import some
from savepoint_runs import (
    NVME,
    SPREAD,
    SPREAD_THRICE,
    check_refused,
    ended,
    ended_after,
    ended_beside_a_checkpoint,
    last,
    on_drive,
    put_back,
    settings_of,
)
from small_commands import after_step, command, metrics
from small_commands import outcome as outcome_of
from test_durable import watched

from megatier import durable
from megatier.checkpoint import chunkfile, savepoint
from megatier.checkpoint.manifest import digest_of
from megatier.checkpoint.savepoint import Savepoint, save_savepoint
from megatier.cli import main
from megatier.errors import SavepointError
from megatier.private import PrivateDirectory
from megatier.saving import saves
from megatier.session.session import Session


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the run without savepoints comes to."""
    folder = tmp_path_factory.mktemp("whole")
    more = {"output.savepoint_every": 0, "tiers.generations": 1}
    assert main(command(folder, settings_of(folder, SPREAD, **more))) == 0
    return outcome_of(folder / "run")


@pytest.mark.parametrize("tiers", some([NVME, SPREAD, {**NVME, "tiers.generations": 3}, SPREAD_THRICE], by=3), ids=str)
def test_run_that_ended_goes_on_from_its_savepoint_to_the_same_bits(
    tiers: dict[str, Any], tmp_path: Path, whole: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = ended(tmp_path, settings_of(tmp_path, tiers))
    shares = [line for line in capsys.readouterr().out.splitlines() if "│" in line and " 0.0 %" in line]
    assert len(shares) == (0 if "gpu" in tiers["tiers.state"] else 2), "state lies where it shall"
    assert [path.name for path in (run / "savepoints").iterdir()] == ["step-00000004"]
    assert on_drive(tmp_path) == ["blocks", "lock", "note.json", "savepoint"]
    assert main(["clean", str(tmp_path / "drive")]) == 0
    assert f" ago, of the run {run}, begun " in capsys.readouterr().out
    with ended_after(5):  # before another savepoint
        assert main(["resume", str(run)]) == 2
    assert "savepoint step-00000004: weights and moments in place" in capsys.readouterr().out
    assert main(["resume", str(run)]) == 0
    assert outcome_of(run) == whole
    assert not list((tmp_path / "drive").iterdir())
    assert not (run / "savepoints").exists()
    moved = capsys.readouterr().out.partition("what moved")[2]
    assert moved.count("none") == moved.count("_to_")


@pytest.mark.gpu
def test_run_on_a_gpu_goes_on_from_its_savepoint_to_the_same_bits(tmp_path: Path) -> None:
    found = []
    for name in ("whole", "ended"):
        (tmp_path / name).mkdir()
        settings = settings_of(tmp_path / name, SPREAD, **{"tiers.device": "cuda", "model.compile": False})
        if name == "whole":
            assert main(command(tmp_path / name, settings)) == 0
        else:
            assert main(["resume", str(ended(tmp_path / name, settings))]) == 0
        found.append(outcome_of(tmp_path / name / "run"))
    assert found[0] == found[1]


def test_run_in_ram_goes_on_from_its_savepoint_to_the_same_bits(tmp_path: Path, whole: dict[str, Any]) -> None:
    run = ended(tmp_path, settings_of(tmp_path, {"tiers.state": "gpu,ram", "tiers.nvme": None, "tiers.generations": 1}))
    assert main(["resume", str(run)]) == 0
    assert outcome_of(run) == whole


def test_drive_that_is_mounted_elsewhere_is_gone_on_from(tmp_path: Path, whole: dict[str, Any]) -> None:
    run = ended(tmp_path, settings_of(tmp_path, SPREAD))
    (tmp_path / "drive").rename(tmp_path / "elsewhere")
    assert main(["resume", str(run), f"--tiers.nvme={tmp_path / 'elsewhere'}:64MiB"]) == 0
    assert outcome_of(run) == whole


def test_savepoint_of_a_step_is_measured_and_logged(tmp_path: Path) -> None:
    assert main(command(tmp_path, settings_of(tmp_path, SPREAD))) == 0
    found = [record for record in metrics(tmp_path) if "savepoint_bytes" in record]
    assert [record["step"] for record in found] == [2, 4, 6]
    assert all(record["savepoint_seconds"] > 0 for record in found)


def test_checkpoint_takes_the_place_of_a_savepoint_before_it(tmp_path: Path, whole: dict[str, Any]) -> None:
    every = {"output.checkpoint_every": 2, "output.savepoint_every": 3}
    run = ended(tmp_path, settings_of(tmp_path, SPREAD, **every), step=7)
    assert not list((tmp_path / "drive").iterdir()), "nothing is to go on from there"
    assert not (run / "savepoints").exists()
    assert main(["resume", str(run)]) == 0
    assert outcome_of(run) == whole


def test_savepoint_older_than_a_checkpoint_is_not_gone_on_from(
    tmp_path: Path, whole: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """A kill before the checkpoint took its place."""
    run = ended(tmp_path, settings_of(tmp_path, SPREAD, **{"output.checkpoint_every": 3}))
    (run / "savepoints" / "step-00000004").rename(run / "savepoints" / "step-00000002")
    assert main(["resume", str(run)]) == 0
    assert "step-00000003: weights and moments in place" in capsys.readouterr().out
    assert outcome_of(run) == whole
    assert not (run / "savepoints").exists()


def test_savepoint_that_is_no_newer_than_a_checkpoint_is_not_looked_at(tmp_path: Path) -> None:
    for folder in ("savepoints", "checkpoints"):
        (tmp_path / folder / "step-00000004").mkdir(parents=True)
    assert Savepoint.last(tmp_path) is None


def test_run_that_is_told_to_stop_leaves_a_checkpoint_and_nothing_on_its_drives(
    tmp_path: Path, whole: dict[str, Any]
) -> None:
    with after_step(5, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        assert main(command(tmp_path, settings_of(tmp_path, SPREAD))) == 0
    assert not list((tmp_path / "drive").iterdir())
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000005"]
    assert main(["resume", str(tmp_path / "run")]) == 0
    assert outcome_of(tmp_path / "run") == whole


def test_budgets_that_nobody_gave_are_those_of_the_start_when_a_run_goes_on(
    tmp_path: Path, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"tiers.gpu": None, "tiers.ram": None, "tiers.nvme": str(tmp_path / "drive")}
    settings = settings_of(tmp_path, {"tiers.state": "nvme"}, **more)
    with monkeypatch.context() as patch:
        patch.setattr("megatier.setup.machine.default_budgets", lambda _: Budget(1 << 20, 8 << 20))
        patch.setattr("megatier.drives.mounts.free_bytes", lambda _: 64 << 20)
        run = ended(tmp_path, settings)
    monkeypatch.setattr("megatier.setup.machine.default_budgets", lambda _: Budget(9 << 20, 9 << 20))
    assert main(["resume", str(run)]) == 0
    assert outcome_of(run) == whole


class Budget:
    """As `hardware.default_budgets` gives it."""

    def __init__(self, gpu_bytes: int, ram_bytes: int) -> None:
        self.gpu_bytes, self.ram_bytes = gpu_bytes, ram_bytes


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.EIO, "Input/output error", "/some/path")


FAULTS: dict[str, tuple[Any, str, Any, str]] = {
    "full": (chunkfile, "create", lambda _: os.open("/dev/full", os.O_WRONLY), "Free space on this drive"),
    "block files": (os, "fsync", refuse, "synchronising failed on tier nvme.*Check the drive"),
    "folder": (durable, "sync_tree", refuse, "writing a savepoint failed in .*Check the drive"),
    "name": (Path, "rename", refuse, "writing a savepoint failed in .*Check the drive"),
    "mark": (PrivateDirectory, "mark", refuse, "marking failed on tier nvme.*Check the drive"),
    "manifest": (json, "dumps", refuse, "writing a savepoint failed in "),
}


@pytest.mark.parametrize("fault", some(FAULTS, by=2))
def test_savepoint_that_a_drive_refuses_ends_the_run_which_goes_on_from_the_one_before(
    fault: str, tmp_path: Path, whole: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    *place, words = FAULTS[fault]

    def save(session: Session, folder: Path, step: int, state: Mapping[str, Any]) -> int:
        with pytest.MonkeyPatch.context() as patch:
            if step == 4:
                patch.setattr(*place)
            return save_savepoint(session, folder, step, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saves, "save_savepoint", save)
        assert main(command(tmp_path, settings_of(tmp_path, SPREAD))) == 2
    assert re.search(words, capsys.readouterr().err)
    run = tmp_path / "run"
    assert [path.name for path in (run / "savepoints").iterdir()] == ["step-00000002"]
    assert main(["resume", str(run)]) == 0
    assert outcome_of(run) == whole


def test_savepoint_goes_when_the_export_has_its_name_on_the_drive(tmp_path: Path) -> None:
    run, calls = tmp_path / "run", list[tuple[str, bool]]()

    def see(name: str, args: tuple[Any, ...]) -> None:
        if args[0] == run and name == "sync_tree" and (run / "model").exists():
            calls.append((name, (run / "savepoints").exists()))

    drop = savepoint.remove_savepoints

    def dropped(folder: Path) -> None:
        if (run / "model").exists():
            calls.append(("drop", folder.exists()))
        drop(folder)

    with pytest.MonkeyPatch.context() as patch:
        watched(patch, see)
        patch.setattr(savepoint, "remove_savepoints", dropped)
        assert main(command(tmp_path, settings_of(tmp_path, SPREAD))) == 0
    assert calls == [("sync_tree", True), ("drop", True)]
    assert not (run / "savepoints").exists()


def test_first_savepoint_that_a_drive_refuses_leaves_no_block_files(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable, "sync_tree", refuse)
        assert main(command(tmp_path, settings_of(tmp_path, SPREAD))) == 2
    assert not list((tmp_path / "drive").iterdir())
    assert list((tmp_path / "run" / "savepoints").iterdir()) == []


def test_room_that_is_short_is_refused_with_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megatier.checkpoint.savepoint.free_bytes", lambda _: 1000)
    assert main(command(tmp_path, settings_of(tmp_path, SPREAD, **{"output.export": False}))) == 2
    assert re.search(r"there is no room for 2 savepoints in \S+: needs .* KiB, 1000 B free", capsys.readouterr().err)


def test_room_that_is_short_beside_a_savepoint_is_refused_for_one_more(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megatier.checkpoint.savepoint.free_bytes", lambda _: 1000)
    assert main(["resume", str(kept / "run")]) == 2
    assert "there is no room for another savepoint in " in capsys.readouterr().err


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with a checkpoint of step 3 and a savepoint of step 5."""
    folder = tmp_path_factory.mktemp("kept")
    ended_beside_a_checkpoint(folder)
    return folder


def with_digest(stored: dict[str, Any]) -> dict[str, Any]:
    """A manifest that somebody changed who knows how to make its digest fit."""
    found = {name: stored[name] for name in savepoint.SAVEPOINT_FIELDS[stored["format"]]}
    return {**stored, "digest": digest_of(found)}


def test_savepoint_with_the_manifest_of_another_is_refused(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = last(kept) / "manifest.json"
    with put_back(path):
        stored = json.loads(path.read_text())
        stored["parts"][0]["manifest"]["step"] = stored["state"]["step"] = 2
        path.write_text(json.dumps(with_digest(stored)))
        check_refused(kept, "is of another savepoint: that of step 2", capsys)


@pytest.mark.parametrize("number", [savepoint.UNBOUND_SAVEPOINT, 2])
def test_savepoint_of_an_older_version_is_gone_on_from(number: int, tmp_path: Path, whole: dict[str, Any]) -> None:
    run = ended(tmp_path, settings_of(tmp_path, SPREAD))
    folder = run / "savepoints" / "step-00000004"
    for path in (folder / "rank-0").iterdir():
        path.rename(folder / path.name)
    (folder / "rank-0").rmdir()
    path = folder / "manifest.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps(with_digest({"format": number, "state": stored["state"], **stored["parts"][0]})))
    assert main(["resume", str(run)]) == 0
    assert outcome_of(run) == whole


@pytest.mark.parametrize(
    "changes",
    [
        {"generations": []},
        {"generations": {}},
        {"generations": {"../../etc": 0}},
        *({"generations": dict.fromkeys(["model.layers.3"], place)} for place in (-1, 2, 1 << 70, True, "0", None)),
        {"placement": "0"},
        {"placement": 3},
        {"manifest": None},
        {"manifest": {}},
        {"state": {}},
        {"state": None},
        {"parts": []},
        {"parts": [None]},
        {"parts": [{}]},
        {"parts": {}},
        {"hosts": 2},
        {"hosts": None},
    ],
    ids=str,
)
def test_hostile_manifest_with_a_right_digest_is_refused(
    changes: dict[str, Any], kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = last(kept) / "manifest.json"
    with put_back(path):
        stored = json.loads(path.read_text())
        for name, value in changes.items():
            tree = stored if name in stored else stored["parts"][0]
            tree[name] = {**tree[name], **value} if isinstance(value, dict) and value else value
        path.write_text(json.dumps(with_digest(stored)))
        check_refused(kept, "", capsys)


def test_manifest_without_a_field_is_refused_by_its_name(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = last(kept) / "manifest.json"
    with put_back(path):
        stored = json.loads(path.read_text())
        del stored["hosts"]
        path.write_text(json.dumps(stored))
        check_refused(kept, "is damaged: its field hosts is missing or of another type", capsys)


def test_manifest_with_a_bit_flipped_is_refused_or_the_same(kept: Path) -> None:
    path, found = last(kept) / "manifest.json", Savepoint.last(kept / "run")
    raw, draw = path.read_bytes(), random.Random(5)
    with put_back(path):
        for bit in (draw.randrange(8 * len(raw)) for _ in range(300)):
            harmed = bytearray(raw)
            harmed[bit // 8] ^= 1 << bit % 8
            path.write_bytes(harmed)
            with contextlib.suppress(SavepointError):
                assert Savepoint.last(kept / "run") == found, f"bit {bit % 8} of byte {bit // 8}"


def test_run_whose_block_file_is_gone_goes_on_from_its_checkpoint_when_the_savepoint_is_moved_away(
    tmp_path: Path, whole: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = ended_beside_a_checkpoint(tmp_path)
    next((tmp_path / "drive").glob("*/blocks")).unlink()
    assert main(["resume", str(run)]) == 2
    assert "opening failed on tier nvme" in capsys.readouterr().err
    last(tmp_path).rename(tmp_path / "away")
    assert main(["resume", str(run), "--tiers.ram=900KiB"]) == 0
    assert "step-00000003: weights and moments in place" in capsys.readouterr().out
    assert outcome_of(run) == whole
    assert not list((tmp_path / "drive").iterdir())
