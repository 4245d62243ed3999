"""Writes a checkpoint while training goes on.

After `player.drain` the state of a step is home. It stays as it is until the updates of the next step. The queue
`checkpoint` goes through the units in the order of their updates, and the update of a unit comes behind it. So nothing
is copied first. Several ranks write one checkpoint; each writes the chunks that it owns (`chunk_owners`).

1. `_begin`: the first rank makes a folder with a hidden name, if there is room. All ranks allocate buffers.
2. `_write_unit`, for each unit: a thread for each group of arrays (masters and both moments) fills chunks, and native
   threads write them. When all ranks are through with the unit, they exchange the elements that others write. The unit
   may be updated from then on, since all of it lies in chunks.
3. `_finish`: each rank waits for its writes and synchronises them. The first rank gathers all checksums, writes the
   metadata, and last of all the manifest. Then it gives the folder its name.
4. Only now does it remove older checkpoints.

A kill before the rename leaves the hidden folder, which the next checkpoint removes, and all older ones whole.

This cannot be part of a deadlock: the queue takes no slots and waits for drives and copies alone, never for an update
or for compute. It also waits for the same queue of other ranks, which goes through the same units.

zarr writes the metadata and `chunkfile` the bytes. The folder has a hidden name until all of it is on the drive.
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
"""Elements of a plane that are brought to RAM at once: 4 or 8 MiB."""
NUM_WRITING_THREADS = 2
"""Native threads that write each array."""
NUM_STAGED = 3
"""Chunks of each array in RAM: one that is being filled, and others on their way."""


class CheckpointWriter:
    """A checkpoint on its way. `wait` for it before the next one is begun, and before the session is closed.

    Attributes:
        step: the last step of the state that it holds.
        num_bytes: bytes of its arrays.
        seconds: how long it took, once it is over.
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
        """Begin a checkpoint; the caller goes on.

        Args:
            session: the run, after `player.drain`, while no other checkpoint of it is on its way.
            folder: the folder of all checkpoints of the run.
            step: the last step. A checkpoint of the same step is replaced.
            state: everything that is no array, as plain JSON.
            num_kept: how many of the whole checkpoints are kept, this one included, at least 1; None: all.
            best_step: the step of a checkpoint that is kept besides; None: of none.
        """
        self.step = step
        self.num_bytes = checkpoint_bytes(session.whole_units)
        self.seconds = 0.0
        self._all_ranks: Channel | SingleRank = SingleRank() if session.ranks is None else session.ranks.beside
        self._leads = self._all_ranks.rank == 0
        self._session = session
        # The process may go to another directory while it is written.
        folder = self._folder = folder.absolute()
        self._num_kept = num_kept
        self._best_step = best_step
        self._target = step_path(folder, step)
        self._partial = folder / f".{self._target.name}{WRITING}"
        # A copy, since the caller goes on and may change it.
        self._state = dict(state)
        self._opened = ExitStack()
        self._writers: list[PlaneWriter] = []
        self._began = time.perf_counter()

        # One item of the queue for each unit, so that the update of a unit waits for that unit alone. Each has the
        # generation that is valid now, which later steps may change.
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
            CapacityError: there was no room. Nothing was written.
            TransferError, IntegrityError: reading or writing failed. What was written is removed; the checkpoints
                before it are whole.
            StepAbandonedError: the session was closed meanwhile. What was written is removed here too.
        """
        # An error of any unit before it is this item's as well, since each item waits for the one before.
        self._end.wait()
        return self._target

    # ------------------------------------------------------------------ the queue's side

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
        # What a kill has left goes first: it may be what takes the room.
        self._folder.mkdir(mode=0o700, exist_ok=True)
        remove_leftovers(self._folder)
        check_room(self._folder, self._session.whole_units)
        self._partial.mkdir(mode=0o700)

    def _open_writers(self) -> None:
        """Allocate buffers, and start threads."""
        whole_units = self._session.whole_units

        # One size of buffers for all arrays, which is that of the largest chunk.
        grids = [Grid.of(shape) for shape in parameter_shapes(whole_units).values()]
        chunk_elements = max(grid.chunk_elements for grid in grids)

        num_shared = 0
        for unit in whole_units:
            shared = [tensor for tensor in unit.layout.tensors if tensor.whole is not None]
            num_shared = max(num_shared, len(shared))

        # A chunk of each parameter that lies in several units may wait for its rest, which comes with the next unit. On
        # several ranks the next unit may begin another such chunk before that, and the ends of the shard's trained and
        # frozen elements wait for those of other ranks.
        num_open = num_shared if self._all_ranks.size == 1 else 2 * num_shared + 2
        num_staged = max(NUM_STAGED, num_open + 1)

        # The queue remembers its last item, which must not keep the writers and their buffers alive.
        self._opened.callback(self._writers.clear)
        longest = max(unit.layout.num_elements for unit in self._session.own_units)
        buffers = Buffers(self._session, min(RUN_ELEMENTS, longest))
        self._opened.callback(buffers.close)

        owners = ChunkOwners(whole_units, self._all_ranks.rank, self._all_ranks.size)
        for name in groups_of(whole_units):
            files = self._opened.enter_context(ChunkFiles(chunk_elements, NUM_WRITING_THREADS, num_staged))
            self._writers.append(PlaneWriter(self._session, files, self._partial, name, buffers, owners))
        # A thread for masters and for each moment: they read different planes of a unit, and each has its own files.
        self._workers = Workers(len(self._writers), "megatier-checkpoint")

        # Called first of all, because the threads fill what the others free.
        self._opened.callback(self._workers.close)

    def _write_unit(self, unit: Unit, generation: Generation) -> None:
        """Copy a unit's masters and moments into chunks, each in a thread of its own."""
        # Each region ends on all ranks, or fails on all. One that failed alone would leave the others in the exchange.
        with self._all_ranks.failing_together():
            self._workers.map(lambda writer: writer.write(unit, generation), self._writers)

        with self._all_ranks.ending_run_on_error():
            received = [writer.exchange(unit, self._all_ranks) for writer in self._writers]
        with self._all_ranks.failing_together():
            for writer, values in zip(self._writers, received, strict=True):
                writer.take(unit, values)

    def _finish(self, last: Transfer) -> None:
        """Make the checkpoint whole, or leave nothing of it. The first rank does so when all ranks have written."""
        # The rename lies inside the outer region, so that all ranks fail if it does. The inner region lets all ranks
        # stop before the rename if one of them has failed.
        with self._all_ranks.failing_together(), self._becoming():
            with self._all_ranks.failing_together():
                chunks = self._end_writing(last)

            written = self._all_ranks.all_gather_object(chunks)
            if self._leads:
                checksums = _joined(written)
                _write_metadata(self._partial, self._session.whole_units, self.step, self._state, checksums)

        # Only now: until this one is whole, the run may need an older one.
        with self._all_ranks.failing_together():
            if self._leads and self._num_kept is not None:
                prune(self._folder, self._num_kept, self._best_step)
        self.seconds = time.perf_counter() - self._began

    def _becoming(self) -> AbstractContextManager[None]:
        """Give the folder its name in the end, on the first rank."""
        if not self._leads:
            return nullcontext()
        return committing(self._partial, self._target, "a checkpoint", replaces=True)

    def _end_writing(self, last: Transfer) -> dict[str, dict[int, int]]:
        """Wait until this rank has written all that it writes, and return the checksums by array and chunk."""
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


def _joined(written: Sequence[Mapping[str, Mapping[int, int]]]) -> dict[str, list[int]]:
    """Return the checksums of each array in the order of its chunks, from those that each rank has written."""
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

    The parts of a layer's experts stay in their own order, because they share arrays that are written from front to
    back.
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
    """Write all of a checkpoint but its chunks, and last of all the manifest, which makes it whole.

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

    # The groups say too that there is a manifest. If a misdirected write put an older root's metadata in place of this
    # one's, that would deny it.
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

    # The manifest says that these files are there, so they have to be on the drive before it is.
    sync_tree(folder)
    root.update_attributes({"megatier": {"format": CHECKPOINT_FORMAT, **bound, "digest": digest}})


def _create_arrays(folder: Path, groups: Mapping[str, Any], shapes: Mapping[tuple[str, str], tuple[int, ...]]) -> None:
    """Write the metadata of arrays, whose shapes are given by group and parameter."""
    from zarr.codecs import BytesCodec, Crc32cCodec

    # Arrays of one shape have the same metadata, for which zarr needs milliseconds. So it makes one of each shape.
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
