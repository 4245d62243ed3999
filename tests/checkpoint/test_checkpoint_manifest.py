"""Whole files in a wrong place of a checkpoint, as a drive's lost or misdirected write leaves them, are refused."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr
from test_checkpoint_checkpoint import SmallGrid, saved, steps
from tiny_runs import PLACES, Run, exactness_config, opened

from megatier.checkpoint import checkpoint, checkpoint_writer, plane_writer
from megatier.checkpoint.checkpoint import UNBOUND_FORMAT, check_moments, is_bound, open_masters, read_state
from megatier.checkpoint.manifest import Manifest, digest_of
from megatier.checkpoint.restore import restore
from megatier.errors import DamagedCheckpointError
from megatier.models.decoder import Unit
from megatier.session.session import Session

RUN = Run(model="tied")
EMBED, NORM = "model.embed_tokens.weight", "model.norm.weight"
FIRST_NORM, SECOND_NORM = "model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"


@pytest.fixture(autouse=True, scope="module")
def _small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (checkpoint, checkpoint_writer, plane_writer):
            patch.setattr(module, "Grid", SmallGrid)
        yield


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with opened(exactness_config("tied"), tmp_path_factory.mktemp("drive"), PLACES["ram"], RUN.train) as opened_session:
        yield opened_session


@pytest.fixture(scope="module")
def made(session: Session, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("made") / "checkpoints"
    for step in (1, 2):
        steps(session, RUN.train, step, step)
        saved(session, folder, step)
    return folder


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Both, to be harmed: that of step 2, which is read, and the older one."""
    folder = Path(shutil.copytree(made, tmp_path / "checkpoints"))
    return folder / "step-00000002", folder / "step-00000001"


def swap(one: Path, other: Path) -> None:
    between = one.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


def take(last: Path, older: Path, name: str) -> None:
    """A write of the later step was lost: what the older one left lies there."""
    if (last / name).is_dir():
        shutil.rmtree(last / name)
        shutil.copytree(older / name, last / name)
    else:
        shutil.copyfile(older / name, last / name)


def rewrite(path: Path, change: dict[str, Any]) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


Harm = Callable[[Path, Path], Any]

TRIALS: dict[str, tuple[Harm, str]] = {
    "two chunks of an array": (
        lambda last, _: swap(last / "params" / EMBED / "c/0/0", last / "params" / EMBED / "c/1/0"),
        f"params/{EMBED}/c/[01]/0 holds other bytes",
    ),
    "two chunks of two arrays": (
        lambda last, _: swap(last / "params" / FIRST_NORM / "c/0", last / "params" / SECOND_NORM / "c/0"),
        f"params/({FIRST_NORM}|{SECOND_NORM})/c/0 holds other bytes",
    ),
    "chunk copied over another": (
        lambda last, _: shutil.copyfile(last / "exp_avg" / EMBED / "c/0/0", last / "exp_avg" / EMBED / "c/1/0"),
        f"exp_avg/{EMBED}/c/1/0 holds other bytes",
    ),
    "older chunk of a master": (
        lambda last, older: take(last, older, f"params/{EMBED}/c/1/0"),
        f"params/{EMBED}/c/1/0 holds other bytes",
    ),
    "older chunk of a moment": (
        lambda last, older: take(last, older, f"exp_avg_sq/{NORM}/c/0"),
        f"exp_avg_sq/{NORM}/c/0 holds other bytes",
    ),
    "older array": (lambda last, older: take(last, older, f"exp_avg/{EMBED}"), f"exp_avg/{EMBED}/c/0/0 holds other"),
    "older group of arrays": (lambda last, older: take(last, older, "params"), r"params/\S+ holds other bytes"),
    "two arrays": (
        lambda last, _: swap(last / "params" / FIRST_NORM, last / "params" / SECOND_NORM),
        f"params/({FIRST_NORM}|{SECOND_NORM})/c/0 holds other bytes",
    ),
    "both moments of an array": (
        lambda last, _: swap(last / "exp_avg" / EMBED, last / "exp_avg_sq" / EMBED),
        rf"exp_avg(_sq)?/{EMBED}/c/0/0 holds other bytes",
    ),
    "both moments": (lambda last, _: swap(last / "exp_avg", last / "exp_avg_sq"), r"exp_avg\S+ holds other bytes"),
    "masters and a moment": (lambda last, _: swap(last / "params", last / "exp_avg"), r"params/\S+ holds other bytes"),
    "older metadata of the whole": (
        lambda last, older: take(last, older, "zarr.json"),
        r"step-00000002/zarr\.json is of another checkpoint: that of step 1",
    ),
    "whole older checkpoint": (
        lambda last, older: last.rename(last.with_name("away")) and older.rename(last),
        r"step-00000002/zarr\.json is of another checkpoint: that of step 1",
    ),
    "other metadata of a group": (
        lambda last, _: rewrite(last / "exp_avg" / "zarr.json", {"attributes": {}}),
        r"exp_avg/zarr\.json is not the one that was written there",
    ),
    "other metadata of an array": (
        lambda last, _: rewrite(last / "params" / NORM / "zarr.json", {"fill_value": 1.0}),
        rf"params/{NORM}/zarr\.json is not the one that was written there",
    ),
    "cut chunk": (
        lambda last, _: os.truncate(last / "params" / NORM / "c/0", 16),
        f"params/{NORM}/c/0 has 16 bytes instead of",
    ),
    "missing chunk": (
        lambda last, _: (last / "exp_avg" / EMBED / "c/1/0").unlink(),
        f"exp_avg/{EMBED}/c/1/0 cannot be read: No such file",
    ),
    "missing manifest": (
        lambda last, _: rewrite(
            last / "zarr.json",
            {"attributes": {"megatier": {"format": checkpoint.CHECKPOINT_FORMAT, "state": {"step": 2}}}},
        ),
        r"zarr\.json is damaged: it has no manifest",
    ),
    "extra chunk": (
        lambda last, _: shutil.copyfile(last / "params" / NORM / "c/0", last / "params" / NORM / "c/1"),
        f"params/{NORM}/c/1 is no file of this checkpoint",
    ),
    "extra array": (
        lambda last, _: shutil.copytree(last / "params" / NORM, last / "params" / "other"),
        "params/other is no file of this checkpoint",
    ),
    "extra group": (
        lambda last, older: shutil.copytree(older / "exp_avg", last / "exp_avg_cubed"),
        "exp_avg_cubed is no file of this checkpoint",
    ),
}


