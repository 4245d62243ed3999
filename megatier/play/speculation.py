"""Speculative updates: they run during the backward, before it is known whether gradients are clipped.

Updates that are clipped wait for the norm, so drives and the CPU would be idle during the backward. So units that
spill, and units in RAM, may have a spare generation of state. When such a unit's gradient is final, its queue
(`update_nvme` or `update`) reads the valid generation, updates it with a clip coefficient of 1, and writes the spare
one. If the norm then needs no clipping, the update is confirmed, and the spare generation becomes the valid one.
Otherwise the update is void: the next pass updates the unit from the old generation, with its gradient, which is still
there. The bits are the same in both cases, but a void update has moved bytes in vain.

A void update does no harm. It reads the valid generation, which no other update changes before the queue has finished
this one, and it writes a generation that nobody reads. If the queue is at a chunk when the update becomes void, it
finishes that chunk. The unit's next update comes later in the same queue.

Threads: the thread that computes calls `begin`, `submit`, `decide` and `abandon`; in a backward that is autograd's. The
queues run the updates on their threads. Only `update_nvme` knows the chunks that are read ahead.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from megatier.planes import Apply
from megatier.play.generations import Generation
from megatier.play.matrix_carrier import MatrixCarrier
from megatier.play.optimizer_protocol import Optimizer
from megatier.play.spilled_updates import UpdateChunk, update_chunk
from megatier.play.unit_blocks import UnitBlocks
from megatier.schedule.demand import Demand
from megatier.schedule.moves import Move, from_nvme, matrix_moves, to_nvme
from megatier.schedule.slots import CHUNK_DEPTH
from megatier.store.queue import Queue
from megatier.store.transfer import Transfer
from megatier.tier import round_up
from megatier.trace.recorder import Recorder

HISTORY = 8
"""The number of last steps that decide: if more than half of them were clipped or skipped, no unit speculates."""


@dataclass(slots=True, kw_only=True)
class Attempt:
    """The speculative updates of one pass."""

    apply: Apply
    """AdamW without clipping."""
    units: dict[str, Generation] = field(default_factory=dict)
    """The generation that each updated unit is written to."""
    is_void: bool = False
    """Whether the updates do not count. Chunks that have not begun are skipped."""
    moved_bytes: int = 0
    """The bytes that it has read and written so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeChunk(UpdateChunk):
    """A chunk of a speculative update, from the valid generation into a spare one."""

    attempt: Attempt
    """The attempt of its pass."""


