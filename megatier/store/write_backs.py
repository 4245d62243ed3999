"""Write-backs: the moves that take bytes one step towards home, from a slot that a copy has.

State that is being written home keeps its slot until that went well, so that a failed write leaves it whole.

Every method is called with the lock of `Copies` held; `send_home` lets go of it while it waits for a slot.
"""

from __future__ import annotations

from megatier.drives.blockfile import BlockFiles
from megatier.store.copies import Copies
from megatier.store.lanes import Lanes, queue_to_ram
from megatier.store.residency import Copy, Span, assign
from megatier.store.transfer import Transfer
from megatier.tier import Tier


class WriteBacks:
    """Starts the moves that take the bytes of copies home."""

    def __init__(self, copies: Copies, lanes: Lanes, files: BlockFiles | None) -> None:
        """Take what is moved, and what moves it."""
        self._copies = copies
        self._lanes = lanes
        self._files = files

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
        self._copies.wake()  # no slot is free yet, but whoever waits for one has a transfer to wait for now
        return transfer

    def _write(self, copy: Copy, span: Span) -> Transfer:
        """RAM -> NVMe, behind an older write of the same bytes."""
        files = self._files
        extent = copy.block.extent
        assert files is not None
        assert extent is not None
        key = copy.block.spec.key
        address = self._copies.view(copy, span).data_ptr()
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
            below = self._copies.place(block, Tier.RAM, span, wait=wait)
        finally:
            copy.num_leases -= 1

        # Compute made the bytes: the uses that ended before this call, and whatever is enqueued now.
        compute = [transfer for transfer in copy.in_use() if transfer.queue == "compute"]
        after = [*copy.arriving(span), *compute, *self._lanes.point(key)]
        behind = self._copies.occupants(below)
        target = self._copies.view(below, span)
        queue = queue_to_ram(block.spec.kind)
        transfer = self._lanes.to_ram(key, target, self._copies.view(copy, span), after, behind, queue=queue)
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
        behind = [*self._copies.occupants(home), *self._lanes.point(key)]
        transfer = self._lanes.to_gpu(key, self._copies.view(home, span), self._copies.view(copy, span), after, behind)
        assign(home.fills, span, transfer)
        return transfer
