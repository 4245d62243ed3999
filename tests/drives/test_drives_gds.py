"""The reader past RAM alone, with a kvikio that fails on demand, and what a machine without kvikio says."""

from __future__ import annotations

import errno
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_kvikio
import pytest
import torch
from fake_kvikio import Kvikio
from from_outside import GRANULE_BYTES, pattern
from gds_library import PADDED, flip
from store_blocks import MIB, NUM_BYTES

from megatier.config.values import MountBudget
from megatier.drives import gds
from megatier.drives.blockfile import BlockFiles, IoOptions
from megatier.drives.extent import Extent
from megatier.drives.gds import GpuReader, IoPath
from megatier.errors import ConfigError, IntegrityError, TransferError
from megatier.store.store import TieredStore
from megatier.tier import BlockSpec, Tier

CPU = torch.device("cpu")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Kvikio:
    return fake_kvikio.install(monkeypatch)


# ---- the reader alone ----


@pytest.fixture
def reader(tmp_path: Path, library: Kvikio, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Prepared]]:
    """Opens a reader of one block, two granules a stripe, round two mounts."""
    monkeypatch.setattr("megatier.drives.extent.STRIPE_BYTES", 2 * GRANULE_BYTES)
    opened_files: list[tuple[BlockFiles, GpuReader]] = []

    def open_reader(**options: Any) -> Prepared:
        directories = [tmp_path / name for name in "ab"]
        for directory in directories:
            directory.mkdir()
        mounts = [MountBudget(directory, MIB) for directory in directories]
        files = BlockFiles(mounts, "run", IoOptions(num_threads=2, granule_bytes=GRANULE_BYTES, **options))
        extent = files.reserve(NUM_BYTES)
        files.allocate()
        files.fill()
        found = GpuReader(files, CPU)
        opened_files.append((files, found))
        found.open(CPU)
        source = pattern(1, PADDED + GRANULE_BYTES)
        skip = -source.data_ptr() % GRANULE_BYTES
        source = source[skip : skip + PADDED]
        files.write("block", extent, 0, PADDED, source.data_ptr()).wait()
        library.requests.clear()
        return Prepared(files, extent, found, source)

    yield open_reader
    for files, found in opened_files:
        found.close()
        files.close()
    assert not library.under_way


class Prepared:
    """A block of seven granules on two mounts, its bytes, and a reader."""

    def __init__(self, files: BlockFiles, extent: Extent, reader: GpuReader, source: torch.Tensor) -> None:
        self.files, self.extent, self.reader, self.source = files, extent, reader, source

    def read(self, start: int = 0, stop: int = PADDED) -> torch.Tensor:
        target = torch.zeros(stop - start, dtype=torch.uint8)
        self.reader.read("block", self.extent, start, target)
        return target

    def damage(self, stripe: int, at: int = 0) -> tuple[Path, int]:
        """Flip a byte of a stripe; returns its file and its offset there."""
        piece = self.extent.stripes[stripe]
        path, offset = self.files.paths[piece.mount], piece.file_offset + at
        flip(path, offset)
        return path, offset


def test_read_asks_each_mount_for_its_stripes(reader: Callable[..., Prepared], library: Kvikio) -> None:
    block = reader()
    assert torch.equal(block.read(), block.source)
    assert len(block.extent.stripes) == 4
    assert {piece.mount for piece in block.extent.stripes} == {0, 1}
    assert library.requests == [(block.files.paths[p.mount], p.file_offset, p.num_bytes) for p in block.extent.stripes]


@pytest.mark.parametrize("span", [(0, 1), (1, 2), (1, 4), (2, 7), (6, 7)])
def test_read_of_a_span_asks_for_no_other_byte(
    reader: Callable[..., Prepared], library: Kvikio, span: tuple[int, int]
) -> None:
    block = reader()
    start, stop = (granule * GRANULE_BYTES for granule in span)
    assert torch.equal(block.read(start, stop), block.source[start:stop])
    assert sum(num_bytes for _, _, num_bytes in library.requests) == stop - start


@pytest.mark.parametrize("where", ["pread", "get"])
@pytest.mark.parametrize("stripe", range(4))
def test_read_that_fails_names_the_file_and_waits_for_the_others(
    reader: Callable[..., Prepared], library: Kvikio, where: str, stripe: int
) -> None:
    block = reader()
    piece = block.extent.stripes[stripe]
    library.failing = where, piece.file_offset
    with pytest.raises(TransferError, match=r"gpu_direct: false reads through RAM") as caught:
        block.read()
    assert (caught.value.path, caught.value.errno) in [(str(path), errno.EIO) for path in block.files.paths]
    assert caught.value.offset == piece.file_offset
    assert not library.under_way


