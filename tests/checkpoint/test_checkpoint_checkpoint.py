"""Checkpoints: saved from any tiers, restored to any others, bit by bit; whole or not there; refused where harmed."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import zarr
from crossed import crossed, some
from tiny_runs import PLACES, Run, exactness_config, opened, outcome, random_groups, read_parameters

from megatier import durable
from megatier.checkpoint import checkpoint, checkpoint_writer, chunkfile, grid, plane_writer
from megatier.checkpoint.checkpoint import checkpoint_bytes, prune, read_state, remove_leftovers
from megatier.checkpoint.checkpoint_writer import CheckpointWriter
from megatier.checkpoint.restore import restore
from megatier.checkpoint.run_directory import checkpoints, last_checkpoint
from megatier.config.data_section import DataConfig
from megatier.config.schema import ModelConfig, RunConfig, TrainConfig
from megatier.errors import CapacityError, CheckpointError, TransferError
from megatier.session.session import Session
from megatier.tier import Kind

STEPS, SAVED_AFTER = 5, 2
RUN = RunConfig(model=ModelConfig(config={"model_type": "llama"}), data=DataConfig(files=("x",), tokenizer="bytes"))


def steps(session: Session, train: TrainConfig, first: int, last: int) -> list[Any]:
    vocab = session.model.config.get_text_config().vocab_size
    return [session.engine.train_step(n, 1e-2, random_groups(train, vocab, n)) for n in range(first, last + 1)]


def saved(session: Session, folder: Path, step: int) -> Path:
    session.player.drain()
    return CheckpointWriter(session, folder, step, {"step": step}).wait()


ORDER = list(PLACES)


def go_on_elsewhere(run: Run, before: str, after: str, folder: Path) -> None:
    """Save in some tiers, restore to others, and compare with the run that nobody stopped."""
    whole = run(folder)
    config, options = (
        exactness_config(run.model),
        cast(
            "dict[str, Any]",
            {"compute_dtype": run.dtype, "compile": run.compile, "expert_parts": run.expert_parts},
        ),
    )
    with opened(config, folder, PLACES[before], run.train, device=run.device, **options) as session:
        results = steps(session, run.train, 1, SAVED_AFTER)
        path = saved(session, folder / "checkpoints", SAVED_AFTER)
    with opened(config, folder, PLACES[after], run.train, device=run.device, **options) as session:
        restore(session, path)
        results += steps(session, run.train, SAVED_AFTER + 1, STEPS)
        assert outcome(session, results) == whole


PAIRS = list(zip(ORDER, [*ORDER[3:], *ORDER[:3]], strict=True))


@pytest.mark.parametrize(("before", "after"), some(PAIRS, by=2))
def test_run_saved_from_some_tiers_goes_on_in_others_to_the_same_bits(before: str, after: str, tmp_path: Path) -> None:
    go_on_elsewhere(Run(model="untied"), before, after, tmp_path)


@pytest.mark.parametrize(
    "run",
    some(
        [
            Run(model="tied", dtype="fp32", clip=None),
            Run(model="untied", moments="bf16"),
            Run(model="tied", dtype="fp32", moments="bf16", clip=None),
            Run(model="moe", groups=2),
            Run(model="untied", moments="fp8"),
            Run(model="untied", optimizer="muon", dtype="fp32", clip=None),
            Run(model="untied", optimizer="lion"),
            Run(model="moe", optimizer="muon"),
        ],
        by=2,
    ),
    ids=str,
)
def test_run_with_arrays_of_many_chunks_goes_on_to_the_same_bits(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (checkpoint, checkpoint_writer, plane_writer):
        monkeypatch.setattr(module, "Grid", SmallGrid)
    go_on_elsewhere(run, "ram_nvme", "gpu_ram", tmp_path)


@pytest.mark.parametrize(("clip", "shares_chunks"), crossed([None, 0.5], [True, False], by=2))
def test_run_with_experts_in_parts_goes_on_to_the_same_bits(
    clip: float | None, shares_chunks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without clipping, layers are written from the last to the first, and chunks have rows of several parts."""
    if shares_chunks:
        for module in (checkpoint, checkpoint_writer, plane_writer):
            monkeypatch.setattr(module, "Grid", SmallGrid)
    go_on_elsewhere(Run(model="moe", expert_parts=2, clip=clip), "gpu_ram_nvme", "ram", tmp_path)


