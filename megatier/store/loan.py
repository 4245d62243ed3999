"""Lends the memory of the gpu tier to others, and takes it back with all that was at home there.

While it is lent, state at home on the GPU lies in RAM outside of the budgets. That copy stays the valid one until the
last of it is back, so whatever ends either way early loses nothing: `take_back` can be called again.

Threads: that of the caller alone, which has drained the queues. Nobody leases or moves bytes of the tier meanwhile.
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

Place = tuple[int, int, int]
"""Where a block is at home in the arena, where it lies in RAM meanwhile, and its bytes."""


class Loan:
    """The memory of one store's gpu tier, which others may use for a while."""

    def __init__(self, blocks: Blocks, copies: Copies, reservation: Reservation, queues: TierQueues) -> None:
        """Lend nothing yet."""
        self._blocks = blocks
        self._copies = copies
        self._reservation = reservation
        self._queues = queues
        self._ram: Arena | None = None
        """Room for the state at home on the GPU. It is kept for the next time, since pinning it takes seconds."""
        self._places: dict[str, Place] = {}
        """The blocks whose state is in RAM alone, by key."""
        self.is_lent = False
        """Whether the memory is lent, so that no byte of the tier may be asked for."""

    @property
    def num_bytes(self) -> int:
        """The bytes of state that are in RAM alone, while the memory is lent."""
        return sum(num_bytes for _, _, num_bytes in self._places.values())

    def lend(self, agreed: contextlib.AbstractContextManager[object] | None = None) -> None:
        """Write the state at home on the GPU to RAM, and give the memory of the tier back to the device.

        Args:
            agreed: surrounds what may fail; ranks agree in it, so that all of them lend or none does.

        Raises:
            CapacityError: RAM has no room for that state. Nothing was changed.
            LeaseHeldError, DirtyBlockError: bytes of the tier are in use, or not home yet.
        """
        with agreed or contextlib.nullcontext():
            self._settle()
            with self._copies.lock, self._copies.consistency.call:
                self._copies.empty(Tier.GPU)
            places = self._homes()
            self._reserve(places)
            self._settle()  # slots that were given back, which the CPU overwrites
            self._copy(places, to_ram=True)

        # In this order: an interrupt in between leaves memory that is lent in name alone, and `take_back` copies into
        # it what it has anyway.
        self._places = places
        self.is_lent = True
        self._reservation.lend(Tier.GPU)

    def check_ram(self) -> None:
        """Refuse to lend if RAM has no room for the state at home on the GPU, as it is now.

        Raises:
            CapacityError: it has none.
        """
        needed = sum(round_up(num_bytes) for _, _, num_bytes in self._homes().values())
        # Asked before: the kernel gives out more than there is, and ends a process that then uses it.
        free = ram_available_bytes()
        if self._ram is None and needed > free:
            raise CapacityError(
                "the GPU's state in RAM while its memory is lent",
                needed,
                free,
                "Lower tiers.gpu or tiers.ram, or generate without lending memory.",
            )

    def take_back(self) -> None:
        """Take the memory again, with the state that was at home there. If it is not lent, this does nothing.

        Raises:
            CapacityError: others still have the memory. The state is safe in RAM, and this may be called again.
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
        """Give the room in RAM back. State in it is lost, as all state is where the store closes."""
        self.is_lent = False
        self._places = {}
        if self._ram is not None:
            self._ram.close()
            self._ram = None

    def _homes(self) -> dict[str, Place]:
        """Return where all state at home on the GPU lies, and where it will lie in RAM."""
        places = {}
        offset = 0
        for key, block in self._blocks.by_key.items():
            # Between two steps nobody wants gradients.
            if block.spec.home is Tier.GPU and block.spec.kind is not Kind.GRAD:
                (home,) = [copy for copy in block.on(Tier.GPU) if copy.slot is None]
                places[key] = home.offset, offset, block.spec.num_bytes
                offset += round_up(block.spec.num_bytes)
        return places

    def _reserve(self, places: dict[str, Place]) -> None:
        """Take room in RAM, unless it was taken before."""
        needed = sum(round_up(num_bytes) for _, _, num_bytes in places.values())
        if self._ram is not None or not needed:
            return
        self.check_ram()
        self._ram = Arena(needed, torch.device("cpu"), pin=self._queues.pins)

    def _copy(self, places: dict[str, Place], *, to_ram: bool) -> None:
        """Copy state between its homes and RAM, and wait for that."""
        queue = "state_to_ram" if to_ram else "state_to_gpu"
        transfers: list[Transfer] = []
        for key, (offset, in_ram, num_bytes) in places.items():
            assert self._ram is not None
            home = self._reservation.view(Tier.GPU, offset, num_bytes)
            kept = self._ram.view(in_ram, num_bytes)
            target, source = (kept, home) if to_ram else (home, kept)
            work = partial(self._queues.copy, queue, target, source)
            # Counted as 0 bytes, since they belong to no step.
            transfers.append(self._queues.submit(queue, key, 0, work))
        for transfer in transfers:
            transfer.wait()

    def _settle(self) -> None:
        """Wait until nothing moves, and nothing computes on the device."""
        for queue in self._queues.queues.values():
            queue.settle()
        if self._queues.clock is not None:
            torch.cuda.synchronize()
