"""Fills: moves of bytes into a copy's slot, from the nearest tier that has them.

The tiers are gpu, ram and nvme. Bytes go up one tier at a time: from NVMe into a slot in RAM, and from there into a
slot on the GPU. With `tiers.gpu_direct` they go from NVMe to the GPU past RAM (`drives.gds`). Bytes at home on the GPU
may also be brought down to RAM.

A fill only starts its moves. Each one is a transfer on a queue, and the copy notes it in `Copy.fills`. The bytes are
valid when the transfer has succeeded. A move has two lists of transfers:

- `requires`: they bring the bytes that it moves. If one fails, the move does not begin, and fails with the same error.
- `follows`: they still use the slot that it writes to. It begins when they have ended or failed.

The caller of each method holds the lock of `Copies`. `bring` releases it while it waits for a slot.
"""

from __future__ import annotations

from functools import partial

import torch

from megatier.address import address_of
from megatier.drives.blockfile import BlockFiles
from megatier.drives.gds import GpuReader
from megatier.errors import BlockNotFoundError
from megatier.store.copies import Copies
from megatier.store.reservation import Reservation
from megatier.store.residency import Block, Copy, Span, assign, overlap, without
from megatier.store.tier_queues import TierQueues, queue_to_gpu
from megatier.store.transfer import Transfer
from megatier.tier import Tier


