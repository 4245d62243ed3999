"""Outside: moves between the homes of blocks and memory that is not the store's.

Activations that are offloaded go from tensors of compute to blocks in RAM or on NVMe, and back. Checkpoints read blocks
into buffers of their own. Such a move needs no lease: the home is never evicted, and the caller keeps the other memory.

An activation on NVMe passes through slots in RAM, piece by piece. No copy of the block is made of them: nobody else
looks at these bytes, and if a move fails they are lost with their step. So a slot is given back as soon as the moves
through it are submitted. The next moves into it come after them (`Slot.pending`), and nobody waits for a slot.

Every method is called with the lock of `Copies` held.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from megatier.address import address_of
from megatier.drives.blockfile import BlockFiles
from megatier.drives.extent import Extent
from megatier.errors import SpanError
from megatier.store.arena import Slot
from megatier.store.blocks import Blocks
from megatier.store.copies import Copies
from megatier.store.lanes import Lanes
from megatier.store.reservation import Reservation
from megatier.store.residency import Block, Copy, Span, assign, overlap
from megatier.store.transfer import Transfer
from megatier.tier import Tier, round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A part of a tensor, on its way through a slot in RAM between the GPU and NVMe."""

    outside: torch.Tensor
    """Its bytes on the GPU."""
    passing: torch.Tensor
    """As many bytes of the slot."""
    slot: Slot
    """The slot."""
    address: int
    """The first byte of the slot in RAM."""
    span: Span
    """The bytes of the block that it is on NVMe: whole granules, so there may be more of them."""


