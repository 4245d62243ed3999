"""The copies of blocks in gpu and ram: how they get slots, wait for slots, and give them back.

A copy has bytes of a block in gpu or ram (`residency.Copy`; that file has a table of their states). It is at home, or
in a slot, which is a reusable piece of the tier's memory. A new copy gets a free slot, or the slot of the least
recently used copy. This file moves no bytes: `fills` brings bytes into slots, and `write_backs` takes them home.

The caller of each method holds `lock`. Methods that say so release it while they wait. Meanwhile anything may happen to
any copy, except that a leased one is not evicted. So after a wait a method looks anew, or it leases the copies that it
needs.

Transfers end at any moment, without the lock. Three rules keep bytes safe:

1. A slot may be freed while moves still touch it. The slot notes them (`Slot.pending`), and the next move into it waits
   for them.
2. State that is being written home is an exception. The write may fail, and then the slot has the only good bytes. So
   the copy is *evicted* but not dropped: it keeps its slot until the write has succeeded.
3. No two copies of a block in one tier overlap. Because a copy keeps its slot while it is written to NVMe, no bytes are
   read from NVMe into a second slot before the newest ones are there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial

import torch

from megatier import _native
from megatier.address import fill_bytes
from megatier.consistency import Consistency
from megatier.errors import CapacityError, DirtyBlockError, LeaseHeldError, StepAbandonedError
from megatier.owner import Owner
from megatier.store.arena import Slot, SlotPool
from megatier.store.reservation import Reservation
from megatier.store.residency import Block, Copy, Span, overlap
from megatier.store.tier_queues import TierQueues
from megatier.store.transfer import Transfer
from megatier.tier import Tier

POISON = 0xFF
"""Without a GPU, freed slots of the gpu tier are filled with this byte, which is NaN in every float format."""


class Copies:
    """The copies of one store's blocks in gpu and ram."""

    def __init__(self, reservation: Reservation, queues: TierQueues) -> None:
        """Begin without copies. Slots come from the reservation, once it is allocated."""
        self._reservation = reservation
        self._queues = queues
        self._slotted: dict[Copy, None] = {}
        """The copies in slots, the least recently used one first."""
        self._lock = threading.Lock()
        self.consistency = Consistency()
        """Whether a change of the copies was interrupted."""
        self.owner = Owner("this store")
        """The process that owns the copies."""
        self._waiting_for_slot: list[_native.Latch] = []
        """A latch for each thread that waits for a slot."""

    @property
    def lock(self) -> threading.Lock:
        """The lock that guards the copies and all their fields.

        Raises:
            ForkedError: this is a forked child, in which the lock may be held for ever by a thread of the parent.
        """
        self.owner.check()
        return self._lock

    # ------------------------------------------------------------------ places

    def view(self, copy: Copy, span: Span) -> torch.Tensor:
        """Return the bytes of a span of a copy, as uint8 [stop - start]."""
        start, stop = span
        first, _ = copy.span
        offset = copy.offset + start - first
        return self._reservation.view(copy.tier, offset, stop - start)

    def copy_for(self, block: Block, tier: Tier, span: Span, *, wait: bool) -> Copy:
        """Return the copy to use for a span, unless only the other tier has its newest bytes.

        The copy may still be empty; see `place`.

        Raises:
            DirtyBlockError: only the other tier has the newest bytes.
        """
        assert tier is not Tier.NVME, "bytes are used in gpu or ram"
        self._check_newest(block, tier, span)
        copy = self.place(block, tier, span, wait=wait)

        # While `place` waited without the lock, another thread may have changed the bytes in the other tier.
        try:
            self._check_newest(block, tier, span)
        except DirtyBlockError:
            self.evict(copy)
            raise
        return copy

    def _check_newest(self, block: Block, tier: Tier, span: Span) -> None:
        """Raise a DirtyBlockError if only the other tier has the newest bytes of a span."""
        # Bytes for the gpu come through ram, even from a dirty copy there. All others come from home, which lacks the
        # newest bytes if a copy in the other tier is dirty.
        if tier is Tier.GPU and block.spec.home is not Tier.GPU:
            return
        beyond = Tier.GPU if tier is Tier.RAM else Tier.RAM
        for copy in block.on(beyond):
            if copy.unsafe(span):
                raise DirtyBlockError(f"block {block.spec.key} has newer bytes on {beyond}; write them back first.")

    def place(self, block: Block, tier: Tier, span: Span, *, wait: bool) -> Copy:
        """Return the copy that holds the span, or a new and empty one in a slot. Copies on the gpu are always whole.

        It releases the lock while it waits: for a slot (with `wait`), or for the write of an evicted copy of these
        bytes.

        Raises:
            CapacityError: the slots are too small; or all are leased, dirty or being written, and not `wait`.
            LeaseHeldError, DirtyBlockError: a copy that overlaps the span is leased or dirty.
            TransferError: a write-back that keeps a slot failed.
        """
        wanted = block.whole if tier is Tier.GPU else span
        wanted_bytes = wanted[1] - wanted[0]

        # Waits release the lock, so each round looks anew. Another thread may have placed these bytes or taken the
        # slot.
        while True:
            # An evicted copy is usable if its write failed, because it has the only good bytes. Then it stays.
            for copy in block.on(tier):
                if copy.holds(span) and copy.is_usable():
                    copy.is_evicted = False
                    return copy

            # Copies of a block in one tier never overlap, so a copy with a part of these bytes has to go first.
            others = [copy for copy in block.on(tier) if overlap(copy.span, wanted)]
            if others:
                self._clear(others[0])
                continue

            pool = self._reservation.pool(tier, block.spec, wanted_bytes)
            slot = self._take(pool, wait=wait)
            if slot is not None:
                copy = Copy(block=block, tier=tier, span=wanted, offset=slot.offset, slot=slot)
                block.copies.append(copy)
                self._slotted[copy] = None
                return copy

            if not wait:
                remedy = f"All {pool.num_slots} slots are leased, dirty or being written; release some."
                raise CapacityError(tier, wanted_bytes, 0, remedy)
            self._wait_for_slot(pool)

    def _clear(self, copy: Copy) -> None:
        """Evict a copy that is in the way, or wait for a move that keeps it. The caller then looks anew."""
        self.evict(copy)

        if not copy.is_evicted:
            return

        # If the move fails, the copy is usable again, and if it succeeds, the next round evicts the copy. The caller
        # finds out.
        moves = copy.in_use()
        if moves:
            self._wait_unlocked(moves[0].wait_for_end)

    def _take(self, pool: SlotPool, *, wait: bool) -> Slot | None:
        """Return a free slot, or that of the least recently used copy; None if no copy can lose its slot now.

        Copies that were prefetched and not used yet come last. They keep their slots if waiting would free another one.
        """
        slot = pool.take()
        if slot is not None:
            return slot

        # Copies keep their slots if their bytes are nowhere else: scratch bytes (without a home), dirty bytes, and
        # bytes whose write may still fail.
        idle = self._list_unleased(pool)
        for copy in idle:
            copy.settle()
        busy = [copy for copy in idle if copy.unwritten or copy.writes()]

        # Dirty bytes whose write nobody has asked for free no slot, however long anybody waits.
        writes = [write for copy in busy for write in (*copy.unwritten.values(), *copy.writes())]
        frees_itself = any(write is not None for write in writes)

        # Evicting a copy that is not busy frees its slot at once.
        prefetched_last = sorted(idle, key=lambda copy: copy.is_ahead)
        for copy in prefetched_last:
            is_scratch = copy.block.spec.home is None
            waits_instead = copy.is_ahead and wait and frees_itself
            if not is_scratch and copy not in busy and not waits_instead:
                self.evict(copy)
                return pool.take()
        return None

    def _list_unleased(self, pool: SlotPool) -> list[Copy]:
        """Return the copies in slots of a pool that are not leased, the least recently used one first."""
        unleased = []
        for copy in self._slotted:
            if copy.slot is not None and copy.slot.pool is pool and not copy.num_leases:
                unleased.append(copy)
        return unleased

    def _wait_for_slot(self, pool: SlotPool) -> None:
        """Wait, without the lock, until a slot may be free. Raise the error of a write-back that keeps one."""
        # A slot becomes free in two ways. The first is the end of a write. Writes end without the lock and wake nobody,
        # so this waits for one directly.
        for copy in self._list_unleased(pool):
            for transfer in (*copy.unwritten.values(), *copy.writes()):
                if transfer is not None:
                    self._wait_unlocked(transfer.wait_for_end)
                    transfer.wait()
                    return

        if self.consistency.is_torn:  # the owners of slots may be unknown
            raise StepAbandonedError("something broke off while slots were taken or given back; see TornStateError")

        # The second way is a change under the lock, which calls `wake`. No wake is lost, because the latch is in the
        # list before the lock is released.
        latch = _native.Latch()
        self._waiting_for_slot.append(latch)
        self._wait_unlocked(latch.wait)

    def _wait_unlocked(self, wait: Callable[[], object]) -> None:
        """Wait without the lock, so that other threads go on."""
        # Looked up before the region: after an interrupt in here the lock would be held, and acquiring it would hang.
        lock = self.lock
        with self.consistency.waiting():
            try:
                # Released inside `try`, so that it is acquired again even if an interrupt comes right afterwards.
                lock.release()
                wait()
            finally:
                lock.acquire()

    # ------------------------------------------------------------------ away

    def occupants(self, copy: Copy) -> list[Transfer]:
        """Return the transfers that must have ended before the bytes of a copy may be overwritten."""
        pending = copy.slot.pending if copy.slot is not None else []
        return [*copy.in_use(), *pending]

    def evict(self, copy: Copy) -> None:
        """Drop a copy in a slot: now, or when the state that is being written from it is home.

        Raises:
            LeaseHeldError: the copy is leased.
            DirtyBlockError: it has dirty bytes, and no write-back of them was started.
            TransferError: a write-back of it failed.
        """
        key = copy.block.spec.key
        home = copy.block.spec.home
        if copy.num_leases:
            raise LeaseHeldError(f"block {key} on {copy.tier} is leased; release it first.")

        # The order matters, because a write may fail at any moment. `writes` is read before the loop. A write that is
        # not in it has ended before the loop, which raises its error, and a write in it is waited for, however it ends.
        # Read after the loop, `writes` would miss a write that failed in between, and the only good bytes would be
        # lost.
        copy.settle()
        writes = copy.writes()
        marks = copy.unwritten.values() if home is not None else ()
        for transfer in marks:
            if transfer is None:
                raise DirtyBlockError(f"block {key} on {copy.tier} has bytes that are not home yet; write them back.")
            if transfer.done():
                transfer.wait()

        if writes:  # they use the slot and the extent until they end
            copy.is_evicted = True
        else:
            self._give(copy)

    def discard(self, copy: Copy) -> None:
        """Drop a copy in a slot even if it is dirty, because its bytes are not needed any more.

        Raises:
            LeaseHeldError: the copy is leased.
            TransferError: a write-back of it failed.
        """
        # Marks of writes under way stay, because they use the slot. `evict` refuses a leased copy, which stays as it
        # is.
        if not copy.num_leases:
            marks = copy.unwritten.items()
            copy.unwritten = {span: transfer for span, transfer in marks if transfer is not None}
        self.evict(copy)

    def empty(self, tier: Tier) -> None:
        """Evict all copies in slots of a tier."""
        for copy in [copy for copy in self._slotted if copy.tier is tier]:
            self.evict(copy)

    def wake(self) -> None:
        """Wake all threads that wait for a slot."""
        for latch in self._waiting_for_slot:
            latch.set()
        self._waiting_for_slot.clear()

    def forget(self, blocks: Iterable[Block]) -> None:
        """Forget all leases, slots and moves. Nothing may be moving. Copies at home stay where they are."""
        for block in blocks:
            block.copies = [copy for copy in block.copies if copy.slot is None]
            block.reads = []
            for copy in block.copies:
                copy.reset()
        self._slotted.clear()
        self._reservation.free_all()

    def drop_stale(self, copies: list[Copy], span: Span) -> None:
        """Remove a span from these copies, because another tier has newer bytes of it.

        Raises:
            LeaseHeldError: one of the copies is leased. Then none is changed.
        """
        stale = [copy for copy in copies if any(overlap(span, filled) for filled in copy.fills)]

        # All are checked before the first one is changed, so that an error changes nothing.
        for copy in stale:
            if copy.num_leases:
                key = copy.block.spec.key
                raise LeaseHeldError(f"block {key} on {copy.tier} is leased; release it first.")

        for copy in stale:
            copy.supersede(span)
            if not copy.fills:
                self.evict(copy)

    def unlease(self, copy: Copy) -> None:
        """End a lease. A copy without bytes gives its slot back, and any other is now the most recently used."""
        copy.num_leases -= 1
        if copy.slot is None:
            return

        copy.forget_failures()

        # Removed and added again, so that it comes last.
        self._slotted[copy] = self._slotted.pop(copy)
        if not copy.num_leases and not copy.fills and not copy.unwritten:
            self._give(copy)
        self.wake()

    def _give(self, copy: Copy) -> None:
        """Free a copy's slot at once. The next move into the slot waits for moves that still touch it."""
        assert copy.slot is not None
        pending = copy.in_use()

        # Without a GPU the slot is overwritten, so that a view that outlives its lease is noticed.
        if copy.tier is Tier.GPU and self._queues.clock is None:
            view = self.view(copy, copy.span)
            fill = partial(fill_bytes, view, POISON)
            pending = [self._queues.submit("ram_to_gpu", "poison", 0, fill, follows=pending)]

        copy.block.copies.remove(copy)
        del self._slotted[copy]
        copy.slot.pool.give(copy.slot, pending)
        self.wake()