@pytest.mark.parametrize("trial", TRIALS)
def test_restore_of_whole_files_in_a_wrong_place_is_refused_by_name(
    trial: str, copied: tuple[Path, Path], session: Session
) -> None:
    harm, words = TRIALS[trial]
    harm(*copied)
    with pytest.raises(DamagedCheckpointError, match=words):
        read_state(copied[0])
        restore(session, copied[0])


def test_restore_of_what_was_not_harmed_is_taken_with_the_file_systems_own_files(
    copied: tuple[Path, Path], session: Session
) -> None:
    (copied[0] / ".nfs0001").touch()
    (copied[0] / "params" / ".DS_Store").touch()
    restore(session, copied[0])
    assert is_bound(copied[0])


def masters(path: Path, units: list[Unit]) -> list[torch.Tensor]:
    with open_masters(path, units) as read:
        return [read(unit, 0, unit.layout.num_elements) for unit in units]


@pytest.mark.parametrize("trial", ["two chunks of an array", "older chunk of a master", "masters and a moment"])
def test_open_masters_of_whole_files_in_a_wrong_place_is_refused_by_name(
    trial: str, copied: tuple[Path, Path], session: Session
) -> None:
    assert masters(copied[0], list(session.own_units))
    harm, words = TRIALS[trial]
    harm(*copied)
    with pytest.raises(DamagedCheckpointError, match=words):
        masters(copied[0], list(session.own_units))


MOMENTS = [trial for trial in TRIALS if "moment" in trial or TRIALS[trial][1].startswith("exp_avg")]
"""Harms that no master shows."""


@pytest.mark.parametrize("trial", MOMENTS)
def test_check_moments_of_files_in_a_wrong_place_is_refused_by_name(
    trial: str, copied: tuple[Path, Path], session: Session
) -> None:
    check_moments(copied[0], session.whole_units)
    harm, words = TRIALS[trial]
    harm(*copied)
    with pytest.raises(DamagedCheckpointError, match=words.replace("params", r"(params|exp_avg)")):
        check_moments(copied[0], session.whole_units)


def test_restore_of_weights_alone_refuses_exchanged_moments_and_stays_whole(
    copied: tuple[Path, Path], session: Session
) -> None:
    harm, words = TRIALS["both moments of an array"]
    harm(*copied)
    with pytest.raises(DamagedCheckpointError, match=words):
        restore(session, copied[0], weights_only=True)
    session.player.drain()  # refused before anything was touched


def as_older_version(path: Path) -> None:
    """As a checkpoint was before there were manifests."""
    found = json.loads((path / "zarr.json").read_text())
    state = found["attributes"]["megatier"]["state"]
    found["attributes"]["megatier"] = {"format": UNBOUND_FORMAT, "state": state, "digest": digest_of(state)}
    (path / "zarr.json").write_text(json.dumps(found))
    for name in ("params", "exp_avg", "exp_avg_sq"):
        rewrite(path / name / "zarr.json", {"attributes": {}})


def test_checkpoint_of_an_older_version_is_read_unbound(copied: tuple[Path, Path], session: Session) -> None:
    expected = masters(copied[0], list(session.own_units))
    as_older_version(copied[0])
    assert not is_bound(copied[0])
    restore(session, copied[0])
    found = masters(copied[0], list(session.own_units))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_metadata_of_an_older_version_over_that_of_this_one_is_refused(copied: tuple[Path, Path]) -> None:
    as_older_version(copied[1])
    take(*copied, "zarr.json")
    with pytest.raises(DamagedCheckpointError, match=r"zarr\.json is of an older checkpoint than the arrays beside it"):
        read_state(copied[0])


def test_manifest_lies_where_zarr_looks_for_nothing_else(copied: tuple[Path, Path]) -> None:
    """A file of its own would be a warning to whoever lists the group."""
    root: Any = zarr.open_group(str(copied[0]), mode="r")
    assert set(root) == {"params", "exp_avg", "exp_avg_sq"}
    manifest = root.attrs["megatier"]["manifest"]
    assert manifest["step"] == 2
    assert set(manifest["checksums"]) == {*root, *(f"{name}/{array}" for name in root for array in root[name])}


@pytest.mark.parametrize(
    "stored",
    [
        None,
        [],
        {},
        {"step": 1},
        {"step": "x", "checksums": {}},
        {"step": math.inf, "checksums": {}},
        {"step": 1, "checksums": {"a": "0"}},
        {"step": 1, "checksums": {"a": 3}},
        {"step": 1, "checksums": {"a": "zz"}},
    ],
    ids=str,
)
def test_manifest_that_is_none_is_refused(stored: object) -> None:
    with pytest.raises(DamagedCheckpointError, match="it has no manifest"):
        Manifest.read(Path("zarr.json"), stored)
