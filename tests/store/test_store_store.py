"""Each back end of the tiered store keeps its contract, and what only some of them do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from from_outside import GRANULE_BYTES, check_invariants, pattern, probe
from late_reads import held_reads
from plain_engine import PlainEngine
from store_blocks import KEYS, NUM_BYTES, SPAN, ZERO, read, send_home, write
from store_contract import StoreContract

from megatier.drives.blockfile import IoOptions
from megatier.errors import (
    BlockError,
    CapacityError,
    ClosedError,
    ConfigError,
    DirtyBlockError,
    LeaseHeldError,
)
from megatier.store.arena import Arena
from megatier.store.copies import POISON
from megatier.store.store import TieredStore
from megatier.tier import BlockSpec, Kind, Tier, round_up


class OutsideRam:
    """Of a home on the GPU or NVMe."""

    def test_copy_out_takes_no_slot_and_is_not_counted(self, store: TieredStore) -> None:
        write(store, "a", Tier.RAM, pattern(9, NUM_BYTES))
        send_home(store, "a")
        leases = [store.lease(key, Tier.RAM, fresh=True, wait=True) for key in KEYS[1:]]
        moved, arena = store.moved_bytes.copy(), Arena(round_up(NUM_BYTES), torch.device("cpu"))
        for span in ((0, NUM_BYTES), SPAN, (SPAN[1], NUM_BYTES)):
            store.copy_out("a", span, arena.bytes).wait()
            assert torch.equal(arena.bytes[: span[1] - span[0]], pattern(9, NUM_BYTES)[slice(*span)])
        assert store.moved_bytes == moved
        for lease in leases:
            lease.release()


class TestRam(StoreContract):
    home = Tier.RAM


class TestGpuStandIn(OutsideRam, StoreContract):
    home = Tier.GPU


class TestNvmeDirect(OutsideRam, StoreContract):
    home = Tier.NVME

    def test_access_is_reported(self, store: TieredStore) -> None:
        store.seal()
        assert store.is_direct is not None


class TestNvmeBuffered(OutsideRam, StoreContract):
    home = Tier.NVME
    direct = False

    def test_access_is_reported(self, store: TieredStore) -> None:
        store.seal()
        assert store.is_direct is False


class TestNvmeByAnotherEngine(OutsideRam, StoreContract):
    home = Tier.NVME
    engine = PlainEngine


class TestRamThroughRings(StoreContract):
    """Nothing is pinned but the pieces of the rings, of a page each."""

    home = Tier.RAM
    locked = 1


class TestNvmeThroughRings(OutsideRam, StoreContract):
    """The last slot is pinned, and a part of the one before."""

    home = Tier.NVME
    locked = 64 << 10


@pytest.mark.gpu
class TestRamCuda(StoreContract):
    home = Tier.RAM
    device = "cuda"


@pytest.mark.gpu
class TestRamThroughRingsCuda(TestRamThroughRings):
    device = "cuda"


@pytest.mark.gpu
class TestNvmeThroughRingsCuda(TestNvmeThroughRings):
    device = "cuda"


@pytest.mark.gpu
class TestGpuCuda(OutsideRam, StoreContract):
    home = Tier.GPU
    device = "cuda"


@pytest.mark.gpu
class TestNvmeCuda(OutsideRam, StoreContract):
    home = Tier.NVME
    device = "cuda"


# ---- the way from NVMe to the GPU and back ----


@pytest.fixture
def open_nvme(tmp_path: Path) -> Iterator[Callable[..., TieredStore]]:
    """Opens stores with blocks at home on NVMe, and RAM slots of the size asked for."""
    stores: list[TieredStore] = []

    def open_store(slot_bytes: int = NUM_BYTES, num_slots: int = 3, mounts: int = 1) -> TieredStore:
        directories = [tmp_path / f"mount{number}" for number in range(mounts)]
        for directory in directories:
            directory.mkdir()
        gpu, ram = 2 * round_up(NUM_BYTES), num_slots * round_up(slot_bytes)
        options = IoOptions(num_threads=2, granule_bytes=GRANULE_BYTES)
        store = TieredStore.open(gpu=gpu, ram=ram, nvme=[f"{d}:1MiB" for d in directories], options=options)
        for key in KEYS:
            store.register(BlockSpec(key, NUM_BYTES, Tier.NVME))
        store.reserve(Tier.RAM, None, slot_bytes, num_slots)
        stores.append(store)
        return store

    yield open_store
    for store in stores:
        check_invariants(store)
        store.close()


def fill_by_granules(store: TieredStore, key: str, values: torch.Tensor, step: int) -> None:
    for start in range(0, NUM_BYTES, step):
        span = (start, min(start + step, NUM_BYTES))
        write(store, key, Tier.RAM, values[slice(*span)], start)
        store.write_back(key, Tier.RAM, span)
        store.evict(key, Tier.RAM, span)
    store.settle(key)


@pytest.mark.parametrize("slot_granules", [1, 2, 3])
def test_lease_on_gpu_through_ram_slots_smaller_than_the_block(
    open_nvme: Callable[..., TieredStore], slot_granules: int
) -> None:
    store = open_nvme(slot_granules * GRANULE_BYTES, num_slots=2)
    for seed, key in enumerate(KEYS):
        fill_by_granules(store, key, pattern(seed, NUM_BYTES), slot_granules * GRANULE_BYTES)
    moved = store.moved_bytes.copy()
    for seed, key in enumerate(KEYS):
        assert torch.equal(read(store, key, Tier.GPU), pattern(seed, NUM_BYTES))
        assert Tier.RAM not in store.residency(key)
    moved = store.moved_bytes - moved
    assert moved == {"nvme_to_ram": 4 * round_up(NUM_BYTES), "ram_to_gpu": 4 * NUM_BYTES}


def test_lease_in_ram_of_more_than_a_slot_raises_with_figures(open_nvme: Callable[..., TieredStore]) -> None:
    store = open_nvme(2 * GRANULE_BYTES)
    with pytest.raises(CapacityError, match="lease spans") as caught:
        store.lease("a", Tier.RAM)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (NUM_BYTES, 2 * GRANULE_BYTES)


def test_lease_on_gpu_with_one_span_in_ram_brings_the_others_too(open_nvme: Callable[..., TieredStore]) -> None:
    store = open_nvme(2 * GRANULE_BYTES)
    fill_by_granules(store, "a", pattern(1, NUM_BYTES), 2 * GRANULE_BYTES)
    expected = pattern(1, NUM_BYTES)
    expected[slice(*SPAN)] = pattern(2, 2 * GRANULE_BYTES)
    write(store, "a", Tier.RAM, expected[slice(*SPAN)], SPAN[0])  # dirty: only RAM has it
    assert torch.equal(read(store, "a", Tier.GPU), expected)
    assert store.residency("a")[Tier.NVME] == ((0, SPAN[0]), (SPAN[1], NUM_BYTES))


def test_write_back_from_gpu_takes_two_steps(open_nvme: Callable[..., TieredStore]) -> None:
    store = open_nvme(2 * GRANULE_BYTES, num_slots=2)
    write(store, "a", Tier.GPU, pattern(3, NUM_BYTES))
    for start in range(0, NUM_BYTES, 2 * GRANULE_BYTES):
        span = (start, min(start + 2 * GRANULE_BYTES, NUM_BYTES))
        assert store.write_back("a", Tier.GPU, span, wait=True) is not None
        assert store.is_dirty("a")
        assert store.write_back("a", Tier.RAM, span) is not None
        store.evict("a", Tier.RAM, span)
    store.settle("a")
    assert not store.is_dirty("a")
    assert torch.equal(probe(store, "a"), pattern(3, NUM_BYTES))


def test_lease_of_other_spans_drops_clean_ones_and_respects_the_rest(open_nvme: Callable[..., TieredStore]) -> None:
    store = open_nvme()
    fill_by_granules(store, "a", pattern(4, NUM_BYTES), NUM_BYTES)
    for start in (0, 2 * GRANULE_BYTES):
        store.lease("a", Tier.RAM, (start, start + GRANULE_BYTES)).release()
    assert torch.equal(read(store, "a", Tier.RAM), pattern(4, NUM_BYTES))
    store.evict("a", Tier.RAM)
    with store.lease("a", Tier.RAM, SPAN), pytest.raises(LeaseHeldError):
        store.lease("a", Tier.RAM)
    write(store, "a", Tier.RAM, pattern(5, 2 * GRANULE_BYTES), SPAN[0])
    with pytest.raises(DirtyBlockError):
        store.lease("a", Tier.RAM)
    send_home(store, "a", SPAN)


def test_read_of_other_spans_comes_after_a_write_in_flight(open_nvme: Callable[..., TieredStore]) -> None:
    store = open_nvme()
    for seed in range(20):
        write(store, "a", Tier.RAM, pattern(seed, 2 * GRANULE_BYTES), SPAN[0])
        store.write_back("a", Tier.RAM, SPAN)
        store.evict("a", Tier.RAM, SPAN)
        assert torch.equal(read(store, "a", Tier.RAM)[slice(*SPAN)], pattern(seed, 2 * GRANULE_BYTES))
        store.evict("a", Tier.RAM)


def test_lease_fresh_is_not_overwritten_by_a_late_prefetch(
    open_nvme: Callable[..., TieredStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = held_reads(monkeypatch)
    store = open_nvme()
    store.prefetch("a", Tier.RAM)

    def overwrite() -> None:
        with store.lease("a", Tier.RAM, fresh=True) as block:
            block.bytes.copy_(pattern(6, NUM_BYTES))
            store.mark_dirty("a", Tier.RAM)

    writing = threading.Thread(target=overwrite)
    writing.start()
    writing.join(0.05)
    assert writing.is_alive()  # it waits for the read, however long that takes
    may_end.set()
    writing.join()
    send_home(store, "a")
    assert torch.equal(probe(store, "a"), pattern(6, NUM_BYTES))


@pytest.mark.parametrize("is_prefetched", [False, True])
def test_lease_fresh_that_is_interrupted_in_its_wait_leaves_no_bytes_that_count_as_valid(
    open_nvme: Callable[..., TieredStore], monkeypatch: pytest.MonkeyPatch, is_prefetched: bool
) -> None:
    store = open_nvme(num_slots=1)
    write(store, "a", Tier.RAM, pattern(3, NUM_BYTES))
    send_home(store, "a")
    store.evict("a", Tier.RAM)
    may_end = held_reads(monkeypatch)
    store.prefetch("a" if is_prefetched else "b", Tier.RAM)
    if not is_prefetched:
        store.evict("b", Tier.RAM)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("megatier.store.transfer.Transfer.wait_before_use", interrupt)
        store.lease("a", Tier.RAM, fresh=True)
    assert not store.consistency.is_torn
    assert Tier.RAM not in store.residency("a")
    may_end.set()
    assert torch.equal(read(store, "a", Tier.RAM), pattern(3, NUM_BYTES))


def test_prefetch_returns_before_the_bytes_are_there(
    open_nvme: Callable[..., TieredStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = held_reads(monkeypatch)
    store = open_nvme()
    (transfer,) = store.prefetch("a", Tier.GPU)
    assert Tier.GPU not in store.residency("a")
    assert transfer.queue == "ram_to_gpu"
    may_end.set()
    transfer.wait()
    assert store.residency("a")[Tier.GPU] == ((0, NUM_BYTES),)


def test_prefetched_block_is_spared_while_written_ones_leave(open_nvme: Callable[..., TieredStore]) -> None:
    store = open_nvme(num_slots=2)
    store.prefetch("a", Tier.RAM)
    moved = store.moved_bytes["nvme_to_ram"]
    for seed in range(20):
        with store.lease("b" if seed % 2 else "c", Tier.RAM, fresh=True, wait=True) as block:
            block.bytes.fill_(seed)
            store.mark_dirty("b" if seed % 2 else "c", Tier.RAM)
        store.write_back("b" if seed % 2 else "c", Tier.RAM)
        store.evict("b" if seed % 2 else "c", Tier.RAM)
    store.lease("a", Tier.RAM).release()
    assert store.moved_bytes["nvme_to_ram"] == moved


def test_blocks_are_striped_over_mounts(open_nvme: Callable[..., TieredStore], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatier.drives.extent.STRIPE_BYTES", 2 * GRANULE_BYTES)
    store = open_nvme(mounts=3)
    for seed, key in enumerate(KEYS):
        extent = store._blocks.find(key).extent
        assert extent is not None
        assert {stripe.mount for stripe in extent.stripes} == {0, 1, 2}
        write(store, key, Tier.RAM, pattern(seed, NUM_BYTES))
        send_home(store, key)
        assert torch.equal(probe(store, key), pattern(seed, NUM_BYTES))
        store.evict(key, Tier.RAM)
    for seed, key in enumerate(KEYS):
        assert torch.equal(read(store, key, Tier.GPU), pattern(seed, NUM_BYTES))


# ---- the CPU arena that stands for the GPU ----


def test_released_gpu_slot_is_poisoned(open_nvme: Callable[..., TieredStore]) -> None:
    store = open_nvme()
    lease = store.lease("a", Tier.GPU)
    view = lease.bytes
    lease.release()
    assert torch.equal(view, ZERO)  # still resident
    store.evict("a", Tier.GPU)
    store._queues.submit("ram_to_gpu", "", 0, lambda: None).wait()
    assert bool((view == POISON).all())
    assert bool(view[: NUM_BYTES // 4 * 4].view(torch.float32).isnan().all())


def test_gpu_stand_in_is_memory_of_its_own(open_nvme: Callable[..., TieredStore]) -> None:
    store = open_nvme()
    with store.lease("a", Tier.GPU) as there, store.lease("a", Tier.RAM) as here:
        there.bytes.fill_(7)
        assert torch.equal(here.bytes, ZERO)


# ---- tensors from outside ----


def test_push_and_pull_exchange_tensors_with_a_block_in_ram(tmp_path: Path) -> None:
    with TieredStore.open(ram="1MiB") as store:
        store.register(BlockSpec("a", NUM_BYTES, Tier.RAM, Kind.ACTIVATION))
        store.seal()
        tensor = pattern(1, 4096).view(torch.float32)
        store.push("a", tensor)
        assert torch.equal(read(store, "a", Tier.RAM, (0, 4096)), pattern(1, 4096))
        found = torch.empty_like(tensor)
        store.pull("a", found).wait_on_stream()
        assert torch.equal(found.view(torch.uint8), pattern(1, 4096))
        assert store.moved_bytes == {"gpu_to_ram": 4096, "ram_to_gpu": 4096}


# ---- budgets ----


def test_interrupt_before_the_lock_is_given_up_for_a_wait_hangs_nobody(
    open_nvme: Callable[..., TieredStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = open_nvme()._copies
    interrupts = [KeyboardInterrupt()]

    def check() -> None:
        if interrupts:
            raise interrupts.pop()

    with copies._lock, monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(copies.owner), "check", lambda _: check())
        copies._wait_unlocked(lambda: None)
    assert not copies._lock.locked()


def test_slots_by_default_are_the_rest_of_the_budget() -> None:
    with TieredStore.open(gpu="64KiB", ram="64KiB") as store:
        store.register(BlockSpec("large", 24 << 10, Tier.RAM))
        store.register(BlockSpec("small", 5 << 10, Tier.RAM))
        store.seal()
        assert store.usage(Tier.GPU) == {"slots": 48 << 10, "budget": 64 << 10}
        assert store.usage(Tier.RAM) == {"weight": 32 << 10, "slots": 0, "budget": 64 << 10}
        with store.lease("large", Tier.GPU), store.lease("small", Tier.GPU):
            check_invariants(store)


def test_slots_by_default_serve_spans_of_a_block_larger_than_the_budget(tmp_path: Path) -> None:
    with TieredStore.open(
        ram="64KiB", nvme=[f"{tmp_path}:1MiB"], options=IoOptions(granule_bytes=GRANULE_BYTES)
    ) as store:
        store.register(BlockSpec("a", 256 << 10, Tier.NVME))
        assert torch.equal(read(store, "a", Tier.RAM, (128 << 10, 192 << 10)), torch.zeros(64 << 10, dtype=torch.uint8))
        with pytest.raises(CapacityError):
            store.lease("a", Tier.RAM)
        with pytest.raises(CapacityError):
            store.lease("a", Tier.GPU)


def test_memory_that_the_system_lacks_is_refused_with_figures(tmp_path: Path) -> None:
    with TieredStore.open(ram=1 << 60, nvme=[f"{tmp_path}:1MiB"]) as store:
        store.register(BlockSpec("a", 1 << 55, Tier.RAM))
        with pytest.raises(CapacityError, match="tier ram is full") as caught:
            store.seal()
        assert caught.value.needed_bytes >= 1 << 55


def test_nvme_block_without_a_mount_is_refused() -> None:
    with TieredStore.open(ram="1MiB") as store:
        with pytest.raises(CapacityError, match="at least one mount"):
            store.register(BlockSpec("a", NUM_BYTES, Tier.NVME))
        assert store.is_direct is None


@pytest.mark.parametrize("wrong", [{"ram": "many"}, {"nvme": ["/nowhere/at/all:1MiB"]}])
def test_open_with_wrong_settings_is_refused_and_leaves_nothing(tmp_path: Path, wrong: dict[str, object]) -> None:
    settings: dict[str, object] = {"nvme": [f"{tmp_path}:1MiB"], **wrong}
    with pytest.raises(ConfigError):
        TieredStore.open(**settings)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_close_with_a_block_still_leased_leaves_no_thread(tmp_path: Path) -> None:
    store = TieredStore.open(ram="1MiB", nvme=[f"{tmp_path}:1MiB"])
    store.register(BlockSpec("a", NUM_BYTES, Tier.NVME))
    lease = store.lease("a", Tier.RAM)
    store.close()
    lease.release()
    assert not list(tmp_path.iterdir())


def test_lease_waiting_for_a_slot_gets_it_when_a_write_ends(open_nvme: Callable[..., TieredStore]) -> None:
    store = open_nvme(num_slots=1)
    for seed in range(20):
        lease, got = store.lease("a", Tier.RAM, wait=True), threading.Event()

        def use(got: threading.Event = got) -> None:
            with store.lease("b", Tier.RAM, wait=True):
                got.set()

        thread = threading.Thread(target=use)
        thread.start()
        time.sleep(0.001 * (seed % 3))
        lease.bytes.fill_(seed)
        store.mark_dirty("a", Tier.RAM)
        lease.release()
        store.write_back("a", Tier.RAM)  # and no evict: the slot is free when the write has ended
        assert got.wait(10)
        thread.join()


def test_store_that_is_closed_says_so(tmp_path: Path) -> None:
    store = TieredStore.open(ram=1 << 20, nvme=[f"{tmp_path}:1MiB"])
    store.register(BlockSpec("a", 100, Tier.NVME))
    store.seal()
    store.close()
    with pytest.raises(ClosedError, match="the store is closed"):
        store.lease("a", Tier.RAM)


@pytest.mark.parametrize(("num_bytes", "elsewhere"), [(0, 0), (-5, 0), (True, 0), (1.0, 0), ("1", 0), (1, 2), (1, -1)])
def test_register_of_a_block_of_no_size_that_a_block_can_have_is_refused(num_bytes: int, elsewhere: int) -> None:
    with TieredStore.open(ram="256KiB") as store, pytest.raises(BlockError, match="Give it 1 at least"):
        store.register(BlockSpec("b", num_bytes, home=Tier.RAM, elsewhere=elsewhere))
