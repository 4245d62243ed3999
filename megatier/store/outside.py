"""Moves between the homes of blocks and memory outside of the store.

Offloaded activations move from tensors of compute to blocks in RAM or on NVMe, and back. Checkpoints read blocks into
their own buffers. Such a move needs no lease, because homes are never evicted and the caller keeps the other memory.

An activation on NVMe passes through slots in RAM, segment by segment. The block gets no copy there, because nobody else
uses these bytes, and if a move fails they are lost with their step. So a slot is free as soon as the moves through it
are submitted. The next moves into it follow them (`Slot.pending`), and no thread waits for a slot.

The caller of each method holds the lock of `Copies`.
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
from megatier.store.reservation import Reservation
from megatier.store.residency import Block, Copy, Span, assign, overlap
from megatier.store.tier_queues import TierQueues
from megatier.store.transfer import Transfer
from megatier.tier import Tier, round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    """A run of a tensor's bytes that passes through a slot in RAM between the GPU and NVMe."""

    on_gpu: torch.Tensor
    """Its bytes on the GPU."""
    in_ram: torch.Tensor
    """As many bytes of the slot."""
    slot: Slot
    """The slot."""
    address: int
    """The first byte of the slot in RAM."""
    span: Span
    """The bytes of the block on NVMe. They are whole granules, so there may be more of them."""


