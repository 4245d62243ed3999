"""Checkpoints: a run's state as named fp32 arrays in Zarr v3, in one format for all placements.

    step-00000100/                       a Zarr group; its attribute "megatier" has the rest of the state (`RunState`)
                                         and the manifest, which is the checksum of every other file
        params/<name>                    master weights; for frozen parameters the weights that they compute with, but
                                         not for the base of adapters
        exp_avg/<name>, exp_avg_sq/<name>   moments of the parameters that AdamW trains
        momentum/<name>                  momentum of the parameters that Muon trains

Names are those of the model's parameters. Tied parameters have one name. For example,
`zarr.open_group(path)["params/lm_head.weight"][:]` reads a tensor.

A checkpoint is written under a hidden name (`checkpoint_writer`), the attribute last, and renamed once all of it is on
the drive. Nothing is unpickled, and every path consists of the model's own names.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatier.checkpoint.arrays import ArrayReader
from megatier.checkpoint.chunkfile import STAGED, ChunkFiles, check_ends
from megatier.checkpoint.grid import Grid, StoredArray
from megatier.checkpoint.manifest import METADATA_FILE, Manifest, digest_of, read_json
from megatier.checkpoint.run_directory import CHECKPOINT_NAME, checkpoints, parse_step
from megatier.durable import REPLACED_SUFFIX, discard, free_bytes, restore_replaced
from megatier.errors import CapacityError, CheckpointError, DamagedCheckpointError, TransferError
from megatier.layout import Layout, TensorSlice
from megatier.models.decoder import Unit
from megatier.state import ARRAYS, MASTERS

CHECKPOINT_FORMAT = 3
"""The format that is written."""
UNBOUND_FORMAT = 2
"""The format of older versions, without a manifest."""
NUM_READING_THREADS = 4
"""Native threads that read chunks."""
WRITING = ".partial"
"""Suffix of the hidden name of an unfinished checkpoint."""
REMOVING = ".removed"
"""Suffix of the hidden name of a checkpoint that is being removed."""
HIDDEN_NAME = re.compile(r"\.step-\d{8,}\.(partial|removed)")
"""Hidden names that only our checkpoints have. Nothing else is ever removed."""
# Zarr's own names, in its own order: bytes first, then the checksum over them.
CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]


def checkpoint_bytes(units: Sequence[Unit]) -> int:
    """Return the bytes of the arrays of one checkpoint."""
    return 4 * sum(math.prod(shape) for shape in list_arrays(units).values())


def list_arrays(units: Sequence[Unit]) -> dict[tuple[str, str], tuple[int, ...]]:
    """Return the shape of each array of a checkpoint, by group and parameter.

    Units that hold parts of one parameter share its arrays.
    """
    shapes = {}
    for name in groups_of(units):
        for unit in units:
            for tensor in list_tensors(unit.layout, name):
                shapes[name, tensor.name] = tensor.parameter_shape
    return shapes


def groups_of(units: Sequence[Unit]) -> tuple[str, ...]:
    """Return the groups of a checkpoint's arrays, which are fp32 for every compute dtype."""
    # The order is fixed, so that checkpoints of one model have equal metadata.
    arrays = {name for unit in units for name in unit.layout.schema.arrays}
    return tuple(name for name in ARRAYS if name in arrays)


def list_tensors(layout: Layout, name: str) -> tuple[TensorSlice, ...]:
    """Return the tensors of a unit in a group. Frozen ones have no moments, and a frozen base has no arrays."""
    # Units of one model may have different optimizers, as with Muon, and so different groups.
    if name not in layout.schema.arrays:
        return ()
    has_frozen = name == MASTERS and not layout.has_base
    return layout.tensors if has_frozen else layout.trained.tensors


