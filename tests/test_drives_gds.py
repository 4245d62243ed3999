"""Reads from NVMe past RAM: with a stand-in for kvikio everywhere, with kvikio itself where there is a GPU."""

from __future__ import annotations

import errno
import importlib.util
import os
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_kvikio
import pytest
import torch
from conftest import GRANULE_BYTES, check_invariants, pattern
from fake_kvikio import Kvikio
from store_blocks import KEYS, MIB, NUM_BYTES, NUM_GRANULES, SPAN, has_copy, read, send_home, write
from store_contract import StoreContract
from tiny_runs import MODELS, PLACES, Run, exactness_config, one_thread, opened, run_in_fresh_process, run_steps

from megatier.config.values import MountBudget
from megatier.drives import gds
from megatier.drives.blockfile import BlockFiles, IoOptions
from megatier.drives.extent import Extent
from megatier.drives.gds import GpuReader, IoPath
from megatier.errors import ConfigError, IntegrityError, TransferError
from megatier.store.store import TieredStore
from megatier.tier import BlockSpec, Tier, round_up

CPU = torch.device("cpu")
PADDED = NUM_GRANULES * GRANULE_BYTES


def why_no_kvikio() -> str:
    """Why kvikio cannot be run here; nothing if it can."""
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    return "" if importlib.util.find_spec("kvikio") else "needs kvikio: pip install 'megatier[gds]'"


def on_gpu(test: Any) -> Any:
    """A test that runs kvikio itself."""
    return pytest.mark.gpu(pytest.mark.skipif(bool(why_no_kvikio()), reason=why_no_kvikio())(test))


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


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


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


# ---- the store ----


class TestNvmePastRam(StoreContract):
    home = Tier.NVME
    gpu_direct = True

    @pytest.fixture(autouse=True)
    def _library(self, library: Kvikio) -> None:
        pass


