"""Filling: fp32 numbers become the planes of units, run by run, in one thread or in all."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial

import numpy as np
import torch
from torch import Tensor

from megatier.models.decoder import Unit
from megatier.models.weights import PartReader, ReadPart
from megatier.optim.masters import narrow, plane_dtype, split_master
from megatier.play.blocks import UnitBlocks
from megatier.play.optimizer import Elements
from megatier.schedule.slots import CHUNK_ELEMENTS_MAX, UPDATE_DEPTH
from megatier.session.pieces import assemble
from megatier.tier import Kind
from megatier.workers import Task, Workers

UNITS_AHEAD = 2
"""Units that threads have runs of at once: while one ends, the next one begins."""


class Filling:
    """Overwrites planes of the units of a session."""

    def __init__(self, blocks: UnitBlocks) -> None:
        """Take the blocks of the units."""
        self._blocks = blocks
        self._gpu = torch.cuda.current_device() if blocks.store.device.type == "cuda" else None
        """The device of whoever opens the session, which a new thread does not have by itself."""

        # Each thread keeps a buffer for a run while it fills: no unit lies in fp32 as a whole, and memory that comes
        # anew from the system takes longer than drawing.
        self._kept = threading.local()

    def fill(self, unit: Unit, kinds: Sequence[Kind], pieces: Iterator[tuple[int, Tensor]], base: bool) -> None:
        """Overwrite planes of a unit from pieces, in this thread; see `Session.fill`."""
        ahead: tuple[int, Tensor] | None = None
        """The piece that reaches beyond the runs that are done."""
        for elements in self._runs(unit, kinds, base=base):
            values = self._buffer(elements)
            ahead = assemble(values, elements, pieces, ahead)
            self._write(unit, kinds, elements, values)

        self._kept = threading.local()
        self._share(unit, kinds, base=base)

    def fill_masters(
        self, units: Sequence[tuple[Unit, Unit]], source: PartReader, threads: int, progress: Callable[[Unit], None]
    ) -> None:
        """Overwrite the masters of all units in several threads.

        What is at home on NVMe has threads of its own, which mostly wait for drives; the others go on meanwhile.

        Args:
            units: each whole unit with what this process has of it.
            source: gives the numbers.
            threads: how many fill what is not at home on NVMe.
            progress: is called after each unit, in this thread.
        """
        with ExitStack() as stack:
            counts = {True: min(threads, UPDATE_DEPTH), False: threads}
            pools = {
                spills: stack.enter_context(closing(Workers(count, "megatier-fill")))
                for spills, count in counts.items()
            }
            under_way: dict[bool, deque[tuple[Unit, list[Task[None]]]]] = {spills: deque() for spills in pools}
            for whole, unit in self._mixed(units):
                spills = self._spills(unit)
                if len(under_way[spills]) == UNITS_AHEAD:
                    self._end(*under_way[spills].popleft(), progress)
                kinds = unit.layout.schema.master_kinds
                read = source.parts(whole)
                tasks = [
                    pools[spills].submit(partial(self._fill_run, unit, kinds, elements, read))
                    for elements in self._runs(unit, kinds, base=True)
                ]
                under_way[spills].append((unit, tasks))

            for rest in under_way.values():
                while rest:
                    self._end(*rest.popleft(), progress)
        self._kept = threading.local()

    def _mixed(self, units: Sequence[tuple[Unit, Unit]]) -> list[tuple[Unit, Unit]]:
        """Return the units so that those at home on NVMe come at even distances, and drives always have work."""
        placed: list[tuple[float, int, tuple[Unit, Unit]]] = []
        for spills in (True, False):
            group = [pair for pair in units if self._spills(pair[1]) is spills]
            placed += [((number + 0.5) / len(group), len(placed) + number, pair) for number, pair in enumerate(group)]
        return [pair for *_, pair in sorted(placed, key=lambda found: found[:2])]

    def _spills(self, unit: Unit) -> bool:
        """Return whether a part of a unit's master is at home on NVMe."""
        return not set(unit.layout.schema.master_kinds).isdisjoint(self._blocks.spilled(unit.name))

    def _end(self, unit: Unit, tasks: Sequence[Task[None]], progress: Callable[[Unit], None]) -> None:
        """Wait for a unit's runs."""
        for task in tasks:
            task.result()
        self._share(unit, unit.layout.schema.master_kinds, base=True)
        progress(unit)

    def _fill_run(self, unit: Unit, kinds: Sequence[Kind], elements: Elements, read: ReadPart) -> None:
        """Fill one run of a unit; this runs in a worker."""
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)
        start, stop = elements
        values = self._buffer(elements)
        done = start
        for first, piece in read(unit.layout.part(start, stop)):
            values[done - start : first - start] = 0
            done = first + piece.numel()
            # Not by torch, which would give a copy to a team of threads for each of ours.
            np.copyto(values[first - start : done - start].numpy(), piece.numpy())
        values[done - start :] = 0
        self._write(unit, kinds, elements, values)

    def _write(self, unit: Unit, kinds: Sequence[Kind], elements: Elements, values: Tensor) -> None:
        """Make a run's planes of its numbers, and start their way home."""
        # All planes of a run are overwritten, so nothing is read before.
        schema = unit.layout.schema
        planes = (Kind.WEIGHT,) if elements[0] >= unit.layout.num_trained else kinds
        with self._blocks.open_state(unit.name, elements, planes, fresh=planes) as state:
            views = [state.planes[kind].view(plane_dtype(schema, kind)) for kind in planes]
            if Kind.REMAINDER in planes:
                split_master(values, *views)
            else:
                narrow(planes[0], values, views[0])
            state.write_back()

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
        size = elements[1] - elements[0]
        kept: Tensor | None = getattr(self._kept, "buffer", None)
        if kept is None or kept.numel() < size:
            kept = self._kept.buffer = torch.empty(size, dtype=torch.float32, device="cpu")
        return kept[:size]


__all__ = ["Filling"]
