"""Chunk files: what is written is read back, what is damaged is refused. That zarr reads them: see the checkpoint."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatier.checkpoint import chunkfile
from megatier.checkpoint.arrays import ArrayReader, ArrayWriter
from megatier.checkpoint.chunkfile import STAGED, ChunkFiles, Staged
from megatier.checkpoint.grid import ArrayChunk, Grid, StoredArray
from megatier.errors import CheckpointError, TransferError

SHAPES = [(), (1,), (7,), (4096,), (5, 3), (33, 128), (3, 5, 7), (2, 3, 4, 5), (1, 1000), (1000, 1)]


def numbers(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32) + 0.5


def write(folder: Path, grid: Grid, values: Tensor, piece: int) -> list[int]:
    """Checksums of its chunks."""
    with ChunkFiles(grid.chunk_elements, 2) as files:
        writer = ArrayWriter(files, folder, grid)
        for start in range(0, values.numel(), piece):
            part = values[start : start + piece]
            for first, target in writer.buffers(start, part.numel()):
                target.copy_(part[first : first + target.numel()])
        files.flush()
    return list(writer.checksums.values())


def read(folder: Path, grid: Grid, checksums: list[int] | None = None) -> Tensor:
    found = torch.full((math.prod(grid.shape),), math.nan)
    with ChunkFiles(grid.chunk_elements, 2) as files:
        for _, start, values in files.read([StoredArray(folder.resolve(), grid, checksums)]):
            found[start : start + values.numel()] = values
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("limit", [1, 6, 100, 1 << 20])
def test_grid_chunks_are_runs_that_cover_the_array_in_order(shape: tuple[int, ...], limit: int) -> None:
    grid = Grid.of(shape, limit)
    assert grid.chunk_elements <= limit
    chunks = list(grid.chunks())
    assert [chunk.start for chunk in chunks] == [sum(c.num_elements for c in chunks[:i]) for i in range(len(chunks))]
    assert sum(chunk.num_elements for chunk in chunks) == math.prod(shape)
    assert len({chunk.key for chunk in chunks}) == len(chunks)


def test_grid_evenly_cut_pads_little() -> None:
    assert Grid.of((10, 4), 28).rows == 5
    assert Grid.of((128256, 4096)).chunk_shape == (2036, 4096)
    assert Grid.of((8, 5120, 8192)).chunk_shape == (1, 1024, 8192)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("limit", [6, 1 << 20])
def test_array_written_in_pieces_is_read_back(shape: tuple[int, ...], limit: int, tmp_path: Path) -> None:
    grid, values = Grid.of(shape, limit), numbers(shape)
    write(tmp_path / "a", grid, values, piece=11)
    assert torch.equal(read(tmp_path / "a", grid), values)
    files = [path for path in (tmp_path / "a").glob("**/*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert {path.stat().st_size for path in files} == {4 * grid.chunk_elements + 4}


def test_arrays_read_one_after_the_other_come_in_order(tmp_path: Path) -> None:
    grids = [Grid.of((1000,), 100), Grid.of((3, 70), 70)]
    for index, grid in enumerate(grids):
        write(tmp_path / str(index), grid, numbers(grid.shape), piece=999)
    with ChunkFiles(100, 2) as files:
        arrays = [StoredArray((tmp_path / str(index)).resolve(), grid) for index, grid in enumerate(grids)]
        found = [(index, start, values.clone()) for index, start, values in files.read(arrays)]
    assert [index for index, _, _ in found] == [0] * 10 + [1] * 3
    assert all(torch.equal(values, numbers(grids[i].shape)[start : start + len(values)]) for i, start, values in found)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("piece", [1, 17, 5000])
def test_array_read_in_pieces_from_back_to_front_is_whole(shape: tuple[int, ...], piece: int, tmp_path: Path) -> None:
    grid, values = Grid.of(shape, 6), numbers(shape)
    write(tmp_path / "a", grid, values, piece=999)
    found = torch.full_like(values, math.nan)
    with ChunkFiles(grid.chunk_elements, 2) as files:
        reader = ArrayReader(files, StoredArray((tmp_path / "a").resolve(), grid))
        for start in reversed(range(0, values.numel(), piece)):
            reader.copy(start, found[start : start + piece])
    assert torch.equal(found, values)


def test_fetch_keeps_the_chunks_that_were_used_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid, reads, begin = Grid.of((STAGED + 1, 10), 10), list[str](), ChunkFiles._begin_read
    write(tmp_path / "a", grid, numbers(grid.shape), piece=999)

    def noted(self: ChunkFiles, array: StoredArray, place: int, chunk: ArrayChunk) -> Staged:
        reads.append(str(place))
        return begin(self, array, place, chunk)

    monkeypatch.setattr(ChunkFiles, "_begin_read", noted)
    array, chunks = StoredArray((tmp_path / "a").resolve(), grid), list(grid.chunks())
    with ChunkFiles(10, 2) as files:
        for index in (*range(STAGED), 0, STAGED, 0, 2, 1):
            assert files.fetch(array, index, chunks[index])[3] == 10 * index + 3.5
    assert reads == [str(index) for index in (*range(STAGED), STAGED, 1)]


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ("flip", "is damaged: its checksum"),
        ("cut", "has 403 bytes instead of 404"),
        ("grow", "has 405 bytes instead of 404"),
        ("remove", "cannot be read: No such file"),
        ("link", "leads out of its checkpoint by a link"),
        ("link folder", "leads out of its checkpoint by a link"),
        ("pipe", "has 0 bytes instead of 404"),
        ("folder", "bytes instead of 404"),
    ],
)
def test_array_with_a_harmed_file_is_refused_by_name(harm: str, words: str, tmp_path: Path) -> None:
    grid = Grid.of((1000,), 100)
    write(tmp_path / "a", grid, numbers(grid.shape), piece=1000)
    path = tmp_path / "a" / "c" / "7"
    raw = path.read_bytes()
    path.unlink()
    if harm == "flip":
        path.write_bytes(raw[:50] + bytes([raw[50] ^ 1]) + raw[51:])
    elif harm in ("cut", "grow"):
        path.write_bytes(raw[:-1] if harm == "cut" else raw + b"\0")
    elif harm == "link":
        (tmp_path / "elsewhere").write_bytes(raw)
        path.symlink_to(tmp_path / "elsewhere")
    elif harm == "link folder":
        path.write_bytes(raw)
        (tmp_path / "a" / "c").rename(tmp_path / "elsewhere")
        (tmp_path / "a" / "c").symlink_to(tmp_path / "elsewhere")
    elif harm == "pipe":
        os.mkfifo(path)
    elif harm == "folder":
        path.mkdir()
    with pytest.raises(CheckpointError, match=words) as caught:
        read(tmp_path / "a", grid)
    assert str(tmp_path / "a" / "c") in str(caught.value)


@pytest.mark.parametrize("reads_on_demand", [False, True])
def test_array_with_a_whole_chunk_of_another_place_is_refused_by_name(reads_on_demand: bool, tmp_path: Path) -> None:
    grid = Grid.of((1000,), 100)
    checksums = write(tmp_path / "a", grid, numbers(grid.shape), piece=1000)
    assert torch.equal(read(tmp_path / "a", grid, checksums), numbers(grid.shape))
    chunks = tmp_path / "a" / "c"
    (chunks / "7").write_bytes((chunks / "3").read_bytes())
    read(tmp_path / "a", grid)  # nobody noted what belongs there
    with pytest.raises(CheckpointError, match="c/7 holds other bytes than were written there"):
        if reads_on_demand:
            with ChunkFiles(grid.chunk_elements, 2) as files:
                reader = ArrayReader(files, StoredArray((tmp_path / "a").resolve(), grid, checksums))
                reader.copy(0, torch.empty(1000))
        else:
            read(tmp_path / "a", grid, checksums)


def test_write_of_more_chunks_than_buffers_waits_for_them(tmp_path: Path) -> None:
    grid = Grid.of((STAGED * 30,), 10)
    write(tmp_path / "a", grid, numbers(grid.shape), piece=7)
    assert len(list((tmp_path / "a" / "c").iterdir())) == STAGED * 3


def test_write_over_a_file_that_exists_is_refused(tmp_path: Path) -> None:
    grid = Grid.of((10,))
    write(tmp_path, grid, numbers((10,)), piece=10)
    with pytest.raises(TransferError, match=r"creating a checkpoint failed .*File exists"):
        write(tmp_path, grid, numbers((10,)), piece=10)


def test_write_to_a_full_drive_says_so(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(TransferError, match="Free space") as caught:
        patch.setattr(chunkfile, "create", lambda _: os.open("/dev/full", os.O_WRONLY))
        write(tmp_path, Grid.of((10,)), numbers((10,)), piece=10)
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("count", [1022, 1023, 1024, 2047, 3000, 5_000_000])
@pytest.mark.parametrize("is_direct", [True, False])
def test_file_of_any_end_is_read_with_and_without_direct_access(
    count: int, is_direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An end before, at and behind that of a page; through the page cache alone where O_DIRECT is refused."""
    grid, values = Grid.of((count,)), numbers((count,))
    write(tmp_path / "a", grid, values, piece=count)
    opened = os.open

    def refusing(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT and not is_direct:
            raise OSError(errno.EINVAL, "refused", path)
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)
    assert torch.equal(read(tmp_path / "a", grid), values)


