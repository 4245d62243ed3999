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
from megatier.errors import CapacityError, DirtyBlockError, LeaseHeldError, StepAbandonedError
from megatier.store.arena import Slot, SlotPool
from megatier.store.lanes import Lanes
from megatier.store.reservation import Reservation
from megatier.store.residency import Block, Copy, Span, overlap
from megatier.store.transfer import Transfer
from megatier.tear import Tear
from megatier.tier import Tier

POISON = 0xFF
"""Byte written over a released slot of the CPU arena that stands for the GPU: NaN in every float type."""


class Copies:
    """The copies of one store's blocks in gpu and ram.

    Attributes:
        lock: guards the copies and everything that is known of them.
        tear: whether something broke off while that was changed.
    """

    def __init__(self, reservation: Reservation, lanes: Lanes) -> None:
        """Slots come from the reservation, once it is allocated."""
        self._reservation = reservation
        self._lanes = lanes
        self._slotted: dict[Copy, None] = {}
        """Copies in slots; the one unused for longest comes first."""
        self.lock = threading.Lock()
        self.tear = Tear()
        self._waiting_for_slot: list[_native.Latch] = []

    # ------------------------------------------------------------------ places

    def view(self, copy: Copy, span: Span) -> torch.Tensor:
        """uint8 [stop - start] of a copy."""
        return self._reservation.view(copy.tier, copy.offset + span[0] - copy.span[0], span[1] - span[0])

    def copy_for(self, block: Block, tier: Tier, span: Span, *, wait: bool) -> Copy:
        """The copy to use, perhaps still empty; refused if another tier alone has the newest bytes. See `place`.

        Raises:
            DirtyBlockError: the other tier has newer bytes.
        """
        assert tier is not Tier.NVME, "bytes are used in gpu or ram"
        beyond = Tier.GPU if tier is Tier.RAM else Tier.RAM
        # Bytes for the gpu come through ram, from dirty copies too. Else they come from home, which lacks the newest.
        if (tier is Tier.RAM or block.spec.home is Tier.GPU) and any(copy.unsafe(span) for copy in block.on(beyond)):
            raise DirtyBlockError(f"block {block.spec.key} has newer bytes on {beyond}; write them back first.")
        return self.place(block, tier, span, wait=wait)

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
                copy = Copy(block=block, tier=tier, span=wanted, offset=slot.offset, slot=slot)
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

    # ------------------------------------------------------------------ away

    def occupants(self, copy: Copy) -> list[Transfer]:
        """The transfers that must have ended before a copy's bytes may be overwritten."""
        return [*copy.in_use(), *(copy.slot.pending if copy.slot is not None else [])]

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
