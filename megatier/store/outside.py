"""Outside: moves between the homes of blocks and memory that is not the store's.

Activations that are offloaded go from tensors of compute to blocks in RAM and back. Checkpoints read blocks into
buffers of their own. Such a move needs no slot and no lease: the home is never evicted, and the caller keeps the other
memory.

Every method is called with the lock of `Copies` held.
"""

from __future__ import annotations

import torch

from megatier.drives.blockfile import BlockFiles
from megatier.store.blocks import Blocks
from megatier.store.copies import Copies
from megatier.store.lanes import Lanes
from megatier.store.residency import Block, Copy, Span, assign
from megatier.store.transfer import Transfer
from megatier.tier import Tier


class Outside:
    """Starts moves between homes and memory outside of the store."""

    def __init__(self, blocks: Blocks, copies: Copies, lanes: Lanes, files: BlockFiles | None) -> None:
        """Take the blocks and copies, and what moves their bytes."""
        self._blocks = blocks
        self._copies = copies
        self._lanes = lanes
        self._files = files

    def push(self, key: str, tensor: torch.Tensor) -> Transfer:
        """Start copying a tensor on the gpu device to a home in RAM; see `TieredStore.push`."""
        copy, inside, outside, behind = self._exchange(key, tensor)
        transfer = self._lanes.to_ram(key, inside, outside, (), behind)

        # The bytes of the home are valid once the copy has ended: a `pull` of them comes after it.
        assign(copy.fills, (0, inside.numel()), transfer)
        return transfer

    def pull(self, key: str, tensor: torch.Tensor) -> Transfer:
        """Start copying a home in RAM to a tensor on the gpu device; see `TieredStore.pull`."""
        copy, inside, outside, behind = self._exchange(key, tensor)
        transfer = self._lanes.to_gpu(key, outside, inside, copy.arriving((0, inside.numel())), behind)

        # The copy reads the home: the next `push` into it comes after this.
        copy.use(transfer)
        return transfer

    def copy_out(self, block: Block, span: Span, target: torch.Tensor) -> Transfer:
        """Start copying bytes from a home on the GPU or on NVMe to RAM outside of the store.

        `moved_bytes` does not count them, since they belong to no step.

        Args:
            block: a block whose write-backs are settled. Nobody may change the span before the transfer is over.
            span: bytes of the block.
            target: uint8 on the CPU, page aligned, as long as the span in whole pages. The caller keeps it until the
                transfer is over.
        """
        key = block.spec.key
        extent = block.extent
        files = self._files
        if extent is not None and files is not None:
            address = target.data_ptr()
            stop = extent.padded(span[1])
            return self._lanes.submit("nvme_to_ram", key, 0, lambda: files.read(key, extent, span[0], stop, address))

        home = block.find(Tier.GPU, span)
        queue = "state_to_ram"  # its copies let those pass that compute waits for
        inside = self._copies.view(home, span)
        outside = target[: span[1] - span[0]]
        transfer = self._lanes.submit(queue, key, 0, lambda: self._lanes.copy(queue, outside, inside))
        home.use(transfer)
        return transfer

    def _exchange(self, key: str, tensor: torch.Tensor) -> tuple[Copy, torch.Tensor, torch.Tensor, list[Transfer]]:
        """Return both ends of a move between a home in RAM and a tensor outside, and the transfers that come first.

        The tensor may have been made, or may still be read, by compute that is enqueued now. So the present point of
        compute comes first as well.
        """
        outside = tensor.detach().reshape(-1).view(torch.uint8)
        block, span = self._blocks.span(key, (0, outside.numel()))
        copy = block.find(Tier.RAM, span)
        return copy, self._copies.view(copy, span), outside, [*copy.in_use(), *self._lanes.point(key)]