class PastRam:
    """What a store promises whose reads to the GPU leave RAM out."""

    device = "cpu"

    @pytest.fixture
    def open_store(self, tmp_path: Path) -> Iterator[Callable[..., TieredStore]]:
        stores: list[TieredStore] = []

        def open_store(
            num_bytes: int = NUM_BYTES, *, ram_slots: int = 0, gpu_slots: int = 2, **options: Any
        ) -> TieredStore:
            size = round_up(num_bytes)
            settings = IoOptions(**{"num_threads": 2, "granule_bytes": GRANULE_BYTES, "gpu_direct": True, **options})
            store = TieredStore.open(
                gpu=gpu_slots * size,
                ram=ram_slots * size,
                nvme=[f"{tmp_path}:{len(KEYS) * size}"],
                device=self.device,
                options=settings,
            )
            for key in KEYS:
                store.register(BlockSpec(key, num_bytes, Tier.NVME))
            stores.append(store)
            return store

        yield open_store
        for store in stores:
            check_invariants(store)
            store.close()

    def test_block_comes_to_the_gpu_without_ram(self, open_store: Callable[..., TieredStore]) -> None:
        store = open_store()
        assert torch.equal(read(store, "a", Tier.GPU), torch.zeros(NUM_BYTES, dtype=torch.uint8))
        assert store.moved_bytes == {"nvme_to_gpu": PADDED}
        path = store.gpu_path
        assert path is not None
        assert path.gds_bytes + path.posix_bytes >= PADDED

    def test_bytes_written_are_read_past_ram(self, open_store: Callable[..., TieredStore]) -> None:
        store = open_store(ram_slots=2)
        for seed, key in enumerate(KEYS):
            write(store, key, Tier.RAM, pattern(seed, NUM_BYTES))
            send_home(store, key)
            store.evict(key, Tier.RAM)
        moved = store.moved_bytes.copy()
        for seed, key in enumerate(KEYS):
            assert torch.equal(read(store, key, Tier.GPU), pattern(seed, NUM_BYTES))
        assert store.moved_bytes - moved == {"nvme_to_gpu": len(KEYS) * PADDED}

    def test_bytes_in_ram_come_from_there(self, open_store: Callable[..., TieredStore]) -> None:
        store = open_store(ram_slots=2)
        expected = torch.zeros(NUM_BYTES, dtype=torch.uint8)
        expected[slice(*SPAN)] = pattern(2, SPAN[1] - SPAN[0])
        write(store, "a", Tier.RAM, expected[slice(*SPAN)], SPAN[0])  # dirty: only RAM has it
        moved = store.moved_bytes.copy()
        assert torch.equal(read(store, "a", Tier.GPU), expected)
        inside = SPAN[1] - SPAN[0]
        assert store.moved_bytes - moved == {"nvme_to_gpu": PADDED - inside, "ram_to_gpu": inside}

    def test_bytes_that_leave_ram_are_read_once_written(self, open_store: Callable[..., TieredStore]) -> None:
        store = open_store(ram_slots=2)
        for seed in range(20):
            write(store, "a", Tier.RAM, pattern(seed, NUM_BYTES))
            store.write_back("a", Tier.RAM)
            store.evict("a", Tier.RAM)
            assert torch.equal(read(store, "a", Tier.GPU), pattern(seed, NUM_BYTES))
            store.settle("a")
            assert not has_copy(store, "a", Tier.RAM)
            store.evict("a", Tier.GPU)

    def test_damaged_block_is_refused_and_the_others_are_not(self, open_store: Callable[..., TieredStore]) -> None:
        store = open_store(ram_slots=2)
        for seed, key in enumerate(KEYS):
            write(store, key, Tier.RAM, pattern(seed, NUM_BYTES))
            send_home(store, key)
            store.evict(key, Tier.RAM)
        extent = store._blocks.find("b").extent
        assert extent is not None
        assert store.files is not None
        path, offset = store.files.paths[0], extent.stripes[0].file_offset + 2 * GRANULE_BYTES + 5
        flip(path, offset)
        with pytest.raises(IntegrityError) as caught:
            store.lease("b", Tier.GPU)
        assert (caught.value.key, caught.value.path, caught.value.offset) == ("b", str(path), offset - 5)
        assert torch.equal(read(store, "c", Tier.GPU), pattern(2, NUM_BYTES))
        flip(path, offset)
        assert torch.equal(read(store, "b", Tier.GPU), pattern(1, NUM_BYTES))

    def test_file_cut_short_is_an_error_that_names_it(self, open_store: Callable[..., TieredStore]) -> None:
        store = open_store()
        store.seal()
        assert store.files is not None
        (path,) = store.files.paths
        extent = store._blocks.find("d").extent
        assert extent is not None
        os.truncate(path, extent.stripes[0].file_offset)
        with pytest.raises(TransferError) as caught:
            store.lease("d", Tier.GPU)
        assert (caught.value.tier, caught.value.path) == ("nvme", str(path))
        assert torch.equal(read(store, "a", Tier.GPU), torch.zeros(NUM_BYTES, dtype=torch.uint8))


class TestPastRam(PastRam):
    @pytest.fixture(autouse=True)
    def _library(self, library: Kvikio) -> None:
        pass

    def test_read_that_failed_is_tried_again(self, open_store: Callable[..., TieredStore], library: Kvikio) -> None:
        store = open_store()
        store.seal()
        library.failing = "get", 0
        for _ in range(2):
            with pytest.raises(TransferError):
                store.lease("a", Tier.GPU)
        library.failing = None
        assert torch.equal(read(store, "a", Tier.GPU), torch.zeros(NUM_BYTES, dtype=torch.uint8))

    def test_write_of_newer_bytes_waits_for_a_read(
        self, open_store: Callable[..., TieredStore], library: Kvikio
    ) -> None:
        store = open_store(ram_slots=2)
        store.seal()
        library.is_open.clear()
        (reading,) = store.prefetch("a", Tier.GPU)
        with store.lease("a", Tier.RAM, fresh=True) as block:
            block.bytes.copy_(pattern(1, NUM_BYTES))
            store.mark_dirty("a", Tier.RAM)  # drops what was prefetched
        writing = store.write_back("a", Tier.RAM)
        assert writing is not None
        assert not writing.issued(0.1)
        library.is_open.set()
        reading.wait()  # not torn: else its checksums would not agree
        writing.wait()
        assert torch.equal(read(store, "a", Tier.GPU), pattern(1, NUM_BYTES))


# ---- training ----


