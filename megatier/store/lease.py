"""Leases: the right to use the bytes of a copy.

Whoever reads or writes a block's bytes holds a lease of them. A leased copy is not evicted, and keeps its slot. A lease
is counted under the store's lock, and then waits without the lock until the bytes are there.
"""

from __future__ import annotations

from typing import Self

from megatier.store.blocks import Blocks
from megatier.store.copies import Copies
from megatier.store.fills import Fills
from megatier.store.residency import Copy, Span, assign, restore
from megatier.store.tier_queues import TierQueues
from megatier.tier import Tier


class Lease:
    """The right to use bytes of a copy, until the `with` block ends or `release`."""

    def __init__(self, leases: Leases, copy: Copy, span: Span) -> None:
        """Lease a copy. Only `Leases.take`, which has counted the lease, makes one."""
        self._leases = leases
        self._copy = copy
        self._is_held = True
        self._num_resets = leases.num_resets
        """The number of resets before this lease."""
        self.bytes = leases.copies.view(copy, span)
        """uint8 [stop - start] on the tier's device, valid until the release."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def release(self) -> None:
        """End the lease. Compute that is enqueued on the current stream by now still reads valid bytes."""
        assert self._is_held, f"{self._copy.block.spec.key} was released twice"

        # A forked child does not own the leases of its parent.
        if not self._leases.copies.owner.is_here:
            return

        with self._leases.copies.consistency.change:
            self._is_held = False

            # After a reset of the store the lease is forgotten, and the slot may belong to another copy.
            if self._num_resets == self._leases.num_resets:
                self._leases.give_back(self._copy)


class Leases:
    """The leases of one store. Its methods acquire the lock of `Copies` themselves."""

    def __init__(self, blocks: Blocks, copies: Copies, fills: Fills, queues: TierQueues) -> None:
        """Use these blocks, copies, fills and queues."""
        self.copies = copies
        """The copies that are leased."""
        self.num_resets = 0
        """The number of times that all leases were forgotten."""
        self._blocks = blocks
        self._fills = fills
        self._queues = queues

    def take(self, key: str, tier: Tier, span: Span | None, *, fresh: bool, wait: bool) -> Lease:
        """Lease bytes of a block in a tier; see `TieredStore.lease`."""
        with self.copies.consistency.call:
            with self.copies.lock:
                block, span = self._blocks.span(key, span)
                copy = self.copies.copy_for(block, tier, span, wait=wait)
                copy.is_ahead = False

                # No move fills a fresh lease, so the lease itself waits for the slot's earlier users. They are listed
                # before the span counts as valid.
                earlier_users = self.copies.occupants(copy) if fresh else []
                marks = dict(copy.fills) if fresh else {}
                if fresh:
                    assign(copy.fills, span, None)
                else:
                    self._fills.bring(copy, span, wait=wait)
                copy.num_leases += 1
                arriving = copy.arriving(span)

            # The wait may be long, so it is without the lock. The lease keeps the slot.
            try:
                with self.copies.consistency.waiting():
                    for transfer in (*earlier_users, *arriving):
                        transfer.wait_before_use(tier, raises=transfer in arriving)
            except BaseException:
                # Nothing was overwritten, so the bytes are as valid as before.
                if fresh:
                    with self.copies.lock:
                        restore(copy.fills, span, marks)
                self.give_back(copy)
                raise
            return Lease(self, copy, span)

    def forget(self) -> None:
        """Let all present leases end without effect. The caller holds the lock."""
        self.num_resets += 1

    def give_back(self, copy: Copy) -> None:
        """End a lease.

        On the gpu, compute that is enqueued by now still uses the bytes. So the copy notes the present point in
        compute's stream as a user, and whatever overwrites the bytes comes after it.
        """
        with self.copies.lock, self.copies.consistency.call:
            if copy.tier is Tier.GPU:
                key = copy.block.spec.key
                for point in self._queues.point(key):
                    copy.use(point)
            self.copies.unlease(copy)
