"""The store of an optimizer's chunks of state.

Between steps every chunk is at home in RAM or on NVMe, or is being written there. For its update it comes to the tier
of its parameters: on a GPU to a slot in GPU memory, from NVMe by way of a slot in RAM.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megatier.store.lease import Lease
from megatier.store.store import TieredStore
from megatier.tier import PAGE_BYTES, BlockSpec, Kind, Tier, round_up
from megatier.tiered_adamw.chunks import AHEAD, SLOTS, ChunkPlan, StateChunk


class ChunkStore:
    """The chunks of a plan, which hold zeros at first. Use it from one thread.

    Attributes:
        chunks: all chunks, in the order of the parameters.
        tier: the tier in which they are updated.
        tiers: the store in which they lie.
    """

    def __init__(self, plan: ChunkPlan, nvme: Sequence[str], device: torch.device) -> None:
        """Allocate all memory and files of a plan.

        Args:
            plan: cuts and homes of the chunks.
            nvme: mounts, which are opened only if a chunk lies there.
            device: the device of the parameters, where chunks are updated.

        Raises:
            CapacityError: the system has less memory or disk than the budgets say.
            TransferError: a drive failed while its file was filled.
        """
        self.chunks = plan.chunks
        self.tier = _update_tier(device)
        gpu_slots = SLOTS if self.tier is Tier.GPU else 0
        ram_slots = plan.num_ram_slots
        slot_bytes = max(PAGE_BYTES, round_up(plan.slot_bytes))
        ram = plan.num_bytes(Tier.RAM) + ram_slots * slot_bytes
        drives = nvme if plan.num_bytes(Tier.NVME) else ()
        self.tiers = TieredStore.open(gpu=gpu_slots * slot_bytes, ram=ram, nvme=drives, device=str(device))

        # The store has created files by now, which only `close` removes.
        try:
            for chunk in self.chunks:
                self.tiers.register(BlockSpec(chunk.key, chunk.num_bytes, chunk.home, Kind.MOMENTS))
            self.tiers.reserve(Tier.GPU, None, slot_bytes, gpu_slots)
            self.tiers.reserve(Tier.RAM, None, slot_bytes, ram_slots)
            self.tiers.seal()
        except BaseException:
            self.tiers.close()
            raise

    # ------------------------------------------------------------------ for updates

    def prefetch(self, chunk: StateChunk) -> None:
        """Start bringing a chunk to the tier in which it is updated."""
        self.tiers.prefetch(chunk.key, self.tier, wait=True)

    def lease(self, chunk: StateChunk) -> Lease:
        """Wait for a chunk in the tier in which it is updated, and return the right to use it."""
        return self.tiers.lease(chunk.key, self.tier, wait=True)

    def give_back(self, chunk: StateChunk, lease: Lease) -> None:
        """Give a chunk back that was changed, and start its way home."""
        # Dirty before the lease ends: a slot that is neither leased nor dirty may be taken for another chunk.
        self.tiers.mark_dirty(chunk.key, self.tier)
        lease.release()
        self._leave(chunk, self.tier)

    # ------------------------------------------------------------------ for saving and loading

    def read(self, chunks: Sequence[StateChunk]) -> Generator[tuple[StateChunk, Tensor]]:
        """Yield chunks, each with its bytes in RAM, uint8, each valid until the next one.

        Close the generator if you do not exhaust it, because it holds the lease of the chunk that it gave last.
        """
        tiers = self.tiers
        for number, chunk in enumerate(chunks):
            for ahead in chunks[number : number + AHEAD + 1]:
                tiers.prefetch(ahead.key, Tier.RAM, wait=True)

            # What the caller raises meets a chunk that is only read, so that nothing is half done then.
            lent = tiers.lease(chunk.key, Tier.RAM, wait=True)
            with tiers.consistency.call, lent as lease, tiers.consistency.waiting():
                yield chunk, lease.bytes
            self._leave(chunk, Tier.RAM)

    @contextmanager
    def overwrite(self, chunk: StateChunk) -> Iterator[Tensor]:
        """Yield the bytes of a chunk in RAM, uint8, every one of which the caller overwrites."""
        tiers = self.tiers
        with tiers.lease(chunk.key, Tier.RAM, fresh=True, wait=True) as lease:
            yield lease.bytes
            # Before the lease ends, as in `give_back`.
            tiers.mark_dirty(chunk.key, Tier.RAM)
        self._leave(chunk, Tier.RAM)

    def _leave(self, chunk: StateChunk, tier: Tier) -> None:
        """Free the chunk's slot in a tier, after the bytes that home does not have yet have left it."""
        if chunk.home is tier:
            return

        # Neither call waits for the move: a copy that is evicted while it is written stays until that went well.
        self.tiers.write_back(chunk.key, tier, wait=True)
        self.tiers.evict(chunk.key, tier)

        # From the GPU a chunk at home on NVMe comes into a RAM slot, from which it has to go on.
        if tier is Tier.GPU:
            self._leave(chunk, Tier.RAM)


def _update_tier(device: torch.device) -> Tier:
    """Return the tier in which chunks are updated, which is that of the parameters."""
    return Tier.GPU if device.type == "cuda" else Tier.RAM
