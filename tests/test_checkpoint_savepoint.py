"""Savepoints: the bits of a run without them, gone on from after any end; whole or not there; refused where harmed."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_commands import after_step, command, metrics
from small_commands import outcome as outcome_of
from test_durable import watched
from tiny_runs import KIB, Outcome, Place, Run, exactness_config, one_thread, opened, outcome, random_groups

from megatier import durable
from megatier.checkpoint import chunkfile, savepoint
from megatier.checkpoint.manifest import digest_of
from megatier.checkpoint.savepoint import Savepoint, drop_savepoint, save_savepoint
from megatier.checkpoint.savepoint_blocks import resident_bytes
from megatier.cli import main
from megatier.errors import ConfigError, SavepointError
from megatier.private import PrivateDirectory
from megatier.session.session import Session
from megatier.tier import Tier
from megatier.train import saves

TWO: dict[str, Any] = {"generations": 2, "savepoints": True}
THREE: dict[str, Any] = {"generations": 3, "savepoints": True}
PLACES = {
    "nvme, two": Place(tiers=("nvme",), **TWO),
    "nvme, three": Place(tiers=("nvme",), **THREE),
    "nvme, three, gradients too": Place(tiers=("nvme",), spills_grads=True, **THREE),
    "ram and nvme, two": Place(tiers=("ram", "nvme"), ram=64 * KIB, **TWO),
    "all, two": Place(tiers=("gpu", "ram", "nvme"), gpu=100 * KIB, **TWO),
    "gpu and nvme, three": Place(tiers=("gpu", "nvme"), gpu=100 * KIB, **THREE),
}
NVME: dict[str, Any] = {"tiers.state": "nvme", "tiers.gpu": "512KiB"}
SPREAD: dict[str, Any] = {"tiers.state": "gpu,ram,nvme", "tiers.gpu": "360KiB", "tiers.ram": "800KiB"}
SPREAD_THRICE: dict[str, Any] = {**SPREAD, "tiers.ram": "1040KiB", "tiers.generations": 3}
STEPS = 7


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    with one_thread():
        yield
    torch.use_deterministic_algorithms(before)


# ---------------------------------------------------------------------- bits


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Run], Outcome]:
    """What runs come to that make no savepoint."""
    return functools.cache(lambda run: run(tmp_path_factory.mktemp("without")))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "run",
    [
        Run(model="untied", clip=1e9),
        Run(model="untied", dtype="fp32", clip=0.5, slices=2),
        Run(model="tied", clip=None, guard=True),
    ],
    ids=str,
)
def test_savepoints_change_no_bit(run: Run, place: str, tmp_path: Path, without: Callable[[Run], Outcome]) -> None:
    assert with_savepoints(run, PLACES[place], tmp_path) == without(run)


@pytest.mark.parametrize("place", ["nvme, two", "all, two", "nvme, three"])
def test_savepoints_beside_several_groups_and_a_clipped_step_change_no_bit(
    place: str, tmp_path: Path, without: Callable[[Run], Outcome]
) -> None:
    run = Run(model="untied", groups=3, clip=1e9)
    run = replace(run, clip=0.999 * max(without(run).norms))
    assert with_savepoints(run, PLACES[place], tmp_path) == without(run)


@pytest.mark.gpu
@pytest.mark.parametrize("place", PLACES)
def test_savepoints_on_a_gpu_change_no_bit(place: str, tmp_path: Path) -> None:
    run = Run(model="untied", device="cuda", compile=False)
    assert with_savepoints(run, PLACES[place], tmp_path) == run(tmp_path)


def with_savepoints(run: Run, place: Place, folder: Path) -> Any:
    """The outcome of a run with a savepoint after steps 1, 3 and 4."""
    config, results = exactness_config(run.model), []
    options: dict[str, Any] = {"compute_dtype": run.dtype, "compile": run.compile, "numerics": run.numerics}
    with opened(config, folder, place, run.train, device=run.device, **options) as session:
        held = {tier for tier, size in session.placement.state_bytes.items() if size}
        assert held == {Tier(name) for name in place.tiers}
        torch.manual_seed(run.seed)
        vocab = session.model.config.get_text_config().vocab_size
        for step in range(1, 6):
            results.append(session.engine.train_step(step, 1e-2, random_groups(run.train, vocab, step)))
            if step in (1, 3, 4):
                session.player.drain()
                size = save_savepoint(session, folder / "savepoints", step, {})
                assert size > resident_bytes(session) or not session.placement.spilled
        found = outcome(session, results)
        drop_savepoint(session, folder / "savepoints")
    assert not list(folder.iterdir())
    return found


# ---------------------------------------------------------------------- going on


def settings_of(folder: Path, tiers: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    (folder / "drive").mkdir(parents=True, exist_ok=True)
    return {
        "model.config.attention_dropout": 0.1,
        "model.config.num_hidden_layers": 6,
        "output.export_dtype": "fp32",
        "output.savepoint_every": 2,
        "tiers.generations": 2,
        "tiers.nvme": f"{folder / 'drive'}:64MiB",
        "train.clip": 1.65,  # some steps clip, most do not
        "train.learning_rate": 1e-3,
        "train.steps": STEPS,
        **tiers,
        **more,
    }


@contextlib.contextmanager
def ended_after(step: int) -> Iterator[None]:
    """An error ends the run."""

    def end() -> None:
        raise ConfigError("ended by the test")

    with after_step(step, end):
        yield


def ended(folder: Path, settings: Mapping[str, Any], step: int = 5) -> Path:
    """The directory of a run that an error ended after a step."""
    folder.mkdir(exist_ok=True)
    with ended_after(step):
        assert main(command(folder, settings)) == 2
    return folder / "run"


def on_drive(folder: Path) -> list[str]:
    return sorted(path.name for directory in (folder / "drive").iterdir() for path in directory.iterdir())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the run without savepoints comes to."""
    folder = tmp_path_factory.mktemp("whole")
    more = {"output.savepoint_every": 0, "tiers.generations": 1}
    assert main(command(folder, settings_of(folder, SPREAD, **more))) == 0
    return outcome_of(folder / "run")


