"""Arenas: the preallocated memory of a tier, and the equal slots that are cut from it.

An arena has the homes of a tier's blocks, and the slots through which other blocks pass. It is allocated once, at its
planned size, with every page touched. It is pinned if a CUDA device reads it, and it never grows.

In RAM it is a mapping of its own, because torch's pinned allocator rounds sizes up to powers of two, and ordinary
allocations have no huge pages. Without these a request has more than the 254 segments that the kernel takes at once,
which halves the speed of O_DIRECT.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from megatier.address import fill_bytes
from megatier.errors import CapacityError, MegatierError, PageLockError
from megatier.hardware import cores_usable
from megatier.page_lock import LOCKED_BYTES, PageLock
from megatier.store.transfer import Transfer
from megatier.tier import PAGE_BYTES, cut_at_addresses, round_up
from megatier.workers import Workers

HUGE_PAGE_BYTES = 2 << 20
POPULATE_BYTES = 64 << 20
"""The bytes that one thread touches at a time. They are few, so that all threads end at about the same time."""

Allocate = Callable[[int], torch.Tensor]
"""Allocates uint8 [n] of device memory, which the current stream fills with zeros."""

# Weak, so that a mapping is freed with its last view.
_MAPPINGS: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
"""All mappings of this process."""


def _keep_mappings() -> None:
    """Keep the mapping objects of a forked child alive for ever.

    The child does not inherit their memory, and may map other memory at their addresses, which they would unmap.
    """
    for mapping in _MAPPINGS:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))


os.register_at_fork(after_in_child=_keep_mappings)


class Touching:
    """Threads that write zeros to every page of new memory, from its start on."""

    def __init__(self, memory: torch.Tensor) -> None:
        """Begin with uint8 [n]."""
        # A thread touches cold memory of a virtual machine at 0.5 GB/s, so several threads do it.
        self._workers = Workers(cores_usable(), "megatier-arena")
        self._tasks = []
        for piece in memory.split(POPULATE_BYTES):
            fill = partial(fill_bytes, piece, 0)
            task = self._workers.submit(fill)
            self._tasks.append(task)

    def wait(self, num_bytes: int) -> None:
        """Wait until so many bytes from the start on were touched."""
        for task in self._tasks[: -(-num_bytes // POPULATE_BYTES)]:
            task.result()

    def close(self) -> None:
        """End the threads, without the pieces that they have not begun."""
        self._workers.close()


class Arena:
    """A contiguous region of bytes on one device.

    `bytes` is the whole region, uint8 [num_bytes], aligned to 2 MiB on the CPU. All other views are slices of it.
    """

    def __init__(
        self,
        num_bytes: int,
        device: torch.device,
        *,
        pin: bool = False,
        allocate: Allocate | None = None,
        finishes: bool = True,
    ) -> None:
        """Allocate the memory and touch every page, with huge pages if the kernel has them.

        Args:
            num_bytes: the size, which is rounded up to a page.
            device: "cuda" takes device memory in one allocation, "cpu" a private anonymous mapping.
            pin: whether to pin an arena on the CPU for the CUDA driver.
            allocate: allocates device memory; None: torch does.
            finishes: whether to wait for the end. Otherwise threads go on until the caller calls `finish`.

        Raises:
            CapacityError: the operating system or the driver refused the memory.
        """
        self.num_bytes = round_up(max(num_bytes, PAGE_BYTES))
        """The size, in whole pages."""
        self._pins = pin
        self._device = device
        self._allocate = allocate
        self._lock: PageLock | None = None
        self._touching: Touching | None = None
        self._mapping: mmap.mmap | None = None
        self._is_lent = False
        try:
            self.bytes = self._device_bytes() if device.type == "cuda" else self._mapped_bytes()
        except (MemoryError, OSError, torch.OutOfMemoryError) as error:
            tier = "gpu" if device.type == "cuda" else "ram"
            raise CapacityError(tier, self.num_bytes, 0, f"The system refused the memory ({error}).") from error
        self.address = self.bytes.data_ptr()
        """The address of its first byte."""
        if finishes:
            self.finish()

    def finish(self) -> None:
        """Wait until every page was touched, and pin the memory if that is wanted. The memory is not used before.

        Raises:
            PageLockError: the driver refused to pin it. All pages were touched, and `lock_end` may be tried.
        """
        if self._touching is None:
            return
        refused: PageLockError | None = None
        with closing(self._touching) as touching:
            if self._pins:
                refused = self._pin(touching)
            touching.wait(self.num_bytes)
        self._touching = None
        if refused is not None:
            raise refused

    def lock_end(self, first: int) -> int:
        """Pin the bytes from an offset on, or as much of the end as the driver allows; see `PageLock.add_end`."""
        self._lock = PageLock(self.address, ())
        return self._lock.add_end(self.address + first, self.num_bytes - first) + first

    def _pin(self, touching: Touching) -> PageLockError | None:
        """Pin the memory, in pieces that end at multiples of their size: `TierQueues` relies on that.

        Returns:
            The error, if the driver refused.
        """
        pieces = cut_at_addresses(self.address, self.num_bytes, LOCKED_BYTES)

        # Pin each piece when it was touched, while threads touch the next one.
        def touched() -> Iterator[tuple[int, int]]:
            for start, stop in pieces:
                touching.wait(stop)
                yield start, stop

        try:
            self._lock = PageLock(self.address, touched())
        except MegatierError as error:
            return PageLockError("ram", self.num_bytes, 0, str(error))
        return None

    def _device_bytes(self) -> torch.Tensor:
        if self._allocate is not None:
            filled = self._allocate(self.num_bytes)
        else:
            filled = torch.zeros(self.num_bytes, dtype=torch.uint8, device=self._device)

        # Queues copy on other streams, which do not wait for this one.
        torch.cuda.synchronize(self._device)
        return filled

    def _mapped_bytes(self) -> torch.Tensor:
        """Return a mapping of zeros, and begin to touch each page of it."""
        # A private mapping, because shared ones, which are Python's default, have no huge pages.
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mapping = mmap.mmap(-1, self.num_bytes + HUGE_PAGE_BYTES, flags=private)
        mapping.madvise(mmap.MADV_HUGEPAGE)

        # A forked child (a worker of a DataLoader) does not inherit it. Otherwise pages would be copied on write, and
        # the driver would use other pages than the tensors.
        mapping.madvise(mmap.MADV_DONTFORK)
        _MAPPINGS.add(mapping)
        self._mapping = mapping

        # np.frombuffer keeps the mapping alive as long as any view, which torch.frombuffer would not.
        whole = np.frombuffer(mapping, dtype=np.uint8)
        skip = -whole.ctypes.data % HUGE_PAGE_BYTES

        # Cut before torch sees it, because torch asks the start of a storage whether it is pinned.
        aligned = whole[skip : skip + self.num_bytes]
        used = torch.from_numpy(aligned)
        self._touching = Touching(used)
        return used

    @property
    def pinned(self) -> bool:
        """Whether the memory is pinned, so that copies from and to a CUDA device are asynchronous."""
        return self._lock is not None

    def view(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Return uint8 [num_bytes] at a byte offset."""
        assert not self._is_lent, "lent memory must not be used"
        return self.bytes[offset : offset + num_bytes]

    def lend(self) -> None:
        """Give the memory back to the device or system. Its bytes are lost, and views are empty until it is back.

        It must not be in use, and not pinned.
        """
        self._is_lent = True
        if self._mapping is not None:
            self._mapping.madvise(mmap.MADV_DONTNEED)
            return
        storage = self.bytes.untyped_storage()
        if storage.resizable():
            # The storage object stays, so that all views show the new memory later.
            storage.resize_(0)
        else:
            # Symmetric memory is freed with its last view, which is this one.
            self.bytes = self.bytes.new_empty(0)
        torch.cuda.empty_cache()

    def take_back(self) -> None:
        """Take the memory back, perhaps at another address.

        Raises:
            CapacityError: others still use it.
            MegatierError: others still use that of another rank.
        """
        if self._mapping is None:
            # Memory that torch caches may be fragmented.
            torch.cuda.empty_cache()
            try:
                if self.bytes.numel():
                    self.bytes.untyped_storage().resize_(self.num_bytes)
                else:
                    self.bytes = self._device_bytes()
            except torch.OutOfMemoryError as error:
                free, _ = torch.cuda.mem_get_info()
                remedy = "Whoever generated has to give its memory back first; then call this model again."
                raise CapacityError("gpu", self.num_bytes, free, remedy) from error
        self._is_lent = False

    def close(self) -> None:
        """Unlock the pages. The memory itself is freed when the last view of it is dropped."""
        if self._touching is not None:
            self._touching.close()
            self._touching = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None


