"""Write-backs: moves of a copy's bytes one step towards their home.

Bytes on the GPU with a home on NVMe take two steps: into a slot in RAM, which is dirty then, and from there to NVMe.
All others take one. A write-back only starts its move, which is a transfer on a queue. The copy notes it in
`Copy.unwritten`, and the bytes are clean when it has succeeded. If it fails, the bytes stay whole where they are,
because a copy keeps its slot while state is written from it (`Copies.evict`).

A move `requires` the transfers that bring its bytes, and fails if they do. It `follows` those that still use its
target, however they end.

The caller of each method holds the lock of `Copies`. `begin` releases it while it waits for a slot.
"""

from __future__ import annotations

from functools import partial

import torch

from megatier.address import address_of
from megatier.drives.blockfile import BlockFiles
from megatier.store.copies import Copies
from megatier.store.residency import Copy, Span, assign, overlap
from megatier.store.tier_queues import TierQueues, queue_to_ram
from megatier.store.transfer import Transfer
from megatier.tier import Tier


class WriteBacks:
    """The moves that take the bytes of one store's copies home."""

    def __init__(self, copies: Copies, queues: TierQueues, files: BlockFiles | None) -> None:
        """Use these copies, queues and files."""
        self._copies = copies
        self._queues = queues
        self._files = files

    def begin(self, copy: Copy, span: Span, *, wait: bool) -> Transfer | None:
        """Start a write-back of a span with dirty bytes. Return None if none of its bytes are dirty.

        With `wait` it releases the lock while it waits for a slot.
        """
        copy.settle()
        marks = copy.unwritten.items()
        unwritten = [transfer for marked, transfer in marks if overlap(span, marked)]
        if not unwritten:
            return None

        # If one move under way takes all of the span, no other is needed. Bytes that changed later would have a mark of
        # their own.
        under_way = unwritten[0]
        is_one = len(unwritten) == 1
        if is_one and under_way is not None and not under_way.done():
            return under_way
        return self._send_home(copy, span, wait=wait)

    def _send_home(self, copy: Copy, span: Span, *, wait: bool) -> Transfer:
        """Start to move a span one step towards home. With `wait` it releases the lock while it waits for a slot."""
        if copy.tier is Tier.GPU:
            transfer = self._copy_down(copy, span, wait=wait)
        elif copy.block.extent is not None:
            transfer = self._write(copy, span)
        else:
            transfer = self._copy_up(copy, span)

        # An older write-back of these bytes stays a user of the slot. The new one decides whether the bytes are clean.
        copy.dirty(span)
        assign(copy.unwritten, span, transfer)

        # No slot is free yet, but threads that wait for one can now wait for this transfer.
        self._copies.wake()
        return transfer

    def _write(self, copy: Copy, span: Span) -> Transfer:
        """Start to write from RAM to NVMe, after older writes of the same bytes and reads past RAM."""
        files = self._files
        extent = copy.block.extent
        assert files is not None
        assert extent is not None
        key = copy.block.spec.key
        start, stop = span
        address = address_of(self._copies.view(copy, span), torch.uint8, stop - start)

        # A block's last page is written whole.
        end = extent.padded(stop)
        write = partial(files.write, key, extent, start, end, address)
        requires = copy.arriving(span)
        follows = [*copy.writes(), *copy.block.reads]
        return self._queues.submit("ram_to_nvme", key, end - start, write, requires, follows)

    def _copy_down(self, copy: Copy, span: Span, *, wait: bool) -> Transfer:
        """Start to copy from the GPU to RAM, into the home there or into a slot.

        If the block's home is on NVMe, the copy in the slot is dirty then.
        """
        block = copy.block
        key = block.spec.key

        # `place` may wait for a slot without the lock. The lease keeps others from evicting the copy.
        copy.num_leases += 1
        try:
            below = self._copies.place(block, Tier.RAM, span, wait=wait)
        finally:
            copy.num_leases -= 1

        # The bytes come from compute, in uses that were released before and in work that is enqueued now. The move
        # comes after both.
        compute = [transfer for transfer in copy.in_use() if transfer.queue == "compute"]
        requires = [*copy.arriving(span), *compute, *self._queues.point(key)]
        follows = self._copies.occupants(below)
        target = self._copies.view(below, span)
        source = self._copies.view(copy, span)
        queue = queue_to_ram(block.spec.kind)
        transfer = self._queues.to_ram(key, target, source, requires, follows, queue=queue)
        assign(below.fills, span, transfer)
        if block.extent is not None:
            below.dirty(span)  # the bytes are one step nearer to home, but not there yet
        return transfer

    def _copy_up(self, copy: Copy, span: Span) -> Transfer:
        """Start to copy from RAM to the home on the GPU."""
        key = copy.block.spec.key
        home = copy.block.find(Tier.GPU, span)
        requires = copy.arriving(span)

        # Compute that is enqueued now may still read the old bytes at home.
        follows = [*self._copies.occupants(home), *self._queues.point(key)]
        target = self._copies.view(home, span)
        source = self._copies.view(copy, span)
        transfer = self._queues.to_gpu(key, target, source, requires, follows)
        assign(home.fills, span, transfer)
        return transfer
