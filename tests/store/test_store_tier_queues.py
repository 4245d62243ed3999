"""The queues between tiers: copies between RAM and the GPU, what they count, and their times."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import pytest
import torch
from from_outside import pattern

from megatier.errors import ClosedError
from megatier.store.staging import Staging
from megatier.store.tier_queues import TierQueues
from megatier.store.transfer import Transfer, compute_point


def test_queues_copy_count_and_log() -> None:
    queues = TierQueues(torch.device("cpu"))
    source, target = pattern(1, 1000), torch.zeros(1000, dtype=torch.uint8)
    queues.to_gpu("up", target, source).wait()
    assert torch.equal(target, source)
    queues.to_ram("down", target[:10], source[10:20]).wait()
    assert torch.equal(target[:10], source[10:20])
    queues.submit("ram_to_gpu", "", 0, lambda: None)
    assert queues.moved_bytes == {"ram_to_gpu": 1000, "gpu_to_ram": 10}
    assert [(t.queue, t.key) for t in queues.take_log()] == [("ram_to_gpu", "up"), ("gpu_to_ram", "down")]
    assert queues.take_log() == []
    queues.close()


def test_move_that_waits_at_close_still_passes_through_its_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    queues = TierQueues(torch.device("cpu"))
    queues.staging = Staging(1 << 20, None)
    ring = queues.staging.rings["ram_to_gpu"]
    up, num_through_ring = ring.up, []

    def counted(*words: Any) -> None:
        num_through_ring.append(1)
        up(*words)

    monkeypatch.setattr(ring, "up", counted)
    source, target = pattern(1, 4096), torch.zeros(4096, dtype=torch.uint8)
    goes_on, closes = threading.Event(), threading.Event()
    first = queues.queues["nvme_to_ram"]
    close = first.close

    def close_first() -> None:
        closes.set()
        close()

    monkeypatch.setattr(first, "close", close_first)

    def wait_first() -> None:
        goes_on.wait()

    queues.submit("ram_to_gpu", "before", 0, wait_first)
    queues.to_gpu("up", target, source)
    closer = threading.Thread(target=queues.close, daemon=True)
    closer.start()
    closes.wait()
    goes_on.set()
    closer.join()

    assert num_through_ring == [1]
    assert torch.equal(target, source)
    assert queues.staging is None


def test_move_that_is_submitted_while_another_thread_closes_ends_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    queues = TierQueues(torch.device("cpu"))
    queue = queues.queues["ram_to_gpu"]
    is_putting, goes_on = threading.Event(), threading.Event()
    items: Any = queue._items

    class SlowItems:
        """Takes its time with the first item."""

        get = items.get

        def put(self, item: object) -> None:
            if item is not None:
                is_putting.set()
                goes_on.wait()
            items.put(item)

    ended: list[bool] = []

    def move() -> None:
        with contextlib.suppress(ClosedError):
            queue.submit("up", 0, lambda: None).wait_for_end()
        ended.append(True)

    monkeypatch.setattr(queue, "_items", SlowItems())
    mover, closer = threading.Thread(target=move, daemon=True), threading.Thread(target=queues.close, daemon=True)
    mover.start()
    is_putting.wait()
    closer.start()
    closer.join(0.1)
    goes_on.set()
    mover.join(30)
    closer.join(30)
    assert ended == [True]
    assert not closer.is_alive()
    with pytest.raises(ClosedError):
        queue.submit("up", 0, lambda: None)


def test_queues_close_all_though_one_of_them_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    queues = TierQueues(torch.device("cpu"))
    first, *others = queues.queues.values()
    close = first.close

    def fail() -> None:
        close()
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(first, "close", fail)
    with pytest.raises(RuntimeError, match="illegal"):
        queues.close()
    for queue in others:
        with pytest.raises(ClosedError):
            queue.submit("up", 0, lambda: None)


@pytest.mark.gpu
def test_queue_of_native_moves_waits_for_streams() -> None:
    queues = TierQueues(torch.device("cuda"))
    source = torch.full((64 << 20,), 7, dtype=torch.uint8, device="cuda")
    target = torch.zeros(64 << 20, dtype=torch.uint8, pin_memory=True)
    seen: list[bool] = []
    for _ in range(5):
        target.zero_()
        copied = queues.to_ram(
            "grad", target, source, requires=[m for m in [compute_point(queues.clock, "grad")] if m is not None]
        )
        queues.submit(
            "ram_to_nvme", "grad", 1, lambda: seen.append(bool((target == 7).all())), requires=[copied]
        ).wait()
    assert seen == [True] * 5
    queues.close()


@pytest.mark.gpu
def test_transfer_on_a_stream_has_a_span_on_the_hosts_clock() -> None:
    queues = TierQueues(torch.device("cuda"))
    start = time.perf_counter_ns()
    transfer = queues.to_gpu("x", torch.zeros(1 << 20, dtype=torch.uint8, device="cuda"), pattern(1, 1 << 20))
    assert transfer.wait() >= 0
    first, last = transfer.span_ns()
    assert start - 2_000_000 < first <= last < time.perf_counter_ns() + 2_000_000
    assert isinstance(transfer, Transfer)
    queues.close()


@pytest.mark.gpu
def test_copy_longer_than_a_piece_arrives_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatier.store.tier_queues.COPY_BYTES_MAX", 1000)
    queues = TierQueues(torch.device("cuda"))
    source, back = pattern(3, 10_500).pin_memory(), torch.zeros(10_500, dtype=torch.uint8, pin_memory=True)
    there = torch.zeros(10_500, dtype=torch.uint8, device="cuda")
    zeros = compute_point(queues.clock, "zeros")
    assert zeros is not None
    up = queues.to_gpu("x", there, source, follows=[zeros])
    queues.to_ram("x", back, there, requires=[up]).wait()
    assert torch.equal(back, source)
    queues.close()
