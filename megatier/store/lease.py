"""Leases: who may use the bytes of a copy, and for how long."""

from __future__ import annotations

from typing import Self

from megatier.store.blocks import Blocks
from megatier.store.copies import Copies
from megatier.store.fills import Fills
from megatier.store.lanes import Lanes
from megatier.store.residency import Copy, Span, assign
from megatier.tier import Tier


class Lease:
    """The right to use a resident copy until exit.

    Attributes:
        bytes: uint8 [stop - start] on the tier's device; valid until exit.
    """

    def __init__(self, leases: Leases, copy: Copy, span: Span) -> None:
        """Only `Leases.take` makes one, and has counted it by then."""
        self._leases = leases
        self._copy = copy
        self._held = True
        self._resets = leases.num_resets
        self.bytes = leases.copies.view(copy, span)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def release(self) -> None:
        """Give the right back. Compute enqueued so far on the current stream still reads valid bytes."""
        assert self._held, f"{self._copy.block.spec.key} was released twice"
        # A store that was reset since has no leases any more, and the copy's slot may be somebody else's.
        with self._leases.copies.tear.change:
            self._held = False
            if self._resets == self._leases.num_resets:
                self._leases.give_back(self._copy)


class Leases:
    """The leases of one store. Its methods take the lock of `Copies` themselves.

    Attributes:
        copies: what is leased.
        num_resets: how often all leases were forgotten.
    """

    def __init__(self, blocks: Blocks, copies: Copies, fills: Fills, lanes: Lanes) -> None:
        """Take what is leased, and what brings its bytes."""
        self.copies = copies
        self.num_resets = 0
        self._blocks = blocks
        self._fills = fills
        self._lanes = lanes

    def take(self, key: str, tier: Tier, span: Span | None, *, fresh: bool, wait: bool) -> Lease:
        """Lease bytes of a block in a tier; see `TieredStore.lease`."""
        with self.copies.tear.call:
            with self.copies.lock:
                block, span = self._blocks.span(key, span)
                copy = self.copies.copy_for(block, tier, span, wait=wait)
                copy.is_ahead = False
                # Nothing brings the bytes, so nothing else would wait for those who still use the slot.
                over = self.copies.occupants(copy) if fresh else []
                if fresh:
                    assign(copy.fills, span, None)
                else:
                    self._fills.bring(copy, span, wait=wait)
                copy.num_leases += 1
                needed = copy.arriving(span)

            # The lease is counted before the lock is let go: nobody takes the slot while this waits for the bytes.
            try:
                with self.copies.tear.waiting():
                    for transfer in (*over, *needed):
                        transfer.order_for(tier, fails=transfer in needed)
            except BaseException:
                self.give_back(copy)
                raise
            return Lease(self, copy, span)

    def forget(self) -> None:
        """From now on the leases that there are end without effect. The lock is held."""
        self.num_resets += 1

    def give_back(self, copy: Copy) -> None:
        """End a lease. On the gpu, compute that is enqueued by now still uses the bytes: the next user comes after."""
        with self.copies.lock, self.copies.tear.call:
            if copy.tier is Tier.GPU:
                for point in self._lanes.point(copy.block.spec.key):
                    copy.use(point)
            self.copies.unlease(copy)
