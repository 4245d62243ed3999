"""Arrays in chunk files: written from front to back, and read in any order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from megatier.checkpoint.chunkfile import ChunkFiles, Staged
from megatier.checkpoint.grid import ArrayChunk, Grid, StoredArray


class ArrayWriter:
    """One array, filled from its first element to its last."""

    def __init__(self, files: ChunkFiles, folder: Path, grid: Grid) -> None:
        """Nothing is written before the first chunk is full."""
        self._files = files
        self._folder = folder
        self._grid = grid
        self._chunks = grid.chunks()
        self._chunk = ArrayChunk("", 0, 0)
        self._staged: Staged | None = None
        self._filled = 0
        self.checksums: list[int] = []
        """CRC32C of each chunk that was filled."""

    def rooms(self, num_elements: int) -> Iterator[tuple[int, Tensor]]:
        """Buffers for the next elements, fp32 [n] each, with the first's number among them; filled by the caller.

        Raises:
            TransferError: an earlier write failed, or a file cannot be created.
        """
        done = 0
        while done < num_elements:
            if self._staged is None:
                self._chunk = next(self._chunks)
                self._staged = self._files.stage()
                self._filled = 0

            count = min(num_elements - done, self._chunk.num_elements - self._filled)
            yield done, self._staged.values(self._filled + count)[self._filled :]
            self._filled = self._filled + count
            done = done + count
            if self._filled == self._chunk.num_elements:
                path = self._folder / self._chunk.key
                whole = self._grid.chunk_elements
                self.checksums.append(self._files.write(self._staged, path, self._filled, whole))
                self._staged = None


class ArrayReader:
    """One array, read in any order, each chunk once if that is from its first element to its last."""

    def __init__(self, files: ChunkFiles, array: StoredArray) -> None:
        """Nothing is read."""
        self._files = files
        self._array = array
        self._chunks = list(array.grid.chunks())

    def copy(self, first: int, target: Tensor) -> None:
        """Copy elements from `first` on into fp32 [n].

        Raises:
            DamagedCheckpointError, TransferError: as in `ChunkFiles.read`.
        """
        stop = first + target.numel()
        index = bisect_right(self._chunks, first, key=lambda chunk: chunk.start) - 1
        while index < len(self._chunks) and (chunk := self._chunks[index]).start < stop:
            values = self._files.fetch(self._array, index, chunk)
            lower = max(first, chunk.start)
            upper = min(stop, chunk.start + chunk.num_elements)
            target[lower - first : upper - first] = values[lower - chunk.start : upper - chunk.start]
            index += 1
