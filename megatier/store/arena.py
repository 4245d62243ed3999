"""Arenas: the preallocated region of a memory tier, and the equal slots cut from it.

Where it stands: an arena holds the home copies of a tier's blocks and the slots through which other blocks pass. It is
allocated once, exactly as large as planned, populated, page-locked where a CUDA device reads it, and never grown.

Why our own mapping: torch's pinned allocator rounds to powers of two, and ordinary allocations get no huge pages,
which halves O_DIRECT speed (a request has at most 254 segments).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch

from megatier import _native
from megatier.errors import CapacityError
from megatier.store.transfer import Transfer
from megatier.tier import PAGE_BYTES, round_up

HUGE_PAGE_BYTES = 2 << 20
POPULATE_BYTES = 256 << 20
"""Bytes that one thread touches at a time."""


_MAPPINGS: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
"""All mappings of this process."""


def _keep_mappings() -> None:
    """In a forked child nothing lies there, or something of its own: these objects must never unmap it."""
    for mapping in _MAPPINGS:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))


os.register_at_fork(after_in_child=_keep_mappings)


class Arena:
    """A contiguous region of bytes on one device.

    Attributes:
        num_bytes: its size, in whole pages.
        address: where it begins in memory.
        bytes: uint8 [num_bytes], 2 MiB aligned on the CPU; every other view of the arena is a slice of it.
        pinned: page-locked for a CUDA device, so that copies to and from it run asynchronously.
    """

    def __init__(self, num_bytes: int, device: torch.device, *, pin: bool = False) -> None:
        """Allocate and touch every page; huge pages are advised, not required.

        Args:
            num_bytes: exact size; rounded up to a page.
            device: "cuda" takes device memory in one allocation, "cpu" a private anonymous mapping.
            pin: register a CPU arena with the CUDA driver.

        Raises:
            CapacityError: the operating system or the driver refused the memory.
        """
        self.num_bytes = round_up(max(num_bytes, PAGE_BYTES))
        self.pinned = False
        try:
            self.bytes = self._device_bytes(device) if device.type == "cuda" else self._mapped_bytes()
        except (MemoryError, OSError, torch.OutOfMemoryError) as error:
            tier = "gpu" if device.type == "cuda" else "ram"
            raise CapacityError(tier, self.num_bytes, 0, f"The system refused the memory ({error}).") from error
        self.address = self.bytes.data_ptr()
        if pin:
            self._pin()

    def _pin(self) -> None:
        """Page-lock it."""
        cudart = torch.cuda.cudart()
        code = cudart.cudaHostRegister(self.address, self.num_bytes, 0)
        if code != cudart.cudaError.success:
            remedy = f"CUDA refused to page-lock it ({cudart.cudaGetErrorString(code)}); lower tiers.ram."
            raise CapacityError("ram", self.num_bytes, 0, remedy)
        self.pinned = True

    def _device_bytes(self, device: torch.device) -> torch.Tensor:
        filled = torch.zeros(self.num_bytes, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)  # lanes copy on streams of their own, which do not wait for the one that fills
        return filled

    def _mapped_bytes(self) -> torch.Tensor:
        """A mapping of zeros, each page of which was touched."""
        # Private and anonymous: Python's default shared mapping gets no huge pages.
        mapping = mmap.mmap(-1, self.num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_HUGEPAGE)

        # A forked child (a worker of a DataLoader) does not get it. Else the fork would mark every page, and whichever
        # process writes first would get a copy: the driver's pages would no longer be those that the tensors show.
        mapping.madvise(mmap.MADV_DONTFORK)
        _MAPPINGS.add(mapping)

        # np.frombuffer holds the buffer export: the mapping outlives every view (torch.frombuffer would not hold it).
        whole = np.frombuffer(mapping, dtype=np.uint8)
        skip = -whole.ctypes.data % HUGE_PAGE_BYTES
        # Cut before torch sees it: torch asks the start of the storage whether a tensor is pinned.
        used = torch.from_numpy(whole[skip : skip + self.num_bytes])

        # Cold memory of a virtual machine arrives at 0.5 GB/s a thread, so several touch it.
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            for start in range(0, self.num_bytes, POPULATE_BYTES):
                size = min(POPULATE_BYTES, self.num_bytes - start)
                threads.submit(_native.fill, used.data_ptr() + start, 0, size)
        return used

    def view(self, offset: int, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] at a byte offset."""
        return self.bytes[offset : offset + num_bytes]

    def close(self) -> None:
        """Unlock the pages. The memory itself goes when the last view is dropped."""
        if self.pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self.address))
            self.pinned = False


@dataclass(slots=True, eq=False, kw_only=True)
class Slot:
    """A reusable piece of an arena.

    Attributes:
        offset: where it begins in the arena.
        num_bytes: its size.
        pool: the pool that it goes back to.
        pending: moves that still read or write it; whoever fills it next comes behind them.
    """

    offset: int
    num_bytes: int
    pool: SlotPool
    pending: list[Transfer] = field(default_factory=list)


class SlotPool:
    """Equal slots in the order in which they were given back.

    The next one that is taken is the one free for longest: the moves that it still waits for have most likely ended.

    Attributes:
        slot_bytes: size of each slot, in whole pages.
        num_slots: how many slots there are, free or not.
    """

    def __init__(self, offset: int, slot_bytes: int, num_slots: int) -> None:
        """Cut num_slots pieces of slot_bytes, page aligned, from `offset` on."""
        self.slot_bytes = round_up(slot_bytes)
        self.num_slots = num_slots
        self._offset = offset
        self.take_back()

    def take_back(self) -> None:
        """Make all slots free, whoever had them. Nothing moves in them any more."""
        offsets = (self._offset + number * self.slot_bytes for number in range(self.num_slots))
        self._free = deque(Slot(offset=offset, num_bytes=self.slot_bytes, pool=self) for offset in offsets)

    @property
    def num_free(self) -> int:
        """Slots that nobody occupies."""
        return len(self._free)

    def take(self) -> Slot | None:
        """The slot free for longest, or None."""
        return self._free.popleft() if self._free else None

    def give(self, slot: Slot, pending: list[Transfer]) -> None:
        """Take a slot back; `pending` must end before its bytes may change."""
        slot.pending = pending
        self._free.append(slot)
