"""Leases: who may use the bytes of a copy, and for how long.

A reader or writer of a block's bytes holds a lease of them. While a copy is leased nobody evicts it and nobody takes
its slot. A lease is counted under the store's lock, and then waits without it until the bytes are there.
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
    """The right to use a resident copy until exit."""

    def __init__(self, leases: Leases, copy: Copy, span: Span) -> None:
        """Take a copy for which `Leases.take` has counted this lease. Nobody else makes one."""
        self._leases = leases
        self._copy = copy
        self._is_held = True
        self._num_resets = leases.num_resets
        """How often all leases had been forgotten when this one was taken."""
        self.bytes = leases.copies.view(copy, span)
        """uint8 [stop - start] on the tier's device, valid until exit."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def release(self) -> None:
        """Give the right back. Compute that is enqueued by now on the current stream still reads valid bytes."""
        assert self._is_held, f"{self._copy.block.spec.key} was released twice"

        # A forked child that leaves a lease of its parent has none of it.
        if not self._leases.copies.owner.is_here:
            return

        with self._leases.copies.consistency.change:
            self._is_held = False

            # If the store was reset since, it has forgotten this lease, and the slot may belong to another copy by now.
            if self._num_resets == self._leases.num_resets:
                self._leases.give_back(self._copy)


class Leases:
    """The leases of one store. Its methods take the lock of `Copies` themselves."""

    def __init__(self, blocks: Blocks, copies: Copies, fills: Fills, queues: TierQueues) -> None:
        """Take the blocks and copies, and what brings their bytes."""
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

                # A fresh lease has no move that brings its bytes and would wait for the slot's earlier users. So the
                # lease waits for them itself. They are asked for before the span counts as valid.
                earlier_users = self.copies.occupants(copy) if fresh else []
                marks = dict(copy.fills) if fresh else {}
                if fresh:
                    assign(copy.fills, span, None)
                else:
                    self._fills.bring(copy, span, wait=wait)
                copy.num_leases += 1
                arriving = copy.arriving(span)

            # The wait is long, so it comes without the lock. The lease is counted already: nobody takes the slot.
            try:
                with self.copies.consistency.waiting():
                    for transfer in (*earlier_users, *arriving):
                        transfer.wait_before_use(tier, raises=transfer in arriving)
            except BaseException:
                # Nothing was overwritten: the bytes are what they were, and not valid if they were not.
                if fresh:
                    with self.copies.lock:
                        restore(copy.fills, span, marks)
                self.give_back(copy)
                raise
            return Lease(self, copy, span)

    def forget(self) -> None:
        """Let the leases that there are end without effect. The caller holds the lock."""
        self.num_resets += 1

    def give_back(self, copy: Copy) -> None:
        """End a lease.

        On the gpu, compute that is enqueued by now still uses the bytes. So its present point is noted as a user of the
        copy, and whatever overwrites the bytes comes after that.
        """
        with self.copies.lock, self.copies.consistency.call:
            if copy.tier is Tier.GPU:
                key = copy.block.spec.key
                for point in self._queues.point(key):
                    copy.use(point)
            self.copies.unlease(copy)
