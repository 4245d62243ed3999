"""Writes a checkpoint while training goes on.

After `player.drain` all state is at home, and it does not change until the updates of the next step. The queue
`checkpoint` reads the units in the order of their updates, and the update of a unit waits until that unit was read. So
nothing has to be copied first. Several ranks write one checkpoint together; each writes the chunks that it owns
(`chunk_owners`).

1. `_begin`: the first rank makes a folder with a hidden name, if there is room. All ranks allocate buffers.
2. `_write_unit`, for each unit: one thread for each group of arrays (masters and both moments) fills chunks, and native
   threads write them. When all ranks have read the unit, they exchange the elements that belong to chunks of other
   ranks. From then on the unit may be updated, because all of it is in chunks.
3. `_finish`: each rank waits for its writes and synchronises them. The first rank collects all checksums, writes the
   metadata, and last of all the manifest. Then it renames the folder.
4. Only then does it remove older checkpoints.

A kill before the rename leaves the hidden folder, which the next checkpoint removes. All older checkpoints stay whole.

The queue cannot take part in a deadlock. It takes no slots, and waits for drives and copies alone, never for updates or
compute. It also waits for the same queue of other ranks, which reads the same units in the same order.

zarr writes the metadata, and `chunkfile` the bytes.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from megatier.checkpoint.checkpoint import (
    CHECKPOINT_FORMAT,
    WRITING,
    check_room,
    checkpoint_bytes,
    groups_of,
    list_arrays,
    parameter_shapes,
    prune,
    remove_leftovers,
)
from megatier.checkpoint.chunk_owners import ChunkOwners
from megatier.checkpoint.chunkfile import ChunkFiles
from megatier.checkpoint.grid import Grid
from megatier.checkpoint.manifest import METADATA_FILE, Manifest, checksum_of, digest_of, read_bytes
from megatier.checkpoint.plane_writer import Buffers, PlaneWriter
from megatier.checkpoint.run_directory import step_path
from megatier.durable import committing, sync_tree
from megatier.errors import ConfigError
from megatier.models.decoder import Unit
from megatier.play.generations import Generation
from megatier.ranks.channel import Channel, SingleRank
from megatier.session.session import Session
from megatier.store.transfer import Transfer
from megatier.workers import Workers

RUN_ELEMENTS = 2 << 20
"""Elements of a plane that are read at once: 4 or 8 MiB."""
NUM_WRITING_THREADS = 2
"""Native threads that write the arrays of one group."""
NUM_STAGED = 3
"""Chunks of each group in RAM: one is being filled, and the others are being written."""


class CheckpointWriter:
    """A checkpoint that is being written. Call `wait` before the next one begins and before the session is closed.

    Attributes:
        step: the step whose state it holds.
        num_bytes: bytes of its arrays.
        seconds: the time that it took, once it is whole.
    """

    def __init__(
        self,
        session: Session,
        folder: Path,
        step: int,
        state: Mapping[str, Any],
        num_kept: int | None = None,
        best_step: int | None = None,
    ) -> None:
        """Begin a checkpoint. This returns at once.

        Args:
            session: the run, after `player.drain`. No other checkpoint of it may be under way.
            folder: the folder of all checkpoints of the run.
            step: the last step. A checkpoint of the same step is replaced.
            state: everything besides the arrays, as plain JSON.
            num_kept: how many checkpoints are kept, including this one, at least 1; None: all.
            best_step: the step of a checkpoint that is kept in addition; None: there is none.
        """
        self.step = step
        self.num_bytes = checkpoint_bytes(session.whole_units)
        self.seconds = 0.0
        self._all_ranks: Channel | SingleRank = SingleRank() if session.ranks is None else session.ranks.beside
        self._leads = self._all_ranks.rank == 0
        self._session = session
        # The process may change its working directory meanwhile.
        folder = self._folder = folder.absolute()
        self._num_kept = num_kept
        self._best_step = best_step
        self._target = step_path(folder, step)
        self._partial = folder / f".{self._target.name}{WRITING}"
        # Copied, because the caller may change it meanwhile.
        self._state = dict(state)
        self._opened = ExitStack()
        self._writers: list[PlaneWriter] = []
        self._began = time.perf_counter()

        # Each unit is an item of the queue, so that the update of a unit waits for that item alone. Each item takes the
        # generation that is valid now, because later steps may change which one is.
        reader = session.reader
        last = reader.submit("begin", self._begin)

        for unit in _in_order(session):
            work = partial(self._write_unit, unit, session.blocks.generations.valid[unit.name])
            last = reader.submit(unit.name, work, last, unit.name)
        self._end = reader.submit("end", partial(self._finish, last))

    def is_over(self) -> bool:
        """Return whether `wait` would not block."""
        return self._end.done()

    def wait(self) -> Path:
        """Wait until the checkpoint is whole, and return its path.

        Raises:
            CapacityError: there is too little room. Nothing was written.
            TransferError, IntegrityError: reading or writing failed. The unfinished checkpoint is removed, and older
                ones stay whole.
            StepAbandonedError: the session was closed meanwhile. The unfinished checkpoint is removed.
        """
        # Each item waits for the one before, so an error of any unit arrives here.
        self._end.wait()
        return self._target

    # ------------------------------------------------------------------ on the queue's thread

    def _begin(self) -> None:
        """Make the hidden folder, on the first rank, and allocate buffers and threads."""
        with self._all_ranks.failing_together():
            if self._leads:
                self._make_folder()

        with self._all_ranks.failing_together():
            if not self._partial.is_dir():
                raise ConfigError(
                    f"rank {self._all_ranks.rank} does not see {self._partial}, which the first rank has made. Name an "
                    "output.directory on a file system that all hosts share."
                )
            self._open_writers()

    def _make_folder(self) -> None:
        """Make the hidden folder, if there is room for the checkpoint."""
        # Leftovers of a kill go first, because they take room.
        self._folder.mkdir(mode=0o700, exist_ok=True)
        remove_leftovers(self._folder)
        check_room(self._folder, self._session.whole_units)
        self._partial.mkdir(mode=0o700)

    def _open_writers(self) -> None:
        """Allocate buffers, and start threads."""
        whole_units = self._session.whole_units

        # All buffers have the size of the largest chunk.
        grids = [Grid.of(shape) for shape in parameter_shapes(whole_units).values()]
        chunk_elements = max(grid.chunk_elements for grid in grids)

        num_shared = 0
        for unit in whole_units:
            shared = [tensor for tensor in unit.layout.tensors if tensor.whole is not None]
            num_shared = max(num_shared, len(shared))

        # If a parameter lies in several units, its last chunk waits for the next unit. With several ranks the next unit
        # may begin another such chunk before that, and the last chunks of the shard's trained and frozen elements wait
        # for elements of other ranks.
        num_open = num_shared if self._all_ranks.size == 1 else 2 * num_shared + 2
        num_staged = max(NUM_STAGED, num_open + 1)

        # The queue keeps a reference to its last item, which must not keep the buffers of the writers alive.
        self._opened.callback(self._writers.clear)
        longest = max(unit.layout.num_elements for unit in self._session.own_units)
        buffers = Buffers(self._session, min(RUN_ELEMENTS, longest))
        self._opened.callback(buffers.close)

        owners = ChunkOwners(whole_units, self._all_ranks.rank, self._all_ranks.size)
        for name in groups_of(whole_units):
            files = self._opened.enter_context(ChunkFiles(chunk_elements, NUM_WRITING_THREADS, num_staged))
            self._writers.append(PlaneWriter(self._session, files, self._partial, name, buffers, owners))
        # Masters and each moment have a thread, because they read different planes and write different files.
        self._workers = Workers(len(self._writers), "megatier-checkpoint")

        # This callback runs first, because the threads fill the buffers that the others free.
        self._opened.callback(self._workers.close)

    def _write_unit(self, unit: Unit, generation: Generation) -> None:
        """Copy a unit's masters and moments into chunks, each on its own thread."""
        # Each region succeeds on all ranks or fails on all. A rank that failed alone would leave the others waiting.
        with self._all_ranks.failing_together():
            self._workers.map(lambda writer: writer.write(unit, generation), self._writers)

        with self._all_ranks.ending_run_on_error():
            received = [writer.exchange(unit, self._all_ranks) for writer in self._writers]
        with self._all_ranks.failing_together():
            for writer, values in zip(self._writers, received, strict=True):
                writer.take(unit, values)

    def _finish(self, last: Transfer) -> None:
        """Write the metadata and rename the folder once all ranks have written, or remove the folder after an error."""
        # The outer region contains the rename, so that all ranks fail if it does. The inner region stops all ranks
        # before the rename if one of them has failed.
        with self._all_ranks.failing_together(), self._renaming_at_end():
            with self._all_ranks.failing_together():
                chunks = self._end_writing(last)

            written = self._all_ranks.all_gather_object(chunks)
            if self._leads:
                checksums = _join_checksums(written)
                _write_metadata(self._partial, self._session.whole_units, self.step, self._state, checksums)

        # Until this checkpoint is whole the run may need an older one, so those are removed last.
        with self._all_ranks.failing_together():
            if self._leads and self._num_kept is not None:
                prune(self._folder, self._num_kept, self._best_step)
        self.seconds = time.perf_counter() - self._began

    def _renaming_at_end(self) -> AbstractContextManager[None]:
        """Return a context that renames the folder at its end, on the first rank."""
        if not self._leads:
            return nullcontext()
        return committing(self._partial, self._target, "a checkpoint", replaces=True)

    def _end_writing(self, last: Transfer) -> dict[str, dict[int, int]]:
        """Wait until this rank has written all of its chunks, and return their checksums by array and chunk."""
        writers = list(self._writers)
        try:
            last.wait()
            for writer in writers:
                writer.files.flush()
        finally:
            self._opened.close()

        # The first rank synchronises its host's files with the metadata.
        if not self._leads:
            sync_tree(self._partial)

        checksums: dict[str, dict[int, int]] = {}
        for writer in writers:
            checksums |= writer.checksums
        return checksums