@pytest.mark.parametrize("frozen", [(), ("model.layers.[01]", "*.experts.down_proj")])
def test_checkpoint_of_experts_in_parts_is_that_of_whole_ones_and_loads_in_any_number(
    frozen: tuple[str, ...], tmp_path: Path
) -> None:
    run, config = Run(model="moe", clip=None), exactness_config("moe")
    states: list[dict[Kind, dict[str, torch.Tensor]]] = []
    found: list[dict[Path, bytes]] = []
    path = tmp_path
    for number, parts in enumerate((1, 2, 3, 1)):
        with opened(config, tmp_path, PLACES["nvme"], run.train, expert_parts=parts, frozen=frozen) as session:
            if number:
                restore(session, path)
            else:
                steps(session, run.train, 1, 1)
            states.append({kind: read_parameters(session, kind) for kind in (Kind.WEIGHT, Kind.EXP_AVG)})
            path = saved(session, tmp_path / str(number), 1)
        found.append({file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()})
    assert all(files == found[0] for files in found)
    for kind, tensors in states[0].items():
        for state in states[1:]:
            assert [name for name, tensor in tensors.items() if not torch.equal(state[kind][name], tensor)] == []


@pytest.mark.gpu
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_run_on_a_gpu_saved_from_some_tiers_goes_on_in_others_to_the_same_bits(
    before: str, after: str, tmp_path: Path
) -> None:
    go_on_elsewhere(Run(model="untied", device="cuda", compile=False), before, after, tmp_path)


class SmallGrid(grid.Grid):
    """Arrays of many chunks."""

    @staticmethod
    def of(shape: Any, max_elements: int = 0) -> grid.Grid:
        return grid.Grid.of(shape, 1000)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Kind, dict[str, torch.Tensor]]]:
    """The checkpoint of a model with a tied head, after one step, and what must be in it."""
    folder, run = tmp_path_factory.mktemp("checkpoints"), Run(model="tied")
    with opened(exactness_config("tied"), folder, PLACES["ram"], run.train) as session:
        steps(session, run.train, 1, 1)
        path = saved(session, folder / "checkpoints", 1)
        found = {kind: read_parameters(session, kind) for kind in (Kind.WEIGHT, Kind.EXP_AVG, Kind.EXP_AVG_SQ)}
    return path, found


@pytest.fixture(scope="module")
def whole(made: tuple[Path, object]) -> Path:
    return made[0]


def test_checkpoint_is_read_by_plain_zarr(made: tuple[Path, dict[Kind, dict[str, torch.Tensor]]]) -> None:
    whole, expected = made
    root: Any = zarr.open_group(str(whole), mode="r")
    for name, kind in (("params", Kind.WEIGHT), ("exp_avg", Kind.EXP_AVG), ("exp_avg_sq", Kind.EXP_AVG_SQ)):
        assert set(root[name]) == set(expected[kind])
        for tensor, values in expected[kind].items():
            array = root[f"{name}/{tensor}"]
            assert array.dtype == "float32"
            assert torch.equal(torch.from_numpy(array[:]), values), tensor
    assert root.attrs["megatier"]["state"] == {"step": 1}
    assert not any("lm_head" in name for name in root["params"]), "a tied weight comes once"


def test_checkpoint_files_are_the_users_alone(whole: Path) -> None:
    chunks = [path for path in whole.glob("*/*/c/**/*") if path.is_file()]
    assert {path.stat().st_mode & 0o077 for path in [*chunks, whole.parent]} == {0}


@pytest.fixture
def restored(whole: Path, tmp_path: Path) -> Iterator[Callable[[Path], None]]:
    """Restores from a folder."""
    with opened(exactness_config("tied"), tmp_path, PLACES["ram"], Run(model="tied").train) as session:
        yield lambda path: restore(session, path)


