"""Traces: spans on one clock, stalls with their cause, and a file that Perfetto opens."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

from megatier.errors import TransferError
from megatier.play.trace import STALL_NS_MIN, Recorder, TraceEvent, stall_seconds, write_trace
from megatier.schedule.timeline import Access
from megatier.store.lanes import Lanes
from megatier.store.stream_clock import Instant
from megatier.store.transfer import Transfer
from megatier.tier import Phase


class At(Instant):
    """An instant whose time is given."""

    __slots__ = ()

    def __init__(self, ns: int) -> None:
        super().__init__(None)
        self._ns = ns


def access(unit: str) -> Access:
    return Access(unit, Phase.FORWARD, 0)


def test_take_gives_compute_stalls_work_and_transfers_in_order_of_start() -> None:
    recorder, lanes = Recorder(), Lanes(torch.device("cpu"))
    recorder.access(access("b"), "nvme_to_ram", At(500_000), At(600_000), At(700_000))
    recorder.access(access("a"), "update", At(100_000), At(200_000), At(400_000))
    recorder.work("update", "c", 50_000, 60_000)
    source = torch.ones(10, dtype=torch.uint8)
    transfer = lanes.to_gpu("weights", torch.zeros_like(source), source)
    lanes.close()
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


def test_take_raises_the_error_of_a_failed_transfer() -> None:
    def fail() -> None:
        raise TransferError("read of block a", "nvme", "/mnt/blocks", 0, 5)

    lanes = Lanes(torch.device("cpu"))
    transfer: Transfer = lanes.submit("nvme_to_ram", "a", 1, fail)
    lanes.close()
    with pytest.raises(TransferError):
        Recorder().take([transfer])


def test_take_leaves_a_transfer_under_way_to_the_next_call() -> None:
    recorder, lanes, go_on = Recorder(), Lanes(torch.device("cpu")), threading.Event()

    def wait() -> None:
        go_on.wait()

    transfer: Transfer = lanes.submit("nvme_to_ram", "a", 1, wait)
    assert recorder.take([transfer]) == []
    go_on.set()
    lanes.close()
    assert [event.name for event in recorder.take([])] == ["a"]


def test_stall_seconds_adds_up_by_cause() -> None:
    events = [
        TraceEvent(lane="stall", name="a", start_ns=0, end_ns=10**9, cause="nvme_to_ram"),
        TraceEvent(lane="stall", name="b", start_ns=0, end_ns=5 * 10**8, cause="nvme_to_ram"),
        TraceEvent(lane="stall", name="c", start_ns=0, end_ns=25 * 10**7, cause="update"),
        TraceEvent(lane="compute", name="c", start_ns=0, end_ns=10**9),
    ]
    assert stall_seconds(events) == {"nvme_to_ram": 1.5, "update": 0.25}
    assert stall_seconds([]) == {}


def test_write_trace_gives_one_named_track_per_lane(tmp_path: Path) -> None:
    steps = [
        (
            1,
            [
                TraceEvent(lane="compute", name="a", start_ns=1000, end_ns=3000),
                TraceEvent(lane="nvme_to_ram", name="b", start_ns=2000, end_ns=5000, num_bytes=4096),
            ],
        ),
        (2, [TraceEvent(lane="stall", name="a", start_ns=6000, end_ns=7000, cause="nvme_to_ram")]),
    ]
    path = tmp_path / "trace.json"
    write_trace(path, steps)
    rows = json.loads(path.read_text())["traceEvents"]
    names = {row["tid"]: row["args"]["name"] for row in rows if row["ph"] == "M"}
    assert list(names.values()) == ["compute", "nvme_to_ram", "stall"]
    spans = [row for row in rows if row["ph"] == "X"]
    assert [(names[row["tid"]], row["name"], row["ts"], row["dur"]) for row in spans] == [
        ("compute", "a", 1.0, 2.0),
        ("nvme_to_ram", "b", 2.0, 3.0),
        ("stall", "a", 6.0, 1.0),
    ]
    assert [row["args"] for row in spans] == [
        {"step": 1, "bytes": 0, "cause": ""},
        {"step": 1, "bytes": 4096, "cause": ""},
        {"step": 2, "bytes": 0, "cause": "nvme_to_ram"},
    ]


def test_write_trace_where_it_cannot_be_written_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(TransferError, match=r"writing the trace failed in .*none/trace\.json .*: No such file"):
        write_trace(tmp_path / "none" / "trace.json", [])
