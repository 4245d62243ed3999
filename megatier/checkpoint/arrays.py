"""Arrays in chunk files: written from front to back, and read in any order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from megatier.checkpoint.chunkfile import ChunkFiles, Staged
from megatier.checkpoint.grid import ArrayChunk, Grid, StoredArray


class ArrayWriter:
    """An array that is written from its first element to its last.

    Attributes:
        checksums: CRC32C of each chunk that was filled, in the order of chunks.
    """

    def __init__(self, files: ChunkFiles, folder: Path, grid: Grid) -> None:
        """Begin an array; nothing is written before its first chunk is full.

        Args:
            files: staging buffers, which several arrays may share.
            folder: the array's folder, which is made with its first chunk.
            grid: how the array is cut.
        """
        self._files = files
        self._folder = folder
        self._grid = grid
        self._chunks = grid.chunks()
        self._chunk = ArrayChunk("", 0, 0)
        self._staged: Staged | None = None
        """The buffer of the chunk that is being filled; None between two chunks."""
        self._filled = 0
        """Number of elements in that buffer."""
        self.checksums: list[int] = []

    def rooms(self, num_elements: int) -> Iterator[tuple[int, Tensor]]:
        """Yield buffers for the next elements, which the caller fills before it asks for the next buffer.

        Args:
            num_elements: number of elements that the caller has.

        Yields:
            The number of the buffer's first element among these, and the buffer, fp32 [n].

        Raises:
            TransferError: an earlier write failed, or a file cannot be created.
        """
        done = 0
        while done < num_elements:
            if self._staged is None:
                self._chunk = next(self._chunks)
                self._staged = self._files.stage()
                self._filled = 0

            # A chunk may be filled by several calls, and a call may fill several chunks.
            count = min(num_elements - done, self._chunk.num_elements - self._filled)
            # Only when the caller comes back is the buffer filled, so it is counted after the yield.
            yield done, self._staged.values(self._filled + count)[self._filled :]
            self._filled += count
            done += count

            if self._filled == self._chunk.num_elements:
                path = self._folder / self._chunk.key
                whole = self._grid.chunk_elements
                self.checksums.append(self._files.write(self._staged, path, self._filled, whole))
                self._staged = None


class ArrayReader:
    """An array that is read in any order. Each chunk is read once if that order is the array's own."""

    def __init__(self, files: ChunkFiles, array: StoredArray) -> None:
        """Prepare to read; nothing is read yet."""
        self._files = files
        self._array = array
        self._chunks = list(array.grid.chunks())

    def copy(self, first: int, target: Tensor) -> None:
        """Copy consecutive elements of the array.

        Args:
            first: number of the first element.
            target: fp32 [n], which takes the elements.

        Raises:
            DamagedCheckpointError, TransferError: see `ChunkFiles.read`.
        """
        stop = first + target.numel()

        # The last chunk that begins at or before the first element.
        index = bisect_right(self._chunks, first, key=lambda chunk: chunk.start) - 1
        while index < len(self._chunks) and (chunk := self._chunks[index]).start < stop:
            values = self._files.fetch(self._array, index, chunk)
            lower = max(first, chunk.start)
            upper = min(stop, chunk.start + chunk.num_elements)
            target[lower - first : upper - first] = values[lower - chunk.start : upper - chunk.start]
            index += 1
