"""How an array is cut into chunks, each of which is a file, as Zarr v3 names and shapes them. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

CHUNK_ELEMENTS = 8 << 20
"""32 MiB: large enough for the drive, small enough for several to wait in RAM."""


@dataclass(frozen=True, slots=True)
class ArrayChunk:
    """One chunk of an array."""

    key: str
    """Path of its file below the array's folder."""
    start: int
    """First element."""
    num_elements: int
    """Without the padding at the array's edge."""


@dataclass(frozen=True, slots=True)
class Grid:
    """How an array is cut: along one axis, with whole rows below it and single ones above it."""

    shape: tuple[int, ...]
    axis: int
    """0 where the shape is ()."""
    rows: int
    """Of a chunk, along the axis."""

    @staticmethod
    def of(shape: Sequence[int], max_elements: int = CHUNK_ELEMENTS) -> Grid:
        """Cut as rarely as chunks of max_elements allow, and evenly, since the last chunk is padded."""
        row = 1
        for axis in reversed(range(len(shape))):
            if row * shape[axis] > max_elements or axis == 0:
                parts = -(-shape[axis] // max(1, max_elements // row))
                return Grid(tuple(shape), axis, -(-shape[axis] // parts))
            row *= shape[axis]
        return Grid((), 0, 1)

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """As Zarr names it."""
        if not self.shape:
            return ()
        return (*(1,) * self.axis, self.rows, *self.shape[self.axis + 1 :])

    @property
    def chunk_elements(self) -> int:
        """Elements of every chunk, padding included."""
        return math.prod(self.chunk_shape)

    def chunks(self) -> Iterator[ArrayChunk]:
        """Every chunk, in the order of its elements."""
        if not self.shape:
            yield ArrayChunk("c", 0, 1)
            return
        size = self.shape[self.axis]
        row = math.prod(self.shape[self.axis + 1 :])
        below = ["0"] * (len(self.shape) - self.axis - 1)

        for number, above in enumerate(product(*map(range, self.shape[: self.axis]))):
            for first in range(0, size, self.rows):
                key = "/".join(["c", *map(str, above), str(first // self.rows), *below])
                yield ArrayChunk(key, (number * size + first) * row, min(self.rows, size - first) * row)


@dataclass(frozen=True, slots=True)
class StoredArray:
    """Where an array lies, and what was written there."""

    folder: Path
    """Resolved already: no link may lead out of it."""
    grid: Grid
    checksums: Sequence[int] | None = None
    """CRC32C of each chunk, by its place; None: nobody noted them."""