class Speculation:
    """The speculative updates of a run, on the queues that do all updates on the CPU."""

    def __init__(
        self,
        blocks: UnitBlocks,
        optimizer: Optimizer,
        carrier: MatrixCarrier,
        recorder: Recorder,
        demand: Demand,
        in_ram: Queue,
        on_nvme: Queue,
    ) -> None:
        """Begin without an attempt.

        Args:
            blocks: the run's blocks.
            optimizer: does the arithmetic.
            carrier: carries matrices to the device that updates them.
            recorder: records updates.
            demand: adds up the bytes that move.
            in_ram: the queue of all updates of units in RAM.
            on_nvme: the queue of all updates of units that spill.
        """
        self._blocks = blocks
        self._optimizer = optimizer
        self._carrier = carrier
        self._recorder = recorder
        self._demand = demand
        self._in_ram = in_ram
        self._on_nvme = on_nvme
        self._store = blocks.store
        self._units = frozenset(blocks.placement.speculative)

        self.updated: frozenset[str] = frozenset()
        """The units whose last update was confirmed."""
        self.outcome: Literal["confirmed", "void"] | None = None
        """The outcome of the last step; None if it had no attempt."""
        self.outcomes: Counter[str] = Counter()
        """The number of steps with each outcome."""
        self.void_bytes = 0
        """The bytes that void updates have read and written so far."""
        self._lock = threading.Lock()
        """Guards `void_bytes` and the attempt's `moved_bytes`, which the queue and `abandon` change."""

        self._clipped: deque[bool] = deque(maxlen=HISTORY)
        """Whether each of the last steps was clipped, or skipped."""
        self._is_closed = False
        self._attempt: Attempt | None = None
        self._transfers: dict[str, Transfer] = {}
        """Each unit's last speculative update, until another update or sum replaces it."""
        self._planned: deque[SpeculativeChunk] = deque()
        """Chunks that are not being read yet, in the order of the queue. The thread that submits appends, and only the
        queue removes."""
        self._asked: deque[SpeculativeChunk] = deque()
        """Chunks that are read or being read, before the planned ones. Only the queue uses it."""

    # ------------------------------------------------------------------ the player's side

    def begin(self) -> None:
        """Begin a training pass, and decide whether it speculates."""
        self.abandon()
        self.updated = frozenset()

        # A run begins with speculation.
        num_clipped = sum(self._clipped)
        is_promising = 2 * num_clipped <= len(self._clipped)
        if self._units and is_promising:
            # Taken now, because it has the scalars of this step, while deferred updates of the last step still run
            # with theirs.
            unclipped = self._optimizer.unclipped()
            apply = self._carrier.in_ram(unclipped)
            self._attempt = Attempt(apply=apply)

    def submit(self, unit: str, requires: Sequence[Transfer]) -> None:
        """Update a unit whose gradient is final, if this pass speculates and the unit has a spare generation.

        Args:
            unit: the name of the unit.
            requires: the transfers that make or sum its gradient.
        """
        attempt = self._attempt

        # All other units have one generation, which must not be overwritten before the norm is known.
        if attempt is None or unit not in self._units:
            return
        generations = self._blocks.generations
        new = generations.spare(unit)

        # If a savepoint keeps a generation, there may be no spare one.
        if new is None:
            return

        old = generations.valid[unit]
        chunks = [
            SpeculativeChunk(unit=unit, elements=elements, old=old, new=new, attempt=attempt)
            for elements in self._blocks.chunks(unit)
        ]
        # A checkpoint may still read the generation that is written now.
        follows = generations.readers(unit, new)

        with self._store.consistency.change:
            attempt.units[unit] = new
            if not self._blocks.is_cut(unit):
                (whole,) = chunks
                in_ram = partial(self._update_in_ram, whole)
                self._transfers[unit] = self._in_ram.submit(unit, 0, in_ram, requires, follows)
                return

            # Chunks are appended before their update, because the queue may begin it at once.
            self._planned.extend(chunks)
            work = partial(self._update, attempt, len(chunks))
            self._transfers[unit] = self._on_nvme.submit(unit, 0, work, requires, follows)

    def decide(self, *, clipped: bool) -> None:
        """Confirm the updates of the pass when the norm is known, or make them void.

        Call it inside a region of `TieredStore.consistency`: an interrupt would leave some units in one generation and
        the rest in the other.

        Args:
            clipped: whether the step is clipped or skipped.
        """
        self._clipped.append(clipped)
        if (attempt := self._attempt) is None:
            self.outcome = None
            return

        self.outcome = "void" if clipped else "confirmed"
        self.outcomes[self.outcome] += 1
        if clipped:
            self.abandon()
            return

        # The new generation is valid although the queue may still write it, because each use waits for `latest`.
        self._attempt = None
        self.updated = frozenset(attempt.units)
        self._blocks.generations.valid.update(attempt.units)

    def abandon(self) -> None:
        """Make an undecided attempt void. Chunks that have not begun are skipped."""
        if (attempt := self._attempt) is not None:
            with self._store.consistency.change:
                # Under the lock, so that each byte counts once. From here on the queue adds to `void_bytes`.
                with self._lock:
                    attempt.is_void = True
                    self.void_bytes += attempt.moved_bytes
                self._attempt = None

                # Their results are not used, so their errors do not count. An item that only follows them replaces
                # them, so that later work still waits for their ends.
                for unit in attempt.units:
                    if unit in self._transfers:
                        queue = self._on_nvme if self._blocks.is_cut(unit) else self._in_ram
                        ended = self._transfers[unit]
                        self._transfers[unit] = queue.submit(unit, 0, lambda: None, follows=[ended])

    def forget(self) -> None:
        """Forget all speculative updates. All have ended, and the state will be overwritten."""
        self.abandon()
        self.updated = frozenset()
        self._transfers.clear()
        self._planned.clear()
        self._asked.clear()

    def latest(self, unit: str) -> Transfer | None:
        """Return the unit's speculative update, if no other update has replaced it."""
        return self._transfers.get(unit)

    def drop(self, unit: str) -> None:
        """Forget the unit's speculative update, because another update or a sum replaces it."""
        self._transfers.pop(unit, None)

    def all(self) -> list[Transfer]:
        """Return the last speculative update of each unit, if no other has replaced it."""
        return list(self._transfers.values())

    def close(self) -> None:
        """Skip all updates that have not begun."""
        self._is_closed = True

    # ------------------------------------------------------------------ the side of the queues

    def _update_in_ram(self, whole: SpeculativeChunk) -> None:
        """Update a whole unit in RAM, from one of its places into the other."""
        if not (whole.attempt.is_void or self._is_closed):
            self._update_chunk(whole)

    def _update(self, attempt: Attempt, num_chunks: int) -> None:
        """Update a unit chunk by chunk, from one generation into the other."""
        # Every chunk is removed from `_asked` and `_planned`, even if it was skipped or failed, so that the next unit
        # does not find it. If a sum fails, the update never begins and its chunks stay, but then every step fails until
        # `forget`.
        for left in range(num_chunks, 0, -1):
            try:
                if not (attempt.is_void or self._is_closed):
                    self._read_ahead()

                    # If the attempt has become void in between, this chunk is not being read.
                    if self._asked:
                        self._update_chunk(self._asked[0])
            except BaseException:
                for _ in range(left):
                    self._next()
                raise
            self._next()

    def _read_ahead(self) -> None:
        """Start to read the next chunks, even those of later units, but not those that are void."""
        self._recorder.busy["update_nvme"] = "nvme_to_ram"
        while self._planned and len(self._asked) < CHUNK_DEPTH:
            chunk = self._planned[0]
            if chunk.attempt.is_void:
                return

            # Moved before it is read. If reading fails, `_next` frees its slots.
            self._planned.popleft()
            self._asked.append(chunk)
            size = self._blocks.read_ahead(chunk.unit, chunk.elements, chunk.old)
            self._count(chunk.attempt, from_nvme(size))

    def _update_chunk(self, chunk: SpeculativeChunk) -> None:
        """Update one chunk, and start to write it to the new generation."""
        unit = chunk.unit
        attempt = chunk.attempt
        blocks = self._blocks
        update_chunk(blocks, self._recorder, attempt.apply, chunk, feeds=False)

        for move in matrix_moves(blocks.units[unit]):
            self._count(attempt, move)
        # Kinds at home in RAM are written in place, so only those on NVMe move.
        for kind in blocks.spilled(unit):
            start, stop = blocks.span(unit, kind, chunk.elements)
            num_bytes = round_up(stop) - start
            self._count(attempt, to_nvme(num_bytes))

    def _next(self) -> None:
        """Remove the first chunk, and free its slots if it was read in vain."""
        if not self._asked:
            self._planned.popleft()
            return

        chunk = self._asked.popleft()
        self._blocks.drop_read(chunk.unit, chunk.elements, chunk.old)

    def _count(self, attempt: Attempt, move: Move) -> None:
        """Count the bytes of a move, also as void bytes if the attempt is void."""
        self._demand.add([move])
        with self._lock:
            attempt.moved_bytes += move.num_bytes

            # `abandon` has counted the bytes before the attempt became void.
            if attempt.is_void:
                self.void_bytes += move.num_bytes
