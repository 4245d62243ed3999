"""The updates of units that spill: AdamW on the CPU, chunk by chunk, on the queue `update_nvme`.

A chunk is read from NVMe into RAM slots, updated there, and written back. The queue reads a few chunks ahead, even
those of later units, so that drives are never idle between units.

If a unit has a due update and its weights come from NVMe, the update feeds the load. State is then read once, and the
new weights go to the GPU from the RAM slots while they are also written home.

Threads: the thread that computes submits; in a backward that is autograd's. All else runs on the queue's thread.
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
from megatier.schedule.slots import CHUNK_DEPTH
from megatier.schedule.timeline import Load, Update
from megatier.store.queue import Queue
from megatier.store.transfer import Transfer
from megatier.tier import Kind, Tier
from megatier.trace.recorder import Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateChunk:
    """A run of a unit's state for an update, from one generation into another or in place."""

    unit: str
    """The name of the unit."""
    elements: Elements
    """The run of elements."""
    old: Generation
    """The generation that is read, which is valid until this update."""
    new: Generation
    """The generation that is written. For an update in place it is the same one."""


def update_chunk(blocks: UnitBlocks, recorder: Recorder, apply: Apply, chunk: UpdateChunk, *, feeds: bool) -> None:
    """Update a chunk and start to write it home. This runs on the unit's update queue.

    Args:
        blocks: the run's blocks.
        recorder: records the update.
        apply: AdamW.
        chunk: the run of elements, and its generations.
        feeds: whether the new weights also go to the unit's GPU slot.
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

        # The weights go to the GPU while the RAM slot is leased. Later they would have to be read from the drive.
        if feeds:
            key = blocks.key(chunk.unit, Kind.WEIGHT, chunk.new)
            span = blocks.span(chunk.unit, Kind.WEIGHT, chunk.elements)
            blocks.store.prefetch(key, Tier.GPU, span, wait=True)


class SpilledUpdates:
    """The updates of units that spill, except speculative ones."""

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
        """Begin without updates.

        Args:
            blocks: the run's blocks.
            optimizer: does the arithmetic.
            carrier: carries matrices to the device that updates them.
            gate: counts the accesses of the pass that are over. A fed load waits there for its slot.
            recorder: records updates.
            queue: `update_nvme`, which does speculative updates too.
            check: called before a unit is updated. It raises if the unit must not be.
        """
        self._blocks = blocks
        self._optimizer = optimizer
        self._carrier = carrier
        self._gate = gate
        self._recorder = recorder
        self._queue = queue
        self._check = check
        self._ahead: deque[UpdateChunk] = deque()
        """Due chunks, in the order of the queue. The thread that submits appends, and only the queue removes. If a sum
        fails, its update never begins and its chunks stay here, but then every step fails until `forget`."""

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
            requires: the transfers that make or sum its gradient.
            follows: the transfers that still use the generation that is written.
        """
        unit = update.unit
        chunks = []
        for elements in self._blocks.chunks(unit):
            chunk = UpdateChunk(unit=unit, elements=elements, old=old, new=new)
            chunks.append(chunk)

        # The chunks are appended first, because the queue may begin the update at once.
        self._ahead.extend(chunks)
        work = partial(self._update, update, chunks)
        return self._queue.submit(unit, 0, work, requires, follows)

    def forget(self) -> None:
        """Forget all updates, which have ended."""
        self._ahead.clear()

    # ------------------------------------------------------------------ the queue's side

    def _update(self, update: Update, chunks: Sequence[UpdateChunk]) -> None:
        """Update a unit: read ahead, run AdamW, feed the load, write back."""
        unit = update.unit
        try:
            # An update that is refused must not read or write anything.
            self._check(unit)

            # This waits for accesses, and so for loads through RAM slots. So it comes before any RAM slot is leased.
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
            # After an error the next unit must not find chunks of this one.
            while self._ahead and self._ahead[0].unit == unit:
                self._ahead.popleft()
            self._blocks.grads.free(unit)

    def _may_feed(self, load: Load) -> bool:
        """Wait for the load's GPU slot. Return False if the step was given up."""
        self._recorder.busy["update_nvme"] = "slot"
        try:
            self._blocks.make_room(load, self._gate)
        except StepAbandonedError:
            return False
        return True

    def _read_ahead(self) -> None:
        """Start to read the next chunks, even those of later units. A chunk is read once."""
        # The thread that submits may append meanwhile, but copying the list is atomic.
        ahead = list(self._ahead)
        for chunk in ahead[:CHUNK_DEPTH]:
            self._blocks.read_ahead(chunk.unit, chunk.elements, chunk.old)
