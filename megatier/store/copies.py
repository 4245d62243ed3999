"""Gives slots to copies, and tells how a slot is taken, waited for and given back.

A copy is bytes of a block in gpu or ram (`residency.Copy`; the head of that file has a table of the states that its
bytes can be in). It lies at home, or in a slot: a reusable piece of the tier's memory. A slot for a new copy is a free
one, or that of the copy that was not used for longest. This file starts no moves of bytes: `fills` starts those that
bring bytes into a slot, and `write_backs` those that take them home.

Every method is called with `lock` held. Those that say so let go of it while they wait, and then anything may happen to
any copy, except that nobody evicts a copy that is leased. So after a wait a method looks anew, or it holds a lease of
the copies that it needs while it waits.

Transfers end without the lock, at any moment. Three rules keep bytes safe from that:

1. A slot may be given back while moves still touch it. They are noted in the slot (`Slot.pending`), and the next move
   into the slot waits for them.
2. The exception is state that is being written home. Such a write may fail, and then the slot has the only good bytes.
   So the copy keeps its slot until the write has ended well; it is leaving until then.
3. No two copies of a block in one tier overlap. As a copy that is written to NVMe keeps its slot, no bytes are read
   from NVMe into a second slot before the newest ones are there.
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
"""The byte that is written over a released slot of the CPU arena that stands for the GPU. It is NaN in every float."""


class Copies:
    """The copies of one store's blocks in gpu and ram."""

    def __init__(self, reservation: Reservation, queues: TierQueues) -> None:
        """Take slots from the reservation, once that is allocated."""
        self._reservation = reservation
        self._queues = queues
        self._slotted: dict[Copy, None] = {}
        """The copies in slots. The one that was not used for longest comes first."""
        self._lock = threading.Lock()
        self.consistency = Consistency()
        """Tells whether something broke off a change of the copies."""
        self.owner = Owner("this store")
        """The process whose copies they are."""
        self._waiting_for_slot: list[_native.Latch] = []
        """A latch for each thread that waits for a slot."""

    @property
    def lock(self) -> threading.Lock:
        """Guards the copies and everything that is known of them.

        Raises:
            ForkedError: this is a forked child, where a thread that is not there may hold it for ever.
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
        """Return the copy to use for a span, unless another tier alone has its newest bytes.

        The copy may still be empty. `place` has more to say.

        Raises:
            DirtyBlockError: the other tier has newer bytes.
        """
        assert tier is not Tier.NVME, "bytes are used in gpu or ram"
        beyond = Tier.GPU if tier is Tier.RAM else Tier.RAM

        # Bytes for the gpu come through ram, from a dirty copy there too. All others come from home, which does not
        # have the newest bytes if a copy beyond this tier is dirty.
        if tier is Tier.RAM or block.spec.home is Tier.GPU:
            key = block.spec.key
            for copy in block.on(beyond):
                if copy.unsafe(span):
                    raise DirtyBlockError(f"block {key} has newer bytes on {beyond}; write them back first.")
        return self.place(block, tier, span, wait=wait)

    def place(self, block: Block, tier: Tier, span: Span, *, wait: bool) -> Copy:
        """Return the copy that holds the span, or a new and empty one in a slot. A copy on the gpu is always whole.

        It lets go of the lock while it waits: for a slot (if `wait`), or for the write of an evicted copy of these
        bytes.

        Raises:
            CapacityError: the slots are too small; or all are leased, dirty or being written, and not `wait`.
            LeaseHeldError, DirtyBlockError: such a copy lies across the span's ends.
            TransferError: a write-back that keeps a slot failed.
        """
        wanted = block.whole if tier is Tier.GPU else span
        wanted_bytes = wanted[1] - wanted[0]

        # A wait lets go of the lock, so each round looks anew: another thread may have placed these bytes meanwhile, or
        # taken the slot.
        while True:
            # A copy that is leaving is usable if its write failed. Then it has the only good bytes, and stays.
            for copy in block.on(tier):
                if copy.holds(span) and copy.is_usable():
                    copy.is_leaving = False
                    return copy

            # The copies of a block in one tier never overlap, so one that has a part of these bytes has to go first.
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
        """Evict a copy that lies in the way, or wait for a move that keeps it; the caller looks anew after that."""
        self.evict(copy)

        if not copy.is_leaving:
            return

        # How the move ends does not matter here. If it failed, the copy is usable again, and the next round of the
        # caller finds that out. If it ended well, the next round evicts the copy for good.
        moves = copy.in_use()
        if moves:
            self._wait_unlocked(moves[0].wait_for_end)

    def _take(self, pool: SlotPool, *, wait: bool) -> Slot | None:
        """Return a free slot, or that of the copy not used for longest; None if no copy may lose its slot now.

        Copies that were prefetched and not used yet come last. They keep their slots if a wait would give another one.
        """
        slot = pool.take()
        if slot is not None:
            return slot

        # Three kinds of bytes are in no other place, so their copies keep their slots: scratch bytes (which have no
        # home), dirty ones, and those whose write may still fail.
        idle = self._unleased(pool)
        for copy in idle:
            copy.settle()
        busy = [copy for copy in idle if copy.unwritten or copy.writes()]

        # A copy that is not busy has no write whose end could make a difference, so evicting it frees its slot at once.
        prefetched_last = sorted(idle, key=lambda copy: copy.is_ahead)
        for copy in prefetched_last:
            is_scratch = copy.block.spec.home is None
            waits_instead = copy.is_ahead and wait and busy
            if not is_scratch and copy not in busy and not waits_instead:
                self.evict(copy)
                return pool.take()
        return None

    def _unleased(self, pool: SlotPool) -> list[Copy]:
        """Return the copies in slots of a pool that nobody leases, the one not used for longest first."""
        unleased = []
        for copy in self._slotted:
            if copy.slot is not None and copy.slot.pool is pool and not copy.num_leases:
                unleased.append(copy)
        return unleased

    def _wait_for_slot(self, pool: SlotPool) -> None:
        """Wait, without the lock, until a slot may be free; raise the error of a write-back that keeps one."""
        # A slot gets free in two ways. The first is the end of a write. It wakes nobody, since it comes without the
        # lock, so it is waited for directly.
        for copy in self._unleased(pool):
            for transfer in (*copy.unwritten.values(), *copy.writes()):
                if transfer is not None:
                    self._wait_unlocked(transfer.wait_for_end)
                    transfer.wait()
                    return

        if self.consistency.is_torn:  # perhaps nobody knows any more who has the slots
            raise StepAbandonedError("something broke off while slots were taken or given back; see TornStateError")

        # The second way is anything that somebody does with the lock held, and all of that calls `wake`. No wake is
        # lost: the latch is in the list before this lets go of the lock.
        latch = _native.Latch()
        self._waiting_for_slot.append(latch)
        self._wait_unlocked(latch.wait)

    def _wait_unlocked(self, wait: Callable[[], object]) -> None:
        """Wait without the lock, so that other threads go on."""
        # Looked up before: in here an interrupt could come while it is still held, and taking it again would hang.
        lock = self.lock
        with self.consistency.waiting():
            try:
                # The release is inside, so that the lock is taken again even if an interrupt comes right after it.
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
        """Drop a copy in a slot: now, or once the state that is being written from it is home.

        Raises:
            LeaseHeldError: it is leased.
            DirtyBlockError: it has bytes that home does not have, and no write-back of them was started.
            TransferError: a write-back of it failed.
        """
        key = copy.block.spec.key
        home = copy.block.spec.home
        if copy.num_leases:
            raise LeaseHeldError(f"block {key} on {copy.tier} is leased; release it first.")

        # The order of these looks matters, since a write may fail between any two of them. `writes` is taken before the
        # loop. So a write that is not in it has ended before the loop, which raises its error; and one that is in it is
        # waited for, however it ends. Taken after the loop, `writes` would miss a write that failed in between, and the
        # slot would be given away with the only good bytes in it.
        copy.settle()
        writes = copy.writes()
        marks = copy.unwritten.values() if home is not None else ()
        for transfer in marks:
            if transfer is None:
                raise DirtyBlockError(f"block {key} on {copy.tier} has bytes that are not home yet; write them back.")
            if transfer.done():
                transfer.wait()

        if writes:  # the slot and the extent are theirs until they end
            copy.is_leaving = True
        else:
            self._give(copy)

    def discard(self, copy: Copy) -> None:
        """Drop a copy in a slot even if it is dirty: nobody wants its bytes any more.

        Raises:
            LeaseHeldError: it is leased.
            TransferError: a write-back of it failed.
        """
        # Marks of writes under way stay, since the slot is theirs until they end. A leased copy is refused as it is.
        if not copy.num_leases:
            marks = copy.unwritten.items()
            copy.unwritten = {span: transfer for span, transfer in marks if transfer is not None}
        self.evict(copy)

    def empty(self, tier: Tier) -> None:
        """Drop all copies in slots of a tier, as `evict` does."""
        for copy in [copy for copy in self._slotted if copy.tier is tier]:
            self.evict(copy)

    def wake(self) -> None:
        """Let everyone who waits for a slot look again."""
        for latch in self._waiting_for_slot:
            latch.set()
        self._waiting_for_slot.clear()

    def forget(self, blocks: Iterable[Block]) -> None:
        """Forget all leases, slots and moves, once nothing moves any more. Copies at home stay where they are."""
        for block in blocks:
            block.copies = [copy for copy in block.copies if copy.slot is None]
            block.reads = []
            for copy in block.copies:
                copy.reset()
        self._slotted.clear()
        self._reservation.free_all()

    def drop_stale(self, copies: list[Copy], span: Span) -> None:
        """Take a span out of these copies, because newer bytes of it are in another tier.

        Raises:
            LeaseHeldError: one of the copies is leased, and none was changed.
        """
        stale = [copy for copy in copies if any(overlap(span, filled) for filled in copy.fills)]

        # All are looked at before the first one is changed, so that a refusal changes nothing.
        for copy in stale:
            if copy.num_leases:
                key = copy.block.spec.key
                raise LeaseHeldError(f"block {key} on {copy.tier} is leased; release it first.")

        for copy in stale:
            copy.supersede(span)
            if not copy.fills:
                self.evict(copy)

    def unlease(self, copy: Copy) -> None:
        """Take one lease back. A copy that got no bytes gives its slot back; any other one is now the last used."""
        copy.num_leases -= 1
        if copy.slot is None:
            return

        copy.forget_failures()

        # Taken out and put back, so that it comes last.
        self._slotted[copy] = self._slotted.pop(copy)
        if not copy.num_leases and not copy.fills and not copy.unwritten:
            self._give(copy)
        self.wake()

    def _give(self, copy: Copy) -> None:
        """Free a copy's slot at once. Moves may still touch it; the next move into the slot waits for them."""
        assert copy.slot is not None
        pending = copy.in_use()

        # If RAM stands for the GPU, the slot is overwritten, so that a view that outlives its lease is noticed.
        if copy.tier is Tier.GPU and self._queues.clock is None:
            view = self.view(copy, copy.span)
            fill = partial(fill_bytes, view, POISON)
            pending = [self._queues.submit("ram_to_gpu", "poison", 0, fill, follows=pending)]

        copy.block.copies.remove(copy)
        del self._slotted[copy]
        copy.slot.pool.give(copy.slot, pending)
        self.wake()
