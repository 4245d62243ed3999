"""The extent of a block: its place on the mounts, and the checksums of its bytes.

A block is cut into stripes, which are distributed over the mounts by their shares. Every granule of 64 KiB has a
checksum in RAM, which is stored when the granule is written and compared when it is read. The end of a block may be in
parts of the user's own files (`base_files`), which are never written. Nothing here opens a file.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatier import _native
from megatier.errors import CapacityError
from megatier.files import FileVersion
from megatier.tier import round_up

STRIPE_BYTES = 32 << 20
"""The most bytes of one stripe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stripe:
    """A run of a block's bytes on one mount."""

    mount: int
    """The index of the mount."""
    file_offset: int
    """The offset of its first byte in the mount's file."""
    start: int
    """The offset of its first byte in the block."""
    num_bytes: int
    """Its length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """A run of a block's bytes in one of the user's own files."""

    path: Path
    """The file."""
    file_offset: int
    """The offset of its first byte there, which may be any."""
    start: int
    """The offset of its first byte in the block."""
    num_bytes: int
    """Its length."""
    version: FileVersion | None = None
    """The file, as it was when it was found there; None: that is not known."""


class Extent:
    """The place of one block, and the checksum of each of its granules."""

    __slots__ = ("checksums", "num_bytes", "own_bytes", "parts", "stripes")

    def __init__(self, num_bytes: int, stripes: tuple[Stripe, ...], checksums: npt.NDArray[np.uint32]) -> None:
        """Take the place of a block, in whole pages."""
        self.num_bytes = num_bytes
        """The size of the block, in whole pages."""
        self.stripes = stripes
        """Its stripes, in order."""
        self.checksums = checksums
        """The checksum of each granule: uint32 [granules]. Native threads store and compare them."""
        self.own_bytes = sum(stripe.num_bytes for stripe in stripes)
        """The bytes on the mounts, which come first. All others are in `parts`."""
        self.parts: tuple[FilePart, ...] = ()
        """The parts of files with the other bytes, in order, with zeros between them."""

    def padded(self, stop: int) -> int:
        """Return the end on the drive of a span that ends at `stop`. A block's last page is moved whole."""
        return round_up(stop)

    def stripe_parts(self, start: int, stop: int) -> Iterator[Stripe]:
        """Yield the parts of stripes with bytes [start, stop) of the block. Their offsets count from `start`."""
        # A block has few stripes, so a linear scan is enough.
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
    """The distribution of stripes over the mounts."""

    def __init__(self, budgets: Sequence[int], shares: Sequence[float], granule_bytes: int) -> None:
        """Use a budget in bytes and a share for each mount. Without shares, the budgets are the shares."""
        self._budgets = tuple(budgets)
        self._shares = tuple(shares or budgets)
        self._granule_bytes = granule_bytes
        self.capacity_bytes = sum(budgets)
        """The sum of the mounts' budgets."""
        self.used = [0] * len(self._budgets)
        """The bytes that are reserved on each mount."""

    def reserve(self, num_bytes: int, elsewhere: int = 0) -> Extent:
        """Reserve an extent for a block, in stripes over the mounts. It will hold zeros.

        Args:
            num_bytes: its size.
            elsewhere: bytes at its end that lie in other files, and take no place.

        Raises:
            CapacityError: the mounts' budgets are used up.
        """
        total = round_up(num_bytes) - elsewhere
        granule = self._granule_bytes
        assert not elsewhere or total % granule == 0, "every granule is read from mounts, or from other files"

        # If all mounts together have too little room, nothing is reserved.
        before = list(self.used)
        stripes = []
        start = 0
        while start < total:
            mount, size = self._next_mount(total - start)
            if not size:
                free = self.capacity_bytes - sum(before)
                self.used = before
                raise CapacityError("nvme", total, free, "Raise a mount's size in tiers.nvme or add a mount.")
            stripe = Stripe(
                mount=mount,
                file_offset=self.used[mount],
                start=start,
                num_bytes=size,
            )
            stripes.append(stripe)
            self.used[mount] += size
            start += size

        # Bytes in other files have checksums too, which `BlockFiles.note` sets.
        block_bytes = total + elsewhere
        checksums = zero_checksums(block_bytes, granule)
        return Extent(block_bytes, tuple(stripes), checksums)

    def _next_mount(self, missing: int) -> tuple[int, int]:
        """Return the mount that takes the next stripe, and the bytes that it takes; 0 if no mount has room.

        It is the one that has taken the least for its share, of those that have room.
        """
        best = (0, 0)
        least = math.inf
        for mount, (budget, used) in enumerate(zip(self._budgets, self.used, strict=True)):
            room = budget - used

            # Only the last stripe may end inside a granule, because every granule is on one mount.
            if room < missing:
                room -= room % self._granule_bytes
            # Stripes have a maximum, so that all mounts move a large block together.
            size = min(missing, STRIPE_BYTES, room)

            # Ties go by index, because a run that resumes from a savepoint needs the same stripes.
            taken = used / max(1, self._shares[mount])
            if size > 0 and taken < least:
                best = (mount, size)
                least = taken
        return best


@functools.cache
def zero_checksum(num_bytes: int) -> int:
    """Return the checksum of so many zeros."""
    zeros = np.zeros(num_bytes, dtype=np.uint8)
    return _native.checksum(zeros.ctypes.data, num_bytes)


def zero_checksums(num_bytes: int, granule_bytes: int) -> npt.NDArray[np.uint32]:
    """Return the checksum of each granule of so many zeros. The last granule may be shorter."""
    # Files are filled with zeros before use, so blocks are valid, and verified, from the start.
    num_granules = -(-num_bytes // granule_bytes)
    whole = zero_checksum(granule_bytes)
    checksums = np.full(num_granules, whole, dtype=np.uint32)
    tail_bytes = num_bytes % granule_bytes
    if tail_bytes:
        checksums[-1] = zero_checksum(tail_bytes)
    return checksums
