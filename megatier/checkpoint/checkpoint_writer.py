"""Writes a checkpoint while training goes on.

After `player.drain` the state of a step is home. It stays as it is until the updates of the next step, and the update
of a unit comes behind the lane `checkpoint`, which goes through the units in the order of their updates. So nothing is
copied first: planes at home in RAM are read where they lie, others pass through a few buffers. A thread for each of the
arrays (masters and both moments) fills chunks, and native threads write them; a unit is free when it lies in chunks.

No deadlock: this lane takes no slots and waits for drives and copies alone, never for an update or for compute.

zarr writes the metadata and `chunkfile` the bytes. The folder has a hidden name until all of it is on the drive.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatier import _native
from megatier.checkpoint.arrays import ArrayWriter
from megatier.checkpoint.checkpoint import (
    ARRAYS,
    FORMAT,
    WRITING,
    arrays_of,
    check_room,
    checkpoint_bytes,
    parameter_shapes,
    prune,
    remove_leftovers,
    tensors_of,
)
from megatier.checkpoint.chunkfile import ChunkFiles
from megatier.checkpoint.grid import Grid
from megatier.checkpoint.manifest import METADATA_FILE, Manifest, checksum_of, digest_of, read_bytes
from megatier.durable import becoming, sync_tree
from megatier.errors import StepAbandonedError
from megatier.layout import TensorSlice
from megatier.models.decoder import Unit
from megatier.numerics.optimizer import join_master, plane_dtype
from megatier.play.generations import Generation
from megatier.session.session import Session
from megatier.store.arena import Arena
from megatier.store.transfer import Transfer
from megatier.tier import Kind, Tier, round_up

RUN_ELEMENTS = 2 << 20
"""Elements of a plane that are brought to RAM at once: 4 or 8 MiB."""
NUM_THREADS = 2
"""Native threads that write each array."""
NUM_STAGED = 3
"""Chunks of each array in RAM: one that is filled, the others on their way."""


class CheckpointWriter:
    """One checkpoint on its way. `wait` for it before the next one, and before the end.

    Attributes:
        step: its last step.
        num_bytes: of its arrays.
        seconds: that it took, once it is over.
    """

    def __init__(
        self, session: Session, folder: Path, step: int, state: Mapping[str, Any], num_kept: int | None = None
    ) -> None:
        """Begin; the caller goes on.

        Args:
            session: after `player.drain`, and no checkpoint of it is on its way.
            folder: of all checkpoints of the run.
            step: its last step; a checkpoint of it that is there already is replaced.
            state: what is no array; plain JSON.
            num_kept: of the whole checkpoints, this one included, at least 1; None: all.
        """
        self.step = step
        self.num_bytes = checkpoint_bytes(session.units)
        self.seconds = 0.0
        self._session = session
        self._folder = folder
        self._num_kept = num_kept
        self._target = folder / f"step-{step:08d}"
        self._partial = folder / f".{self._target.name}{WRITING}"
        self._state = dict(state)
        self._opened = ExitStack()
        self._writers: list[_PlaneWriter] = []
        self._began = time.perf_counter()
        reader = session.reader
        last = reader.submit("begin", self._begin)

        for unit in _in_order(session):
            work = partial(self._write_unit, unit, session.blocks.generations.valid[unit.name])
            last = reader.submit(unit.name, work, last, unit.name)
        self._end = reader.submit("end", partial(self._finish, last))

    def is_over(self) -> bool:
        """True when `wait` would not block."""
        return self._end.done()

    def wait(self) -> Path:
        """Block until it is whole.

        Raises:
            CapacityError: there was no room. Nothing was written.
            TransferError, IntegrityError: reading or writing failed. What was written is removed; the checkpoints
                before it are whole.
            StepAbandonedError: the session was closed meanwhile. The same.
        """
        self._end.wait()
        return self._target

    # ------------------------------------------------------------------ the lane's side

    def _begin(self) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        remove_leftovers(self._folder)
        check_room(self._folder, self._session.units)
        self._partial.mkdir(mode=0o700)
        units = self._session.units
        layouts = [unit.layout for unit in units]
        chunk_elements = max(Grid.of(shape).chunk_elements for shape in parameter_shapes(units).values())
        num_shared = max(sum(tensor.whole is not None for tensor in layout.tensors) for layout in layouts)
        num_staged = max(NUM_STAGED, num_shared + 1)  # a chunk of each may wait for its rest, from the next unit
        self._opened.callback(self._writers.clear)  # the lane remembers its last work
        run_elements = min(RUN_ELEMENTS, max(layout.num_elements for layout in layouts))
        buffers = _Buffers(self._session, run_elements)
        self._opened.callback(buffers.close)

        for name, kinds in self._session.schema.arrays.items():
            files = self._opened.enter_context(ChunkFiles(chunk_elements, NUM_THREADS, num_staged))
            self._writers.append(_PlaneWriter(self._session, files, self._partial, name, kinds, buffers))
        self._threads = ThreadPoolExecutor(len(ARRAYS), "megatier-checkpoint")
        self._opened.callback(self._threads.shutdown)  # first: what they fill goes

    def _write_unit(self, unit: Unit, generation: Generation) -> None:
        list(self._threads.map(lambda writer: writer.write(unit, generation), self._writers))

    def _finish(self, last: Transfer) -> None:
        """Make it whole, or leave nothing of it."""
        with becoming(self._partial, self._target, "a checkpoint", replaces=True):
            writers = list(self._writers)
            try:
                last.wait()
                for writer in writers:
                    writer.files.flush()
            finally:
                self._opened.close()

            chunks = {node: values for writer in writers for node, values in writer.checksums.items()}
            _write_metadata(self._partial, self._session.units, self.step, self._state, chunks)

        if self._num_kept is not None:
            prune(self._folder, self._num_kept)
        self.seconds = time.perf_counter() - self._began


class _Buffers:
    """RAM for planes that are not at home there: two runs of each kind, one of them on its way."""

    def __init__(self, session: Session, run_elements: int) -> None:
        """Allocate, unless all state is in RAM."""
        self.run_elements = run_elements
        self._places: dict[Kind, tuple[int, int]] = {}
        schema = session.schema
        num_bytes = 0
        for kind in schema.kinds:
            size = round_up(run_elements * schema.width(kind))
            self._places[kind] = num_bytes, size
            num_bytes += 2 * size

        passes = any(home is not Tier.RAM for home in session.placement.homes.values())
        is_cuda = session.store.device.type == "cuda"
        self._arena = Arena(num_bytes, torch.device("cpu"), pin=is_cuda) if passes else None

    def of(self, kind: Kind, number: int) -> Tensor:
        """uint8, for a kind's run of this number; the one after the next has the same place."""
        assert self._arena is not None, "all state is in RAM"
        start, size = self._places[kind]
        return self._arena.view(start + number % 2 * size, size)

    def close(self) -> None:
        """Unlock the pages."""
        if self._arena is not None:
            self._arena.close()


