"""Chunk files: fp32 arrays on disk as Zarr v3 lays them out, one file a chunk, with its CRC32C in the last four bytes.

A chunk is a run of consecutive elements of its array, so arrays are written and read from front to back through a few
staging buffers, whatever their size. If another order is asked for, each buffer keeps the chunk that it read last.

Bytes go through native threads, with several files in flight, and by O_DIRECT if the file system takes it. The end of a
file is no whole page, so it is read without O_DIRECT. Metadata is not written here, and nothing is synchronised.

Source: Zarr v3 core, codecs `bytes` (little endian) and `crc32c`.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from megatier import _native
from megatier.address import address_of
from megatier.checkpoint.chunk_access import check_place, check_size, create, open_direct, open_plain, typed_open_errors
from megatier.checkpoint.grid import ArrayChunk, StoredArray
from megatier.drives.io_engine import QUEUE_DEPTH_MAX, REQUEST_BYTES
from megatier.errors import DamagedCheckpointError, TransferError
from megatier.store.arena import Arena
from megatier.tier import PAGE_BYTES, round_up

CRC_BYTES = 4
"""The length of the checksum at the end of each file."""
STAGED = 8
"""Number of staging buffers: one that is being filled or looked at, and others on their way."""


@dataclass(kw_only=True, slots=True, eq=False)
class Staged:
    """A staging buffer, and the file that it goes to or comes from."""

    buffer: Tensor
    """uint8, page-aligned."""
    path: Path | None = None
    """The file that the buffer goes to, or that its bytes come from."""
    files: list[int] = field(default_factory=list)
    """Open descriptors: one to write, or two to read, of which the second is without O_DIRECT."""
    num_bytes: int = 0
    """Bytes of the file."""
    expected: int | None = None
    """CRC32C of what was written at this place; None if nobody noted it."""
    batch: _native.Batch | None = None
    """The transfer that was begun last."""

    def values(self, num_elements: int) -> Tensor:
        """Return the first elements, fp32 [num_elements]."""
        return self.buffer[: 4 * num_elements].view(torch.float32)

    def close(self) -> None:
        """Close the descriptors of the file."""
        # Each one leaves the list before it is closed, so that none is closed twice if this is called again.
        while self.files:
            os.close(self.files.pop())

    def crc(self) -> Tensor:
        """Return the place of the file's checksum, uint8 [4]."""
        return self.buffer[self.num_bytes - CRC_BYTES : self.num_bytes]

    def computed_crc(self) -> int:
        """Return the CRC32C of the file's bytes before its checksum."""
        size = self.num_bytes - CRC_BYTES
        return _native.crc32c(address_of(self.buffer, torch.uint8, size), size)

    def stored_crc(self) -> int:
        """Return the checksum that lies in the file, little endian."""
        return int.from_bytes(self.crc().numpy().tobytes(), "little")


