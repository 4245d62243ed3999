"""Fills: the moves that bring bytes up, into a slot that a copy has.

Bytes go up from NVMe through RAM slots to the GPU, or past them (`gds`), from the nearest tier that has them.

Every method is called with the lock of `Copies` held; `bring` lets go of it while it waits for a slot.
"""

from __future__ import annotations

from megatier.drives.blockfile import BlockFiles
from megatier.drives.gds import GpuReader
from megatier.errors import BlockNotFoundError
from megatier.store.copies import Copies
from megatier.store.lanes import Lanes, queue_to_gpu
from megatier.store.reservation import Reservation
from megatier.store.residency import Block, Copy, Span, assign, overlap, without
from megatier.tier import Tier


class Fills:
    """Starts the moves that fill copies."""

    def __init__(
        self,
        copies: Copies,
        reservation: Reservation,
        lanes: Lanes,
        files: BlockFiles | None,
        reader: GpuReader | None,
    ) -> None:
        """With a reader, NVMe -> GPU leaves RAM out."""
        self._copies = copies
        self._reservation = reservation
        self._lanes = lanes
        self._files = files
        self._reader = reader

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
            self._copies.unlease(copy)
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
        address = self._copies.view(copy, span).data_ptr()
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
        after = [*source.arriving(span), *self._lanes.point(key)]
        target = self._copies.view(copy, span)
        transfer = self._lanes.to_ram(key, target, self._copies.view(source, span), after, copy.slot.pending)
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

            source = self._copies.place(block, Tier.RAM, part, wait=wait)
            self.bring(source, part, wait=wait)
            after = source.arriving(part)
            behind = copy.slot.pending
            target = self._copies.view(copy, part)
            queue = queue_to_gpu(block.spec.kind)
            transfer = self._lanes.to_gpu(key, target, self._copies.view(source, part), after, behind, queue=queue)
            assign(copy.fills, part, transfer)
            source.use(transfer)  # whoever gets the slot in RAM next comes behind this move
            if passing:
                self._copies.evict(source)

    def _read_past_ram(self, copy: Copy, span: Span, reader: GpuReader) -> None:
        """NVMe -> GPU. Bytes that are leaving RAM for NVMe come first."""
        block = copy.block
        extent = copy.block.extent
        assert extent is not None
        assert copy.slot is not None

        # After the newest bytes, without which the extent is stale; behind older writes, however they end.
        target = self._copies.view(copy, (span[0], extent.padded(span[1])))
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
