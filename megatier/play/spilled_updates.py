"""Updates units that spill: AdamW on the CPU, chunk by chunk, on the queue `update_nvme`.

A chunk is read from NVMe into RAM slots, updated there, and written back. The queue reads a few chunks ahead, also
those of units that come later, so that the drive has no pause between units.

If a unit's weights come from NVMe and its update is due, the update feeds the load: state is read once, and the new
weights go from the RAM slot to the GPU on their way home.

Threads: the thread that computes submits (autograd's, in a backward). All else runs on the queue's thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from megatier.errors import StepAbandonedError
from megatier.planes import Apply, Elements
from megatier.play.gate import Gate
from megatier.play.generations import Generation
from megatier.play.matrix_carrier import MatrixCarrier
from megatier.play.optimizer_protocol import Optimizer
from megatier.play.unit_blocks import UnitBlocks
from megatier.schedule.slots import UPDATE_DEPTH
from megatier.schedule.timeline import Load, Update
from megatier.store.queue import Queue
from megatier.store.transfer import Transfer
from megatier.tier import Kind, Tier
from megatier.trace.recorder import Recorder

CHUNK_DEPTH = UPDATE_DEPTH - 1
"""Update chunks that arrive or are worked on; one more leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateChunk:
    """A run of a unit's state, to be read in one generation and written in another, or in place."""

    unit: str
    """The name of the unit."""
    elements: Elements
    """The run of elements."""
    old: Generation
    """The generation that is read, which holds until this update."""
    new: Generation
    """The generation that is written; the same one, for an update in place."""


def update_chunk(blocks: UnitBlocks, recorder: Recorder, apply: Apply, chunk: UpdateChunk, *, feeds: bool) -> None:
    """Update a chunk and start its way home, on the unit's own queue.

    Args:
        blocks: the run's blocks.
        recorder: notes the update.
        apply: AdamW.
        chunk: the run of elements, and its generations.
        feeds: take its new weights to the unit's GPU slot as well.
    """
    with (
        blocks.grads.open(chunk.unit, chunk.elements) as grad,
        blocks.open_update(chunk.unit, chunk.elements, chunk.old, chunk.new) as state,
    ):
        lane = blocks.placement.update_queue(chunk.unit)
        recorder.busy[lane] = "update"
        start_ns = time.perf_counter_ns()
        work = apply(chunk.unit, chunk.elements, state.planes, grad, state.before)
        if work is not None:
            work.wait()
        recorder.work(lane, chunk.unit, start_ns, time.perf_counter_ns())

        state.write_back()

        # While the slot in RAM is leased: once it is left to the drive, the weights would be read from there.
        if feeds:
            key = blocks.key(chunk.unit, Kind.WEIGHT, chunk.new)
            span = blocks.span(chunk.unit, Kind.WEIGHT, chunk.elements)
            blocks.store.prefetch(key, Tier.GPU, span, wait=True)


class SpilledUpdates:
    """The updates of a run's units that spill, but for those that are speculative."""

    def __init__(
        self,
        blocks: UnitBlocks,
        optimizer: Optimizer,
        carrier: MatrixCarrier,
        gate: Gate,
        recorder: Recorder,
        queue: Queue,
        check: Callable[[str], None],
    ) -> None:
        """Nothing is submitted yet.

        Args:
            blocks: the run's blocks.
            optimizer: does the arithmetic.
            carrier: takes matrices to where it is done.
            gate: counts the accesses of the pass that are over; a fed load waits for its slot there.
            recorder: notes updates.
            queue: `update_nvme`, which does the speculative updates as well.
            check: called before a unit is updated; it raises if that must not be.
        """
        self._blocks = blocks
        self._optimizer = optimizer
        self._carrier = carrier
        self._gate = gate
        self._recorder = recorder
        self._queue = queue
        self._check = check
        self._ahead: deque[UpdateChunk] = deque()
        """Chunks that are due, in the order of the queue. The thread that submits appends; the queue alone takes out.
        An item that never begins, because its sum failed, leaves its chunks here. But then every step fails, until
        `forget`."""

    def submit(
        self,
        update: Update,
        *,
        old: Generation,
        new: Generation,
        requires: Sequence[Transfer],
        follows: Sequence[Transfer],
    ) -> Transfer:
        """Append the update of a unit to the queue. Call it inside a region of `TieredStore.consistency`.

        Args:
            update: the unit, and the load to feed.
            old: the generation that is read.
            new: the generation that is written.
            requires: what makes its gradient, or adds it up.
            follows: what still uses the generation that is written.
        """
        unit = update.unit
        chunks = []
        for elements in self._blocks.chunks(unit):
            chunk = UpdateChunk(unit=unit, elements=elements, old=old, new=new)
            chunks.append(chunk)

        # The chunks come before the update: when the queue comes to the update, all of them are there to take.
        self._ahead.extend(chunks)
        work = partial(self._update, update, chunks)
        return self._queue.submit(unit, 0, work, requires, follows)

    def forget(self) -> None:
        """Forget every update: all have ended."""
        self._ahead.clear()

    # ------------------------------------------------------------------ the queue's side

    def _update(self, update: Update, chunks: Sequence[UpdateChunk]) -> None:
        """Run AdamW on a unit: read ahead, update, feed the load, write back."""
        unit = update.unit
        try:
            # Before anything moves: an update that is refused must not have read or written.
            self._check(unit)

            # Room on the GPU comes first. It waits for accesses, so for loads, which pass through RAM slots: none of
            # these may be leased here meanwhile.
            feeds = update.load is not None and self._may_feed(update.load)
            apply = self._carrier.in_ram(self._optimizer.apply)
            for chunk in chunks:
                self._recorder.busy["update_nvme"] = "nvme_to_ram"
                self._read_ahead()
                self._ahead.popleft()
                update_chunk(self._blocks, self._recorder, apply, chunk, feeds=feeds)

            if feeds:
                self._blocks.prefetch_frozen(unit)
        finally:
            # If it failed half-way, the next unit must not take these chunks for its own.
            while self._ahead and self._ahead[0].unit == unit:
                self._ahead.popleft()
            self._blocks.grads.free(unit)

    def _may_feed(self, load: Load) -> bool:
        """Wait for room for the weights on the GPU. Return False if the step that wanted them was given up."""
        self._recorder.busy["update_nvme"] = "slot"
        try:
            self._blocks.make_room(load, self._gate)
        except StepAbandonedError:
            return False
        return True

    def _read_ahead(self) -> None:
        """Ask for the next chunks, also those of units that come later. What was asked for does not move again."""
        # The thread that submits appends to the list meanwhile, so it is copied in one step of the interpreter.
        ahead = list(self._ahead)
        for chunk in ahead[:CHUNK_DEPTH]:
            self._blocks.read_ahead(chunk.unit, chunk.elements, chunk.old)