class ChunkFiles:
    """Staging buffers and native threads for chunk files. Use as a context, from one thread at a time."""

    def __init__(self, chunk_elements: int, num_threads: int, num_staged: int = STAGED) -> None:
        """Allocate buffers for chunks of at most so many elements, and start the threads.

        Raises:
            CapacityError: the system refused the memory.
        """
        size = round_up(4 * chunk_elements + CRC_BYTES)
        arena = Arena(num_staged * size, torch.device("cpu"))
        self._free: deque[Staged] = deque()
        for index in range(num_staged):
            buffer = arena.view(index * size, size)
            self._free.append(Staged(buffer=buffer))
        self._flying: deque[Staged] = deque()
        self._pool = _native.ThreadPool(num_threads, QUEUE_DEPTH_MAX)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        # No request may outlive the buffers, so the threads end first.
        self._pool.close()
        for staged in self._flying:
            staged.close()
        self._flying.clear()

    def stage(self) -> Staged:
        """Return a buffer to fill; wait for one that is being written if none is free.

        Raises:
            TransferError: that write failed.
        """
        if not self._free:
            self._finish_write()
        return self._free.popleft()

    def write(self, staged: Staged, path: Path, num_elements: int, chunk_elements: int) -> int:
        """Start writing a buffer to a new file; the rest of a chunk that is not full becomes zeros.

        Args:
            staged: the buffer, which belongs to this object again from now on.
            path: the file; folders above it are made.
            num_elements: number of elements that are filled.
            chunk_elements: number of elements of a whole chunk.

        Returns:
            The CRC32C that the file ends with.

        Raises:
            TransferError: the file cannot be created.
        """
        # Zarr's chunks are all equally long. The buffer may hold the rest of another chunk.
        staged.values(chunk_elements)[num_elements:] = 0
        staged.path = path
        staged.num_bytes = 4 * chunk_elements + CRC_BYTES

        checksum = staged.computed_crc()
        digits = list(checksum.to_bytes(CRC_BYTES, "little"))
        staged.crc().copy_(torch.tensor(digits, dtype=torch.uint8, device="cpu"))
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            staged.files.append(create(path))
        except OSError as error:
            raise _make_transfer_error("creating", path, 0, error.errno) from error

        # O_DIRECT takes whole pages alone, so the last one is written whole. `_finish_write` cuts the file.
        self._flying.append(staged)
        size = round_up(staged.num_bytes)
        address = address_of(staged.buffer, torch.uint8, size)
        self._submit(staged, [(staged.files[0], 0, address, size)], write=True)
        return checksum

    def flush(self) -> None:
        """Wait until everything is written.

        Raises:
            TransferError: a write failed.
        """
        while self._flying:
            self._finish_write()

    def read(
        self, arrays: Sequence[StoredArray], wanted: Sequence[tuple[int, int]] | None = None
    ) -> Generator[tuple[int, int, Tensor], None, None]:
        """Yield the elements of arrays, each array from front to back.

        Args:
            arrays: where they lie.
            wanted: elements [start, stop) of each; None: all of them.

        Yields:
            The number of the array, the number of the first element in it, and elements fp32 [n], which are valid until
            the next ones are asked for.

        Raises:
            DamagedCheckpointError: a file is missing, of another size, no plain file in this folder, damaged, or not
                the one that was written at its place.
            TransferError: the drive failed.
        """
        bounds = wanted
        if bounds is None:
            sizes = [math.prod(array.grid.shape) for array in arrays]
            bounds = [(0, size) for size in sizes]

        chunks = []
        for index, (array, (start, stop)) in enumerate(zip(arrays, bounds, strict=True)):
            for place, chunk in enumerate(array.grid.chunks()):
                if start < chunk.start + chunk.num_elements and chunk.start < stop:
                    chunks.append((index, place, chunk))
        waiting = deque(chunks)
        reading = deque[Staged]()

        # Every free buffer reads ahead. One comes free when the caller asks for more, because it is done with that
        # chunk then.
        in_use: Staged | None = None
        try:
            for index, _, chunk in chunks:
                while self._free and waiting:
                    number, place, ahead = waiting.popleft()
                    reading.append(self._begin_read(arrays[number], place, ahead))

                in_use = reading.popleft()
                self._finish_read(in_use)

                start, stop = bounds[index]
                first = max(start, chunk.start)
                values = in_use.values(min(stop - chunk.start, chunk.num_elements))
                yield index, first, values[first - chunk.start :]
                self._free.append(in_use)
                in_use = None
        finally:
            # After damage, or if the caller stops early, others may use these buffers. One whose wait was interrupted
            # is still being read into.
            if in_use is not None and in_use in self._flying:
                reading.append(in_use)
            elif in_use is not None:
                in_use.path = None
                self._free.append(in_use)
            for staged in reading:
                self._drop(staged)

    def fetch(self, array: StoredArray, place: int, chunk: ArrayChunk) -> Tensor:
        """Return a chunk, fp32 with its padding, which is not read again before as many others as there are buffers.

        Args:
            array: where the array lies.
            place: number of the chunk in the array.
            chunk: the chunk of this number.

        Raises:
            DamagedCheckpointError, TransferError: see `read`.
        """
        # A free buffer still holds the chunk that its path names. One whose read failed is not among the free ones.
        # So a reader that goes back and forth at the border of two chunks does not read them again and again.
        path = array.folder / chunk.key
        staged = next((staged for staged in self._free if staged.path == path), None)
        if staged is None:
            # The buffer that was not used for longest is the first of the free ones.
            staged = self._begin_read(array, place, chunk)
            self._finish_read(staged)
        else:
            self._free.remove(staged)

        self._free.append(staged)
        return staged.values(array.grid.chunk_elements)

    def _begin_read(self, array: StoredArray, place: int, chunk: ArrayChunk) -> Staged:
        """Start reading a chunk into a free buffer.

        Raises:
            DamagedCheckpointError: its file is missing, of another size, or no plain file in this folder.
        """
        staged = self._free.popleft()
        path = array.folder / chunk.key
        staged.path = path
        staged.num_bytes = _file_bytes(array)
        staged.expected = None if array.checksums is None else array.checksums[place]

        # Among those in flight before it has a file, so that `__exit__` closes what was opened.
        self._flying.append(staged)
        staged.batch = None
        try:
            with typed_open_errors(path):
                staged.files.append(open_direct(path))
                staged.files.append(open_plain(path))
            check_size(path, staged.files[0], staged.num_bytes)
        except DamagedCheckpointError:
            self._drop(staged)
            raise

        # Whole pages go by O_DIRECT, and the rest through the descriptor that is without it.
        direct, plain = staged.files
        start = staged.num_bytes // PAGE_BYTES * PAGE_BYTES
        address = address_of(staged.buffer, torch.uint8, staged.num_bytes)
        pages = direct, 0, address, start
        rest = plain, start, address + start, staged.num_bytes - start
        self._submit(staged, [pages, rest], write=False)
        return staged

    def _finish_read(self, staged: Staged) -> None:
        """Wait for a chunk and compare it with its checksums.

        Raises:
            DamagedCheckpointError: it is damaged, or not the one that was written at its place.
            TransferError: the drive failed.
        """
        assert staged.batch is not None
        staged.batch.wait()
        self._flying.remove(staged)
        staged.close()
        _check(staged, "reading")

        stored_crc = staged.stored_crc()
        if stored_crc != staged.computed_crc():
            raise DamagedCheckpointError(str(staged.path), "is damaged: its checksum is not that of its bytes")

        if staged.expected is not None:
            assert staged.path is not None
            check_place(staged.path, stored_crc, staged.expected)

    def _drop(self, staged: Staged) -> None:
        """Give back a buffer whose chunk nobody wants any more, once nothing is on its way into it."""
        if staged.batch is not None:
            staged.batch.wait()
        self._flying.remove(staged)
        staged.close()
        staged.path = None
        self._free.append(staged)

    def _finish_write(self) -> None:
        """Wait for the write that was begun first, and cut its file to the file's size.

        Raises:
            TransferError: it failed.
        """
        # Files are finished in the order in which they were begun, so buffers come free in that order too.
        staged = self._flying[0]
        assert staged.batch is not None
        assert staged.path is not None
        staged.batch.wait()

        # The buffer is free whether or not the write went well.
        self._free.append(self._flying.popleft())
        try:
            _check(staged, "writing")
            os.ftruncate(staged.files[0], staged.num_bytes)
        except TransferError:
            raise
        except OSError as error:
            raise _make_transfer_error("writing", staged.path, 0, error.errno) from error
        finally:
            staged.close()

    def _submit(self, staged: Staged, segments: Sequence[tuple[int, int, int, int]], *, write: bool) -> None:
        # No table of checksums: the file's own covers all of it, and lies in the buffer.
        staged.batch = self._pool.submit_io(write, segments, 0, REQUEST_BYTES, REQUEST_BYTES)


