"""Weights that are read from NVMe into GPU memory past RAM: the store, training, and kvikio itself."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_kvikio
import pytest
import torch
from crossed import crossed
from fake_kvikio import Kvikio
from from_outside import GRANULE_BYTES, check_invariants, pattern
from gds_library import PADDED, flip
from store_blocks import KEYS, MIB, NUM_BYTES, SPAN, has_copy, read, send_home, write
from store_contract import StoreContract
from tiny_runs import MODELS, PLACES, Run, exactness_config, opened, run_in_fresh_process, run_steps

from megatier.drives.blockfile import IoOptions
from megatier.errors import IntegrityError, TransferError
from megatier.store.store import TieredStore
from megatier.tier import BlockSpec, Tier, round_up


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
        assert not writing.has_started(0.1)
        library.is_open.set()
        reading.wait()  # not torn: else its checksums would not agree
        writing.wait()
        assert torch.equal(read(store, "a", Tier.GPU), pattern(1, NUM_BYTES))


@pytest.mark.parametrize(
    ("run", "place"),
    crossed(
        [Run(model="untied", groups=3), Run(model="tied", clip=None), Run(model="moe")],
        ["nvme", "nvme_twice", "ram_nvme"],
        by=3,
    ),
)
def test_training_past_ram_gives_the_same_bits(run: Run, place: str, tmp_path: Path, library: Kvikio) -> None:
    run = replace(run, place=place)
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
    with opened(exactness_config("untied"), tmp_path, PLACES[place], run.train, gpu_direct=True) as session:
        before = Counter(session.store.moved_bytes)
        run_steps(session, run.train, 3)
        session.player.drain()
        assert session.store.moved_bytes - before == +session.player.demanded
        assert session.player.demanded["nvme_to_gpu"]


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
