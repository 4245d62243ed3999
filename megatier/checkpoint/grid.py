"""Cuts an array into chunks, each of which is a file, as Zarr v3 names and shapes them. Pure arithmetic.

A chunk has whole rows of one axis, so its elements lie side by side in the array. That is what lets an array be written
and read from front to back, a chunk at a time, and by ranks that have a run of its elements each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

CHUNK_ELEMENTS = 8 << 20
"""Elements of a chunk at most, 32 MiB in fp32: large enough for the drive, and small enough for several to wait in
RAM."""


@dataclass(frozen=True, slots=True)
class ArrayChunk:
    """One chunk of an array: the elements that lie in one file."""

    key: str
    """Path of its file below the array's folder."""
    start: int
    """Number of its first element in the array."""
    num_elements: int
    """Number of its elements, without the padding at the array's edge."""


# One axis is cut, and no second one: else the elements of a chunk would not lie side by side.
@dataclass(frozen=True, slots=True)
class Grid:
    """The cut of an array along one axis.

    A chunk has several rows of that axis, each of them with all axes below, and a single place on each axis above.
    """

    shape: tuple[int, ...]
    axis: int
    """The axis that is cut; 0 if the shape is ()."""
    rows: int
    """Number of rows of a chunk along that axis."""

    @staticmethod
    def of(shape: Sequence[int], max_elements: int = CHUNK_ELEMENTS) -> Grid:
        """Cut an array as rarely as chunks of max_elements allow, and evenly, because the last chunk is padded."""
        # From the last axis up: the first axis that would make a chunk too large is the one that is cut.
        row = 1
        for axis in reversed(range(len(shape))):
            size = shape[axis]
            if row * size > max_elements or axis == 0:
                most = max(1, max_elements // row)
                parts = -(-size // most)
                return Grid(tuple(shape), axis, -(-size // parts))
            row *= size

        # A number without axes is one chunk, which Zarr calls `c`.
        return Grid((), 0, 1)

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """The shape of every chunk, padding included, as Zarr's metadata has it."""
        if not self.shape:
            return ()
        # Zarr cuts all axes alike in all places, so axes above the one that is cut have chunks of a single place.
        ones = (1,) * self.axis
        below = self.shape[self.axis + 1 :]
        return (*ones, self.rows, *below)

    @property
    def chunk_elements(self) -> int:
        """Number of elements of every chunk, padding included."""
        return math.prod(self.chunk_shape)

    def bounds(self, element: int) -> tuple[int, int]:
        """Return the elements [start, stop) of the chunk that an element lies in."""
        if not self.shape:
            return 0, 1

        # Chunks end where the cut axis does, so they are counted anew from each place on the axes above.
        row = math.prod(self.shape[self.axis + 1 :])
        axis = self.shape[self.axis] * row
        chunk = self.rows * row
        above = element - element % axis
        start = element - (element - above) % chunk
        return start, min(start + chunk, above + axis)

    def chunks(self) -> Iterator[ArrayChunk]:
        """Yield every chunk, in the order of the array's elements."""
        if not self.shape:
            yield ArrayChunk("c", 0, 1)
            return

        size = self.shape[self.axis]
        row = math.prod(self.shape[self.axis + 1 :])
        below = ["0"] * (len(self.shape) - self.axis - 1)

        places_above = product(*map(range, self.shape[: self.axis]))
        for number, above in enumerate(places_above):
            for first in range(0, size, self.rows):
                places = *map(str, above), str(first // self.rows), *below
                key = "/".join(["c", *places])
                start = (number * size + first) * row
                num_rows = min(self.rows, size - first)
                yield ArrayChunk(key, start, num_rows * row)


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array in a folder, and the checksums of what was written there."""

    folder: Path
    """The array's folder with all links resolved, so that a chunk that leads out of it by a link is found."""
    grid: Grid
    checksums: Sequence[int] | None = None
    """CRC32C of each chunk, in the order of chunks; None: nobody noted them."""
