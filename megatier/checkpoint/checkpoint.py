"""Checkpoints: a run's state as named fp32 arrays in Zarr v3, whole or not there, whatever tier each byte came from.

    step-00000100/                       a Zarr group; its attribute "megatier" holds what is no array (`RunState`), and
                                         the manifest: the checksum of each other file by its place
        params/<name>                    master weights; of what is frozen, those that it computes with
        exp_avg/<name>, exp_avg_sq/<name>   of what is trained

Names are those of the model's parameters; a tied one comes once. `zarr.open_group(path)["params/lm_head.weight"][:]`
reads a tensor.

A checkpoint is written (`checkpoint_writer`) under a hidden name, the attribute last, and renamed when all of it is on
the drive. Nothing is unpickled; a path is made of the model's own names alone.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatier.checkpoint.arrays import ArrayReader
from megatier.checkpoint.chunkfile import ChunkFiles
from megatier.checkpoint.grid import Grid, StoredArray
from megatier.checkpoint.manifest import METADATA_FILE, Manifest, digest_of, read_json
from megatier.checkpoint.run_directory import CHECKPOINT_FOLDER
from megatier.durable import REPLACED, discard, settle
from megatier.errors import CapacityError, CheckpointError, DamagedCheckpointError, TransferError
from megatier.layout import TensorSlice
from megatier.models.decoder import Unit
from megatier.session.session import Session
from megatier.state import ADAMW_BF16, MASTERS

ARRAYS = tuple(ADAMW_BF16.arrays)
"""Groups of arrays. They hold fp32, so they are the same whatever the compute dtype is."""
FORMAT = 3
UNBOUND_FORMAT = 2
"""Written before there were manifests."""
NUM_THREADS = 4
NAME = re.compile(r"step-(\d{8,})")
WRITING = ".partial"
REMOVING = ".removed"
"""Ends of hidden names: a checkpoint that is not whole yet, and one that is not whole any more."""
HIDDEN = re.compile(r"\.step-\d{8,}\.(partial|removed)")
CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]


def checkpoint_bytes(units: Sequence[Unit]) -> int:
    """Bytes of the arrays of one checkpoint."""
    return 4 * sum(math.prod(shape) for shape in arrays_of(units).values())


def arrays_of(units: Sequence[Unit]) -> dict[tuple[str, str], tuple[int, ...]]:
    """Shape of each array of a checkpoint, by group and parameter; units that hold parts of a parameter share it."""
    return {
        (name, tensor.name): tensor.parameter_shape
        for name in ARRAYS
        for unit in units
        for tensor in tensors_of(unit, name)
    }


def tensors_of(unit: Unit, name: str) -> tuple[TensorSlice, ...]:
    """The tensors of a unit that lie in arrays of one group: frozen ones have no moments."""
    return unit.layout.tensors if name == MASTERS else unit.layout.trained.tensors


def parameter_shapes(units: Sequence[Unit]) -> dict[str, tuple[int, ...]]:
    """Of all parameters by name, frozen ones too."""
    return {parameter: shape for (name, parameter), shape in arrays_of(units).items() if name == "params"}


def check_room(folder: Path, units: Sequence[Unit]) -> None:
    """Refuse to begin a checkpoint for which there is no room; `room` asks for a whole run's.

    Raises:
        CapacityError: there is less room.
    """
    needed = checkpoint_bytes(units)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CapacityError(f"a checkpoint in {folder}", needed, free, "Free space there, or name another directory.")


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    found = folder.iterdir() if folder.is_dir() else iter(())
    return sorted((path for path in found if NAME.fullmatch(path.name)), key=step_of)


def step_of(path: Path) -> int:
    """The last step of a checkpoint."""
    return int(path.name.removeprefix("step-"))


def last_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint of a run."""
    found = checkpoints(folder)
    return found[-1] if found else None