class Fills:
    """The moves that fill the copies of one store."""

    def __init__(
        self,
        copies: Copies,
        reservation: Reservation,
        queues: TierQueues,
        files: BlockFiles | None,
        reader: GpuReader | None,
    ) -> None:
        """Use these copies, queues and files. With a reader, bytes go from NVMe to the GPU past RAM."""
        self._copies = copies
        self._reservation = reservation
        self._queues = queues
        self._files = files
        self._reader = reader

    def bring(self, copy: Copy, span: Span, *, wait: bool) -> None:
        """Start the moves that make a span of a copy valid.

        With `wait` it releases the lock while it waits for slots in RAM.

        Raises:
            CapacityError: there is no slot in RAM to pass through, and not `wait`.
            BlockNotFoundError: no tier has the bytes.
            TransferError: the copy is at home, and a write-back to it failed, so no other lasting place has the bytes.
        """
        # A slot whose fill failed is filled again. But if bytes failed to get home, they may be nowhere else, so that
        # error is raised.
        if copy.slot is None:
            for transfer in copy.arriving(span):
                if transfer.failed():
                    transfer.wait()
        copy.forget_failures()

        # This may wait for slots in RAM without the lock, so a lease keeps this copy's own slot. After an error
        # `unlease` frees the slot if it got no bytes.
        copy.num_leases += 1
        try:
            for part in copy.missing(span):
                if copy.tier is Tier.GPU:
                    self._fill_gpu(copy, part, wait=wait)
                elif copy.block.extent is not None:
                    self._read(copy, part)
                else:
                    self._fill_ram(copy, part)
        except BaseException:
            self._copies.unlease(copy)
            raise
        copy.num_leases -= 1

        # A thread that looked for a slot during a wait saw this copy as leased, and may sleep since.
        self._copies.wake()

    def _read(self, copy: Copy, span: Span) -> None:
        """Start to read from NVMe into RAM."""
        files = self._files
        extent = copy.block.extent
        slot = copy.slot
        assert files is not None
        assert extent is not None
        assert slot is not None
        key = copy.block.spec.key
        start, stop = span
        address = address_of(self._copies.view(copy, span), torch.uint8, stop - start)

        # No write can be under way for these bytes, because `place` gives no second slot for them (rule 3 of `copies`).
        # The last page of a block is read whole. Slots have whole pages, so it fits.
        end = extent.padded(stop)
        read = partial(files.read, key, extent, start, end, address)
        transfer = self._queues.submit("nvme_to_ram", key, end - start, read, follows=slot.pending)
        assign(copy.fills, span, transfer)

    def _fill_ram(self, copy: Copy, span: Span) -> None:
        """Start to copy from the GPU into RAM: from the home there, or from a copy of a scratch block there."""
        key = copy.block.spec.key
        assert copy.slot is not None
        try:
            source = copy.block.find(Tier.GPU, span)
        except BlockNotFoundError:
            raise _no_bytes(key, span) from None

        # Compute that is enqueued already may still write the bytes, so the copy comes after it.
        requires = [*source.arriving(span), *self._queues.point(key)]
        target = self._copies.view(copy, span)
        brought = self._copies.view(source, span)
        transfer = self._queues.to_ram(key, target, brought, requires, copy.slot.pending)
        assign(copy.fills, span, transfer)
        source.use(transfer)

    def _fill_gpu(self, copy: Copy, span: Span, *, wait: bool) -> None:
        """Start to copy from RAM to the GPU. Bytes on NVMe pass through RAM in pieces that fit there, or go past it."""
        assert copy.slot is not None
        block = copy.block
        key = block.spec.key
        queue = queue_to_gpu(block.spec.kind)

        # Each round may wait for a slot without the lock, so each one looks anew whether RAM has its bytes.
        for part in self._ram_spans(block, span):
            in_ram = block.on(Tier.RAM)
            passes = not any(other.holds(part) and other.is_usable() for other in in_ram)
            if passes and self._reader is not None and block.extent is not None:
                self._read_past_ram(copy, part, self._reader)
                continue

            source = self._copies.place(block, Tier.RAM, part, wait=wait)
            self.bring(source, part, wait=wait)
            requires = source.arriving(part)
            follows = copy.slot.pending
            target = self._copies.view(copy, part)
            brought = self._copies.view(source, part)
            transfer = self._queues.to_gpu(key, target, brought, requires, follows, queue=queue)
            assign(copy.fills, part, transfer)

            # Bytes that only pass free their slot in RAM at once, because another piece may need it. The slot notes the
            # move, and the next move into it waits for that.
            source.use(transfer)

            # `place` may have waited without the lock. If another thread has brought the same bytes to RAM meanwhile,
            # and leased or changed them, they stay there.
            if passes and not source.num_leases and not source.unwritten:
                self._copies.evict(source)

    def _read_past_ram(self, copy: Copy, span: Span, reader: GpuReader) -> None:
        """Start to read from NVMe to the GPU past RAM, after bytes that are leaving RAM for NVMe are written."""
        block = copy.block
        key = block.spec.key
        extent = block.extent
        assert extent is not None
        assert copy.slot is not None

        start, stop = span
        end = extent.padded(stop)
        target = self._copies.view(copy, (start, end))

        # The read fails if a write of the newest bytes fails, because the extent is stale then. Older writes only have
        # to be over.
        requires: list[Transfer] = []
        follows = [*copy.slot.pending]
        leaving = [other for other in block.on(Tier.RAM) if not other.is_usable()]
        for other in leaving:
            requires += [write for write in other.unwritten.values() if write is not None]
            follows += other.writes()

        read = partial(reader.read, key, extent, start, target)
        transfer = self._queues.submit("nvme_to_gpu", key, target.numel(), read, requires, follows)
        assign(copy.fills, span, transfer)

        # A write waits for other reads of its extent by their slot in RAM. This read has none, so the block notes it.
        block.reads = [earlier for earlier in block.reads if not earlier.done()]
        block.reads.append(transfer)

    def _ram_spans(self, block: Block, span: Span) -> list[Span]:
        """Cut a span into the parts that RAM has now, and pieces of the rest that fit into slots there.

        Raises:
            BlockNotFoundError: the block is scratch, and RAM does not have all bytes.
        """
        first, last = span
        in_ram: list[Span] = []
        for copy in block.on(Tier.RAM):
            if overlap(copy.span, span) and copy.is_usable():
                start, stop = copy.span
                in_ram.append((max(start, first), min(stop, last)))

        missing = without(span, in_ram)
        if not missing:
            return sorted(in_ram)
        if self._reader is not None and block.extent is not None:
            return sorted([*in_ram, *missing])
        if block.spec.home is None:
            raise _no_bytes(block.spec.key, missing[0])

        # Reads are in whole granules, because each has a checksum. `Reservation.pool` refuses slots that are smaller.
        granule = self._files.options.granule_bytes if self._files is not None else 1
        slot_bytes = self._reservation.slot_bytes(Tier.RAM, block.spec)
        step = max(granule, slot_bytes // granule * granule)
        passing: list[Span] = []
        for start, stop in missing:
            for begin in range(start, stop, step):
                passing.append((begin, min(begin + step, stop)))
        return sorted([*in_ram, *passing])


def _no_bytes(key: str, span: Span) -> BlockNotFoundError:
    """Return the error for a scratch block whose bytes were never written."""
    return BlockNotFoundError(f"block {key} has no bytes {span} anywhere; lease it fresh first.")
