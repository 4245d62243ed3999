"""Fills the state of a session with fp32 numbers: first weights, a checkpoint, or tensors of the user.

A unit is filled in runs of bounded size, so none lies in fp32 as a whole. Worker threads fill several units at a time;
the thread that calls waits for them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from functools import partial
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from megatier.models.decoder import Unit
from megatier.models.weights import PartReader, ReadPart
from megatier.optim.masters import narrow, plane_dtype, split_master
from megatier.planes import Elements
from megatier.play.unit_blocks import UnitBlocks
from megatier.schedule.slots import CHUNK_ELEMENTS_MAX, UPDATE_DEPTH
from megatier.session.pieces import Piece, assemble
from megatier.tier import Kind
from megatier.workers import Task, Workers

UNITS_AHEAD = 2
"""Units whose tasks are submitted at once, so that threads have work while the last tasks of a unit end."""

Progress = Callable[[Unit], None]
"""Called after each unit."""
TasksOf = Callable[[Unit], Iterator[Callable[[], None]]]
"""Returns the tasks of a unit."""
Source = Callable[[], AbstractContextManager[Iterator[Piece]]]
"""Opens the pieces of some planes. The thread that fills them calls it."""
Sources = Callable[[Unit], Sequence[tuple[Sequence[Kind], Source]]]
"""Returns which planes of a unit are filled together, each with the source of their pieces."""


class Filling:
    """Overwrites planes of a session's units."""

    def __init__(self, blocks: UnitBlocks) -> None:
        """Take the blocks of the units."""
        self._blocks = blocks
        self._gpu = torch.cuda.current_device() if blocks.store.device.type == "cuda" else None
        """The device of the thread that opens the session. New threads have to set it."""

        # Each thread keeps a buffer for a run, because new memory from the system costs more time than the numbers.
        self._kept = threading.local()
        self.num_runs = 0
        """Runs that all threads have filled so far, by which the watchdog sees progress."""
        self._is_left = False
        """Whether the calling thread has left, by an error or an interrupt. Then the others stop after their run."""

    def fill(self, unit: Unit, kinds: Sequence[Kind], pieces: Iterator[Piece], base: bool) -> None:
        """Overwrite planes of a unit from pieces, in this thread.

        Args:
            unit: a unit of the session.
            kinds: the kinds of the master (`StateSchema.master_kinds`), or one kind that is fp32.
            pieces: (first element, flat fp32) in the unit's layout, in increasing order. Elements in no piece become 0.
                Only the master has frozen elements.
            base: whether frozen elements are filled. Otherwise they stay.
        """
        self._is_left = False
        self._fill_part(unit, kinds, pieces, base=base)

        # No budget counts the buffers, so they do not outlive the filling.
        self._kept = threading.local()
        self._share(unit, kinds, base=base)

    def fill_arrays(self, units: Sequence[Unit], sources: Sources, threads: int, progress: Progress) -> None:
        """Overwrite planes of all units in several threads; see `Session.fill_arrays`."""

        def tasks_of(unit: Unit) -> Iterator[Callable[[], None]]:
            for kinds, source in sources(unit):
                yield partial(self._fill_from, unit, kinds, source)

        def end(unit: Unit) -> None:
            for kinds, _ in sources(unit):
                self._share(unit, kinds, base=not unit.layout.has_base)
            progress(unit)

        # The sources may name planes of any kind, so a unit counts as spilled if any of its kinds lies on NVMe.
        spills = {unit.name for unit in units if self._blocks.spilled(unit.name)}
        self._in_threads(units, spills, tasks_of, threads, end)

    def fill_masters(
        self,
        whole_units: Sequence[Unit],
        units: Sequence[Unit],
        source: PartReader,
        threads: int,
        progress: Progress,
    ) -> None:
        """Overwrite the masters of all units in several threads.

        Args:
            whole_units: the whole units.
            units: the shards of this process, in the same order.
            source: reads the numbers.
            threads: number of threads for units that are not at home on NVMe.
            progress: called after each unit, in this thread.
        """
        whole_of = {whole.name: whole for whole in whole_units}

        def tasks_of(unit: Unit) -> Iterator[Callable[[], None]]:
            kinds = unit.layout.schema.master_kinds
            read = source.part_reader(whole_of[unit.name])
            for elements in self._runs(unit, kinds, base=True):
                yield partial(self._fill_run, unit, kinds, elements, read)

        def end(unit: Unit) -> None:
            self._share(unit, unit.layout.schema.master_kinds, base=True)
            progress(unit)

        # The master may have another home than the moments, and only the master is filled.
        spills = set()
        for unit in units:
            kinds = set(unit.layout.schema.master_kinds)
            if kinds & set(self._blocks.spilled(unit.name)):
                spills.add(unit.name)
        self._in_threads(units, spills, tasks_of, threads, end)

    def _in_threads(
        self,
        units: Sequence[Unit],
        spilled: Collection[str],
        tasks_of: TasksOf,
        threads: int,
        end: Progress,
    ) -> None:
        """Do the tasks of all units in several threads.

        Units on NVMe have a pool of their own, whose threads mostly wait for drives while the others go on. It has few
        threads, because each holds slots of an update chunk.

        Args:
            units: the units to fill.
            spilled: names of the units that have planes to fill on NVMe.
            tasks_of: returns the tasks of a unit.
            threads: number of threads for the other units.
            end: called in this thread when all tasks of a unit are done.
        """
        with ExitStack() as stack:
            pools = {}
            under_way: dict[bool, deque[tuple[Unit, list[Task[None]]]]] = {}
            for spills, count in ((True, min(threads, UPDATE_DEPTH)), (False, threads)):
                workers = Workers(count, "megatier-fill")
                pools[spills] = stack.enter_context(closing(workers))
                under_way[spills] = deque()

            # This runs before the pools are closed, since closing waits for their threads.
            self._is_left = False
            stack.callback(self._leave)
            for unit in _mix_units(units, spilled):
                spills = unit.name in spilled

                # This waits for the oldest unit of the pool, whose threads have the tasks of the next one meanwhile.
                if len(under_way[spills]) == UNITS_AHEAD:
                    _wait(*under_way[spills].popleft(), end)
                tasks = [pools[spills].submit(task) for task in tasks_of(unit)]
                under_way[spills].append((unit, tasks))

            for rest in under_way.values():
                while rest:
                    _wait(*rest.popleft(), end)
        self._kept = threading.local()

    def _leave(self) -> None:
        """Stop all threads after the run that they are filling."""
        self._is_left = True

    def _fill_from(self, unit: Unit, kinds: Sequence[Kind], source: Source) -> None:
        """Open the pieces of a unit, and fill its planes from them; this runs in a worker."""
        self._take_gpu()
        with source() as pieces:
            self._fill_part(unit, kinds, pieces, base=not unit.layout.has_base)

    def _fill_part(self, unit: Unit, kinds: Sequence[Kind], pieces: Iterator[Piece], *, base: bool) -> None:
        """Fill planes of a unit, run by run."""
        ahead: Piece | None = None
        """The piece that reaches beyond the runs so far."""
        for elements in self._runs(unit, kinds, base=base):
            # After an interrupt the result is of no use, and closing the pools waits for this thread.
            if self._is_left:
                return
            values = self._buffer(elements)
            ahead = assemble(values, elements, pieces, ahead)
            self._write(unit, kinds, elements, values)

    def _fill_run(self, unit: Unit, kinds: Sequence[Kind], elements: Elements, read: ReadPart) -> None:
        """Fill one run of a unit; this runs in a worker."""
        self._take_gpu()
        start, stop = elements
        values = self._buffer(elements)
        done = start
        run = unit.layout.part(start, stop)
        for first, piece in read(run):
            # The padding between two tensors is in no piece.
            values[done - start : first - start] = 0
            done = first + piece.numel()

            # numpy copies in this thread. torch would start a team of threads for each worker.
            target = values[first - start : done - start].numpy()
            np.copyto(target, piece.numpy())
        values[done - start :] = 0
        self._write(unit, kinds, elements, values)

    def _take_gpu(self) -> None:
        """Set the device of the thread that opened the session."""
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)

    def _write(self, unit: Unit, kinds: Sequence[Kind], elements: Elements, values: Tensor) -> None:
        """Convert the numbers of a run into its planes, and start writing them home."""
        # Frozen elements have a weight plane alone. No run has both frozen and trained elements.
        schema = unit.layout.schema
        planes = (Kind.WEIGHT,) if elements[0] >= unit.layout.num_trained else kinds

        # All planes of a run are overwritten, so nothing is read first.
        with self._blocks.open_state(unit.name, elements, planes, fresh=planes) as state:
            views = [state.planes[kind].view(plane_dtype(schema, kind)) for kind in planes]
            if Kind.REMAINDER in planes:
                split_master(values, *views)
            else:
                narrow(planes[0], values, views[0])
            state.write_back()
        self.num_runs += 1

    def _share(self, unit: Unit, kinds: Sequence[Kind], *, base: bool) -> None:
        """Copy filled frozen weights to every generation, because no update writes them."""
        if base and Kind.WEIGHT in kinds:
            self._blocks.share_frozen(unit.name)

    def _runs(self, unit: Unit, kinds: Sequence[Kind], *, base: bool) -> list[Elements]:
        """Return the elements of a unit to fill, in runs of bounded size."""
        fills_frozen = base and Kind.WEIGHT in kinds
        return [
            (first, min(first + CHUNK_ELEMENTS_MAX, stop))
            for (start, stop), _ in self._blocks.runs(unit.name)
            for first in range(start, stop, CHUNK_ELEMENTS_MAX)
            if start < unit.layout.num_trained or fills_frozen
        ]

    def _buffer(self, elements: Elements) -> Tensor:
        """Return this thread's buffer for the numbers of a run, with any contents."""
        start, stop = elements
        size = stop - start

        # Most runs have one size, so the buffer of the largest one so far serves nearly all.
        kept: Tensor | None = getattr(self._kept, "buffer", None)
        if kept is None or kept.numel() < size:
            kept = torch.empty(size, dtype=torch.float32, device="cpu")
            self._kept.buffer = kept
        return kept[:size]


def _mix_units(units: Sequence[Unit], spilled: Collection[str]) -> list[Unit]:
    """Return the units in an order that spreads those on NVMe evenly, so that drives always have work."""
    groups = (
        [unit for unit in units if unit.name in spilled],
        [unit for unit in units if unit.name not in spilled],
    )
    placed: list[tuple[float, Unit]] = []
    for group in groups:
        for number, unit in enumerate(group):
            distance = (number + 0.5) / len(group)
            placed.append((distance, unit))

    # The sort is stable, so at equal distances the unit on NVMe comes first.
    placed.sort(key=itemgetter(0))
    return [unit for _, unit in placed]


def _wait(unit: Unit, tasks: Sequence[Task[None]], end: Progress) -> None:
    """Wait for the tasks of a unit, and call `end`."""
    for task in tasks:
        task.result()
    end(unit)
