"""The reservation of bytes of gpu and ram before anything is allocated, and the arenas that are made of them.

In a tier's arena the homes come first, and then the slots of each kind of block. All bytes count in the tier's budget
when they are reserved, and are allocated once. The caller of each method holds the store's lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch

from megatier.errors import CapacityError, ClosedError, PageLockError
from megatier.store.arena import Allocate, Arena, SlotPool
from megatier.store.staging import Staging
from megatier.store.stream_clock import StreamClock
from megatier.store.tier_queues import AWAITED
from megatier.tier import PAGE_BYTES, BlockSpec, Kind, Tier, round_up

_PoolKey = tuple[Tier, Kind | None]
"""The tier of slots, and the kind of their blocks; None: all kinds without slots of their own."""


class Reservation:
    """The budgets, homes, slots and arenas of one store."""

    def __init__(
        self, budgets: Mapping[Tier, int], allocate: Allocate | None = None, locked_bytes: int | None = None
    ) -> None:
        """Begin with nothing reserved.

        Args:
            budgets: bytes of each tier. Those on NVMe are only counted here; `BlockFiles` reserves them.
            allocate: allocates the gpu tier on a CUDA device; None: torch does.
            locked_bytes: the most RAM to pin; None: as much as the driver allows.
        """
        self._locked_bytes = locked_bytes
        self._budgets = dict(budgets)
        self._allocate = allocate
        self._homes: Counter[tuple[Tier, Kind]] = Counter()
        """The bytes at home in each tier, by kind."""
        self._awaited_bytes = 0
        """The bytes at home in RAM of the kinds for which compute waits."""
        self._wanted: dict[_PoolKey, tuple[int, int]] = {}
        """The size and number of the reserved slots."""
        self._pools: dict[_PoolKey, SlotPool] = {}
        self._arenas: dict[Tier, Arena] = {}

    def reserve_home(self, spec: BlockSpec, tier: Tier) -> int:
        """Reserve the home of a block. Return its offset in the tier's arena, for `view`.

        Raises:
            CapacityError: the budget is used up.
        """
        size = round_up(spec.num_bytes) - spec.elsewhere
        self._check_budget(tier, size)

        # Homes are in the order of reservation, from the start of the arena, so the offset is final.
        offset = self._home_bytes(tier)
        self._homes[tier, spec.kind] += size
        if tier is not Tier.RAM:
            return offset

        # In RAM the homes for which compute waits are behind all others, so that they are pinned first. Their offsets
        # count from the end of all homes, because the start is not known yet.
        if spec.kind not in AWAITED:
            return offset - self._awaited_bytes
        self._awaited_bytes += size
        return -self._awaited_bytes

    def reserve_slots(self, tier: Tier, kind: Kind | None, slot_bytes: int, num_slots: int) -> None:
        """Reserve slots. Those of kind None are for all kinds without slots of their own.

        Raises:
            CapacityError: the budget is used up.
        """
        assert (tier, kind) not in self._wanted, f"{kind} has slots on {tier} already"
        num_bytes = round_up(slot_bytes) * num_slots
        self._check_budget(tier, num_bytes)
        self._wanted[tier, kind] = slot_bytes, num_slots

    def reserve_default_slots(self, specs: Sequence[BlockSpec]) -> None:
        """In each tier without reserved slots, make slots of the rest of its budget, for the blocks that pass."""
        for tier in (Tier.GPU, Tier.RAM):
            self._default_slots(tier, [spec.num_bytes for spec in specs if spec.home is not tier])

    def _default_slots(self, tier: Tier, passing: Sequence[int]) -> None:
        """Make slots of the rest of a tier's budget, for blocks of these sizes."""
        has_slots = any(other is tier for other, _ in self._wanted)
        if not passing or has_slots:
            return
        left = self._budgets[tier] - self._home_bytes(tier)
        room = left // PAGE_BYTES * PAGE_BYTES
        if not room:
            return

        # Slots are as large as the largest block that fits. Larger blocks pass in spans.
        sizes = [round_up(size) for size in passing]
        largest = max((size for size in sizes if size <= room), default=room)

        # More slots than blocks would stay empty.
        num_slots = min(len(passing), room // largest)
        self._wanted[tier, None] = largest, num_slots

    def allocate(self, device: torch.device, clock: StreamClock | None) -> Staging | None:
        """Cut the slots and allocate the arenas.

        Args:
            device: the device of the gpu tier.
            clock: its clock, if it is a CUDA device.

        Returns:
            The rings for RAM that is not pinned; None: all of RAM is pinned.

        Raises:
            CapacityError: the system has less memory than the budgets say.
        """
        staging = None
        with ExitStack() as undone:
            undone.callback(self.close)

            # RAM first, because threads touch its pages while the GPU's memory is allocated.
            for tier in (Tier.RAM, Tier.GPU):
                self._begin(tier, device)
            is_refused = False
            for arena in self._arenas.values():
                try:
                    arena.finish()
                except PageLockError:
                    # RAM that is not pinned is copied through rings.
                    is_refused = True

            ram = self._arenas.get(Tier.RAM)
            if ram is not None and (is_refused or self._is_short_of_locks(ram.num_bytes)):
                staging = Staging(self._locked_bytes, clock)
                undone.callback(staging.close)
                self._lock_end(ram, staging)
            undone.pop_all()
        return staging

    def _is_short_of_locks(self, num_bytes: int) -> bool:
        """Return whether an arena of this size in RAM is larger than the limit of pinned RAM."""
        return self._locked_bytes is not None and self._locked_bytes < num_bytes

    def _lock_end(self, ram: Arena, staging: Staging) -> None:
        """Pin what the rings leave of the limit, from the end of the arena: first slots, then homes."""
        first = 0
        if self._locked_bytes is not None:
            left = max(0, self._locked_bytes - staging.num_bytes)
            first = max(0, ram.num_bytes - left // PAGE_BYTES * PAGE_BYTES)
        if staging.pins:
            first = ram.lock_end(first)
        staging.locked = ram.address + first, ram.address + ram.num_bytes
        staging.unlocked_bytes = first

    def _begin(self, tier: Tier, device: torch.device) -> None:
        """Cut the slots of a tier, and begin its arena."""
        # Homes have the offsets from `reserve_home`, so slots come after them.
        end = self._home_bytes(tier)
        for (pool_tier, kind), (slot_bytes, num_slots) in self._wanted.items():
            if pool_tier is tier:
                pool = SlotPool(end, slot_bytes, num_slots)
                self._pools[tier, kind] = pool
                end += pool.slot_bytes * num_slots

        if end:
            self._arenas[tier] = Arena(
                end,
                device if tier is Tier.GPU else torch.device("cpu"),
                pin=device.type == "cuda" and tier is Tier.RAM and not self._is_short_of_locks(end),
                allocate=self._allocate,
                # `allocate` begins both arenas before it waits for either.
                finishes=False,
            )

    def pool(self, tier: Tier, spec: BlockSpec, num_bytes: int) -> SlotPool:
        """Return the slots for a block: those of its kind, or else those for all other kinds.

        Raises:
            CapacityError: there are no such slots, or they are smaller than num_bytes.
        """
        pool = self._pools.get((tier, spec.kind)) or self._pools.get((tier, None))

        # With a pool without slots a block would wait for ever, so it counts as too small.
        slot_bytes = pool.slot_bytes if pool is not None and pool.num_slots else 0
        if pool is None or slot_bytes < num_bytes:
            remedy = (
                f"The slots for {spec.kind} blocks on {tier} are too small: raise the {tier} budget or lease spans."
            )
            raise CapacityError(tier, num_bytes, slot_bytes, remedy)
        return pool

    def free_all(self) -> None:
        """Free all slots, even those of copies. No moves may use them any more."""
        for pool in self._pools.values():
            pool.free_all()

    def slot_bytes(self, tier: Tier, spec: BlockSpec) -> int:
        """Return the size of the slots for a block.

        Raises:
            CapacityError: there are no such slots.
        """
        return self.pool(tier, spec, 1).slot_bytes

    def view(self, tier: Tier, offset: int, num_bytes: int) -> torch.Tensor:
        """Return uint8 [num_bytes] at an offset in a tier's arena. Below 0 it counts from the end of all homes.

        Raises:
            ClosedError: the store is closed.
        """
        arena = self._arenas.get(tier)
        if arena is None:
            raise ClosedError("the store is closed, and its memory is given back. Open another one.")
        start = offset if offset >= 0 else self._home_bytes(tier) + offset
        return arena.view(start, num_bytes)

    def lend(self, tier: Tier) -> None:
        """Give the memory of a tier back to the device; see `Arena.lend`."""
        if tier in self._arenas:
            self._arenas[tier].lend()

    def take_back(self, tier: Tier) -> None:
        """Take the memory of a tier back; see `Arena.take_back`."""
        if tier in self._arenas:
            self._arenas[tier].take_back()

    def usage(self, tier: Tier) -> dict[str, int]:
        """Return the bytes at home in a tier by kind, those of its `slots`, and its `budget`."""
        kinds = {str(kind): size for (home, kind), size in self._homes.items() if home is tier}
        return kinds | {"slots": self._slot_bytes(tier), "budget": self._budgets[tier]}

    def close(self) -> None:
        """Unpin and drop the arenas. Nothing may move any more."""
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()

    def _check_budget(self, tier: Tier, num_bytes: int) -> None:
        """Raise a CapacityError if the budget of a tier has no room for so many bytes."""
        taken = self._home_bytes(tier) + self._slot_bytes(tier)
        free = self._budgets[tier] - taken
        if num_bytes > free:
            remedy = f"Raise the {tier} budget or home fewer blocks there."
            raise CapacityError(tier, num_bytes, free, remedy)

    def _home_bytes(self, tier: Tier) -> int:
        """Return the bytes at home in a tier."""
        return sum(size for (home, _), size in self._homes.items() if home is tier)

    def _slot_bytes(self, tier: Tier) -> int:
        """Return the bytes of all slots of a tier."""
        wanted = [slots for (other, _), slots in self._wanted.items() if other is tier]
        return sum(round_up(slot_bytes) * num_slots for slot_bytes, num_slots in wanted)
