"""Fills the planes of units with fp32 numbers, run by run, in one thread or in all."""

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
"""Units that threads have tasks of at once: while one ends, the next one begins."""

Progress = Callable[[Unit], None]
"""Is called after each unit."""
TasksOf = Callable[[Unit], Iterator[Callable[[], None]]]
"""Makes the tasks of a unit."""
Source = Callable[[], AbstractContextManager[Iterator[Piece]]]
"""Opens the pieces of some planes, in the thread that takes them."""
Sources = Callable[[Unit], Sequence[tuple[Sequence[Kind], Source]]]
"""Names the planes of a unit that are filled together, and where their pieces come from."""


class Filling:
    """Overwrites planes of the units of a session."""

    def __init__(self, blocks: UnitBlocks) -> None:
        """Take the blocks of the units."""
        self._blocks = blocks
        self._gpu = torch.cuda.current_device() if blocks.store.device.type == "cuda" else None
        """The device of the thread that opens the session, which a new thread does not have by itself."""

        # Each thread keeps a buffer for a run while it fills: no unit lies in fp32 as a whole, and memory that comes
        # anew from the system takes longer than drawing.
        self._kept = threading.local()
        self.num_runs = 0
        """Runs that were filled so far, by any thread, so that a watchdog sees that something moves on."""
        self._is_left = False
        """Whether the waiting thread has left, by an error or an interrupt. So the others end at the next run."""

    def fill(self, unit: Unit, kinds: Sequence[Kind], pieces: Iterator[Piece], base: bool) -> None:
        """Overwrite planes of a unit from pieces, in this thread.

        Args:
            unit: one of the session's.
            kinds: those of the master (`StateSchema.master_kinds`), or one kind that is fp32.
            pieces: (first element, flat fp32) of the unit's layout, in increasing order. Elements that they leave out
                become 0. Only those of the master have frozen elements.
            base: whether frozen elements are filled; else they stay as they are.
        """
        self._is_left = False
        self._fill_part(unit, kinds, pieces, base=base)
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

        # The sources may name planes of any kind, so a unit counts as spilled if any of its kinds is.
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
            units: what this process has of them, in the same order.
            source: gives the numbers.
            threads: how many fill what is not at home on NVMe.
            progress: is called after each unit, in this thread.
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

        # A master may be at home elsewhere than the moments.
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

        What is at home on NVMe has threads of its own, which mostly wait for drives; the others go on meanwhile. They
        are few, because each holds slots of an update chunk.

        Args:
            units: what is filled.
            spilled: names of the units of which something that is filled is at home on NVMe.
            tasks_of: makes the tasks of a unit.
            threads: how many work on what is not at home on NVMe.
            end: is called in this thread when a unit's tasks are done.
        """
        with ExitStack() as stack:
            pools = {}
            under_way: dict[bool, deque[tuple[Unit, list[Task[None]]]]] = {}
            for spills, count in ((True, min(threads, UPDATE_DEPTH)), (False, threads)):
                workers = Workers(count, "megatier-fill")
                pools[spills] = stack.enter_context(closing(workers))
                under_way[spills] = deque()

            # Called before the pools are closed, which wait for their threads.
            self._is_left = False
            stack.callback(self._leave)
            for unit in _mixed(units, spilled):
                spills = unit.name in spilled

                # Only now is the oldest waited for: the threads of this pool have work for one more unit while it ends.
                if len(under_way[spills]) == UNITS_AHEAD:
                    _wait(*under_way[spills].popleft(), end)
                tasks = [pools[spills].submit(task) for task in tasks_of(unit)]
                under_way[spills].append((unit, tasks))

            for rest in under_way.values():
                while rest:
                    _wait(*rest.popleft(), end)
        self._kept = threading.local()

    def _leave(self) -> None:
        """Let threads end at the next run. Where all is done, none is at work."""
        self._is_left = True

    def _fill_from(self, unit: Unit, kinds: Sequence[Kind], source: Source) -> None:
        """Fill planes of a unit from pieces that are opened for it; this runs in a worker."""
        self._take_gpu()
        with source() as pieces:
            self._fill_part(unit, kinds, pieces, base=not unit.layout.has_base)

    def _fill_part(self, unit: Unit, kinds: Sequence[Kind], pieces: Iterator[Piece], *, base: bool) -> None:
        """Fill planes of a unit, run by run."""
        ahead: Piece | None = None
        """The piece that reaches beyond the runs that are done."""
        for elements in self._runs(unit, kinds, base=base):
            # Nobody takes what is filled after an interrupt, and closing the pools waits for this thread.
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
            # Between two tensors there is padding, which no piece has.
            values[done - start : first - start] = 0
            done = first + piece.numel()

            # Not by torch, which would give a copy to a team of threads for each of ours.
            own = values[first - start : done - start].numpy()
            np.copyto(own, piece.numpy())
        values[done - start :] = 0
        self._write(unit, kinds, elements, values)

    def _take_gpu(self) -> None:
        """Let this thread work on the device of the thread that opened the session."""
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)

    def _write(self, unit: Unit, kinds: Sequence[Kind], elements: Elements, values: Tensor) -> None:
        """Make a run's planes of its numbers, and start their way home."""
        # Frozen elements lie in the weight plane alone, and a run never has both.
        schema = unit.layout.schema
        planes = (Kind.WEIGHT,) if elements[0] >= unit.layout.num_trained else kinds

        # All planes of a run are overwritten, so nothing is read before.
        with self._blocks.open_state(unit.name, elements, planes, fresh=planes) as state:
            views = [state.planes[kind].view(plane_dtype(schema, kind)) for kind in planes]
            if Kind.REMAINDER in planes:
                split_master(values, *views)
            else:
                narrow(planes[0], values, views[0])
            state.write_back()
        self.num_runs += 1

    def _share(self, unit: Unit, kinds: Sequence[Kind], *, base: bool) -> None:
        """Give every generation the frozen weights that were filled, since updates write none."""
        if base and Kind.WEIGHT in kinds:
            self._blocks.share_frozen(unit.name)

    def _runs(self, unit: Unit, kinds: Sequence[Kind], *, base: bool) -> list[Elements]:
        """Return a unit's elements in runs of bounded size, also if it is at home on the GPU and updated whole.

        Frozen elements are among them if they are filled.
        """
        fills_frozen = base and Kind.WEIGHT in kinds
        return [
            (first, min(first + CHUNK_ELEMENTS_MAX, stop))
            for (start, stop), _ in self._blocks.runs(unit.name)
            for first in range(start, stop, CHUNK_ELEMENTS_MAX)
            if start < unit.layout.num_trained or fills_frozen
        ]

    def _buffer(self, elements: Elements) -> Tensor:
        """Return this thread's memory for the numbers of a run, whatever is in it."""
        start, stop = elements
        size = stop - start

        # Runs of one size come again and again, so the buffer of the largest one so far serves nearly all.
        kept: Tensor | None = getattr(self._kept, "buffer", None)
        if kept is None or kept.numel() < size:
            kept = torch.empty(size, dtype=torch.float32, device="cpu")
            self._kept.buffer = kept
        return kept[:size]


def _mixed(units: Sequence[Unit], spilled: Collection[str]) -> list[Unit]:
    """Return the units so that those on NVMe come at even distances, and drives always have work."""
    groups = (
        [unit for unit in units if unit.name in spilled],
        [unit for unit in units if unit.name not in spilled],
    )
    placed: list[tuple[float, Unit]] = []
    for group in groups:
        for number, unit in enumerate(group):
            distance = (number + 0.5) / len(group)
            placed.append((distance, unit))

    # The sort is stable, so of two at one distance the one on NVMe comes first.
    placed.sort(key=itemgetter(0))
    return [unit for _, unit in placed]


def _wait(unit: Unit, tasks: Sequence[Task[None]], end: Progress) -> None:
    """Wait for a unit's tasks, and end it."""
    for task in tasks:
        task.result()
    end(unit)


__all__ = ["Filling", "Source", "Sources"]