def _join_checksums(written: Sequence[Mapping[str, Mapping[int, int]]]) -> dict[str, list[int]]:
    """Return the checksums of each array in the order of its chunks, joined from all ranks."""
    arrays: dict[str, dict[int, int]] = {}
    for chunks in written:
        for node, values in chunks.items():
            arrays.setdefault(node, {}).update(values)

    joined = {}
    for node, values in arrays.items():
        joined[node] = [checksum for _, checksum in sorted(values.items())]
    return joined


def _in_order(session: Session) -> list[Unit]:
    """Return the units in the order of their updates, which in the immediate mode is that of the backward.

    The parts of a layer's experts keep their order, because they share arrays that are written from front to back.
    """
    if session.optimizer.hyper.deferred:
        return list(session.own_units)

    def layer_of(unit: Unit) -> str:
        return unit.module_names[0] if unit.experts is not None else unit.name

    layers = [list(units) for _, units in groupby(session.own_units, key=layer_of)]
    return list(chain.from_iterable(reversed(layers)))


def _write_metadata(
    folder: Path, units: Sequence[Unit], step: int, state: Mapping[str, Any], chunks: Mapping[str, Sequence[int]]
) -> None:
    """Write the metadata of a checkpoint, and last of all the manifest, which makes it whole.

    Args:
        folder: the checkpoint's folder, which may hold chunks already.
        units: the model's units.
        step: the last step.
        state: everything that is no array.
        chunks: checksums of chunks, by the path of their array.

    Raises:
        OSError: the drive failed.
    """
    import zarr  # slow to import, and most of a run does without

    # The groups note the format too. So a root of an older checkpoint is found, if a misdirected write has put it here.
    root = zarr.create_group(store=str(folder), zarr_format=3)
    attributes = {"megatier": {"format": CHECKPOINT_FORMAT}}
    groups = {name: root.create_group(name, attributes=attributes) for name in groups_of(units)}
    _create_arrays(folder, groups, list_arrays(units))

    # Groups have no chunks.
    checksums = {}
    for node in (*groups, *sorted(chunks)):
        metadata = read_bytes(folder / node / METADATA_FILE)
        checksums[node] = [checksum_of(metadata), *chunks.get(node, ())]

    bound = {"state": state, "manifest": Manifest(step, checksums).to_dict()}
    digest = digest_of(bound)

    # The manifest lists these files, so they have to be on the drive first.
    sync_tree(folder)
    root.update_attributes({"megatier": {"format": CHECKPOINT_FORMAT, **bound, "digest": digest}})


def _create_arrays(folder: Path, groups: Mapping[str, Any], shapes: Mapping[tuple[str, str], tuple[int, ...]]) -> None:
    """Write the metadata of arrays, whose shapes are given by group and parameter."""
    from zarr.codecs import BytesCodec, Crc32cCodec

    # zarr needs milliseconds for the metadata of an array. Arrays of one shape have the same, so it is copied.
    like: dict[tuple[int, ...], Path] = {}
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
