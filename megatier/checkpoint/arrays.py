"""Writes and reads arrays in chunk files, in any order.

A chunk that is not full yet holds a staging buffer. So code that fills arrays in its own order must have as many
buffers as chunks may be open at once, and one more (`CheckpointWriter`); else `ChunkFiles.stage` has none to give.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from megatier.checkpoint.chunkfile import ChunkFiles, Staged
from megatier.checkpoint.grid import ArrayChunk, Grid, StoredArray


class ArrayWriter:
    """An array whose chunks are written as they become full. What fills a chunk may come in any order.

    Attributes:
        checksums: CRC32C of each chunk that was filled, by its number.
    """

    def __init__(self, files: ChunkFiles, folder: Path, grid: Grid) -> None:
        """Begin an array; nothing is written before a chunk is full.

        Args:
            files: staging buffers, which several arrays may share.
            folder: the array's folder, which is made with its first chunk.
            grid: how the array is cut.
        """
        self._files = files
        self._folder = folder
        self._grid = grid
        self._chunks = list(grid.chunks())
        self._opened: dict[int, tuple[Staged, int]] = {}
        """The buffers of chunks that are being filled, and how many elements they have, by the chunk's number."""
        self.checksums: dict[int, int] = {}

    def buffers(self, first: int, num_elements: int) -> Iterator[tuple[int, Tensor]]:
        """Yield buffers for consecutive elements, which the caller fills before it asks for the next buffer.

        Args:
            first: number of the first element in the array.
            num_elements: number of elements that the caller has.

        Yields:
            The number of the buffer's first element among these, and the buffer, fp32 [n].

        Raises:
            TransferError: an earlier write failed, or a file cannot be created.
        """
        # Units come in the order of the model, and an array's elements may begin anywhere in it.
        number = _number_of(self._chunks, first)
        done = 0
        while done < num_elements:
            # A chunk may be filled by several calls, and a call may fill several chunks.
            chunk = self._chunks[number]
            start = first + done - chunk.start
            stop = min(start + num_elements - done, chunk.num_elements)
            if number in self._opened:
                staged, filled = self._opened.pop(number)
            else:
                staged, filled = self._files.stage(), 0

            # Only when the caller comes back is the buffer filled, so it is counted after the yield.
            yield done, staged.values(stop)[start:]
            filled += stop - start
            done += stop - start
            if filled < chunk.num_elements:
                self._opened[number] = staged, filled
            else:
                path = self._folder / chunk.key

                # A file has a whole chunk always, so that other readers find elements by their position. The last one
                # is padded.
                whole = self._grid.chunk_elements
                self.checksums[number] = self._files.write(staged, path, filled, whole)
            number += 1


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

        for index in range(_number_of(self._chunks, first), len(self._chunks)):
            chunk = self._chunks[index]
            if chunk.start >= stop:
                return

            # The last chunk of an array may be padded, and its padding is none of the array's elements.
            values = self._files.fetch(self._array, index, chunk)
            lower = max(first, chunk.start)
            upper = min(stop, chunk.start + chunk.num_elements)
            wanted = values[lower - chunk.start : upper - chunk.start]
            target[lower - first : upper - first] = wanted


def _number_of(chunks: Sequence[ArrayChunk], element: int) -> int:
    """Return the number of the chunk that an element lies in: the last one that begins at or before it."""
    return bisect_right(chunks, element, key=lambda chunk: chunk.start) - 1
