"""The loan of the gpu tier's memory to others, such as an engine that generates text.

While the memory is lent, state at home on the GPU is in RAM, outside of the budgets. That copy stays the valid one
until all of it is back. So an error on either way loses nothing, and `take_back` can be called again.

Threads: only the caller's, which has drained the queues. Meanwhile no bytes of the tier are leased or moved.
"""

from __future__ import annotations

import contextlib
from functools import partial

import torch

from megatier.errors import CapacityError
from megatier.hardware import ram_available_bytes
from megatier.store.arena import Arena
from megatier.store.blocks import Blocks
from megatier.store.copies import Copies
from megatier.store.reservation import Reservation
from megatier.store.tier_queues import TierQueues
from megatier.store.transfer import Transfer
from megatier.tier import Kind, Tier, round_up

HomePlace = tuple[int, int, int]
"""The offset of a block's home in the arena, its offset in RAM meanwhile, and its size."""


class Loan:
    """The loan of one store's gpu tier."""

    def __init__(self, blocks: Blocks, copies: Copies, reservation: Reservation, queues: TierQueues) -> None:
        """Begin without a loan."""
        self._blocks = blocks
        self._copies = copies
        self._reservation = reservation
        self._queues = queues
        self._ram: Arena | None = None
        """Room in RAM for the state at home on the GPU. It is kept, because pinning it takes seconds."""
        self._places: dict[str, HomePlace] = {}
        """By key, the blocks whose state is only in RAM."""
        self.is_lent = False
        """Whether the memory is lent, so that no bytes of the tier may be used."""

    @property
    def num_bytes(self) -> int:
        """The bytes of state that are only in RAM while the memory is lent."""
        return sum(num_bytes for _, _, num_bytes in self._places.values())

    def lend(self, agreed: contextlib.AbstractContextManager[object] | None = None) -> None:
        """Write the state at home on the GPU to RAM, and give the memory of the tier back to the device.

        Args:
            agreed: a context for the steps that may fail, in which ranks agree that all of them lend or none does.

        Raises:
            CapacityError: RAM has no room for that state. Nothing has changed.
            LeaseHeldError, DirtyBlockError: bytes of the tier are in use, or not home yet.
        """
        with agreed or contextlib.nullcontext():
            self._settle()
            with self._copies.lock, self._copies.consistency.call:
                self._copies.empty(Tier.GPU)
            places = self._homes()
            self._reserve(places)
            self._settle()  # without CUDA, freed slots are being overwritten
            self._copy(places, to_ram=True)

        # After an interrupt between these lines the memory is not lent yet, and `take_back` copies the same bytes
        # again.
        self._places = places
        self.is_lent = True
        self._reservation.lend(Tier.GPU)

    def check_ram(self) -> None:
        """Check that RAM has room for the state at home on the GPU.

        Raises:
            CapacityError: it has not.
        """
        needed = sum(round_up(num_bytes) for _, _, num_bytes in self._homes().values())

        # The kernel would grant more memory than there is, and kill the process when it uses that.
        free = ram_available_bytes()
        if self._ram is None and needed > free:
            raise CapacityError(
                "the GPU's state in RAM while its memory is lent",
                needed,
                free,
                "Lower tiers.gpu or tiers.ram, or generate without lending memory.",
            )

    def take_back(self) -> None:
        """Take the memory back, with the state that was at home there. Without a loan this does nothing.

        Raises:
            CapacityError: others still use the memory. The state is safe in RAM, and this may be called again.
        """
        if not self.is_lent:
            return
        self._settle()
        self._reservation.take_back(Tier.GPU)
        self._copy(self._places, to_ram=False)
        self.is_lent = False
        self._places = {}

    def saved(self, key: str) -> torch.Tensor:
        """Return the bytes of a block at home on the GPU, in RAM, while the memory is lent: uint8 [block]."""
        _, offset, num_bytes = self._places[key]
        assert self._ram is not None
        return self._ram.view(offset, num_bytes)

    def close(self) -> None:
        """Free the room in RAM. State in it is lost, as is all state when the store closes."""
        self.is_lent = False
        self._places = {}
        if self._ram is not None:
            self._ram.close()
            self._ram = None

    def _homes(self) -> dict[str, HomePlace]:
        """Return the places of all state at home on the GPU, there and in RAM."""
        places = {}
        offset = 0
        for key, block in self._blocks.by_key.items():
            # Between two steps gradients are not needed.
            if block.spec.home is Tier.GPU and block.spec.kind is not Kind.GRAD:
                (home,) = [copy for copy in block.on(Tier.GPU) if copy.slot is None]
                places[key] = home.offset, offset, block.spec.num_bytes
                offset += round_up(block.spec.num_bytes)
        return places

    def _reserve(self, places: dict[str, HomePlace]) -> None:
        """Allocate the room in RAM, unless it is there already."""
        needed = sum(round_up(num_bytes) for _, _, num_bytes in places.values())
        if self._ram is not None or not needed:
            return
        self.check_ram()
        self._ram = Arena(needed, torch.device("cpu"), pin=self._queues.pins)

    def _copy(self, places: dict[str, HomePlace], *, to_ram: bool) -> None:
        """Copy state between its homes and RAM, and wait for that."""
        queue = "state_to_ram" if to_ram else "state_to_gpu"
        transfers: list[Transfer] = []
        for key, (offset, in_ram, num_bytes) in places.items():
            assert self._ram is not None
            home = self._reservation.view(Tier.GPU, offset, num_bytes)
            kept = self._ram.view(in_ram, num_bytes)
            target, source = (kept, home) if to_ram else (home, kept)
            work = partial(self._queues.copy, queue, target, source)

            # 0 bytes are counted, because these belong to no step.
            transfers.append(self._queues.submit(queue, key, 0, work))
        for transfer in transfers:
            transfer.wait()

    def _settle(self) -> None:
        """Wait for all queues and for the device."""
        for queue in self._queues.queues.values():
            queue.settle()
        if self._queues.clock is not None:
            torch.cuda.synchronize()