@pytest.mark.parametrize(("place", "cores"), crossed(["gpu", "ram", "nvme_twice", "gpu_ram_nvme"], [8, 1], by=2))
def test_restore_by_any_number_of_threads_gives_the_same_bits(
    place: str, cores: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "num_cores", cores)
    told = list[str]()
    with opened(exactness_config("tied"), tmp_path, PLACES[place], Run(model="tied").train) as session:
        restore(session, whole, lambda unit: told.append(unit.name))
        assert sorted(told) == sorted(unit.name for unit in session.own_units)
        again = saved(session, tmp_path / "again", 1)
    read = [
        {path.relative_to(at): path.read_bytes() for path in at.rglob("*") if path.is_file()} for at in (whole, again)
    ]
    assert read[0] == read[1]


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy" / whole.name))


NORM = "params/model.norm.weight"


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ({"shape": [1 << 60]}, "shape is"),
        ({"data_type": "float64"}, "data_type is float64"),
        ({"data_type": {"name": "pickle"}}, "data_type is"),
        ({"codecs": [{"name": "blosc"}]}, "codecs is"),
        ({"node_type": "group"}, "node_type is group"),
        (
            {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1]}}},
            "chunk_grid is",
        ),
        ("{", "damaged: it is no JSON"),
        ("[]", "damaged: it holds no JSON object"),
        ("[" * 100_000, "damaged: it is no JSON"),
        (None, "cannot be read: No such file"),
    ],
    ids=str,
)
def test_restore_of_hostile_metadata_is_refused(
    harm: object, words: str, copied: Path, restored: Callable[[Path], None]
) -> None:
    path = copied / NORM / "zarr.json"
    if harm is None:
        path.unlink()
    elif isinstance(harm, str):
        path.write_text(harm)
    else:
        path.write_text(json.dumps({**json.loads(path.read_text()), **harm}))  # type: ignore[dict-item]
    with pytest.raises(CheckpointError, match=words):
        restored(copied)


@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "link", "link array"])
def test_restore_of_a_damaged_array_is_refused_by_path(
    harm: str, copied: Path, restored: Callable[[Path], None]
) -> None:
    path = copied / NORM / "c" / "0"
    raw = bytearray(path.read_bytes())
    path.unlink()
    if harm in ("flip", "cut"):
        raw[3] ^= harm == "flip"
        path.write_bytes(raw[: len(raw) - (harm == "cut")])
    elif harm == "link":
        (copied.parent / "elsewhere").write_bytes(raw)
        path.symlink_to(copied.parent / "elsewhere")
    elif harm == "link array":
        path.write_bytes(raw)
        (copied / NORM).rename(copied.parent / "array")
        (copied / NORM).symlink_to(copied.parent / "array")
    with pytest.raises(CheckpointError, match=NORM):
        restored(copied)


def test_restore_of_another_models_checkpoint_is_refused(whole: Path, tmp_path: Path) -> None:
    run = Run(model="untied")
    with (
        opened(exactness_config("untied"), tmp_path, PLACES["ram"], run.train) as session,
        pytest.raises(CheckpointError, match=r"is of another model: it has no lm_head\.weight"),
    ):
        restore(session, whole)


@pytest.mark.parametrize("text", ["{}", '{"attributes": {"megatier": {"format": 1}}}', '{"attributes": 3}', "nonsense"])
def test_read_state_of_no_checkpoint_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "zarr.json").write_text(text)
    with pytest.raises(CheckpointError):
        read_state(tmp_path)
    with pytest.raises(CheckpointError, match="No such file"):
        read_state(tmp_path / "nothing")


def test_read_state_that_is_not_that_of_its_digest_is_refused(copied: Path) -> None:
    path = copied / "zarr.json"
    text = path.read_text()
    found = json.loads(text)
    found["attributes"]["megatier"]["state"]["step"] = 2
    path.write_text(json.dumps(found))
    with pytest.raises(CheckpointError, match="its digest is not that of its state"):
        read_state(copied)