class Outside:
    """The moves between homes and memory outside of the store."""

    def __init__(
        self, blocks: Blocks, copies: Copies, reservation: Reservation, queues: TierQueues, files: BlockFiles | None
    ) -> None:
        """Use these parts of the store."""
        self._blocks = blocks
        self._copies = copies
        self._reservation = reservation
        self._queues = queues
        self._files = files

    def push(self, key: str, tensor: torch.Tensor, start: int) -> Transfer:
        """Start to move a contiguous tensor on the gpu device home: to ram or, through slots there, to NVMe.

        The caller may free the tensor at once, because its memory is not reused before it has left the gpu.

        Args:
            key: the key of the block.
            tensor: the bytes for the block from `start` on.
            start: a byte of the block; on NVMe the start of a granule.

        Returns:
            The transfer after which the tensor has left the gpu. If it does not get home, `pull` raises.
        """
        block = self._blocks.find(key)
        if block.extent is not None:
            return self._push_through(block, block.extent, tensor, start)

        outside = _bytes_of(tensor)
        span = start, start + outside.numel()
        home, inside = self._home(key, span)

        # Compute that is enqueued by now fills the tensor.
        follows = [*home.in_use(), *self._queues.point(key)]
        transfer = self._queues.to_ram(key, inside, outside, (), follows)

        # The home is valid when the copy has ended, so a `pull` comes after it.
        assign(home.fills, span, transfer)
        return transfer

    def pull(self, key: str, tensor: torch.Tensor, start: int) -> Transfer:
        """Start to move pushed bytes, from `start` on, into a contiguous tensor on the gpu device.

        Returns:
            The transfer after which the tensor is filled. It fails if any move of the bytes has failed, home or back.
        """
        block = self._blocks.find(key)
        if block.extent is not None:
            return self._pull_through(block, block.extent, tensor, start)

        outside = _bytes_of(tensor)
        span = start, start + outside.numel()
        home, inside = self._home(key, span)

        # Compute that is enqueued by now may still use the memory of the tensor.
        requires = home.arriving(span)
        follows = [*home.in_use(), *self._queues.point(key)]
        transfer = self._queues.to_gpu(key, outside, inside, requires, follows)

        # The copy reads the home, so the next `push` comes after it.
        home.use(transfer)
        return transfer

    def copy_out(self, block: Block, span: Span, target: torch.Tensor) -> Transfer:
        """Start to copy bytes from a home on the GPU or on NVMe to RAM outside of the store.

        `moved_bytes` does not count them, because they belong to no step.

        Args:
            block: a block whose write-backs are settled. The span must not change before the transfer is over.
            span: bytes of the block.
            target: uint8 on the CPU, page aligned, as long as the span in whole pages. Keep it until the transfer is
                over.
        """
        key = block.spec.key
        start, stop = span
        extent = block.extent
        if extent is not None and self._files is not None:
            end = extent.padded(stop)
            address = address_of(target, torch.uint8, end - start)
            read = partial(self._files.read, key, extent, start, end, address)
            return self._queues.submit("nvme_to_ram", key, 0, read)

        # Copies on `state_to_ram` yield to those for which compute waits.
        home = block.find(Tier.GPU, span)
        source = self._copies.view(home, span)
        work = partial(self._queues.copy, "state_to_ram", target[: stop - start], source)
        transfer = self._queues.submit("state_to_ram", key, 0, work)
        home.use(transfer)
        return transfer

    def _push_through(self, block: Block, extent: Extent, tensor: torch.Tensor, start: int) -> Transfer:
        """Start to move a tensor to NVMe through slots in RAM. Return the last copy to RAM."""
        files = self._files
        assert files is not None
        key = block.spec.key
        point = self._queues.point(key)
        copied: list[Transfer] = []

        for segment in self._segments(block, extent, tensor, start):
            first, stop = segment.span
            slot = segment.slot
            follows = [*slot.pending, *point]
            copied = [self._queues.to_ram(key, segment.in_ram, segment.on_gpu, (), follows)]

            # A step that was given up may still move these bytes of the extent.
            older = _last_moves(block, segment.span)
            write = partial(files.write, key, extent, first, stop, segment.address)
            written = self._queues.submit("ram_to_nvme", key, stop - first, write, copied, older)
            assign(block.outside, segment.span, written)

            # The write ends after the copy into the slot.
            slot.pool.give(slot, [written])

        return copied[-1]

    def _pull_through(self, block: Block, extent: Extent, tensor: torch.Tensor, start: int) -> Transfer:
        """Start to move bytes from NVMe to a tensor through slots in RAM. Return the last copy from RAM."""
        files = self._files
        assert files is not None
        key = block.spec.key
        point = self._queues.point(key)
        copied: list[Transfer] = []

        for segment in self._segments(block, extent, tensor, start):
            first, stop = segment.span
            slot = segment.slot

            # The read fails if the write of its bytes has failed.
            written = _last_moves(block, segment.span)
            fill = partial(files.read, key, extent, first, stop, segment.address)
            read = self._queues.submit("nvme_to_ram", key, stop - first, fill, written, slot.pending)
            assign(block.outside, segment.span, read)

            # The copy before is required too, so that a wait for the last one raises the error of any.
            requires = [read, *copied]
            copied = [self._queues.to_gpu(key, segment.on_gpu, segment.in_ram, requires, point)]
            slot.pool.give(slot, copied)

        return copied[-1]

    def _segments(self, block: Block, extent: Extent, tensor: torch.Tensor, start: int) -> Iterator[_Segment]:
        """Yield segments of a tensor that fit into slots in RAM, each with a slot that the caller gives back."""
        outside = _bytes_of(tensor)
        assert self._files is not None
        spec = block.spec
        granule = self._files.options.granule_bytes
        end = start + outside.numel()
        if start % granule or end > spec.num_bytes:
            raise SpanError(spec.key, (start, end), spec.num_bytes, granule)

        # A segment has whole granules, unless a single one has the whole block.
        step = self._reservation.slot_bytes(Tier.RAM, spec)
        if step < extent.num_bytes:
            step = step // granule * granule

        for first in range(start, end, step):
            on_gpu = outside[first - start : first - start + step]
            last = round_up(first + on_gpu.numel(), granule)
            stop = min(last, extent.num_bytes)
            num_bytes = stop - first

            slot = self._reservation.pool(Tier.RAM, spec, num_bytes).take()
            assert slot is not None, "each slot is given back before the next one is taken"
            passing = self._reservation.view(Tier.RAM, slot.offset, num_bytes)
            yield _Segment(
                on_gpu=on_gpu,
                in_ram=passing[: on_gpu.numel()],
                slot=slot,
                address=address_of(passing, torch.uint8, num_bytes),
                span=(first, stop),
            )

    def _home(self, key: str, span: Span) -> tuple[Copy, torch.Tensor]:
        """Return the home of a block in RAM, and the bytes of a span there."""
        block, span = self._blocks.span(key, span)
        home = block.find(Tier.RAM, span)
        return home, self._copies.view(home, span)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor: uint8, flat."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _last_moves(block: Block, wanted: Span) -> list[Transfer]:
    """Return the last moves between a part of a block on NVMe and memory outside. Some may have ended."""
    moves = []
    for span, move in block.outside.items():
        if move is not None and overlap(span, wanted):
            moves.append(move)
    return moves
