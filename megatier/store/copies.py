"""Copies: how bytes get into slots and out of them. The moving half of the store; `store` is its face.

Bytes go up from NVMe through RAM slots to the GPU, or past them, and home again one step at a time. A slot is taken
free, or from the copy unused for longest. State that is being written home keeps its slot until that went well, so that
a failed write leaves it whole. The head of `residency` has a table of the states of a copy.

Every method is called with `lock` held; those that say so let go of it while they wait. Then others may do anything but
evict a copy that is leased. So whoever comes back looks anew, or holds a lease meanwhile. No two copies of a block in
one tier overlap, and one that is written to NVMe keeps its slot, so no slot reads an extent that another one writes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import torch

from megatier import _native
from megatier.drives.blockfile import BlockFiles
from megatier.drives.gds import GpuReader
from megatier.errors import BlockNotFoundError, CapacityError, DirtyBlockError, LeaseHeldError, StepAbandonedError
from megatier.store.arena import Slot, SlotPool
from megatier.store.lanes import Lanes, queue_to_gpu, queue_to_ram
from megatier.store.reservation import Reservation
from megatier.store.residency import Block, Copy, Span, assign, overlap, without
from megatier.store.tear import Tear
from megatier.store.transfer import Transfer, mark
from megatier.tier import Tier

POISON = 0xFF
"""Byte written over a released slot of the CPU arena that stands for the GPU: NaN in every float type."""


class Copies:
    """The copies of one store's blocks in gpu and ram.

    Attributes:
        lock: guards the copies and everything that is known of them.
        tear: whether something broke off while that was changed.
    """

    def __init__(
        self, reservation: Reservation, lanes: Lanes, files: BlockFiles | None, reader: GpuReader | None
    ) -> None:
        """Slots come from the reservation, once it is allocated. With a reader, NVMe -> GPU leaves RAM out."""
        self._reservation = reservation
        self._lanes = lanes
        self._files = files
        self._reader = reader
        self._slotted: dict[Copy, None] = {}
        """Copies in slots; the one unused for longest comes first."""
        self.lock = threading.Lock()
        self.tear = Tear()
        self._waiting_for_slot: list[_native.Latch] = []

    # ------------------------------------------------------------------ places

    def view(self, copy: Copy, span: Span) -> torch.Tensor:
        """uint8 [stop - start] of a copy."""
        return self._reservation.view(copy.tier, copy.offset + span[0] - copy.span[0], span[1] - span[0])

    def place(self, block: Block, tier: Tier, span: Span, *, wait: bool) -> Copy:
        """The copy that holds the span, or a new, empty one in a slot. A gpu copy is always whole.

        Lets go of the lock while it waits: for a slot (if `wait`), or for the write of an evicted copy of these bytes.

        Raises:
            CapacityError: the slots are too small; or all are leased, dirty or being written, and not `wait`.
            LeaseHeldError, DirtyBlockError: such a copy lies across the span's ends.
            TransferError: a write-back that keeps a slot failed.
        """
        wanted = block.whole if tier is Tier.GPU else span
        # A wait lets go of the lock. So each round looks anew: these bytes may be placed by now, or the slot taken.
        while True:
            for copy in block.on(tier):
                if copy.holds(span) and copy.is_usable():
                    copy.is_leaving = False
                    return copy

            if others := [copy for copy in block.on(tier) if overlap(copy.span, wanted)]:
                self._clear(others[0])
                continue

            pool = self._reservation.pool(tier, block.spec, wanted[1] - wanted[0])
            if (slot := self._take(pool, wait=wait)) is not None:
                copy = Copy(block, tier, wanted, slot.offset, slot)
                block.copies.append(copy)
                self._slotted[copy] = None
                return copy
            if not wait:
                remedy = f"All {pool.num_slots} slots are leased, dirty or being written; release some."
                raise CapacityError(tier, wanted[1] - wanted[0], 0, remedy)
            self._wait_for_slot(pool)

    def _clear(self, copy: Copy) -> None:
        """Evict a copy that lies in the way, or wait for a move that keeps it; then the caller looks anew."""
        self.evict(copy)
        if copy.is_leaving and (moves := copy.in_use()):
            self._unlocked(moves[0].over)

    def _take(self, pool: SlotPool, *, wait: bool) -> Slot | None:
        """A free slot, or that of the copy unused for longest. What was prefetched is spared if a wait helps."""
        if (slot := pool.take()) is not None:
            return slot

        # Scratch bytes (no home) are nowhere else, nor are those that are dirty or whose write may still fail.
        idle = [c for c in self._slotted if c.slot is not None and c.slot.pool is pool and not c.num_leases]
        for copy in idle:
            copy.settle()
        busy = [copy for copy in idle if copy.unwritten or copy.writes()]
        for copy in sorted(idle, key=lambda copy: copy.is_ahead):
            if copy.block.spec.home is not None and copy not in busy and not (copy.is_ahead and wait and busy):
                self.evict(copy)
                return pool.take()
        return None

    def _wait_for_slot(self, pool: SlotPool) -> None:
        """Let others go on until a slot may be free; raise the error of a write-back that keeps one."""
        # The end of a write wakes nobody, so it is waited for itself. All else that frees a slot calls `wake`.
        for copy in self._slotted:
            if copy.slot is not None and copy.slot.pool is pool and not copy.num_leases:
                for transfer in (*copy.unwritten.values(), *copy.writes()):
                    if transfer is not None:
                        self._unlocked(transfer.over)
                        transfer.wait()
                        return

        if self.tear.is_torn:  # perhaps nobody knows any more who has the slots
            raise StepAbandonedError("something broke off while slots were taken or given back; see TornStateError")
        # No wake is lost: the latch is in the list before the lock is let go, and `wake` is called with the lock held.
        self._waiting_for_slot.append(latch := _native.Latch())
        self._unlocked(latch.wait)

    def _unlocked(self, wait: Callable[[], object]) -> None:
        """Wait without the lock, so that others go on."""
        with self.tear.waiting():
            try:
                # In here, so that the lock is taken again even if an interrupt comes just after this call.
                self.lock.release()
                wait()
            finally:
                self.lock.acquire()

    # ------------------------------------------------------------------ up

    def bring(self, copy: Copy, span: Span, *, wait: bool) -> None:
        """Start the moves that make the span valid, from the nearest tier that has it.

        Lets go of the lock while it waits for RAM slots, if `wait`.

        Raises:
            CapacityError: no RAM slot to pass through, and not `wait`.
            BlockNotFoundError: the bytes are nowhere.
            TransferError: a write-back to this home failed; its bytes are nowhere else that lasts.
        """
        # A slot that was not filled is filled again. Bytes that did not get home exist in no other place: raise.
        for transfer in copy.arriving(span) if copy.slot is None else ():
            if transfer.failed():
                transfer.wait()
        copy.forget_failures()

        copy.num_leases += 1  # nobody takes the slot while this waits for another one
        try:
            for part in copy.missing(span):
                if copy.tier is Tier.GPU:
                    self._fill_gpu(copy, part, wait=wait)
                elif copy.block.extent is not None:
                    self._read(copy, part)
                else:
                    self._fill_ram(copy, part)
        except BaseException:
            self.unlease(copy)
            raise
        copy.num_leases -= 1

    def _read(self, copy: Copy, span: Span) -> None:
        """NVMe -> RAM."""
        files = self._files
        extent = copy.block.extent
        slot = copy.slot
        assert files is not None
        assert extent is not None
        assert slot is not None
        key = copy.block.spec.key
        address = self.view(copy, span).data_ptr()
        stop = extent.padded(span[1])
        transfer = self._lanes.submit(
            "nvme_to_ram",
            key,
            stop - span[0],
            lambda: files.read(key, extent, span[0], stop, address),
            behind=slot.pending,
        )
        assign(copy.fills, span, transfer)

    def _fill_ram(self, copy: Copy, span: Span) -> None:
        """GPU -> RAM, from the home there or from the copy of a scratch block."""
        key = copy.block.spec.key
        assert copy.slot is not None
        try:
            source = copy.block.find(Tier.GPU, span)
        except BlockNotFoundError:
            raise BlockNotFoundError(f"block {key} has no bytes {span} anywhere; lease it fresh first.") from None

        # The copy comes after the present point of compute, which may still be writing the bytes.
        after = [*source.arriving(span), *self.point(key)]
        transfer = self._lanes.to_ram(key, self.view(copy, span), self.view(source, span), after, copy.slot.pending)
        assign(copy.fills, span, transfer)
        source.use(transfer)

    def _fill_gpu(self, copy: Copy, span: Span, *, wait: bool) -> None:
        """RAM -> GPU; bytes from NVMe pass through RAM in pieces as large as its slots, or go past it."""
        assert copy.slot is not None
        block = copy.block
        key = copy.block.spec.key

        # Any round may wait for a slot in RAM, so each one looks anew whether its bytes are there.
        for part in self._ram_spans(block, span):
            passing = not any(c.holds(part) and c.is_usable() for c in block.on(Tier.RAM))
            if passing and self._reader is not None and block.extent is not None:
                self._read_past_ram(copy, part, self._reader)
                continue

            source = self.place(block, Tier.RAM, part, wait=wait)
            self.bring(source, part, wait=wait)
            after = source.arriving(part)
            behind = copy.slot.pending
            target = self.view(copy, part)
            queue = queue_to_gpu(block.spec.kind)
            transfer = self._lanes.to_gpu(key, target, self.view(source, part), after, behind, queue=queue)
            assign(copy.fills, part, transfer)
            source.use(transfer)  # whoever gets the slot in RAM next comes behind this move
            if passing:
                self.evict(source)

    def _read_past_ram(self, copy: Copy, span: Span, reader: GpuReader) -> None:
        """NVMe -> GPU. Bytes that are leaving RAM for NVMe come first."""
        block = copy.block
        extent = copy.block.extent
        assert extent is not None
        assert copy.slot is not None

        # After the newest bytes, without which the extent is stale; behind older writes, however they end.
        target = self.view(copy, (span[0], extent.padded(span[1])))
        leaving = [other for other in block.on(Tier.RAM) if not other.is_usable()]
        after = [t for other in leaving for t in other.unwritten.values() if t is not None]
        behind = [*copy.slot.pending, *(t for other in leaving for t in other.writes())]
        transfer = self._lanes.submit(
            "nvme_to_gpu",
            block.spec.key,
            target.numel(),
            lambda: reader.read(block.spec.key, extent, span[0], target),
            after,
            behind,
        )
        assign(copy.fills, span, transfer)
        # No slot in RAM is held meanwhile, so the next write of the extent has to be told of this read.
        block.reads = [*(read for read in block.reads if not read.done()), transfer]

    def _ram_spans(self, block: Block, span: Span) -> list[Span]:
        """A span cut at the copies that lie in RAM now; the rest in pieces that fit into slots there."""
        copies = [copy.span for copy in block.on(Tier.RAM) if overlap(copy.span, span) and copy.is_usable()]
        parts = [(max(start, span[0]), min(stop, span[1])) for start, stop in copies]
        rest = without(span, parts)
        if rest and self._reader is not None and block.extent is not None:
            parts += rest
        elif rest and block.spec.home is not None:
            chunk = self._files.options.chunk_bytes if self._files is not None else 1
            size = max(chunk, self._reservation.slot_bytes(Tier.RAM, block.spec) // chunk * chunk)
            for start, stop in rest:
                parts += [(first, min(first + size, stop)) for first in range(start, stop, size)]
        return sorted(parts)

    # ------------------------------------------------------------------ home

    def send_home(self, copy: Copy, span: Span, *, wait: bool) -> Transfer:
        """Start copying a span one step towards home. Lets go of the lock while it waits for a slot, if `wait`."""
        if copy.tier is Tier.GPU:
            transfer = self._copy_down(copy, span, wait=wait)
        elif copy.block.extent is not None:
            transfer = self._write(copy, span)
        else:
            transfer = self._copy_up(copy, span)

        copy.dirty(span)  # an older write-back goes on among the users; from now on the new one counts
        assign(copy.unwritten, span, transfer)
        self.wake()  # no slot is free yet, but whoever waits for one has a transfer to wait for now
        return transfer

    def _write(self, copy: Copy, span: Span) -> Transfer:
        """RAM -> NVMe, behind an older write of the same bytes."""
        files = self._files
        extent = copy.block.extent
        assert files is not None
        assert extent is not None
        key = copy.block.spec.key
        address = self.view(copy, span).data_ptr()
        stop = extent.padded(span[1])
        return self._lanes.submit(
            "ram_to_nvme",
            key,
            stop - span[0],
            lambda: files.write(key, extent, span[0], stop, address),
            copy.arriving(span),
            [*copy.writes(), *copy.block.reads],
        )

    def _copy_down(self, copy: Copy, span: Span, *, wait: bool) -> Transfer:
        """GPU -> RAM: into the home there, or into a slot, which is dirty from then on unless the block is scratch."""
        block = copy.block
        key = copy.block.spec.key
        copy.num_leases += 1  # nobody takes the slot while this waits for another one
        try:
            below = self.place(block, Tier.RAM, span, wait=wait)
        finally:
            copy.num_leases -= 1

        # Compute made the bytes: the uses that ended before this call, and whatever is enqueued now.
        compute = [transfer for transfer in copy.in_use() if transfer.queue == "compute"]
        after = [*copy.arriving(span), *compute, *self.point(key)]
        behind = self.occupants(below)
        target = self.view(below, span)
        queue = queue_to_ram(block.spec.kind)
        transfer = self._lanes.to_ram(key, target, self.view(copy, span), after, behind, queue=queue)
        assign(below.fills, span, transfer)
        if block.extent is not None:
            below.dirty(span)  # one step nearer to home, and not there yet
        return transfer

    def _copy_up(self, copy: Copy, span: Span) -> Transfer:
        """RAM -> the home on the GPU."""
        block = copy.block
        key = copy.block.spec.key
        home = block.find(Tier.GPU, span)
        after = copy.arriving(span)
        behind = [*self.occupants(home), *self.point(key)]
        transfer = self._lanes.to_gpu(key, self.view(home, span), self.view(copy, span), after, behind)
        assign(home.fills, span, transfer)
        return transfer

    # ------------------------------------------------------------------ out

    def copy_out(self, block: Block, span: Span, target: torch.Tensor) -> Transfer:
        """Home on the GPU or on NVMe -> RAM outside of the store, past slots and leases; `moved_bytes` leaves it out.

        Args:
            block: it is settled, and nobody changes the span before the transfer is over.
            span: bytes of it.
            target: uint8 on the CPU, page aligned, as long as the span in whole pages; kept until the transfer is over.
        """
        key = block.spec.key
        extent = block.extent
        files = self._files
        if extent is not None and files is not None:
            address = target.data_ptr()
            stop = extent.padded(span[1])
            return self._lanes.submit("nvme_to_ram", key, 0, lambda: files.read(key, extent, span[0], stop, address))
        home = block.find(Tier.GPU, span)
        queue = "state_to_ram"  # there it yields to what compute waits for
        inside = self.view(home, span)
        outside = target[: span[1] - span[0]]
        transfer = self._lanes.submit(queue, key, 0, lambda: self._lanes.copy(queue, outside, inside))
        home.use(transfer)
        return transfer

    # ------------------------------------------------------------------ away

    def occupants(self, copy: Copy) -> list[Transfer]:
        """The transfers that must have ended before a copy's bytes may be overwritten."""
        return [*copy.in_use(), *(copy.slot.pending if copy.slot is not None else [])]

    def point(self, key: str) -> list[Transfer]:
        """The present point of compute if it is asynchronous, else nothing."""
        point = mark(self._lanes.clock, key)
        return [] if point is None else [point]

    def evict(self, copy: Copy) -> None:
        """Drop a copy in a slot, now or, if it is being written to NVMe, when that went well.

        Raises:
            LeaseHeldError: it is leased.
            DirtyBlockError: bytes are not home, and no write-back was started.
            TransferError: a write-back failed.
        """
        key = copy.block.spec.key
        home = copy.block.spec.home
        if copy.num_leases:
            raise LeaseHeldError(f"block {key} on {copy.tier} is leased; release it first.")

        # Writes end at any time, so look for them first: one that fails meanwhile is found by the loop or waited for.
        copy.settle()
        writes = copy.writes()
        for transfer in copy.unwritten.values() if home is not None else ():
            if transfer is None:
                raise DirtyBlockError(f"block {key} on {copy.tier} has bytes that are not home yet; write them back.")
            if transfer.done():
                transfer.wait()

        if writes:  # the slot and the extent are theirs until they end
            copy.is_leaving = True
        else:
            self._give(copy)

    def discard(self, copy: Copy) -> None:
        """Drop a copy in a slot, dirty or not: nobody wants its bytes any more.

        Raises:
            LeaseHeldError: it is leased.
            TransferError: a write-back of it failed.
        """
        if not copy.num_leases:
            copy.unwritten = {span: transfer for span, transfer in copy.unwritten.items() if transfer is not None}
        self.evict(copy)

    def wake(self) -> None:
        """Let everyone who waits for a slot look again."""
        for latch in self._waiting_for_slot:
            latch.set()
        self._waiting_for_slot.clear()

    def forget(self, blocks: Iterable[Block]) -> None:
        """Forget leases, slots and moves of all blocks. Nothing moves any more; home copies stay where they are."""
        for block in blocks:
            block.copies = [copy for copy in block.copies if copy.slot is None]
            block.reads = []
            for copy in block.copies:
                copy.reset()
        self._slotted.clear()
        self._reservation.take_back()

    def drop_stale(self, copies: list[Copy], span: Span) -> None:
        """Take the span out of these copies: newer bytes of it are in another tier.

        Raises:
            LeaseHeldError: one of the copies is leased; none was dropped.
        """
        stale = [copy for copy in copies if any(overlap(span, filled) for filled in copy.fills)]
        for copy in stale:  # all are looked at before the first is changed
            if copy.num_leases:
                raise LeaseHeldError(f"block {copy.block.spec.key} on {copy.tier} is leased; release it first.")
        for copy in stale:
            copy.supersede(span)
            if not copy.fills:
                self.evict(copy)

    def unlease(self, copy: Copy) -> None:
        """Take one lease back. A copy that got no bytes goes; any other becomes the last used."""
        copy.num_leases -= 1
        if copy.slot is None:
            return

        copy.forget_failures()
        self._slotted[copy] = self._slotted.pop(copy)
        if not copy.num_leases and not copy.fills and not copy.unwritten:
            self._give(copy)
        self.wake()

    def _give(self, copy: Copy) -> None:
        """Free the slot at once, though moves may still touch it: whoever fills it next comes behind them."""
        assert copy.slot is not None
        pending = copy.in_use()
        # Where RAM stands for the GPU, a view that outlives its lease shall not go unnoticed.
        if copy.tier is Tier.GPU and self._lanes.clock is None:
            view = self.view(copy, copy.span)
            poison = self._lanes.submit(
                "ram_to_gpu", "poison", 0, lambda: _native.fill(view.data_ptr(), POISON, view.numel()), behind=pending
            )
            pending = [poison]

        copy.block.copies.remove(copy)
        del self._slotted[copy]
        copy.slot.pool.give(copy.slot, pending)
        self.wake()
