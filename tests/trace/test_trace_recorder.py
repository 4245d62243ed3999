"""The recorder: events on one clock, stalls with their cause, and moves that outlast a pass."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest
import torch

from megatier.errors import TransferError
from megatier.host_wait import HOST_WAIT
from megatier.schedule.timeline import Access
from megatier.store.stream_clock import Instant
from megatier.store.tier_queues import TierQueues
from megatier.store.transfer import Transfer
from megatier.tier import Phase
from megatier.trace.events import TraceEvent
from megatier.trace.recorder import STALL_NS_MIN, WAIT_SLICE_S, Recorder


class At(Instant):
    """An instant whose time is given."""

    __slots__ = ()

    def __init__(self, ns: int) -> None:
        super().__init__(None)
        self._ns = ns


def access(unit: str) -> Access:
    return Access(unit, Phase.FORWARD, 0)


def test_take_gives_compute_stalls_work_and_transfers_in_order_of_start() -> None:
    recorder, queues = Recorder(), TierQueues(torch.device("cpu"))
    recorder.access(access("b"), "nvme_to_ram", At(500_000), At(600_000), At(700_000))
    recorder.access(access("a"), "update", At(100_000), At(200_000), At(400_000))
    recorder.work("update", "c", 50_000, 60_000)
    source = torch.ones(10, dtype=torch.uint8)
    transfer = queues.to_gpu("weights", torch.zeros_like(source), source)
    queues.close()
    events = recorder.take([transfer])
    assert events[:-1] == [
        TraceEvent(lane="update", name="c", start_ns=50_000, end_ns=60_000),
        TraceEvent(lane="stall", name="a", start_ns=100_000, end_ns=200_000, cause="update"),
        TraceEvent(lane="compute", name="a forward 0", start_ns=200_000, end_ns=400_000),
        TraceEvent(lane="stall", name="b", start_ns=500_000, end_ns=600_000, cause="nvme_to_ram"),
        TraceEvent(lane="compute", name="b forward 0", start_ns=600_000, end_ns=700_000),
    ]
    last = events[-1]
    assert (last.lane, last.name, last.num_bytes) == ("ram_to_gpu", "weights", 10)
    assert 0 < last.start_ns <= last.end_ns
    assert recorder.take([]) == []


def test_wait_shorter_than_the_cost_of_asking_is_no_stall() -> None:
    recorder = Recorder()
    recorder.access(access("a"), "ram_to_gpu", At(0), At(STALL_NS_MIN - 1), At(100_000))
    recorder.access(access("b"), "ram_to_gpu", At(0), At(STALL_NS_MIN), At(100_000))
    assert [event.name for event in recorder.take([]) if event.lane == "stall"] == ["b"]


def test_time_in_which_nothing_was_waited_for_is_no_stall() -> None:
    recorder = Recorder()
    recorder.access(access("a"), "", At(0), At(10 * STALL_NS_MIN), At(900_000))
    (found,) = recorder.take([])
    assert (found.lane, found.start_ns, found.end_ns) == ("compute", 10 * STALL_NS_MIN, 900_000)


def test_pause_inside_a_use_is_a_stall_and_no_compute() -> None:
    recorder = Recorder()
    recorder.pause("ranks", At(0), At(50_000))
    recorder.pause("ranks", At(300_000), At(450_000))
    recorder.pause("ranks", At(500_000), At(500_000 + STALL_NS_MIN - 1))
    recorder.access(access("a"), "update", At(100_000), At(200_000), At(600_000))
    recorder.access(access("b"), "update", At(700_000), At(700_000), At(800_000))
    assert recorder.own_seconds() == pytest.approx((100 + 100 + 150 + 100) * 1e-6)
    assert [(event.lane, event.cause, event.start_ns, event.end_ns) for event in recorder.take([])] == [
        ("stall", "ranks", 0, 50_000),
        ("stall", "update", 100_000, 200_000),
        ("compute", "", 200_000, 300_000),
        ("stall", "ranks", 300_000, 450_000),
        ("compute", "", 450_000, 600_000),
        ("compute", "", 700_000, 800_000),
    ]
    assert recorder.own_seconds() == 0


def test_take_raises_the_error_of_a_failed_transfer() -> None:
    def fail() -> None:
        raise TransferError("read of block a", "nvme", "/mnt/blocks", 0, 5)

    queues = TierQueues(torch.device("cpu"))
    transfer: Transfer = queues.submit("nvme_to_ram", "a", 1, fail)
    queues.close()
    with pytest.raises(TransferError):
        Recorder().take([transfer])


def test_take_leaves_a_transfer_under_way_to_the_next_call() -> None:
    recorder, queues, go_on = Recorder(), TierQueues(torch.device("cpu")), threading.Event()

    def wait() -> None:
        go_on.wait()

    transfer: Transfer = queues.submit("nvme_to_ram", "a", 1, wait)
    assert recorder.take([transfer]) == []
    go_on.set()
    queues.close()
    assert [event.name for event in recorder.take([])] == ["a"]


def test_host_does_not_work_while_it_waits() -> None:
    recorder = Recorder()
    HOST_WAIT.restart()
    with recorder.waiting("ram_to_gpu"):
        time.sleep(0.02)
    assert HOST_WAIT.ns >= 0.02 * 1e9


def test_wait_from_which_the_thread_was_woken_late_has_a_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a wait of half a slice may take several."""
    recorder, queues, go_on = Recorder(), TierQueues(torch.device("cpu")), threading.Event()

    def wait() -> None:
        go_on.wait()

    queues.submit("nvme_to_ram", "a", 1, wait)
    second: Transfer = queues.submit("nvme_to_ram", "b", 1, lambda: None)
    has_started = Transfer.has_started

    def woken_late(transfer: Transfer, timeout_s: float) -> bool:
        if not timeout_s:
            return has_started(transfer, timeout_s)
        go_on.set()
        time.sleep(5 * WAIT_SLICE_S)
        return has_started(transfer, timeout_s)

    monkeypatch.setattr(Transfer, "has_started", woken_late)
    causes = Counter[str]()
    recorder.wait_until_started(second, causes)
    assert causes == {"nvme_to_ram": 1}

    recorder.wait_until_started(second, causes)
    assert causes == {"nvme_to_ram": 1}, "it has started long ago"
    queues.close()


def test_event_that_a_lane_notes_while_others_are_taken_belongs_to_the_next_call() -> None:
    recorder = Recorder()
    looked_up = recorder._events
    assert recorder.take([]) == []
    event = TraceEvent(lane="update", name="c", start_ns=1, end_ns=2)
    looked_up.append(event)
    assert recorder.take([]) == [event]