@pytest.mark.parametrize("at", [0, 4096, 8191, 8192, 12003])
def test_file_with_a_flipped_bit_in_any_page_is_refused(at: int, tmp_path: Path) -> None:
    grid = Grid.of((3000,))
    write(tmp_path / "a", grid, numbers((3000,)), piece=3000)
    path = tmp_path / "a" / "c" / "0"
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="is damaged: its checksum"):
        read(tmp_path / "a", grid)


@pytest.mark.parametrize("harm", ["gone", "flipped", "left"])
def test_read_that_ends_early_leaves_all_buffers_to_the_next(harm: str, tmp_path: Path) -> None:
    values, chunks = numbers((60,)), Grid.of((60,), 6)
    write(tmp_path, chunks, values, 60)
    array = StoredArray(tmp_path.resolve(), chunks)
    (tmp_path / "whole").mkdir()
    write(tmp_path / "whole", chunks, values, 60)
    path = tmp_path / "c" / "4"
    if harm == "gone":
        path.unlink()
    elif harm == "flipped":
        raw = bytearray(path.read_bytes())
        raw[3] ^= 1
        path.write_bytes(raw)

    with ChunkFiles(chunks.chunk_elements, 2, 3) as files:
        for _ in range(4):
            reading = files.read([array])
            if harm == "left":
                next(reading)
                reading.close()
            else:
                with pytest.raises(CheckpointError, match="c/4"):
                    list(reading)
        found = [part.clone() for *_, part in files.read([StoredArray((tmp_path / "whole").resolve(), chunks)])]
    assert torch.equal(torch.cat(found), values)


def test_read_that_is_interrupted_in_its_wait_leaves_no_buffer_that_is_still_read_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, chunks = numbers((60,)), Grid.of((60,), 6)
    write(tmp_path, chunks, values, 60)
    array = StoredArray(tmp_path.resolve(), chunks)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with ChunkFiles(chunks.chunk_elements, 2, 3) as files:
        with monkeypatch.context() as patch:
            patch.setattr(ChunkFiles, "_finish_read", interrupt)
            with pytest.raises(KeyboardInterrupt):
                list(files.read([array]))
        assert (len(files._free), len(files._flying)) == (3, 0)
        found = [part.clone() for *_, part in files.read([array])]
    assert torch.equal(torch.cat(found), values)