def parameter_shapes(units: Sequence[Unit]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters in a checkpoint by name. A frozen base is left out."""
    return {parameter: shape for (name, parameter), shape in list_arrays(units).items() if name == MASTERS}


def check_room(folder: Path, units: Sequence[Unit]) -> None:
    """Refuse to begin a checkpoint without room for it; `DriveSpace` checks the room for a whole run.

    Raises:
        CapacityError: there is less room.
    """
    needed = checkpoint_bytes(units)
    free = free_bytes(folder)
    if needed > free:
        raise CapacityError(f"a checkpoint in {folder}", needed, free, "Free space there, or name another directory.")


def prune(folder: Path, num_kept: int, best_step: int | None = None) -> None:
    """Remove all checkpoints but the last `num_kept`, at least 1, and that of the best step; see `remove`."""
    # The oldest goes first, so that a kill leaves the newest.
    for path in checkpoints(folder)[:-num_kept]:
        if parse_step(path) != best_step:
            remove(path)


def remove(path: Path) -> None:
    """Remove a checkpoint. If its name is a link, the link is removed, and its target stays.

    Raises:
        TransferError: it cannot be removed. Then it is still whole, or has a hidden name.
    """
    # It is renamed first, so that a kill leaves nothing that looks whole.
    hidden = path.with_name(f".{path.name}{REMOVING}")
    with _removing(path):
        path.rename(hidden)
        discard(hidden)


def settle_replaced(folder: Path) -> None:
    """Finish replacements of checkpoints that a kill has cut short; see `durable.restore_replaced`.

    Raises:
        TransferError: the drive refuses.
    """
    for path in folder.glob(f".step-*{REPLACED_SUFFIX}"):
        name = path.name.removeprefix(".").removesuffix(REPLACED_SUFFIX)
        restore_replaced(folder / name)


def remove_leftovers(folder: Path) -> None:
    """Remove unfinished and half-removed checkpoints from a folder, by their hidden names.

    Raises:
        TransferError: one cannot be removed.
    """
    # The whole name is compared, because users may have hidden files of their own there.
    for path in folder.iterdir() if folder.is_dir() else ():
        if HIDDEN_NAME.fullmatch(path.name):
            with _removing(path):
                discard(path)


def read_state(path: Path) -> dict[str, Any]:
    """Return the state in a checkpoint without its arrays.

    Raises:
        CheckpointError: it is no checkpoint of ours, or damaged.
    """
    state, _ = _read_root(path)
    return state


def is_bound(path: Path) -> bool:
    """Return whether a checkpoint has a manifest, by which exchanged chunks are found.

    Checkpoints of older versions have none.

    Raises:
        CheckpointError: see `read_state`.
    """
    _, manifest = _read_root(path)
    return manifest is not None


UNBOUND = "{} was written by an older version: damage of a chunk is found, but not one that took another's place"
"""The warning if a checkpoint has no manifest."""


def _read_root(path: Path) -> tuple[dict[str, Any], Manifest | None]:
    """Return the state and the manifest of a checkpoint; None if an older version wrote it without one.

    Raises:
        CheckpointError: it is no checkpoint of ours, or damaged.
    """
    file = path / METADATA_FILE
    stored = read_json(file).get("attributes", {})
    stored = stored.get("megatier") if isinstance(stored, dict) else None
    if not isinstance(stored, dict) or stored.get("format") not in (CHECKPOINT_FORMAT, UNBOUND_FORMAT):
        raise CheckpointError(
            f"{path} is no checkpoint that this version of megatier reads (format {CHECKPOINT_FORMAT}). Use the "
            "version that wrote it."
        )

    # The groups of the arrays note the format too. If theirs is newer than that of this file, a lost or misdirected
    # write has left the file of an older checkpoint here.
    manifest = None
    state = stored.get("state")
    digested: Any = state
    if stored["format"] == CHECKPOINT_FORMAT:
        manifest = Manifest.read(file, stored.get("manifest"))
        digested = {"state": state, "manifest": stored["manifest"]}
    elif any(read_json(path / name / METADATA_FILE).get("attributes") for name in ARRAYS if (path / name).is_dir()):
        raise DamagedCheckpointError(str(file), "is of an older checkpoint than the arrays beside it")

    if not isinstance(state, dict) or stored.get("digest") != digest_of(digested):
        raise DamagedCheckpointError(str(file), "is damaged: its digest is not that of its state")

    # An unfinished checkpoint has a hidden name, which has no step to compare.
    if manifest is not None and CHECKPOINT_NAME.fullmatch(path.name) and manifest.step != parse_step(path):
        raise DamagedCheckpointError(str(file), f"is of another checkpoint: that of step {manifest.step}")
    return state, manifest


def check_parameters(path: Path, units: Sequence[Unit]) -> None:
    """Refuse a checkpoint whose parameters have other names than those of a model.

    Args:
        path: the checkpoint. Older versions did not list their parameters, and are not checked.
        units: all units of the model, whole.

    Raises:
        CheckpointError: the checkpoint or the model has a parameter that the other lacks.
    """
    _, manifest = _read_root(path)
    if manifest is None:
        return

    start = f"{MASTERS}/"
    stored = {node.removeprefix(start) for node in manifest.checksums if node.startswith(start)}
    wanted = parameter_shapes(units).keys()
    for names, who_lacks in ((wanted - stored, "it has no"), (stored - wanted, "this model has no")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(
                f"{path} is of another model: {who_lacks} {min(names)}{more}. Open the model that it was saved from."
            )


def open_arrays(path: Path, shapes: dict[tuple[str, str], tuple[int, ...]]) -> dict[tuple[str, str], StoredArray]:
    """Return arrays by group and parameter, with the checksums of their chunks. No chunk is read yet.

    Args:
        path: the checkpoint.
        shapes: shapes of the model's arrays by group and parameter.

    Raises:
        CheckpointError: the metadata does not belong to this model or this checkpoint.
    """
    root = path.resolve()
    _, manifest = _read_root(path)
    grids = {place: _grid(root.joinpath(*place), shape) for place, shape in shapes.items()}
    if manifest is None:
        return {place: StoredArray(root.joinpath(*place), grid) for place, grid in grids.items()}

    # Unknown files are refused as well, since one may be an array of another checkpoint.
    manifest.check_folder(root, "", (METADATA_FILE,))
    for name in ARRAYS:
        # Every checkpoint has masters. Its moments depend on the optimizer.
        if name == MASTERS or name in manifest.checksums:
            manifest.check_metadata(root, name)
            manifest.check_folder(root, name, (METADATA_FILE,))

    arrays = {}
    for (name, parameter), grid in grids.items():
        arrays[name, parameter] = manifest.array(root, f"{name}/{parameter}", grid)
    return arrays


@contextmanager
def open_masters(path: Path, units: Sequence[Unit]) -> Iterator[Callable[[Unit, int, int], Tensor]]:
    """Open the master weights of a checkpoint.

    Yields:
        A function that reads elements [start, stop) of a unit: fp32 on the CPU, with 0 for padding. If elements are
        read in order, each chunk is read once.

    Raises:
        CheckpointError: the arrays are damaged, or do not belong to this model or checkpoint.
        TransferError: the drive failed.
    """
    check_parameters(path, units)
    shapes = {(MASTERS, name): shape for name, shape in parameter_shapes(units).items()}
    arrays = open_arrays(path, shapes)
    with make_chunk_files(arrays.values()) as files:
        readers = {name: ArrayReader(files, array) for (_, name), array in arrays.items()}

        def read(unit: Unit, start: int, stop: int) -> Tensor:
            # The padding between tensors is in no array.
            values = torch.zeros(stop - start, dtype=torch.float32, device="cpu")
            for tensor in unit.layout.tensors:
                lower = max(start, tensor.start)
                upper = min(stop, tensor.stop)
                if lower < upper:
                    first = tensor.offset + lower - tensor.start
                    readers[tensor.name].copy(first, values[lower - start : upper - start])
            return values

        yield read


def check_moments(path: Path, units: Sequence[Unit]) -> None:
    """Compare moments that nobody reads with the manifest, chunk by chunk, by the ends of their files.

    Args:
        path: the checkpoint. Those of older versions have nothing to compare with.
        units: all units of the model, whole. Their optimizer may be another one than that of the checkpoint.

    Raises:
        DamagedCheckpointError: a file is missing, of another size, or not the one that was written at its place.
    """
    _, manifest = _read_root(path)
    if manifest is None:
        return

    # Which moments there are is asked of the checkpoint, since a model that is exported has no optimizer.
    shapes = parameter_shapes(units)
    moments = {}
    for node in manifest.checksums:
        name, _, parameter = node.partition("/")
        if name != MASTERS and parameter in shapes:
            moments[name, parameter] = shapes[parameter]
    for array in open_arrays(path, moments).values():
        check_ends(array)


def make_chunk_files(arrays: Iterable[StoredArray], num_staged: int = STAGED) -> ChunkFiles:
    """Open so many staging buffers that take the chunks of these arrays."""
    largest = max((array.grid.chunk_elements for array in arrays), default=1)
    return ChunkFiles(largest, NUM_READING_THREADS, num_staged)


def _grid(folder: Path, shape: tuple[int, ...]) -> Grid:
    """Return the grid of an array, if its metadata is what we write.

    Raises:
        CheckpointError: it is missing, or something else.
    """
    # The checkpoint's own path is resolved, so any other link on the way shows here.
    if os.path.realpath(folder) != str(folder):
        raise DamagedCheckpointError(str(folder), "leads out of its checkpoint by a link; it was not read")
    metadata = read_json(folder / METADATA_FILE)
    grid = Grid.of(shape)

    # Compared and not interpreted, so metadata that somebody else wrote decides nothing about what is read, or how.
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
        if metadata.get(key) != value:
            raise CheckpointError(
                f"{folder}: {key} is {str(metadata.get(key))[:200]}; this run's model and format ask for {value}. Use "
                "the model that the checkpoint was made of, or another checkpoint."
            )
    return grid


@contextmanager
def _removing(path: Path) -> Iterator[None]:
    """Turn errors of the drive into one that names the checkpoint."""
    try:
        yield
    except OSError as error:
        raise TransferError("removing a checkpoint", "disk", str(path), 0, error.errno or 0) from error