def test_read_that_ends_early_is_an_error(reader: Callable[..., Prepared], library: Kvikio) -> None:
    block = reader()
    library.missing_bytes = 100
    with pytest.raises(TransferError, match="the device ended early") as caught:
        block.read(0, GRANULE_BYTES)
    first = block.extent.stripes[0]
    assert (caught.value.path, caught.value.offset) == (str(block.files.paths[first.mount]), GRANULE_BYTES - 100)
    assert not library.under_way


@pytest.mark.parametrize("stripe", range(4))
def test_read_of_a_damaged_granule_is_an_integrity_error(reader: Callable[..., Prepared], stripe: int) -> None:
    block = reader()
    path, offset = block.damage(stripe, at=block.extent.stripes[stripe].num_bytes - 1)
    with pytest.raises(IntegrityError) as caught:
        block.read()
    assert (caught.value.key, caught.value.path) == ("block", str(path))
    assert caught.value.offset == offset // GRANULE_BYTES * GRANULE_BYTES
    assert caught.value.expected != caught.value.found


def test_read_without_checksums_takes_what_is_there(reader: Callable[..., Prepared]) -> None:
    block = reader(checksums=False)
    block.damage(0)
    assert (block.read() != block.source).sum() == 1


@pytest.mark.parametrize("direct", [True, False])
def test_open_sets_kvikio_and_close_restores_it(reader: Callable[..., Prepared], library: Kvikio, direct: bool) -> None:
    block = reader(direct=direct)
    assert library.settings["num_threads"] == 2
    assert library.settings["auto_direct_io_read"] is block.files.is_direct
    block.reader.close()
    block.reader.close()
    assert library.settings == {}
    assert sorted(library.closed) == sorted(block.files.paths)


@pytest.mark.parametrize("is_loaded", [True, False])
def test_open_reads_every_file_so_that_the_path_is_known(
    reader: Callable[..., Prepared], library: Kvikio, monkeypatch: pytest.MonkeyPatch, is_loaded: bool
) -> None:
    monkeypatch.setattr(gds, "nvidia_fs_is_loaded", lambda: is_loaded)
    library.gds_bytes = 100
    assert reader().reader.path() == IoPath(100, PADDED, has_nvidia_fs=is_loaded)


def test_open_that_fails_closes_what_it_opened(
    tmp_path: Path, library: Kvikio, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.failing = "get", 0
    options = IoOptions(num_threads=2, granule_bytes=GRANULE_BYTES, gpu_direct=True)
    with TieredStore.open(gpu=MIB, nvme=[f"{tmp_path}:1MiB"], options=options) as store:
        store.register(BlockSpec("a", NUM_BYTES, Tier.NVME))
        with pytest.raises(TransferError, match=r"\(zeros\)"):
            store.seal()
    assert library.closed
    assert library.settings == {}
    assert not list(tmp_path.iterdir())


def test_path_tells_what_the_counters_tell() -> None:
    assert str(IoPath(0, 3 * MIB, has_nvidia_fs=False)) == "kvikio in compatibility mode (3.0 MiB)"
    assert str(IoPath(5 * MIB, 0, has_nvidia_fs=True)) == "kvikio GDS (5.0 MiB; 0 B in compatibility mode)"
    assert "cuFile's own fallback" in str(IoPath(5 * MIB, 0, has_nvidia_fs=False))


# ---- kvikio missing ----


def test_load_library_without_gpu_never_imports_kvikio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cpu", "cuda"):
        with pytest.raises(ConfigError, match=r"tiers\.gpu_direct .* no GPU"):
            gds.load_library(torch.device(device))
    assert "kvikio" not in sys.modules


def test_load_library_without_kvikio_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with pytest.raises(ConfigError, match=r"megatier\[gds\]"):
        gds.load_library(torch.device("cuda"))


def test_load_library_without_counters_asks_for_a_newer_kvikio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("kvikio", "kvikio.defaults"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    with pytest.raises(ConfigError, match=r"26\.10"):
        gds.load_library(torch.device("cuda"))


def test_store_on_the_cpu_refuses_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set it to false"):
        TieredStore.open(nvme=[f"{tmp_path}:1MiB"], options=IoOptions(gpu_direct=True))
    assert not list(tmp_path.iterdir())