@pytest.mark.parametrize("tiers", [NVME, {**NVME, "tiers.generations": 3}, SPREAD, SPREAD_THRICE], ids=str)
def test_run_that_ended_goes_on_from_its_savepoint_to_the_same_bits(
    tiers: dict[str, Any], tmp_path: Path, whole: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = ended(tmp_path, settings_of(tmp_path, tiers))
    shares = [line for line in capsys.readouterr().out.splitlines() if "│" in line and " 0.0 %" in line]
    assert len(shares) == (0 if "gpu" in tiers["tiers.state"] else 2), "state lies where it shall"
    assert [path.name for path in (run / "savepoints").iterdir()] == ["step-00000004"]
    assert on_drive(tmp_path) == ["blocks", "lock", "savepoint"]
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
        patch.setattr("megatier.session.machine.default_budgets", lambda _: Budget(1 << 20, 8 << 20))
        patch.setattr("megatier.drives.mounts.free_bytes", lambda _: 64 << 20)
        run = ended(tmp_path, settings)
    monkeypatch.setattr("megatier.session.machine.default_budgets", lambda _: Budget(9 << 20, 9 << 20))
    assert main(["resume", str(run)]) == 0
    assert outcome_of(run) == whole


class Budget:
    """As `hardware.default_budgets` gives it."""

    def __init__(self, gpu_bytes: int, ram_bytes: int) -> None:
        self.gpu_bytes, self.ram_bytes = gpu_bytes, ram_bytes


# ---------------------------------------------------------------------- faults while one is written


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.EIO, "Input/output error", "/some/path")


