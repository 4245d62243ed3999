"""The blocks of a savepoint: the bits of a run without one, and refused by name if harmed or elsewhere."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crossed import crossed, some
from savepoint_runs import check_refused, cut, ended_beside_a_checkpoint, flip, last, link, put_back
from tiny_runs import KIB, Outcome, Place, Run, exactness_config, opened, outcome, random_groups

from megatier.checkpoint.savepoint import drop_savepoint, save_savepoint
from megatier.checkpoint.savepoint_blocks import resident_bytes
from megatier.tier import Tier

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


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Run], Outcome]:
    """What runs come to that make no savepoint."""
    return functools.cache(lambda run: run(tmp_path_factory.mktemp("without")))


@pytest.mark.parametrize(
    ("run", "place"),
    crossed(
        [
            Run(model="untied", clip=1e9),
            Run(model="untied", dtype="fp32", clip=0.5, slices=2),
            Run(model="tied", clip=None, guard=True),
        ],
        PLACES,
        by=3,
    ),
    ids=str,
)
def test_savepoints_change_no_bit(run: Run, place: str, tmp_path: Path, without: Callable[[Run], Outcome]) -> None:
    assert with_savepoints(run, PLACES[place], tmp_path) == without(run)


@pytest.mark.parametrize(
    ("place", "optimizer", "moments"),
    [
        *some(
            [
                ("all, two", "adamw", "bf16"),
                ("nvme, two", "adamw", "fp32"),
                ("nvme, three", "muon", "bf16"),
                ("nvme, two", "adamw", "fp8"),
                ("all, two", "lion", "fp32"),
            ],
            by=2,
        ),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product(
                ("nvme, two", "all, two", "nvme, three"),
                ("adamw", "muon", "lion"),
                ("fp32", "bf16"),
            )
        ),
    ],
)
def test_savepoints_beside_several_groups_and_a_clipped_step_change_no_bit(
    place: str, optimizer: str, moments: str, tmp_path: Path, without: Callable[[Run], Outcome]
) -> None:
    run = Run(model="untied", groups=3, clip=1e9, optimizer=optimizer, moments=moments)
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


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with a checkpoint of step 3 and a savepoint of step 5."""
    folder = tmp_path_factory.mktemp("kept")
    ended_beside_a_checkpoint(folder)
    return folder


def flip_each_chunk(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    for start in range(100, len(raw), 64 << 10):
        raw[start] ^= 1
    path.write_bytes(raw)


WEIGHT = "rank-0/state/model.layers.0/weight/c/0"


@pytest.mark.parametrize(
    ("name", "harm", "words"),
    [
        ("manifest.json", flip, r"manifest\.json is damaged"),
        ("manifest.json", cut, r"manifest\.json is damaged: it is no JSON"),
        ("manifest.json", Path.unlink, r"manifest\.json cannot be read: No such file"),
        ("manifest.json", link, r"manifest\.json cannot be read"),
        ("manifest.json", lambda path: path.write_text("[" * 100_000), r"manifest\.json is damaged: it is no JSON"),
        ("manifest.json", lambda path: path.write_text("{}"), "no savepoint that this version of megatier reads"),
        ("rank-0/checksums/c/0", flip, "checksums/c/0 is damaged: its checksum"),
        ("rank-0/checksums/c/0", cut, "checksums/c/0 has .* bytes instead of"),
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
    for path in sorted(last(kept).glob("rank-0/state/**/c/0")):
        files.setdefault(path.stat().st_size, []).append(path)
    one, other = next(paths[:2] for paths in files.values() if len(paths) > 1)
    with put_back(one), put_back(other):
        raw = one.read_bytes(), other.read_bytes()
        assert raw[0] != raw[1]
        one.write_bytes(raw[1])
        other.write_bytes(raw[0])
        check_refused(kept, "state/.*/c/0 holds other bytes than were written there", capsys)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tiers.ram=900KiB"], r"lay elsewhere \(tiers\.ram was 819200 and is 921600\)"),
        (["--tiers.state=ram", "--tiers.ram=8MiB"], r"tiers\.state was .* and is \['ram'\]\)"),
        (
            ["--train.moments=bf16", "--accept-changes"],
            r"lay elsewhere \(train\.moments was 'fp32' and is 'bf16'\)",
        ),
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
