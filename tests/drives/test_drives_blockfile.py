"""Block files: the bytes that were written come back, or a typed error says why not."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from block_files import GRANULE_BYTES, NUM_BYTES, memory, open_files, prepared, read, write

from megatier.drives import blockfile
from megatier.drives.blockfile import BlockFiles
from megatier.drives.extent import FilePart
from megatier.drives.io_engine import IoBatch, Memory, NativeEngine, Segment
from megatier.errors import IntegrityError, TransferError


@pytest.fixture
def files(tmp_path: Path) -> Iterator[BlockFiles]:
    files = open_files(tmp_path)
    yield files
    files.close()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("checksums", [True, False])
def test_write_then_read_gives_the_bytes(tmp_path: Path, direct: bool, checksums: bool) -> None:
    files = open_files(tmp_path, direct=direct, checksums=checksums)
    first, second = prepared(files, NUM_BYTES, NUM_BYTES - 100)
    source = memory(NUM_BYTES, seed=1)
    write(files, first, source)
    write(files, second, source[::-1].copy() if not direct else memory(NUM_BYTES, seed=2))
    assert np.array_equal(read(files, first, 0, NUM_BYTES), source)
    assert np.array_equal(
        read(files, first, GRANULE_BYTES, 3 * GRANULE_BYTES), source[GRANULE_BYTES : 3 * GRANULE_BYTES]
    )
    assert (tmp_path / "megatier-run" / "blocks").read_bytes()[:NUM_BYTES] == source.tobytes()
    assert files.is_direct is direct or direct
    files.close()


def test_files_go_on_with_another_number_of_threads(files: BlockFiles) -> None:
    (extent,) = prepared(files, NUM_BYTES)
    for count in (5, 1):
        source = memory(NUM_BYTES, seed=count)
        write(files, extent, source)
        files.set_threads(count)
        assert np.array_equal(read(files, extent, 0, NUM_BYTES), source)


def test_fresh_extent_reads_as_zeros_with_valid_checksums(files: BlockFiles) -> None:
    (ragged,) = prepared(files, NUM_BYTES - GRANULE_BYTES // 2)
    assert ragged.num_bytes == NUM_BYTES
    assert not read(files, ragged, 0, NUM_BYTES).any()


def test_file_is_allocated_and_filled_at_full_size(files: BlockFiles, tmp_path: Path) -> None:
    prepared(files, NUM_BYTES, NUM_BYTES)
    found = (tmp_path / "megatier-run" / "blocks").stat()
    assert found.st_size == files.used_bytes == 2 * NUM_BYTES
    assert found.st_blocks * 512 >= 2 * NUM_BYTES


def test_file_system_without_direct_access_falls_back_and_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECT:
            os.close(
                real(path, flags & ~os.O_DIRECT, mode, dir_fd=dir_fd)
            )  # some file systems make it before they refuse
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", refuse)
    files = open_files(tmp_path)
    (extent,) = prepared(files, NUM_BYTES)
    assert not files.is_direct
    source = memory(NUM_BYTES, seed=3)
    write(files, extent, source)
    assert np.array_equal(read(files, extent, 0, NUM_BYTES), source)
    files.close()


def test_changed_file_is_an_integrity_error_naming_the_granule(files: BlockFiles, tmp_path: Path) -> None:
    _, extent = prepared(files, NUM_BYTES, NUM_BYTES)
    write(files, extent, memory(NUM_BYTES, seed=4))
    path = tmp_path / "megatier-run" / "blocks"
    offset = NUM_BYTES + 3 * GRANULE_BYTES
    file = os.open(path, os.O_RDWR)
    os.pwrite(file, bytes([os.pread(file, 1, offset + 5)[0] ^ 1]), offset + 5)
    os.close(file)
    with pytest.raises(IntegrityError, match="block block is damaged") as caught:
        read(files, extent, 0, NUM_BYTES)
    error = caught.value
    assert (error.key, error.path, error.offset) == ("block", str(path), offset)
    assert error.expected == extent.checksums[3] != error.found
    read(files, extent, 4 * GRANULE_BYTES, NUM_BYTES)


def test_truncated_file_is_a_transfer_error(files: BlockFiles, tmp_path: Path) -> None:
    (extent,) = prepared(files, NUM_BYTES)
    path = tmp_path / "megatier-run" / "blocks"
    os.truncate(path, 2 * GRANULE_BYTES)
    with pytest.raises(TransferError, match="ended early") as caught:
        read(files, extent, 0, NUM_BYTES)
    assert (caught.value.tier, caught.value.path, caught.value.offset) == ("nvme", str(path), 2 * GRANULE_BYTES)


def test_span_off_the_granules_asserts(files: BlockFiles) -> None:
    (extent,) = prepared(files, NUM_BYTES)
    for start, stop in ((100, GRANULE_BYTES), (0, GRANULE_BYTES + 100)):
        with pytest.raises(AssertionError, match="granule"):
            files.read("block", extent, start, stop, 0)


class OneWay(NativeEngine):
    """Moves bytes of block files, and refuses those of the base."""

    waited: ClassVar[list[IoBatch]] = []

    def submit(self, segments: Sequence[Segment], checksums: int, granule_bytes: int, *, writes: bool) -> IoBatch:
        batch = super().submit(segments, checksums, granule_bytes, writes=writes)
        return batch if writes else Watched(batch)

    def gather(self, target: Memory, parts: Sequence[Segment], checksums: int, granule_bytes: int) -> IoBatch:
        raise MemoryError


class Watched:
    """A batch of which is known whether somebody has waited for it."""

    def __init__(self, batch: IoBatch) -> None:
        self._batch = batch
        self.done, self.span_ns, self.error = batch.done, batch.span_ns, batch.error

    def wait(self) -> bool:
        OneWay.waited.append(self._batch)
        return self._batch.wait()


def test_read_whose_second_half_cannot_begin_ends_the_first_before_it_fails(tmp_path: Path) -> None:
    files = open_files(tmp_path, engine=OneWay)
    extent = files.reserve(NUM_BYTES, elsewhere=4 * GRANULE_BYTES)
    base = tmp_path / "base"
    base.write_bytes(bytes(4 * GRANULE_BYTES))
    start = extent.own_bytes
    files.attach(extent, [FilePart(path=base, file_offset=0, start=start, num_bytes=NUM_BYTES - start)])
    files.allocate()
    files.fill()
    target = memory(NUM_BYTES)
    with pytest.raises(MemoryError):
        files.read("block", extent, 0, NUM_BYTES, target.ctypes.data)
    (batch,) = OneWay.waited
    assert batch.done()
    files.close()


class Counting(NativeEngine):
    """Notes which files are written, and how many requests nobody has waited for at most."""

    files: ClassVar[list[int]] = []
    open: ClassVar[int] = 0
    most: ClassVar[int] = 0

    def submit(self, segments: Sequence[Segment], checksums: int, granule_bytes: int, *, writes: bool) -> IoBatch:
        Counting.files.append(segments[0][0])
        Counting.open += 1
        Counting.most = max(Counting.most, Counting.open)
        return Counted(super().submit(segments, checksums, granule_bytes, writes=writes))


class Counted(Watched):
    """A batch of which that engine counts the waits."""

    def wait(self) -> bool:
        Counting.open -= 1
        return self._batch.wait()


def test_filling_asks_for_few_requests_at_a_time_and_of_all_mounts_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blockfile, "QUEUE_DEPTH_MAX", 3)
    monkeypatch.setattr(blockfile, "REQUEST_BYTES", 2 * GRANULE_BYTES)
    monkeypatch.setattr(Counting, "files", [])
    monkeypatch.setattr(Counting, "most", 0)
    mounts = [tmp_path / "first", tmp_path / "second"]
    for mount in mounts:
        mount.mkdir()
    files = open_files(*mounts, engine=Counting, shares=(3.0, 1.0))
    for _ in range(8):
        files.reserve(NUM_BYTES)
    files.allocate()
    asked: list[int] = []
    files.fill(asked.append)

    used = [path.stat().st_size for path in files.paths]
    assert used[0] > used[1] > 0
    assert sum(asked) == sum(used) == files.used_bytes
    assert (Counting.most, Counting.open) == (3, 0)
    small = -(-used[1] // (2 * GRANULE_BYTES))
    first, second = Counting.files[:2]
    assert Counting.files[: 2 * small] == [first, second] * small
    assert not any(path.read_bytes().strip(b"\0") for path in files.paths)
    files.close()


def test_filling_that_is_broken_off_ends_what_reads_its_zeros(files: BlockFiles) -> None:
    files.reserve(NUM_BYTES)
    files.allocate()

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.fill(stop)
    with pytest.raises(RuntimeError, match="closed"):
        files.write("block", files.reserve(GRANULE_BYTES), 0, GRANULE_BYTES, memory(GRANULE_BYTES).ctypes.data)
