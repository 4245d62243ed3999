"""The chunks of an optimizer in a store of their own.

Between steps every chunk is at home, in RAM or on NVMe, or on its way there. For its update it comes to the tier where
its parameters are. On a GPU it passes through slots in GPU memory, and from NVMe through RAM slots as well.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megatier.integrations.chunks import AHEAD, SLOTS, Chunk, ChunkPlan
from megatier.store.lease import Lease
from megatier.store.store import TieredStore
from megatier.tier import PAGE_BYTES, BlockSpec, Kind, Tier, round_up


class ChunkStore:
    """State of zeros, to begin with. Use it from one thread.

    Attributes:
        chunks: all of them, in the order of the parameters.
        tier: where they are updated.
    """

    def __init__(self, plan: ChunkPlan, nvme: Sequence[str], device: torch.device, tier: Tier) -> None:
        """Allocate all memory and files of a plan.

        Args:
            plan: cuts and homes.
            nvme: mounts, used if something lies there.
            device: of the gpu tier.
            tier: where chunks are updated; ram or gpu.

        Raises:
            CapacityError: the system has less memory or disk than the budgets say.
            TransferError: a drive failed while its file was filled.
        """
        self.chunks, self.tier = plan.chunks, tier
        gpu_slots, ram_slots = SLOTS if tier is Tier.GPU else 0, plan.num_ram_slots
        slot_bytes = max(PAGE_BYTES, round_up(plan.slot_bytes))
        ram = plan.num_bytes(Tier.RAM) + ram_slots * slot_bytes
        drives = nvme if plan.num_bytes(Tier.NVME) else ()
        self._store = TieredStore.open(gpu=gpu_slots * slot_bytes, ram=ram, nvme=drives, device=str(device))
        try:
            for chunk in self.chunks:
                self._store.register(BlockSpec(chunk.key, chunk.num_bytes, chunk.home, Kind.MOMENTS))
            self._store.reserve(Tier.GPU, None, slot_bytes, gpu_slots)
            self._store.reserve(Tier.RAM, None, slot_bytes, ram_slots)
            self._store.seal()
        except BaseException:
            self._store.close()
            raise

    # ------------------------------------------------------------------ for updates

    def prefetch(self, chunk: Chunk) -> None:
        """Start bringing a chunk to where it is updated."""
        self._store.prefetch(chunk.key, self.tier, wait=True)

    def lease(self, chunk: Chunk) -> Lease:
        """A chunk where it is updated."""
        return self._store.lease(chunk.key, self.tier, wait=True)

    def give_back(self, chunk: Chunk, lease: Lease) -> None:
        """The chunk was changed: start its way home."""
        self._store.mark_dirty(chunk.key, self.tier)
        lease.release()
        self._leave(chunk, self.tier)

    # ------------------------------------------------------------------ for saving and loading

    def read(self) -> Generator[tuple[Chunk, Tensor]]:
        """Every chunk in RAM, uint8, one after another, each valid until the next. Close it: none is kept then."""
        for number, chunk in enumerate(self.chunks):
            for ahead in self.chunks[number : number + AHEAD + 1]:
                self._store.prefetch(ahead.key, Tier.RAM, wait=True)
            tear = self._store.tear
            with tear.call, self._store.lease(chunk.key, Tier.RAM, wait=True) as lease, tear.waiting():
                yield chunk, lease.bytes
            self._leave(chunk, Tier.RAM)

    @contextmanager
    def overwrite(self, chunk: Chunk) -> Iterator[Tensor]:
        """A chunk in RAM, uint8, every byte of which is new afterwards."""
        with self._store.lease(chunk.key, Tier.RAM, fresh=True, wait=True) as lease:
            yield lease.bytes
            self._store.mark_dirty(chunk.key, Tier.RAM)
        self._leave(chunk, Tier.RAM)

    @property
    def is_torn(self) -> bool:
        """Something broke off while a chunk was taken or given back."""
        return self._store.tear.is_torn

    def reset(self) -> None:
        """After something broke off: nobody has a chunk any more. Overwrite all of them."""
        self._store.reset()

    def close(self) -> None:
        """Finish all moves, remove the files, free the memory. Safe to call twice."""
        self._store.close()

    def _leave(self, chunk: Chunk, tier: Tier) -> None:
        """Free the chunk's slot in a tier, behind the move of what home has not."""
        if chunk.home is tier:
            return
        self._store.write_back(chunk.key, tier, wait=True)
        self._store.evict(chunk.key, tier)
        if tier is Tier.GPU:
            self._leave(chunk, Tier.RAM)