class Outside:
    """Starts moves between homes and memory outside of the store."""

    def __init__(
        self, blocks: Blocks, copies: Copies, reservation: Reservation, lanes: Lanes, files: BlockFiles | None
    ) -> None:
        """Take the blocks and copies, the slots, and what moves their bytes."""
        self._blocks = blocks
        self._copies = copies
        self._reservation = reservation
        self._lanes = lanes
        self._files = files

    def push(self, key: str, tensor: torch.Tensor, start: int) -> Transfer:
        """Start moving a contiguous tensor on the gpu device home: to ram or, through slots there, to NVMe.

        The tensor may be freed at once: its memory is not given to others before it has left the gpu.

        Args:
            key: the block.
            tensor: its bytes go to the block from `start` on.
            start: on NVMe, where a granule starts. What is moved there ends with a granule or with the block.

        Returns:
            The transfer after which the tensor has left the gpu. If it does not come home, `pull` says so.
        """
        block = self._blocks.find(key)
        if block.extent is not None:
            return self._push_through(block, block.extent, tensor, start)

        outside = _bytes_of(tensor)
        copy, inside = self._home(key, start, outside.numel())
        behind = [*copy.in_use(), *self._lanes.point(key)]
        transfer = self._lanes.to_ram(key, inside, outside, (), behind)

        # The bytes of the home are valid once the copy has ended: a `pull` of them comes after it.
        assign(copy.fills, (start, start + inside.numel()), transfer)
        return transfer

    def pull(self, key: str, tensor: torch.Tensor, start: int) -> Transfer:
        """Start moving what `push` took, from `start` on, into a contiguous tensor on the gpu device.

        Returns:
            The transfer after which it is there. It fails if any move of it failed, also on its way home.
        """
        block = self._blocks.find(key)
        if block.extent is not None:
            return self._pull_through(block, block.extent, tensor, start)

        outside = _bytes_of(tensor)
        copy, inside = self._home(key, start, outside.numel())
        after = copy.arriving((start, start + inside.numel()))
        behind = [*copy.in_use(), *self._lanes.point(key)]
        transfer = self._lanes.to_gpu(key, outside, inside, after, behind)

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
        start, stop = span
        extent = block.extent
        if extent is not None and self._files is not None:
            end = extent.padded(stop)
            address = address_of(target, torch.uint8, end - start)
            read = partial(self._files.read, key, extent, start, end, address)
            return self._lanes.submit("nvme_to_ram", key, 0, read)

        # This queue's copies let those pass that compute waits for.
        home = block.find(Tier.GPU, span)
        copy = partial(self._lanes.copy, "state_to_ram", target[: stop - start], self._copies.view(home, span))
        transfer = self._lanes.submit("state_to_ram", key, 0, copy)
        home.use(transfer)
        return transfer

    def _push_through(self, block: Block, extent: Extent, tensor: torch.Tensor, start: int) -> Transfer:
        """Start moving a tensor to NVMe through slots in RAM; returns the last copy to RAM."""
        files = self._files
        assert files is not None
        key = block.spec.key
        point = self._lanes.point(key)
        copied: list[Transfer] = []

        for piece in self._pieces(block, extent, tensor, start):
            # An older step that was given up may still move these bytes of the extent, however that ends.
            first, stop = piece.span
            older = _last_moves(block, piece.span)
            behind = [*piece.slot.pending, *point]
            copied = [self._lanes.to_ram(key, piece.passing, piece.outside, (), behind)]
            write = partial(files.write, key, extent, first, stop, piece.address)
            written = self._lanes.submit("ram_to_nvme", key, stop - first, write, copied, older)
            assign(block.outside, piece.span, written)

            # The write comes after the copy into the slot, so it is the last of the two to end.
            piece.slot.pool.give(piece.slot, [written])

        return copied[-1]

    def _pull_through(self, block: Block, extent: Extent, tensor: torch.Tensor, start: int) -> Transfer:
        """Start moving bytes from NVMe to a tensor through slots in RAM; returns the last copy from RAM."""
        files = self._files
        assert files is not None
        key = block.spec.key
        point = self._lanes.point(key)
        copied: list[Transfer] = []

        for piece in self._pieces(block, extent, tensor, start):
            # The bytes are on NVMe once the write has ended well, so the read fails if that failed.
            first, stop = piece.span
            written = _last_moves(block, piece.span)
            fill = partial(files.read, key, extent, first, stop, piece.address)
            read = self._lanes.submit("nvme_to_ram", key, stop - first, fill, written, piece.slot.pending)
            assign(block.outside, piece.span, read)

            # After the copy before, too: whoever waits for the last piece has the error of any other.
            after = [read, *copied]
            copied = [self._lanes.to_gpu(key, piece.outside, piece.passing, after, point)]
            piece.slot.pool.give(piece.slot, copied)

        return copied[-1]

    def _pieces(self, block: Block, extent: Extent, tensor: torch.Tensor, start: int) -> Iterator[_Piece]:
        """Cut a tensor into pieces that fit into slots in RAM, and take a slot for each. The caller gives it back."""
        outside = _bytes_of(tensor)
        assert self._files is not None
        granule = self._files.options.granule_bytes
        end = start + outside.numel()
        if start % granule or end > block.spec.num_bytes:
            raise SpanError(block.spec.key, (start, end), block.spec.num_bytes, granule)
        step = self._reservation.slot_bytes(Tier.RAM, block.spec)

        # A piece is whole granules, unless a single one has all of the block.
        if step < extent.num_bytes:
            step = step // granule * granule
        for first in range(start, end, step):
            part = outside[first - start : first - start + step]
            stop = min(round_up(first + part.numel(), granule), extent.num_bytes)
            size = stop - first

            slot = self._reservation.pool(Tier.RAM, block.spec, size).take()
            assert slot is not None, "each slot is given back before the next one is taken"
            inside = self._reservation.view(Tier.RAM, slot.offset, size)
            address = address_of(inside, torch.uint8, size)
            yield _Piece(outside=part, passing=inside[: part.numel()], slot=slot, address=address, span=(first, stop))

    def _home(self, key: str, start: int, num_bytes: int) -> tuple[Copy, torch.Tensor]:
        """Return the home of a block in RAM, and its bytes from `start` on."""
        block, span = self._blocks.span(key, (start, start + num_bytes))
        copy = block.find(Tier.RAM, span)
        return copy, self._copies.view(copy, span)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor: uint8, flat."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _last_moves(block: Block, wanted: Span) -> list[Transfer]:
    """The last moves between a part of a block on NVMe and memory outside; some may have ended."""
    moves = []
    for span, move in block.outside.items():
        if move is not None and overlap(span, wanted):
            moves.append(move)
    return moves
