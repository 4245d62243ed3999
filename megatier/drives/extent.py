"""Extents: where a block lies on the mounts, and the checksums of its bytes.

A block is cut into stripes that are dealt to the mounts by their shares. Every chunk of 64 KiB has a checksum, held in
RAM, stored when it is written and verified when it is read. Nothing here opens a file.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatier import _native
from megatier.errors import CapacityError
from megatier.tier import round_up

STRIPE_BYTES = 32 << 20
"""Most bytes of one stripe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stripe:
    """A run of a block's bytes on one mount.

    Attributes:
        mount: index of the mount.
        file_offset: where it begins in the mount's file.
        start: where it begins in the block.
        num_bytes: its length.
    """

    mount: int
    file_offset: int
    start: int
    num_bytes: int


class Extent:
    """The place of one block, and the checksum of each of its chunks.

    Attributes:
        num_bytes: the block's size in whole pages.
        stripes: its pieces, in order.
        checksums: uint32 per chunk, in RAM. Native threads store them and compare with them.
    """

    __slots__ = ("checksums", "num_bytes", "stripes")

    def __init__(self, num_bytes: int, stripes: tuple[Stripe, ...], checksums: npt.NDArray[np.uint32]) -> None:
        """Take the place of a block, in whole pages."""
        self.num_bytes = num_bytes
        self.stripes = stripes
        self.checksums = checksums

    def padded(self, stop: int) -> int:
        """The end on the drive of a span that ends at `stop`: a block's last page is moved whole."""
        return round_up(stop)

    def pieces(self, start: int, stop: int) -> Iterator[Stripe]:
        """Give the parts of stripes that hold bytes [start, stop) of the block; a part's `start` counts from there."""
        for stripe in self.stripes:
            first = max(start, stripe.start)
            last = min(stop, stripe.start + stripe.num_bytes)
            if first < last:
                yield Stripe(
                    mount=stripe.mount,
                    file_offset=stripe.file_offset + first - stripe.start,
                    start=first - start,
                    num_bytes=last - first,
                )


class Striping:
    """Deals stripes to the mounts.

    Attributes:
        used: bytes reserved per mount.
        capacity_bytes: the sum of the mounts' budgets.
    """

    def __init__(self, budgets: Sequence[int], shares: Sequence[float], chunk_bytes: int) -> None:
        """Take a budget in bytes per mount, and the shares that they take; without shares, by their budgets."""
        self._budgets = tuple(budgets)
        self._shares = tuple(shares or budgets)
        self._chunk_bytes = chunk_bytes
        self.capacity_bytes = sum(budgets)
        self.used = [0] * len(self._budgets)

    def reserve(self, num_bytes: int) -> Extent:
        """Give a block its place, striped over the mounts; it will hold zeros.

        Raises:
            CapacityError: the mounts' budgets are used up.
        """
        total = round_up(num_bytes)
        chunk = self._chunk_bytes
        before = list(self.used)
        stripes = []
        start = 0
        while start < total:
            mount, size = self._next_mount(total - start)
            if not size:
                free = self.capacity_bytes - sum(before)
                self.used = before
                raise CapacityError("nvme", total, free, "Raise a mount's size in tiers.nvme or add a mount.")
            stripes.append(Stripe(mount=mount, file_offset=self.used[mount], start=start, num_bytes=size))
            self.used[mount] += size
            start += size
        return Extent(total, tuple(stripes), zero_checksums(total, chunk))

    def _next_mount(self, missing: int) -> tuple[int, int]:
        """The mount with room that has taken least for its share, and the bytes that it takes; 0 if none has room."""
        chunk = self._chunk_bytes
        free = [budget - used for budget, used in zip(self._budgets, self.used, strict=True)]
        sizes = [min(missing, STRIPE_BYTES, room if room >= missing else room // chunk * chunk) for room in free]
        best = min(range(len(free)), key=lambda i: (sizes[i] <= 0, self.used[i] / max(1, self._shares[i]), i))
        return best, max(0, sizes[best])


@functools.cache
def zero_checksum(num_bytes: int) -> int:
    """The checksum of so many zeros."""
    zeros = np.zeros(num_bytes, dtype=np.uint8)
    return _native.checksum(zeros.ctypes.data, num_bytes)


def zero_checksums(num_bytes: int, chunk_bytes: int) -> npt.NDArray[np.uint32]:
    """The checksum of each chunk of so many zeros; the last chunk may be shorter."""
    checksums = np.full(-(-num_bytes // chunk_bytes), zero_checksum(chunk_bytes), dtype=np.uint32)
    if tail := num_bytes % chunk_bytes:
        checksums[-1] = zero_checksum(tail)
    return checksums