FAULTS: dict[str, tuple[Any, str, Any, str]] = {
    "full": (chunkfile, "_create", lambda _: os.open("/dev/full", os.O_WRONLY), "Free space on this drive"),
    "block files": (os, "fsync", refuse, "synchronising failed on tier nvme.*Check the drive"),
    "folder": (durable, "sync_tree", refuse, "writing a savepoint failed in .*Check the drive"),
    "name": (Path, "rename", refuse, "writing a savepoint failed in .*Check the drive"),
    "mark": (PrivateDirectory, "mark", refuse, "marking failed on tier nvme.*Check the drive"),
    "manifest": (json, "dumps", refuse, "writing a savepoint failed in "),
}


@pytest.mark.parametrize("fault", FAULTS)
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
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert main(command(tmp_path, settings_of(tmp_path, SPREAD, **{"output.export": False}))) == 2
    assert re.search(r"there is no room for 2 savepoints in \S+: needs .* KiB, 1000 B free", capsys.readouterr().err)


# ---------------------------------------------------------------------- what is refused


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with a checkpoint of step 3 and a savepoint of step 5."""
    folder = tmp_path_factory.mktemp("kept")
    every = {"output.checkpoint_every": 3, "output.savepoint_every": 5}
    ended(folder, settings_of(folder, SPREAD, **every), step=6)
    return folder


def last(folder: Path) -> Path:
    return folder / "run" / "savepoints" / "step-00000005"


@contextlib.contextmanager
def put_back(path: Path) -> Iterator[None]:
    """A file may be harmed meanwhile."""
    raw = path.read_bytes()
    yield
    if path.is_symlink() or path.exists():
        path.unlink()
    path.write_bytes(raw)
    path.chmod(0o600)


def check_refused(folder: Path, words: str, capsys: pytest.CaptureFixture[str], *more: str) -> None:
    """Nothing is changed, and what is to be done instead is said."""
    before = (folder / "run" / "config.yaml").read_bytes()
    assert main(["resume", str(folder / "run"), *more]) == 2
    found = capsys.readouterr().err
    assert re.search(rf"cannot go on from its savepoint {last(folder)}: .*{words}", found), found
    assert f"(move that folder away) the run goes on from {folder / 'run' / 'checkpoints' / 'step-00000003'}." in found
    assert on_drive(folder)[-2:] == ["lock", "savepoint"]
    assert (folder / "run" / "config.yaml").read_bytes() == before


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def flip_each_chunk(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    for start in range(100, len(raw), 64 << 10):
        raw[start] ^= 1
    path.write_bytes(raw)


def link(path: Path) -> None:
    path.rename(path.with_name(".elsewhere"))
    path.symlink_to(path.with_name(".elsewhere"))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


WEIGHT = "state/model.layers.0/weight/c/0"


@pytest.mark.parametrize(
    ("name", "harm", "words"),
    [
        ("manifest.json", flip, r"manifest\.json is damaged"),
        ("manifest.json", cut, r"manifest\.json is damaged: it is no JSON"),
        ("manifest.json", Path.unlink, r"manifest\.json cannot be read: No such file"),
        ("manifest.json", link, r"manifest\.json cannot be read"),
        ("manifest.json", lambda path: path.write_text("[" * 100_000), r"manifest\.json is damaged: it is no JSON"),
        ("manifest.json", lambda path: path.write_text("{}"), "no savepoint that this version of megatier reads"),
        ("checksums/c/0", flip, "checksums/c/0 is damaged: its checksum"),
        ("checksums/c/0", cut, "checksums/c/0 has .* bytes instead of"),
        (WEIGHT, flip, f"{WEIGHT} is damaged: its checksum"),
        (WEIGHT, Path.unlink, f"{WEIGHT} cannot be read: No such file"),
        (WEIGHT, link, f"{WEIGHT} leads out of its checkpoint by a link"),
        ("blocks", flip_each_chunk, "block .* is damaged in .*/blocks at byte"),
        ("blocks", cut, "blocks at byte .*: the device ended early"),
    ],
)
def test_savepoint_that_is_damaged_is_refused_by_name(
    name: str, harm: Callable[[Path], Any], words: str, kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [blocks] = (kept / "drive").glob("*/blocks")
    path = blocks if name == "blocks" else last(kept) / name
    with put_back(path):
        harm(path)
        check_refused(kept, words, capsys)


def test_savepoint_with_two_blocks_exchanged_is_refused_by_name(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each file has its own checksum, which does not say where it belongs."""
    files: dict[int, list[Path]] = {}
    for path in sorted(last(kept).glob("state/**/c/0")):
        files.setdefault(path.stat().st_size, []).append(path)
    one, other = next(paths[:2] for paths in files.values() if len(paths) > 1)
    with put_back(one), put_back(other):
        raw = one.read_bytes(), other.read_bytes()
        assert raw[0] != raw[1]
        one.write_bytes(raw[1])
        other.write_bytes(raw[0])
        check_refused(kept, "state/.*/c/0 holds other bytes than were written there", capsys)