class _PlaneWriter:
    """Writes the masters, or one of the moments, to files of its own; from one thread at a time."""

    def __init__(
        self,
        session: Session,
        files: ChunkFiles,
        folder: Path,
        name: str,
        kinds: Sequence[Kind],
        buffers: _Buffers,
    ) -> None:
        """For the arrays of one name in the folder of a checkpoint."""
        self._reader = session.reader
        self._store = session.store
        self._blocks = session.blocks
        self.files = files
        self._folder = folder / name
        self._name = name
        self._kinds = kinds
        self._buffers = buffers
        self._schema = session.schema
        self._arrays: dict[str, ArrayWriter] = {}
        """Of parameters that are not whole yet."""
        self.checksums: dict[str, list[int]] = {}
        """Of each chunk, by the path of its array."""

    def write(self, unit: Unit, generation: Generation) -> None:
        """All of a unit's elements into chunks, the last of which may still be on their way to the drive."""
        tensors = tensors_of(unit, self._name)
        writers = [self._array(tensor) for tensor in tensors]
        with closing(self._runs(unit, generation)) as runs:
            for (start, stop), planes in runs:
                for tensor, writer in zip(tensors, writers, strict=True):
                    lower = max(start, tensor.start)
                    upper = min(stop, tensor.stop)
                    for first, target in writer.rooms(upper - lower) if lower < upper else ():
                        _copy_fp32(planes, lower - start + first, target)

    def _array(self, tensor: TensorSlice) -> ArrayWriter:
        """The array of a parameter. The units that hold parts of it come in the order of its elements."""
        array = self._arrays.pop(tensor.name, None)
        if array is None:
            array = ArrayWriter(self.files, self._folder / tensor.name, Grid.of(tensor.parameter_shape))
            self.checksums[f"{self._name}/{tensor.name}"] = array.checksums
        if tensor.elements[1] < math.prod(tensor.parameter_shape):
            self._arrays[tensor.name] = array
        return array

    def _runs(self, unit: Unit, generation: Generation) -> Generator[tuple[tuple[int, int], list[Tensor]]]:
        """Runs of a unit's elements and their planes, valid until the next; that is on its way meanwhile."""
        runs = self._cut(0, unit.layout.num_trained)
        if Kind.WEIGHT in self._kinds:
            runs += self._cut(unit.layout.num_trained, unit.layout.num_elements)
        if not runs:
            return

        with ExitStack() as stack:
            ahead = self._ask(stack, unit, generation, runs[0], 0)
            for number, run in enumerate(runs):
                if self._reader.is_closed:
                    raise StepAbandonedError("the run was closed before its checkpoint was whole")
                planes = ahead
                if number + 1 < len(runs):
                    ahead = self._ask(stack, unit, generation, runs[number + 1], number + 1)

                for _, transfer in planes:
                    if transfer is not None:
                        transfer.wait()
                yield run, [plane for plane, _ in planes]

    def _cut(self, start: int, stop: int) -> list[tuple[int, int]]:
        step = self._buffers.run_elements
        return [(first, min(first + step, stop)) for first in range(start, stop, step)]

    def _ask(
        self, stack: ExitStack, unit: Unit, generation: Generation, run: tuple[int, int], number: int
    ) -> list[tuple[Tensor, Transfer | None]]:
        """Each plane of a run, and what brings it; of frozen elements there are weights alone."""
        found: list[tuple[Tensor, Transfer | None]] = []
        for kind in self._kinds if run[0] < unit.layout.num_trained else (Kind.WEIGHT,):
            key = self._blocks.key(unit.name, kind, generation)
            span = self._blocks.span(unit.name, kind, run)
            dtype = plane_dtype(self._schema, kind)
            if self._blocks.placement.homes[unit.name, kind] is Tier.RAM:
                lease = self._store.lease(key, Tier.RAM, span)
                found.append((stack.enter_context(lease).bytes.view(dtype), None))
                continue

            target = self._buffers.of(kind, number)
            transfer = self._store.copy_out(key, span, target)
            stack.callback(transfer.over)  # whatever happens, nothing fills a buffer that has gone to others
            found.append((target.view(dtype), transfer))

        return found