@dataclass(slots=True, eq=False, kw_only=True)
class Slot:
    """A reusable piece of an arena, for one copy at a time."""

    offset: int
    """The offset of its first byte in the arena."""
    num_bytes: int
    """Its size."""
    pool: SlotPool
    """The pool of the slot."""
    pending: list[Transfer] = field(default_factory=list)
    """Moves of its last copy that may still use it. The next move into the slot waits for them."""


class SlotPool:
    """Equal slots, in the order in which they were freed.

    The slot that has been free for longest is taken next, because its pending moves have most likely ended.
    """

    def __init__(self, offset: int, slot_bytes: int, num_slots: int) -> None:
        """Cut num_slots slots of slot_bytes, page aligned, from `offset` on."""
        self.slot_bytes = round_up(slot_bytes)
        """The size of each slot, in whole pages."""
        self.num_slots = num_slots
        """The number of slots, free or not."""
        self._offset = offset
        self.free_all()

    def free_all(self) -> None:
        """Free all slots, even those of copies. No moves may use them any more."""
        self._free: deque[Slot] = deque()
        for number in range(self.num_slots):
            # The moves in the old slots have ended.
            slot = Slot(
                offset=self._offset + number * self.slot_bytes,
                num_bytes=self.slot_bytes,
                pool=self,
            )
            self._free.append(slot)

    @property
    def num_free(self) -> int:
        """The number of free slots."""
        return len(self._free)

    def take(self) -> Slot | None:
        """Return the slot that has been free for longest, or None."""
        return self._free.popleft() if self._free else None

    def give(self, slot: Slot, pending: list[Transfer]) -> None:
        """Free a slot. Its bytes may change only after the moves in `pending` have ended."""
        slot.pending = pending
        self._free.append(slot)
