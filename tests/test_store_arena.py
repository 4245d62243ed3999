"""Arenas and the slots cut from them."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from megatier.errors import CapacityError
from megatier.store.arena import HUGE_PAGE_BYTES, Arena, SlotPool
from megatier.store.tier import PAGE_BYTES
from megatier.store.transfer import Transfer

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


def test_arena_is_resident_from_the_start() -> None:
    def resident_kib() -> int:
        with open("/proc/self/status", encoding="ascii") as status:  # noqa: PTH123
            return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

    before = resident_kib()
    arena = Arena(64 << 20, CPU)
    assert resident_kib() - before > 60 << 10
    arena.close()


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
    with pytest.raises(CapacityError, match=r"error 2: out of memory.*lower tiers\.ram") as caught:
        Arena(PAGE_BYTES, CPU, pin=True)
    assert (caught.value.tier, caught.value.needed_bytes) == ("ram", PAGE_BYTES)


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


@pytest.mark.gpu
def test_arena_on_cuda_is_device_memory_and_ram_is_pinned() -> None:
    device = Arena(1 << 20, torch.device("cuda"))
    assert device.bytes.is_cuda
    host = Arena(1 << 20, CPU, pin=True)
    assert host.pinned
    assert host.bytes.is_pinned()
    host.close()
    assert not host.bytes.is_pinned()