def _in_order(session: Session) -> list[Unit]:
    """The order of the updates, in the immediate mode that of the backward; but parts of a parameter from its first."""
    if session.optimizer.hyper.deferred:
        return list(session.units)
    layers = groupby(session.units, key=lambda unit: unit.module_names[0] if unit.experts is not None else unit.name)
    return list(chain.from_iterable(reversed([list(units) for _, units in layers])))


def _copy_fp32(planes: Sequence[Tensor], first: int, target: Tensor) -> None:
    """Elements from `first` on into fp32 [n]: of a master in two planes, or of one."""
    source = planes[0][first : first + target.numel()]
    if len(planes) == 2:
        join_master(source, planes[1][first : first + target.numel()], target)
    elif source.dtype is torch.float32:
        _native.copy(target.data_ptr(), source.data_ptr(), 4 * target.numel())
    else:  # frozen
        target.copy_(source)


def _write_metadata(
    folder: Path, units: Sequence[Unit], step: int, state: Mapping[str, Any], chunks: Mapping[str, Sequence[int]]
) -> None:
    """All of a checkpoint but its chunks, in a folder that may hold these already; last of all what binds them.

    Args:
        folder: of the checkpoint.
        units: of the model.
        step: the last one.
        state: what is no array.
        chunks: checksums, by the path of their array.

    Raises:
        OSError: the drive failed.
    """
    import zarr  # slow to import, and most of a run does without

    root = zarr.create_group(store=str(folder), zarr_format=3)
    # The second place that says there is a manifest: an older group's metadata over the root's would deny it.
    groups = {name: root.create_group(name, attributes={"megatier": {"format": FORMAT}}) for name in ARRAYS}
    _create_arrays(folder, groups, arrays_of(units))
    checksums = {name: [checksum_of(read_bytes(folder / name / METADATA_FILE))] for name in ARRAYS}
    for node, values in sorted(chunks.items()):
        checksums[node] = [checksum_of(read_bytes(folder / node / METADATA_FILE)), *values]

    manifest = Manifest(step, checksums).to_dict()
    digest = digest_of({"state": state, "manifest": manifest})
    sync_tree(folder)  # the manifest says that these files are there
    root.update_attributes({"megatier": {"format": FORMAT, "state": state, "manifest": manifest, "digest": digest}})


def _create_arrays(folder: Path, groups: Mapping[str, Any], shapes: Mapping[tuple[str, str], tuple[int, ...]]) -> None:
    """Metadata of arrays, by group and parameter."""
    from zarr.codecs import BytesCodec, Crc32cCodec

    like: dict[tuple[int, ...], Path] = {}
    """Metadata of each shape: arrays of one shape have the same, and zarr needs milliseconds for it."""
    for (name, parameter), shape in shapes.items():
        path = folder / name / parameter / METADATA_FILE
        if shape in like:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            shutil.copyfile(like[shape], path)
            continue

        grid = Grid.of(shape)
        like[shape] = path
        groups[name].create_array(
            parameter,
            shape=grid.shape,
            chunks=grid.chunk_shape,
            dtype="float32",
            filters=None,
            serializer=BytesCodec(endian="little"),
            compressors=[Crc32cCodec()],
            fill_value=0.0,
        )