def find_checkpoint(path: Path) -> Path:
    """The checkpoint itself, or the last whole one of a run directory.

    Raises:
        CheckpointError: there is none.
    """
    if NAME.fullmatch(path.resolve().name) and path.is_dir():
        return path
    found = last_checkpoint(path / CHECKPOINT_FOLDER)
    if found is None:
        raise CheckpointError(
            f"{path} is no checkpoint and holds none. Name a run directory or one of its {CHECKPOINT_FOLDER}/step-... "
            "folders; a run writes them with output.checkpoint_every."
        )

    return found


def prune(folder: Path, num_kept: int) -> None:
    """Remove all whole checkpoints but the last num_kept, at least 1; see `remove`."""
    for path in checkpoints(folder)[:-num_kept]:
        remove(path)


def remove(path: Path) -> None:
    """Remove a checkpoint; one that somebody moved elsewhere stays there: only the link to it goes.

    Raises:
        TransferError: it cannot be removed; it is not among the whole ones any more, or whole.
    """
    hidden = path.with_name(f".{path.name}{REMOVING}")
    with _removing(path):
        path.rename(hidden)
        discard(hidden)


def settle_replaced(folder: Path) -> None:
    """See `durable.settle`, for all checkpoints of a folder in which one may take the place of another.

    Raises:
        TransferError: the drive does not let it.
    """
    for path in folder.glob(f".step-*{REPLACED}"):
        settle(folder / path.name[1:].removesuffix(REPLACED))


