"""Memory that native threads put together from parts of files, which begin at any byte."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from block_files import memory

from megatier import _native

GRANULE_BYTES = 16384
NUM_BYTES = 10 * GRANULE_BYTES + 4096
REQUEST_BYTES = 2 * GRANULE_BYTES
SIZES = (3 * GRANULE_BYTES + 5, 9 * GRANULE_BYTES - 1000)
"""Bytes of the files, none of which ends with a page."""


@pytest.fixture
def pool() -> Iterator[_native.ThreadPool]:
    pool = _native.ThreadPool(2, 8)
    yield pool
    pool.close()


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def files(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[int]]:
    found = []
    for index, size in enumerate(SIZES):
        (tmp_path / str(index)).write_bytes(memory(size, seed=index).tobytes())
        found.append(os.open(tmp_path / str(index), os.O_RDONLY | (os.O_DIRECT if request.param else 0)))
    yield found
    for file in found:
        os.close(file)


class Gather:
    """Parts of both files with gaps between them, and what they come to."""

    def __init__(self, files: list[int]) -> None:
        self.target = memory(NUM_BYTES + 4096, seed=7)
        self.expected = np.zeros(NUM_BYTES, np.uint8)
        self.parts: list[tuple[int, int, int, int]] = []
        end = SIZES[1] - 2 * GRANULE_BYTES
        for index, offset, start, size in (
            (0, 8, 256, 1000),  # inside one page
            (0, 4090, 1256, 12),  # over the border of two pages, right behind the part before
            (1, 24, 4096, 4 * GRANULE_BYTES),  # over the borders of requests
            (0, SIZES[0] - 77, 5 * GRANULE_BYTES, 77),  # the last bytes of a file
            (1, end, 6 * GRANULE_BYTES + 8, 2 * GRANULE_BYTES),
        ):
            content = memory(SIZES[index], seed=index)
            self.expected[start : start + size] = content[offset : offset + size]
            self.parts.append((files[index], offset, self.target.ctypes.data + start, size))
        starts = range(0, NUM_BYTES, GRANULE_BYTES)
        address = self.expected.ctypes.data
        sums = [_native.checksum(address + start, min(GRANULE_BYTES, NUM_BYTES - start)) for start in starts]
        self.checksums = np.array(sums, np.uint32)

    def submit(self, pool: _native.ThreadPool, request_bytes: int = REQUEST_BYTES) -> _native.Batch:
        memory = self.target.ctypes.data, NUM_BYTES
        table = self.checksums.ctypes.data
        batch = pool.submit_gather(*memory, self.parts, table, GRANULE_BYTES, request_bytes)
        assert batch.wait()
        return batch


@pytest.mark.parametrize("request_bytes", [1, REQUEST_BYTES, 1 << 20])
def test_gather_puts_parts_at_any_byte_together_and_touches_nothing_else(
    pool: _native.ThreadPool, files: list[int], request_bytes: int
) -> None:
    gather = Gather(files)
    beyond = gather.target[NUM_BYTES:].copy()
    assert gather.submit(pool, request_bytes).error() is None
    assert np.array_equal(gather.target[:NUM_BYTES], gather.expected)
    assert np.array_equal(gather.target[NUM_BYTES:], beyond)


def test_gather_of_a_file_that_was_cut_is_short_and_names_the_part(
    pool: _native.ThreadPool, files: list[int], tmp_path: Path
) -> None:
    gather = Gather(files)
    os.truncate(tmp_path / "0", SIZES[0] - 50)
    error = gather.submit(pool).error()
    assert error is not None
    assert (error[0], error[2], error[3]) == ("short", 3, SIZES[0] - 50)


def test_gather_of_other_bytes_names_the_part_and_its_place(
    pool: _native.ThreadPool, files: list[int], tmp_path: Path
) -> None:
    gather = Gather(files)
    with (tmp_path / "1").open("r+b") as file:
        file.seek(24 + 2 * GRANULE_BYTES)
        byte = file.read(1)[0]
        file.seek(24 + 2 * GRANULE_BYTES)
        file.write(bytes([byte ^ 1]))
    error = gather.submit(pool).error()
    assert error is not None
    # The granule in which it lies begins so many bytes into the part, which begins at 4,096.
    assert (error[0], error[2], error[3]) == ("checksum", 2, 24 + 2 * GRANULE_BYTES - 4096)


@pytest.mark.parametrize("harm", ["none", "order", "outside", "checksums"])
def test_gather_with_impossible_arguments_is_refused(pool: _native.ThreadPool, files: list[int], harm: str) -> None:
    gather = Gather(files)
    parts = {"none": [], "order": gather.parts[::-1]}.get(harm, gather.parts)
    size = GRANULE_BYTES if harm == "outside" else NUM_BYTES
    table = 0 if harm == "checksums" else gather.checksums.ctypes.data
    with pytest.raises(ValueError, match=r"a gather needs|parts must lie"):
        pool.submit_gather(gather.target.ctypes.data, size, parts, table, GRANULE_BYTES, REQUEST_BYTES)


def test_gather_in_threads_that_made_smaller_requests_before_gives_the_same(
    pool: _native.ThreadPool, files: list[int]
) -> None:
    gather = Gather(files)
    for request_bytes in (1, 1 << 22, REQUEST_BYTES):
        gather.target[:NUM_BYTES] = 7
        assert gather.submit(pool, request_bytes).error() is None
        assert np.array_equal(gather.target[:NUM_BYTES], gather.expected)


def test_windows_of_threads_end_with_them(files: list[int]) -> None:
    gather = Gather(files)
    process = psutil.Process()
    before = process.memory_info().rss
    for _ in range(60):
        pool = _native.ThreadPool(2, 8)
        assert gather.submit(pool).error() is None
        pool.close()
    assert process.memory_info().rss - before < 60 << 20
