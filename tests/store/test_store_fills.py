"""Fills from NVMe to the GPU while another thread uses the same bytes in RAM."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from from_outside import check_invariants, pattern
from opened_store import OpenedStore
from store_blocks import NUM_BYTES, read, send_home, write

from megatier.errors import DirtyBlockError
from megatier.store.store import TieredStore
from megatier.tier import Tier

TIMEOUT_S = 10.0


class OnNvme(OpenedStore):
    home = Tier.NVME


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    """A store with one slot on the GPU and one in RAM."""
    opened = OnNvme().open(tmp_path, gpu_slots=1, ram_slots=1)
    yield opened
    check_invariants(opened)
    opened.close()


def on_another_thread(action: Callable[[], None]) -> None:
    """Run an action on another thread, to its end."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def during_first_wait(store: TieredStore, monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Run an action while a thread waits for a slot without the lock, the first time that one does."""
    real = store._copies._wait_unlocked

    def wait_unlocked(_: Callable[[], object]) -> None:
        monkeypatch.setattr(store._copies, "_wait_unlocked", real)
        real(action)

    monkeypatch.setattr(store._copies, "_wait_unlocked", wait_unlocked)


def test_prefetch_while_another_thread_leases_the_bytes_in_ram_leaves_them_there(
    store: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, "a", Tier.RAM, pattern(1, NUM_BYTES))
    send_home(store, "a")
    only_slot = store.lease("b", Tier.RAM)
    leases = []

    def lease_in_ram() -> None:
        only_slot.release()
        on_another_thread(lambda: leases.append(store.lease("a", Tier.RAM)))

    during_first_wait(store, monkeypatch, lease_in_ram)
    for transfer in store.prefetch("a", Tier.GPU, wait=True):
        transfer.wait()

    assert torch.equal(leases[0].bytes, pattern(1, NUM_BYTES))
    leases[0].release()
    assert torch.equal(read(store, "a", Tier.GPU), pattern(1, NUM_BYTES))


def test_prefetch_while_another_thread_changes_the_bytes_in_ram_brings_the_new_ones(
    store: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_slot = store.lease("b", Tier.RAM)

    def change_in_ram() -> None:
        only_slot.release()
        on_another_thread(lambda: write(store, "a", Tier.RAM, pattern(2, NUM_BYTES)))

    during_first_wait(store, monkeypatch, change_in_ram)
    store.prefetch("a", Tier.GPU, wait=True)

    assert torch.equal(read(store, "a", Tier.GPU), pattern(2, NUM_BYTES))
    assert store.is_dirty("a")
    send_home(store, "a")


def test_prefetch_that_waited_wakes_a_thread_that_waits_for_its_slot(
    store: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_slot = store.lease("b", Tier.RAM)
    leases = []
    waiting = threading.Thread(target=lambda: leases.append(store.lease("c", Tier.GPU, fresh=True, wait=True)))

    def have_another_thread_wait() -> None:
        only_slot.release()
        on_another_thread(lambda: leases.append(store.lease("a", Tier.RAM)))

        # The slot on the GPU counts as leased now, so this thread goes to sleep.
        waiting.start()
        while not store._copies._waiting_for_slot:
            waiting.join(0.001)
            assert waiting.is_alive()

    during_first_wait(store, monkeypatch, have_another_thread_wait)
    store.prefetch("a", Tier.GPU, wait=True)

    # Nothing else wakes it: the bytes in RAM are still leased.
    waiting.join(TIMEOUT_S)
    assert not waiting.is_alive()
    for lease in leases:
        lease.release()


def test_lease_in_ram_that_waits_while_the_gpu_gets_newer_bytes_is_refused(
    store: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, "a", Tier.RAM, pattern(1, NUM_BYTES))
    send_home(store, "a")
    for transfer in store.prefetch("a", Tier.GPU):
        transfer.wait()
    only_slot = store.lease("b", Tier.RAM)

    def change_on_gpu() -> None:
        on_another_thread(lambda: write(store, "a", Tier.GPU, pattern(2, NUM_BYTES)))
        only_slot.release()

    during_first_wait(store, monkeypatch, change_on_gpu)
    with pytest.raises(DirtyBlockError, match="a has newer bytes on gpu"):
        store.lease("a", Tier.RAM, wait=True)

    assert torch.equal(read(store, "a", Tier.GPU), pattern(2, NUM_BYTES))
    send_home(store, "a")
    assert torch.equal(read(store, "a", Tier.RAM), pattern(2, NUM_BYTES))


def test_lease_that_waits_takes_a_prefetched_slot_if_nobody_writes_dirty_bytes_home(tmp_path: Path) -> None:
    opened = OnNvme().open(tmp_path, gpu_slots=1, ram_slots=2)
    write(opened, "a", Tier.RAM, pattern(1, NUM_BYTES))
    for transfer in opened.prefetch("b", Tier.RAM):
        transfer.wait()

    on_another_thread(lambda: opened.lease("c", Tier.RAM, wait=True).release())

    assert opened.is_dirty("a")
    send_home(opened, "a")
    check_invariants(opened)
    opened.close()