@pytest.mark.parametrize("every", [29, pytest.param(1, marks=pytest.mark.slow)])
def test_read_state_with_any_bit_flipped_is_refused_or_the_same(every: int, copied: Path) -> None:
    path, state = copied / "zarr.json", read_state(copied)
    raw = path.read_bytes()
    assert state == {"step": 1}
    for bit in range(0, 8 * len(raw), every):  # an odd number comes by all eight bits of a byte
        harmed = bytearray(raw)
        harmed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(harmed)
        with contextlib.suppress(CheckpointError):
            assert read_state(copied) == state, f"bit {bit % 8} of byte {bit // 8}"


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    run = Run(model="tied")
    with opened(exactness_config("tied"), tmp_path_factory.mktemp("drive"), PLACES["ram"], run.train) as opened_session:
        yield opened_session


def test_save_keeps_the_last_ones_and_leaves_strangers_alone(session: Session, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / "step-x").mkdir()
    for step in (1, 2, 10, 3):
        saved(session, folder, step)
        prune(folder, 2)
    assert [path.name for path in checkpoints(folder)] == ["step-00000003", "step-00000010"]
    assert last_checkpoint(folder) == folder / "step-00000010"
    assert {path.name for path in folder.iterdir()} >= {"notes.txt", "step-x"}


def test_prune_of_a_checkpoint_that_was_moved_away_removes_the_link_alone(session: Session, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    first = saved(session, folder, 1).rename(tmp_path / "elsewhere")
    (folder / "step-00000001").symlink_to(first)
    saved(session, folder, 2)
    prune(folder, 1)
    assert [path.name for path in folder.iterdir()] == ["step-00000002"]
    assert read_state(first)["step"] == 1


def test_prune_that_a_drive_refuses_says_so_and_leaves_the_last(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints"
    for step in (1, 2):
        saved(session, folder, step)

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch, pytest.raises(TransferError, match="removing a checkpoint"):
        patch.setattr(shutil, "rmtree", refuse)
        prune(folder, 1)
    assert checkpoints(folder) == [folder / "step-00000002"]
    with monkeypatch.context() as patch, pytest.raises(TransferError, match="removing a checkpoint"):
        patch.setattr(shutil, "rmtree", refuse)
        remove_leftovers(folder)
    remove_leftovers(folder)
    assert [path.name for path in folder.iterdir()] == ["step-00000002"]


def test_save_that_fails_leaves_the_checkpoints_before_it(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = saved(session, tmp_path / "checkpoints", 1)
    monkeypatch.setattr(chunkfile, "create", lambda _: os.open("/dev/full", os.O_WRONLY))
    with pytest.raises(TransferError, match="Free space") as caught:
        saved(session, tmp_path / "checkpoints", 2)
    assert caught.value.errno == errno.ENOSPC
    assert [path.name for path in first.parent.iterdir()] == [first.name]


@pytest.mark.parametrize("what", ["rename", "syncfs", "metadata"])
def test_save_that_a_drive_refuses_says_so(
    what: str, session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error", str(tmp_path))

    monkeypatch.setattr(
        *{
            "rename": (Path, "rename", refuse),
            "syncfs": (durable, "sync_tree", refuse),
            "metadata": (zarr, "create_group", refuse),
        }[what]
    )
    with pytest.raises(TransferError, match=r"writing a checkpoint failed in .*Check the drive"):
        saved(session, tmp_path / "checkpoints", 1)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_room_that_is_short_is_refused_with_figures(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = checkpoint_bytes(session.own_units)
    assert size == 12 * sum(math.prod(p.shape) for p in session.model.parameters())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=size - 1))
    with pytest.raises(CapacityError, match=r"there is no room for a checkpoint in \S+: needs .* Free space there"):
        saved(session, tmp_path / "checkpoints", 1)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_leftovers_are_our_hidden_names_alone(tmp_path: Path) -> None:
    names = [".step-00000001.partial", ".step-00000002.removed", ".step-1.partial", "step-00000003", ".other.partial"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[2:])
    remove_leftovers(tmp_path / "nothing")