def test_savepoint_with_the_manifest_of_another_is_refused(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = last(kept) / "manifest.json"
    with put_back(path):
        stored = json.loads(path.read_text())
        stored["manifest"]["step"] = stored["state"]["step"] = 2
        stored["digest"] = digest_of({name: stored[name] for name in (*savepoint.FIELDS, "manifest")})
        path.write_text(json.dumps(stored))
        check_refused(kept, "is of another savepoint: that of step 2", capsys)


def test_savepoint_of_an_older_version_is_gone_on_from(tmp_path: Path, whole: dict[str, Any]) -> None:
    run = ended(tmp_path, settings_of(tmp_path, SPREAD))
    path = run / "savepoints" / "step-00000004" / "manifest.json"
    stored = json.loads(path.read_text())
    found = {name: stored[name] for name in savepoint.FIELDS}
    path.write_text(json.dumps({"format": savepoint.UNBOUND_FORMAT, "digest": digest_of(found), **found}))
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
        {"state": {}},
        {"state": None},
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
            stored[name] = {**stored[name], **value} if isinstance(value, dict) and value else value
        stored["digest"] = digest_of({name: stored[name] for name in (*savepoint.FIELDS, "manifest")})
        path.write_text(json.dumps(stored))
        check_refused(kept, "", capsys)


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tiers.ram=900KiB"], r"lay elsewhere \(tiers\.ram was 819200 and is 921600\)"),
        (["--tiers.state=ram", "--tiers.ram=8MiB"], r"tiers\.state was .* and is \['ram'\]\)"),
        (["--tiers.generations=3", "--tiers.ram=1MiB"], r"tiers\.generations was 2 and is 3; tiers\.ram was"),
    ],
)
def test_savepoint_is_refused_on_other_tiers(
    words: list[str], said: str, kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_refused(kept, said, capsys, *words)


def test_savepoint_on_another_drive_is_refused(kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(kept, "opening failed on tier nvme", capsys, f"--tiers.nvme={tmp_path}:64MiB")
    assert not list(tmp_path.iterdir())


def test_run_whose_block_file_is_gone_goes_on_from_its_checkpoint_when_the_savepoint_is_moved_away(
    tmp_path: Path, whole: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    every = {"output.checkpoint_every": 3, "output.savepoint_every": 5}
    run = ended(tmp_path, settings_of(tmp_path, SPREAD, **every), step=6)
    next((tmp_path / "drive").glob("*/blocks")).unlink()
    assert main(["resume", str(run)]) == 2
    assert "opening failed on tier nvme" in capsys.readouterr().err
    last(tmp_path).rename(tmp_path / "away")
    assert main(["resume", str(run), "--tiers.ram=900KiB"]) == 0
    assert "step-00000003: weights and moments in place" in capsys.readouterr().out
    assert outcome_of(run) == whole
    assert not list((tmp_path / "drive").iterdir())