def remove_leftovers(folder: Path) -> None:
    """Remove what was begun and not finished: our hidden names, nothing else.

    Raises:
        TransferError: one cannot be removed.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        if HIDDEN.fullmatch(path.name):
            with _removing(path):
                discard(path)


def read_state(path: Path) -> dict[str, Any]:
    """What a checkpoint holds beside its arrays.

    Raises:
        CheckpointError: it is no checkpoint of ours, or damaged.
    """
    return _read_root(path)[0]


def is_bound(path: Path) -> bool:
    """Whether each chunk is compared with what was written at its place; those of older versions have no manifest.

    Raises:
        CheckpointError: as `read_state`.
    """
    return _read_root(path)[1] is not None


UNBOUND = "{} was written by an older version: damage of a chunk is found, but not one that took another's place"
"""What is said where a run or an export reads one."""


def _read_root(path: Path) -> tuple[dict[str, Any], Manifest | None]:
    """State and manifest; None: it is of an older version."""
    file = path / METADATA_FILE
    found = read_json(file).get("attributes", {})
    found = found.get("megatier") if isinstance(found, dict) else None
    if not isinstance(found, dict) or found.get("format") not in (FORMAT, UNBOUND_FORMAT):
        raise CheckpointError(f"{path} is no checkpoint that this version of megatier reads (format {FORMAT}).")

    manifest = None
    state = found.get("state")
    digested: Any = state
    if found["format"] == FORMAT:
        manifest = Manifest.read(file, found.get("manifest"))
        digested = {"state": state, "manifest": found["manifest"]}
    elif any(read_json(path / name / METADATA_FILE).get("attributes") for name in ARRAYS):
        raise DamagedCheckpointError(str(file), "is of an older checkpoint than the arrays beside it")

    if not isinstance(state, dict) or found.get("digest") != digest_of(digested):
        raise CheckpointError(f"{file} is damaged: its digest is not that of its state.")
    if manifest is not None and NAME.fullmatch(path.name) and manifest.step != step_of(path):
        raise DamagedCheckpointError(str(file), f"is of another checkpoint: that of step {manifest.step}")
    return state, manifest


def _open_arrays(path: Path, shapes: dict[tuple[str, str], tuple[int, ...]]) -> dict[tuple[str, str], StoredArray]:
    """Arrays that are about to be read, by group and parameter, with the checksums of their chunks.

    Raises:
        CheckpointError: metadata is not what this model asks for, or not of this checkpoint.
    """
    root = path.resolve()
    manifest = _read_root(path)[1]
    grids = {place: _grid(root.joinpath(*place), shape) for place, shape in shapes.items()}
    if manifest is None:
        return {place: StoredArray(root.joinpath(*place), grid) for place, grid in grids.items()}

    manifest.check_folder(root, "", (METADATA_FILE,))
    for name in ARRAYS:
        manifest.check_metadata(root, name)
        manifest.check_folder(root, name, (METADATA_FILE,))
    return {place: manifest.array(root, "/".join(place), grid) for place, grid in grids.items()}


def restore(session: Session, path: Path) -> None:
    """Fill the whole state of a run, also after something broke off while state was changed.

    Raises:
        CheckpointError: the arrays are not those of this model or checkpoint, or damaged.
        TransferError: the drive failed.
    """
    root = path.resolve()
    shapes = arrays_of(session.units)
    for name, parameter in shapes:
        if not (root / name / parameter).exists() and (root / "params" / parameter).exists():
            raise CheckpointError(
                f"{path} has no moments of {parameter}, which was frozen in its run. Freeze it as before, or export "
                "the checkpoint and begin a run with that model."
            )

    with session.player.loading():
        _fill(session, _open_arrays(path, shapes))
        session.player.drain()


def _fill(session: Session, arrays: dict[tuple[str, str], StoredArray]) -> None:
    with _files(arrays.values()) as files:
        for unit in session.units:
            for name, planes in session.schema.arrays.items():
                if not (tensors := tensors_of(unit, name)):
                    continue
                places = [arrays[name, tensor.name] for tensor in tensors]
                pieces = files.read(places, [tensor.elements for tensor in tensors])
                session.fill(unit, planes, ((tensors[i].place(first), values) for i, first, values in pieces))


@contextmanager
def open_masters(path: Path, units: Sequence[Unit]) -> Iterator[Callable[[Unit, int, int], Tensor]]:
    """Gives elements [start, stop) of a unit's master weights, fp32 on the CPU; padding is 0.

    Through STAGED chunks: asked in the order of a unit's elements, each chunk is read once.

    Raises:
        CheckpointError: the arrays are not those of this model or checkpoint, or damaged.
        TransferError: the drive failed.
    """
    arrays = _open_arrays(path, {("params", name): shape for name, shape in parameter_shapes(units).items()})
    with _files(arrays.values()) as files:
        readers = {name: ArrayReader(files, array) for (_, name), array in arrays.items()}

        def read(unit: Unit, start: int, stop: int) -> Tensor:
            values = torch.zeros(stop - start)
            for tensor in unit.layout.tensors:
                lower = max(start, tensor.start)
                upper = min(stop, tensor.stop)
                if lower < upper:
                    first = tensor.offset + lower - tensor.start
                    readers[tensor.name].copy(first, values[lower - start : upper - start])
            return values

        yield read


def _files(arrays: Iterable[StoredArray]) -> ChunkFiles:
    return ChunkFiles(max(array.grid.chunk_elements for array in arrays), NUM_THREADS)


def _grid(folder: Path, shape: tuple[int, ...]) -> Grid:
    """The grid of one array, if its metadata is what we write.

    Raises:
        CheckpointError: it is missing, or something else.
    """
    if os.path.realpath(folder) != str(folder):
        raise DamagedCheckpointError(str(folder), "leads out of its checkpoint by a link; it was not read")
    found = read_json(folder / METADATA_FILE)
    grid = Grid.of(shape)
    expected = {
        "node_type": "array",
        "zarr_format": 3,
        "shape": list(shape),
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(grid.chunk_shape)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": CODECS,
    }

    for key, value in expected.items():
        if found.get(key) != value:
            raise CheckpointError(
                f"{folder}: {key} is {str(found.get(key))[:200]}; this run's model and format ask for {value}."
            )
    return grid


@contextmanager
def _removing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TransferError("removing a checkpoint", "disk", str(path), 0, error.errno or 0) from error
