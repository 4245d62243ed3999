"""Arenas and the slots cut from them."""

from __future__ import annotations

import gc
import mmap
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_driver import SmallDriver, check_codes_alone

from megatier.address import fill_bytes
from megatier.errors import CapacityError, UnsealedError
from megatier.page_lock import LOCKED_BYTES, PageLock
from megatier.store.arena import HUGE_PAGE_BYTES, Arena, SlotPool
from megatier.store.store import TieredStore
from megatier.store.tier_queues import COPY_BYTES_MAX, TierQueues
from megatier.store.transfer import Transfer
from megatier.tier import PAGE_BYTES, BlockSpec, Tier, cut_at_addresses

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_bytes", [1, PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 5])
def test_arena_is_aligned_zeroed_and_of_exact_size(num_bytes: int) -> None:
    arena = Arena(num_bytes, CPU)
    assert arena.num_bytes == -(-num_bytes // PAGE_BYTES) * PAGE_BYTES == arena.bytes.numel()
    assert arena.address % HUGE_PAGE_BYTES == 0
    assert arena.bytes.dtype is torch.uint8
    assert not arena.bytes.any()
    assert not arena.pinned
    arena.close()


def test_arena_is_touched_by_the_cores_of_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatier.store.arena.cores_usable", lambda: 3)
    before = threading.active_count()
    arena = Arena(64 << 20, CPU, finishes=False)
    assert threading.active_count() == before + 3
    arena.close()


def test_arena_is_resident_from_the_start() -> None:
    def resident_kib() -> int:
        with open("/proc/self/status", encoding="ascii") as status:  # noqa: PTH123
            return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

    before = resident_kib()
    arena = Arena(64 << 20, CPU)
    assert resident_kib() - before > 60 << 10
    arena.close()


def test_arena_that_is_closed_while_it_is_touched_leaves_no_thread() -> None:
    before = threading.active_count()
    arena = Arena(64 << 20, CPU, finishes=False)
    arena.close()
    assert threading.active_count() == before


def test_seal_that_is_refused_gives_back_the_memory_that_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    close = Arena.close

    def noted(arena: Arena) -> None:
        closed.append(arena.num_bytes)
        close(arena)

    monkeypatch.setattr(Arena, "close", noted)
    before = threading.active_count()
    store = TieredStore.open(gpu=1 << 60, ram=65 << 20)
    started = threading.active_count()
    store.register(BlockSpec("a", PAGE_BYTES, Tier.RAM))
    store.reserve(Tier.GPU, None, 1 << 59, 1)
    store.reserve(Tier.RAM, None, 64 << 20, 1)
    with pytest.raises(CapacityError, match="refused"):
        store.seal()
    assert closed == [(64 << 20) + PAGE_BYTES]
    assert threading.active_count() == started

    # Whoever comes next learns of it too, and is not told of slots that are too small.
    for again in (store.seal, lambda: store.lease("a", Tier.RAM), lambda: store.prefetch("a", Tier.GPU)):
        with pytest.raises(UnsealedError, match=r"could not take its memory .* refused") as caught:
            again()
        assert isinstance(caught.value.__cause__, CapacityError)
    store.close()
    assert threading.active_count() == before


def test_view_shares_the_arena_and_outlives_it() -> None:
    arena = Arena(4 * PAGE_BYTES, CPU)
    view = arena.view(PAGE_BYTES, 100)
    view.fill_(7)
    assert int(arena.bytes.sum()) == 700
    assert view.data_ptr() == arena.address + PAGE_BYTES
    arena.close()
    del arena
    gc.collect()
    assert bool((view == 7).all())


def test_arena_that_the_system_lacks_is_a_capacity_error() -> None:
    with pytest.raises(CapacityError, match="refused") as caught:
        Arena(1 << 60, CPU)
    assert (caught.value.tier, caught.value.needed_bytes) == ("ram", 1 << 60)


def test_arena_that_cuda_does_not_page_lock_is_a_capacity_error(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = SimpleNamespace(
        cudaError=SimpleNamespace(success=0),
        cudaHostRegister=lambda *_: 2,
        cudaGetErrorString=lambda code: f"error {code}: out of memory",
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    with pytest.raises(CapacityError, match=r"error 2: out of memory") as caught:
        Arena(PAGE_BYTES, CPU, pin=True)
    assert (caught.value.tier, caught.value.needed_bytes) == ("ram", PAGE_BYTES)


@pytest.fixture
def locked_bytes(monkeypatch: pytest.MonkeyPatch) -> int:
    """So that small arenas are pinned in several pieces."""
    monkeypatch.setattr("megatier.store.arena.LOCKED_BYTES", 4 * HUGE_PAGE_BYTES)
    if not torch.cuda.is_available():
        check_codes_alone(monkeypatch)
    return 4 * HUGE_PAGE_BYTES


def test_arena_larger_than_the_driver_locks_at_once_is_locked_in_pieces(
    locked_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = SmallDriver(locked_bytes, 10 * locked_bytes)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    arena = Arena(3 * locked_bytes + PAGE_BYTES, CPU, pin=True)
    assert arena.pinned
    assert min(driver.locked) == arena.address
    assert sum(driver.locked.values()) == arena.num_bytes
    ends = sorted(address + size for address, size in driver.locked.items())
    assert all(end % locked_bytes == 0 for end in ends[:-1])
    assert sorted(driver.locked)[1:] == ends[:-1]
    arena.close()
    assert not driver.locked


def test_arena_is_page_locked_where_it_was_touched_while_the_rest_is_touched(
    locked_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = SmallDriver(locked_bytes, 10 * locked_bytes)
    first_is_locked = threading.Event()
    begun: list[int] = []
    touched: list[int] = []

    def touch(piece: torch.Tensor, byte: int) -> None:
        begun.append(piece.data_ptr())
        if len(begun) == 3 * locked_bytes // HUGE_PAGE_BYTES:
            assert first_is_locked.wait(60)
        fill_bytes(piece, byte)
        touched.append(piece.data_ptr())

    def lock(address: int, num_bytes: int, flags: int) -> int:
        wanted = set(range(address, address + num_bytes, HUGE_PAGE_BYTES))
        assert wanted <= set(touched)
        first_is_locked.set()
        return SmallDriver.cudaHostRegister(driver, address, num_bytes, flags)

    monkeypatch.setattr(driver, "cudaHostRegister", lock, raising=False)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr("megatier.store.arena.fill_bytes", touch)
    monkeypatch.setattr("megatier.store.arena.POPULATE_BYTES", HUGE_PAGE_BYTES)
    arena = Arena(3 * locked_bytes, CPU, pin=True)
    assert sum(driver.locked.values()) == arena.num_bytes == len(touched) * HUGE_PAGE_BYTES
    arena.close()


def test_page_lock_that_is_interrupted_between_pieces_leaves_nothing_locked(
    locked_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = SmallDriver(locked_bytes, 10 * locked_bytes)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)

    def pieces() -> Iterator[tuple[int, int]]:
        yield 0, locked_bytes
        assert driver.locked
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        PageLock(0, pieces())
    assert not driver.locked


def test_arena_of_which_a_piece_is_refused_leaves_nothing_locked(
    locked_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = SmallDriver(locked_bytes, 2 * locked_bytes)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    with pytest.raises(CapacityError, match=r"error 2"):
        Arena(4 * locked_bytes, CPU, pin=True)
    assert not driver.locked


def test_copies_of_queues_never_cross_the_end_of_what_is_locked_at_once() -> None:
    assert LOCKED_BYTES % COPY_BYTES_MAX == 0
    address = 3 * LOCKED_BYTES - 1000
    pieces = list(cut_at_addresses(address, 3 * COPY_BYTES_MAX, COPY_BYTES_MAX))
    assert pieces[0] == (0, 1000)
    assert [stop for _, stop in pieces[:-1]] == [start for start, _ in pieces[1:]]
    assert pieces[-1][1] == 3 * COPY_BYTES_MAX
    assert all(stop - start <= COPY_BYTES_MAX for start, stop in pieces)
    assert list(cut_at_addresses(address, 0, COPY_BYTES_MAX)) == []


def test_slots_are_equal_disjoint_page_aligned_and_last_in_last_out() -> None:
    pool = SlotPool(PAGE_BYTES, 5000, 3)
    slots = [pool.take() for _ in range(3)]
    assert pool.take() is None
    assert pool.num_free == 0
    found = [slot for slot in slots if slot is not None]
    assert [slot.offset for slot in found] == [PAGE_BYTES, 3 * PAGE_BYTES, 5 * PAGE_BYTES]
    assert {slot.num_bytes for slot in found} == {2 * PAGE_BYTES}
    transfer = Transfer("queue", "key", 0)
    for slot in reversed(found):
        pool.give(slot, [transfer])
    assert [pool.take() for _ in range(3)] == found[::-1]
    assert found[0].pending == [transfer]


def test_arena_is_not_in_a_forked_child() -> None:
    arena = Arena(4 * PAGE_BYTES, CPU)
    assert "dc" in flags_at(arena.address), "do not copy on fork"
    assert run_in_child(lambda: flags_at(arena.address) == []) == 0
    arena.close()


def test_arena_that_a_forked_child_drops_unmaps_nothing_of_the_childs() -> None:
    arenas = [Arena(4 * HUGE_PAGE_BYTES, CPU)]

    def drop() -> bool:
        taken = [mmap.mmap(-1, 1 << 20) for _ in range(32)]  # some of it lies where the arena did
        arenas.clear()
        gc.collect()
        return all(region[0] == 0 and region[-1] == 0 for region in taken)

    assert run_in_child(drop) == 0


def flags_at(address: int) -> list[str]:
    """VmFlags of the mapping that holds an address; none where there is none."""
    found = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        first, _, rest = line.partition(" ")
        start, dash, stop = first.partition("-")
        if dash and ":" not in first:
            found = int(start, 16) <= address < int(stop, 16)
        elif found and first == "VmFlags:":
            return rest.split()
    return []


def run_in_child(check: Callable[[], bool]) -> int:
    """Exit status of a forked child: 0 where the check holds, a negative signal where it was killed."""
    with warnings.catch_warnings():  # Python warns of threads; the child starts none and takes no lock of theirs
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        status = 2
        try:
            status = 0 if check() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.gpu
def test_arena_that_is_pinned_keeps_its_pages_through_a_fork() -> None:
    host = Arena(8 << 20, CPU, pin=True)
    device = torch.zeros(host.num_bytes, dtype=torch.uint8, device="cuda")
    release, hold = os.pipe()
    child = os.fork()
    if not child:  # it lives while the parent writes, and touches nothing
        os.close(hold)
        os.read(release, 1)
        os._exit(0)
    for byte in (1, 2, 3):
        host.bytes.fill_(byte)
        device.copy_(host.bytes, non_blocking=True)
        assert bool((device == byte).all())
        device.fill_(byte + 10)
        host.bytes.copy_(device, non_blocking=True)
        torch.cuda.synchronize()
        assert bool((host.bytes == byte + 10).all())
    os.close(hold)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(release)
    host.close()


@pytest.mark.gpu
def test_arena_on_cuda_is_device_memory_and_ram_is_pinned() -> None:
    device = Arena(1 << 20, torch.device("cuda"))
    assert device.bytes.is_cuda
    host = Arena(1 << 20, CPU, pin=True)
    assert host.pinned
    assert host.bytes.is_pinned()
    host.close()
    assert not host.bytes.is_pinned()


@pytest.mark.gpu
def test_arena_that_is_locked_in_pieces_is_copied_across_their_ends(locked_bytes: int) -> None:
    """The queues cut a copy where a piece ends; here it ends in the middle of what they move."""
    host = Arena(3 * locked_bytes, CPU, pin=True)
    host.bytes.copy_(torch.arange(host.num_bytes, dtype=torch.int64).remainder_(251))
    there = torch.zeros(host.num_bytes, dtype=torch.uint8, device="cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatier.store.tier_queues.COPY_BYTES_MAX", locked_bytes)
        queues = TierQueues(torch.device("cuda"))
        queues.to_gpu("x", there, host.bytes).wait()
        assert torch.equal(there.cpu(), host.bytes)
        host.bytes.zero_()
        queues.to_ram("x", host.bytes, there).wait()
        assert torch.equal(there.cpu(), host.bytes)
        queues.close()
    host.close()