def check_ends(array: StoredArray) -> None:
    """Compare sizes and checksums of chunks that are not read: whether each is the one that was written at its place.

    That costs four bytes a chunk. It finds what was exchanged, and no flipped bit.

    Raises:
        DamagedCheckpointError: see `ChunkFiles.read`.
    """
    num_bytes = _file_bytes(array)
    for chunk, expected in zip(array.grid.chunks(), array.checksums or (), strict=False):
        path = array.folder / chunk.key
        with typed_open_errors(path):
            file = open_plain(path)
            try:
                check_size(path, file, num_bytes)
                end = os.pread(file, CRC_BYTES, num_bytes - CRC_BYTES)
            finally:
                os.close(file)
        check_place(path, int.from_bytes(end, "little"), expected)


def _file_bytes(array: StoredArray) -> int:
    """Return the bytes of each chunk's file."""
    return 4 * array.grid.chunk_elements + CRC_BYTES


def _check(staged: Staged, action: str) -> None:
    """Raise the error of a transfer that is over, if it has one.

    Raises:
        TransferError: the drive failed.
    """
    assert staged.batch is not None
    error = staged.batch.error()
    if error is not None:
        assert staged.path is not None
        _, code, _, offset, *_ = error
        raise _make_transfer_error(action, staged.path, offset, code)


def _make_transfer_error(action: str, path: Path, offset: int, code: int | None) -> TransferError:
    return TransferError(f"{action} a checkpoint", "disk", str(path), offset, code or 0)
