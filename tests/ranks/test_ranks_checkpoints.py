"""Checkpoints over ranks: the files of one process whatever their number, and any number goes on from them."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import POOL
from rank_runs import RankRun, first_weights, session_on_ranks, train_step
from test_ranks_exactness import PLACES
from tiny_runs import Place

from megatier import layout
from megatier.checkpoint import chunkfile
from megatier.checkpoint.checkpoint_writer import CheckpointWriter
from megatier.checkpoint.grid import Grid
from megatier.checkpoint.restore import restore
from megatier.checkpoint.run_directory import checkpoints, last_checkpoint
from megatier.errors import ConfigError, MegatierError, StepAbandonedError
from megatier.models.initialiser import Initialiser

CHUNKS = 1000
"""Elements of a chunk where arrays have many."""
SHARDS = 2048
"""What shards are multiples of where even tiny units are cut, which no step could compute with."""


@contextlib.contextmanager
def cut(chunks: int | None = None, shards: int | None = None) -> Iterator[None]:
    """Chunks have at most so many elements, and shards are multiples of so many; None: as they are."""
    with pytest.MonkeyPatch.context() as patch:
        if chunks is not None:
            patch.setattr(Grid.of, "__defaults__", (chunks,))
        if shards is not None:
            patch.setattr(layout, "SHARD_ELEMENTS", shards)
        yield


def digest(path: Path) -> str:
    """Of every file of a checkpoint."""
    found = hashlib.blake2b()
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        found.update(str(file.relative_to(path)).encode() + file.read_bytes())
    return found.hexdigest()


def train_between(
    run: RankRun, place: Place, mount: Path, folder: Path, steps: tuple[int, int], chunks: int | None = None
) -> list[tuple[float, float]]:
    """Go on to a step, and write a checkpoint after it: losses and norms. Call it on all ranks."""
    first, last = steps
    with cut(chunks), session_on_ranks(run, place, mount) as session:
        before = last_checkpoint(folder)
        if before is None or run.adapters:  # whose base no checkpoint has
            session.load(first_weights(session, run))
        if before is not None:
            restore(session, before)
        results = [train_step(session, run, step) for step in range(first, last + 1)]
        session.player.drain()
        CheckpointWriter(session, folder, last, {"step": last}).wait()
        return [(result.loss, result.grad_norm) for result in results]


@cache
def alone(name: str, base: Path, last: int, chunks: int | None) -> tuple[list[tuple[float, float]], Path]:
    """Losses and norms of one process, and its checkpoint."""
    folder = base / f"alone {name} {last} {chunks}"
    run = replace({**RUNS, "two GPUs": ON_GPUS}[name], steps=last)
    if run.adapters:
        pytest.importorskip("peft")
    (figures,) = POOL.run(train_between, 1, run, PLACES["ram"], base, folder, (1, last), chunks)
    return figures, folder / f"step-{last:08d}"


RUNS = {
    "untied": RankRun(steps=2),
    "tied, fp32": RankRun(steps=2, model="tied", dtype="fp32"),
    "frozen": RankRun(steps=2, frozen=("model.embed_tokens", "model.layers.0.self_attn", "model.layers.1.mlp")),
    "expert parts": RankRun(steps=2, model="moe", expert_parts=3),
    "muon on experts": RankRun(steps=2, model="moe", optimizer="muon", expert_parts=3),
    "adapters": RankRun(steps=2, adapters=3),
}
ON_GPUS = RankRun(device="cuda", groups=2, model="flash")
CASES = [
    ("untied", "gpu, ram, nvme", 4, CHUNKS),
    ("tied, fp32", "ram", 2, CHUNKS),
    ("frozen", "nvme", 2, CHUNKS),
    ("adapters", "nvme", 2, CHUNKS),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("untied", "gpu, ram", 2, None),
            ("untied", "nvme twice", 2, CHUNKS),
            ("expert parts", "ram", 2, CHUNKS),
        )
    ),
]


@pytest.mark.parametrize(("name", "place", "size", "chunks"), CASES)
def test_checkpoint_of_several_ranks_has_the_bytes_of_one_process(
    name: str, place: str, size: int, chunks: int | None, tmp_path: Path
) -> None:
    figures, expected = alone(name, tmp_path.parent, 2, chunks)
    folder = tmp_path / "checkpoints"
    found = POOL.run(train_between, size, RUNS[name], PLACES[place], tmp_path, folder, (1, 2), chunks)
    assert found == [figures] * size
    assert digest(folder / "step-00000002") == digest(expected)


def test_run_that_goes_on_with_other_numbers_of_ranks_has_the_bits_of_one_process(tmp_path: Path) -> None:
    run = RankRun(steps=5)
    folder = tmp_path / "checkpoints"
    figures, expected = alone("untied", tmp_path.parent, 5, None)
    for size, first, last, place in (
        (4, 1, 2, "ram"),
        (2, 3, 3, "nvme"),
        (1, 4, 4, "gpu, ram"),
        (4, 5, 5, "gpu, ram, nvme"),
    ):
        found = POOL.run(train_between, size, run, PLACES[place], tmp_path, folder, (first, last))
        assert found == [figures[first - 1 : last]] * size
    assert digest(folder / "step-00000005") == digest(expected)


def test_adapters_that_go_on_with_another_number_of_ranks_have_the_bits_of_one_process(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    figures, expected = alone("adapters", tmp_path.parent, 2, None)
    for size, step in ((2, 1), (1, 2)):
        found = POOL.run(train_between, size, RUNS["adapters"], PLACES["ram"], tmp_path, folder, (step, step))
        assert found == [figures[step - 1 : step]] * size
    assert digest(folder / "step-00000002") == digest(expected)


# ---------------------------------------------------------------------- shards that cut every unit


def copy(run: RankRun, mount: Path, source: Path, folder: Path, chunks: int) -> None:
    """Restore a checkpoint and write it again, with shards that cut even tiny units. Call it on all ranks."""
    with cut(chunks, SHARDS), session_on_ranks(run, PLACES["ram"], mount) as session:
        restore(session, source)
        CheckpointWriter(session, folder, 2, {"step": 2}).wait()


# What cuts the others into shards of ranks is met above.
USUALLY_CUT = {("expert parts", 300), ("frozen", 1500), ("muon on experts", 5000)}


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        pytest.param(*case, marks=[] if case in USUALLY_CUT else [pytest.mark.slow])
        for case in itertools.product(RUNS, (300, 1500, 5000))
    ],
)
def test_checkpoint_that_shards_cut_everywhere_has_the_bytes_of_one_process(
    name: str, chunks: int, tmp_path: Path
) -> None:
    _, source = alone(name, tmp_path.parent, 2, chunks)
    POOL.run(copy, 4, RUNS[name], tmp_path, source, tmp_path / "checkpoints", chunks)
    assert digest(tmp_path / "checkpoints" / "step-00000002") == digest(source)


# ---------------------------------------------------------------------- beside training


def train_beside(run: RankRun, place: Place, mount: Path, folder: Path) -> list[tuple[float, float]]:
    """Steps that go on while the checkpoint of the second is written: losses and norms. Call it on all ranks."""
    with cut(CHUNKS), session_on_ranks(run, place, mount) as session:
        session.load(Initialiser(session.model, 0))
        results = [train_step(session, run, step) for step in (1, 2)]
        session.player.drain()
        writer = CheckpointWriter(session, folder, 2, {"step": 2})
        results += [train_step(session, run, step) for step in (3, 4)]
        writer.wait()
        return [(result.loss, result.grad_norm) for result in results]


@pytest.mark.parametrize("place", ["nvme twice", pytest.param("ram", marks=pytest.mark.slow)])
def test_checkpoint_that_ranks_write_beside_training_changes_no_bit_of_either(place: str, tmp_path: Path) -> None:
    run = RankRun(steps=4)
    folder = tmp_path / "checkpoints"
    figures, _ = alone("untied", tmp_path.parent, 4, None)
    _, expected = alone("untied", tmp_path.parent, 2, CHUNKS)
    assert POOL.run(train_beside, 2, run, PLACES[place], tmp_path, folder) == [figures] * 2
    assert digest(folder / "step-00000002") == digest(expected)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("place", ["gpu", "gpu, ram, nvme"])
def test_checkpoint_that_two_gpus_write_beside_training_has_the_bytes_of_one(place: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    figures, _ = alone("two GPUs", tmp_path.parent, 4, None)
    _, expected = alone("two GPUs", tmp_path.parent, 2, CHUNKS)
    assert POOL.run(train_beside, 2, replace(ON_GPUS, steps=4), PLACES[place], tmp_path, folder) == [figures] * 2
    assert digest(folder / "step-00000002") == digest(expected)


# ---------------------------------------------------------------------- what ends it


def save_with(what: str, mount: Path, folder: Path) -> list[Any]:
    """Write three checkpoints, the second of which one rank cannot write: what the second raised, and what is left."""
    with cut(CHUNKS), session_on_ranks(RankRun(), PLACES["ram"], mount) as session:
        session.load(Initialiser(session.model, 0))
        assert session.ranks is not None
        seen: list[Any] = []
        for step in (1, 2, 3):
            target = folder
            with pytest.MonkeyPatch.context() as patch:
                if (step, session.ranks.rank) == (2, 1):
                    if what == "drive":
                        patch.setattr(chunkfile, "create", lambda _: os.open("/dev/full", os.O_WRONLY))
                    elif what == "folder":
                        target = folder / "of another host"
                    elif what == "closed":
                        session.reader.is_closed = True
                try:
                    CheckpointWriter(session, target, step, {}).wait()
                except MegatierError as error:
                    seen.append((type(error), getattr(error, "errno", None)))
            session.reader.is_closed = False
            session.ranks.all_gather_object(step)
            seen.append(sorted(path.name for path in folder.iterdir()))
            session.ranks.all_gather_object(step)
        return seen


@pytest.mark.parametrize(("what", "raised"), [("drive", errno.ENOSPC), ("folder", ConfigError), ("closed", None)])
def test_checkpoint_that_one_rank_cannot_write_fails_on_all_and_leaves_nothing(
    what: str, raised: object, tmp_path: Path
) -> None:
    found = POOL.run(save_with, 2, what, tmp_path, tmp_path / "checkpoints")
    assert found[0] == found[1]
    before, (kind, code), after, last = found[0]
    assert raised == code if what == "drive" else kind is (raised or StepAbandonedError)
    assert before == after == ["step-00000001"]
    assert last == ["step-00000001", "step-00000003"]
    assert len(checkpoints(tmp_path / "checkpoints")) == 2


def restore_damaged(mount: Path, folder: Path) -> str:
    """What restoring raises on this rank."""
    with cut(CHUNKS), session_on_ranks(RankRun(steps=2), PLACES["ram"], mount) as session:
        with pytest.raises(MegatierError) as caught:
            restore(session, folder)
        return str(caught.value)


def test_restore_of_a_chunk_that_is_damaged_for_one_rank_is_refused_by_all(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000002"
    shutil.copytree(alone("untied", tmp_path.parent, 2, CHUNKS)[1], folder)
    last = max((folder / "params/lm_head.weight/c").iterdir(), key=lambda path: int(path.name)) / "0"
    last.write_bytes(b"\1" + last.read_bytes()[1:])
    first, second = POOL.run(restore_damaged, 2, tmp_path, folder)
    assert first == second
    assert f"{last} is damaged" in first
