"""Sets bytes of gpu and ram aside before anything is allocated, and makes arenas of them.

In a tier's arena the homes come first, and then the slots of each kind of block. Everything is counted against the
tier's budget when it is asked for, and allocated once. Every method is called with the store's lock held.
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
"""The tier of slots, and the kind of their blocks; None: all kinds that have no slots of their own."""


class Reservation:
    """The budgets, homes, slots and arenas of one store."""

    def __init__(
        self, budgets: Mapping[Tier, int], allocate: Allocate | None = None, locked_bytes: int | None = None
    ) -> None:
        """Take the budgets.

        Args:
            budgets: bytes per tier. Those on NVMe are only counted here; `BlockFiles` reserves them.
            allocate: gives the memory of the gpu tier on a CUDA device; None: torch does.
            locked_bytes: the most RAM to pin; None: as much as the driver takes.
        """
        self._locked_bytes = locked_bytes
        self._budgets = dict(budgets)
        self._allocate = allocate
        self._homes: Counter[tuple[Tier, Kind]] = Counter()
        """The bytes at home in each tier, by kind."""
        self._awaited_bytes = 0
        """The bytes at home in RAM of kinds that compute waits for."""
        self._wanted: dict[_PoolKey, tuple[int, int]] = {}
        """The size and the number of the slots that were asked for."""
        self._pools: dict[_PoolKey, SlotPool] = {}
        self._arenas: dict[Tier, Arena] = {}

    def reserve_home(self, spec: BlockSpec, tier: Tier) -> int:
        """Set the home of a block aside; return its offset in the tier's arena, for `view`.

        Raises:
            CapacityError: the budget is used up.
        """
        size = round_up(spec.num_bytes) - spec.elsewhere
        self._check_budget(tier, size)

        # Homes lie in the order in which they are asked for. The offset holds although the arena does not exist yet,
        # because nothing is put in front of them later.
        offset = self._home_bytes(tier)
        self._homes[tier, spec.kind] += size
        if tier is not Tier.RAM:
            return offset

        # In RAM, those that compute waits for lie behind all others, so that they are pinned before them. How far
        # behind is not known yet, so they are counted from their end.
        if spec.kind not in AWAITED:
            return offset - self._awaited_bytes
        self._awaited_bytes += size
        return -self._awaited_bytes

    def reserve_slots(self, tier: Tier, kind: Kind | None, slot_bytes: int, num_slots: int) -> None:
        """Set slots aside. Those of kind None serve all kinds that have no slots of their own.

        Raises:
            CapacityError: the budget is used up.
        """
        assert (tier, kind) not in self._wanted, f"{kind} has slots on {tier} already"
        num_bytes = round_up(slot_bytes) * num_slots
        self._check_budget(tier, num_bytes)
        self._wanted[tier, kind] = slot_bytes, num_slots

    def reserve_default_slots(self, specs: Sequence[BlockSpec]) -> None:
        """Make the rest of each tier's budget slots for the blocks that pass, if nobody has asked for slots there."""
        for tier in (Tier.GPU, Tier.RAM):
            self._default_slots(tier, [spec.num_bytes for spec in specs if spec.home is not tier])

    def _default_slots(self, tier: Tier, passing: Sequence[int]) -> None:
        """Make the rest of a tier's budget slots for blocks of these sizes."""
        has_slots = any(other is tier for other, _ in self._wanted)
        if not passing or has_slots:
            return
        left = self._budgets[tier] - self._home_bytes(tier)
        room = left // PAGE_BYTES * PAGE_BYTES
        if not room:
            return

        # The slots are as large as the largest block that fits. A block that is larger passes in spans.
        sizes = [round_up(size) for size in passing]
        largest = max((size for size in sizes if size <= room), default=room)

        # More slots than blocks would never be in use at once.
        num_slots = min(len(passing), room // largest)
        self._wanted[tier, None] = largest, num_slots

    def allocate(self, device: torch.device, clock: StreamClock | None) -> Staging | None:
        """Cut the slots and allocate the arenas.

        Args:
            device: that of the gpu tier.
            clock: its clock, if it is a CUDA device.

        Returns:
            What takes bytes between the GPU and RAM that is not pinned; None: all of RAM is.

        Raises:
            CapacityError: the system has less memory than the budgets say.
        """
        staging = None
        with ExitStack() as undone:
            undone.callback(self.close)

            # RAM first: threads touch its pages while the GPU's memory is allocated.
            for tier in (Tier.RAM, Tier.GPU):
                self._begin(tier, device)
            is_refused = False
            for arena in self._arenas.values():
                try:
                    arena.finish()
                except PageLockError:
                    # No error: bytes of RAM that is not pinned pass through rings.
                    is_refused = True

            ram = self._arenas.get(Tier.RAM)
            if ram is not None and (is_refused or self._is_short_of_locks(ram.num_bytes)):
                staging = Staging(self._locked_bytes, clock)
                undone.callback(staging.close)
                self._lock_end(ram, staging)
            undone.pop_all()
        return staging

    def _is_short_of_locks(self, num_bytes: int) -> bool:
        """Return whether an arena of this size in RAM has more than may be pinned."""
        return self._locked_bytes is not None and self._locked_bytes < num_bytes

    def _lock_end(self, ram: Arena, staging: Staging) -> None:
        """Pin what the rings leave of the limit: the slots, which lie at the end, and then homes."""
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
        # The homes lie at the offsets that `reserve_home` gave, so the slots come after them.
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
                # Both arenas are begun before either one is waited for (`allocate`).
                finishes=False,
            )

    def pool(self, tier: Tier, spec: BlockSpec, num_bytes: int) -> SlotPool:
        """Return the slots through which a block's bytes pass: those of its kind, or else those of all other kinds.

        Raises:
            CapacityError: there are no such slots, or they are smaller than num_bytes.
        """
        pool = self._pools.get((tier, spec.kind)) or self._pools.get((tier, None))

        # A pool without slots would let its blocks wait for ever, so it counts as one whose slots are too small.
        slot_bytes = pool.slot_bytes if pool is not None and pool.num_slots else 0
        if pool is None or slot_bytes < num_bytes:
            remedy = (
                f"The slots for {spec.kind} blocks on {tier} are too small: raise the {tier} budget or lease spans."
            )
            raise CapacityError(tier, num_bytes, slot_bytes, remedy)
        return pool

    def free_all(self) -> None:
        """Make all slots free, also those that copies have. Nothing may move in them any more."""
        for pool in self._pools.values():
            pool.free_all()

    def slot_bytes(self, tier: Tier, spec: BlockSpec) -> int:
        """Return the size of the slots through which a block's bytes pass.

        Raises:
            CapacityError: there are no such slots.
        """
        return self.pool(tier, spec, 1).slot_bytes

    def view(self, tier: Tier, offset: int, num_bytes: int) -> torch.Tensor:
        """Return uint8 [num_bytes] at an offset in a tier's arena; below 0, it counts from the end of all homes.

        Raises:
            ClosedError: the arenas were dropped.
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
        """Take the memory of a tier again; see `Arena.take_back`."""
        if tier in self._arenas:
            self._arenas[tier].take_back()

    def usage(self, tier: Tier) -> dict[str, int]:
        """Return the bytes at home in a tier by kind, those of its `slots`, and its `budget`."""
        kinds = {str(kind): size for (home, kind), size in self._homes.items() if home is tier}
        return kinds | {"slots": self._slot_bytes(tier), "budget": self._budgets[tier]}

    def close(self) -> None:
        """Unlock and drop the arenas. Nothing may move any more."""
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()

    def _check_budget(self, tier: Tier, num_bytes: int) -> None:
        """Refuse bytes that the budget of a tier has no room for."""
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