@pytest.mark.parametrize("run", [Run(model="untied", groups=3), Run(model="tied", clip=None), Run(model="moe")])
@pytest.mark.parametrize("place", ["nvme", "nvme_twice", "ram_nvme"])
def test_training_past_ram_gives_the_same_bits(run: Run, place: str, tmp_path: Path, library: Kvikio) -> None:
    run = replace(run, place=place)
    with one_thread():
        expected = run(tmp_path)
        assert not library.requests
        assert replace(run, gpu_direct=True)(tmp_path) == expected
    assert library.requests


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(("place", "clip"), [("nvme", 0.5), ("nvme", None), ("nvme_twice", 1e3), ("nvme_twice", 1e-3)])
def test_training_past_ram_moves_what_is_demanded(
    place: str, clip: float | None, groups: int, tmp_path: Path, library: Kvikio
) -> None:
    run = Run(model="untied", groups=groups, clip=clip)
    with (
        one_thread(),
        opened(exactness_config("untied"), tmp_path, PLACES[place], run.train, gpu_direct=True) as session,
    ):
        before = Counter(session.store.moved_bytes)
        run_steps(session, run.train, 3)
        session.player.drain()
        assert session.store.moved_bytes - before == +session.player.demanded
        assert session.player.demanded["nvme_to_gpu"]


# ---- kvikio itself ----


@on_gpu
class TestNvmeKvikio(StoreContract):
    home = Tier.NVME
    gpu_direct = True
    device = "cuda"


@on_gpu
class TestKvikio(PastRam):
    device = "cuda"

    @pytest.mark.parametrize("checksums", [True, False])
    def test_large_block_arrives_whole(self, open_store: Callable[..., TieredStore], checksums: bool) -> None:
        num_bytes = 80 * MIB + 12_345
        store = open_store(num_bytes, ram_slots=1, gpu_slots=1, granule_bytes=64 << 10, checksums=checksums)
        for seed, key in enumerate(KEYS):
            write(store, key, Tier.RAM, pattern(seed, num_bytes))
            send_home(store, key)
            store.evict(key, Tier.RAM)
        for seed, key in enumerate(KEYS):
            assert torch.equal(read(store, key, Tier.GPU), pattern(seed, num_bytes))
        path = store.gpu_path
        assert path is not None
        assert path.gds_bytes + path.posix_bytes >= len(KEYS) * round_up(num_bytes)

    def test_slot_is_overwritten_when_compute_is_over(self, open_store: Callable[..., TieredStore]) -> None:
        store = open_store(16 * MIB, ram_slots=1, gpu_slots=1)
        for seed, key in enumerate(KEYS):
            write(store, key, Tier.RAM, pattern(seed, 16 * MIB))
            send_home(store, key)
            store.evict(key, Tier.RAM)
        factor = torch.randn(8192, 8192, device="cuda")
        for seed, key in enumerate(KEYS):
            lease = store.lease(key, Tier.GPU)
            for _ in range(8):  # compute that is still going on when the next block is asked for
                factor = factor @ factor * 1e-3
            found = lease.bytes.clone()
            lease.release()
            store.prefetch(KEYS[(seed + 1) % len(KEYS)], Tier.GPU)
            assert torch.equal(found.cpu(), pattern(seed, 16 * MIB))


@on_gpu
@pytest.mark.parametrize("model", MODELS)
def test_training_by_kvikio_gives_the_same_bits(model: str, tmp_path: Path) -> None:
    run = Run(model=model, device="cuda", compile=False)
    runs = [
        replace(run, place=p, clip=c, groups=g)
        for p in ("nvme", "nvme_twice", "ram_nvme")
        for c, g in ((0.5, 3), (None, 1))
    ]
    found = run_in_fresh_process([*runs, *(replace(run, gpu_direct=True) for run in runs)], tmp_path)
    assert found[: len(runs)] == found[len(runs) :]


@on_gpu
@pytest.mark.parametrize("groups", [1, 3])
def test_training_by_kvikio_moves_what_is_demanded(groups: int, tmp_path: Path) -> None:
    train = Run(model="untied", groups=groups).train
    config = exactness_config("untied")
    with opened(config, tmp_path, PLACES["nvme"], train, device="cuda", compile=False, gpu_direct=True) as session:
        before = Counter(session.store.moved_bytes)
        run_steps(session, train, 3)
        session.player.drain()
        assert session.store.moved_bytes - before == +session.player.demanded
        assert session.player.demanded["nvme_to_gpu"]
