"""Events of a trace: what they add up to, and the file that Perfetto opens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatier.errors import TransferError
from megatier.trace.events import TraceEvent, own_seconds, stall_seconds, write_trace


def test_stall_seconds_adds_up_by_cause() -> None:
    events = [
        TraceEvent(lane="stall", name="a", start_ns=0, end_ns=10**9, cause="nvme_to_ram"),
        TraceEvent(lane="stall", name="b", start_ns=0, end_ns=5 * 10**8, cause="nvme_to_ram"),
        TraceEvent(lane="stall", name="c", start_ns=0, end_ns=25 * 10**7, cause="update"),
        TraceEvent(lane="compute", name="c", start_ns=0, end_ns=10**9),
    ]
    assert stall_seconds(events) == {"nvme_to_ram": 1.5, "update": 0.25}
    assert stall_seconds([]) == {}


def test_own_seconds_are_compute_and_waits_for_all_but_other_ranks() -> None:
    events = [
        TraceEvent(lane="stall", name="a", start_ns=0, end_ns=4 * 10**9, cause="ranks"),
        TraceEvent(lane="stall", name="b", start_ns=0, end_ns=5 * 10**8, cause="update"),
        TraceEvent(lane="update", name="b", start_ns=0, end_ns=3 * 10**9),
        TraceEvent(lane="compute", name="a", start_ns=0, end_ns=10**9),
        TraceEvent(lane="compute", name="b", start_ns=10**9, end_ns=2 * 10**9),
    ]
    assert own_seconds(events) == 2.5
    assert own_seconds([]) == 0


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


def test_write_trace_links_a_stall_to_what_compute_waited_for(tmp_path: Path) -> None:
    events = [
        TraceEvent(lane="nvme_to_ram", name="a/weight", start_ns=0, end_ns=4000),
        TraceEvent(lane="nvme_to_ram", name="b/weight", start_ns=5000, end_ns=8000),
        TraceEvent(lane="stall", name="a", start_ns=1000, end_ns=4500, cause="nvme_to_ram"),
        TraceEvent(lane="stall", name="c", start_ns=9000, end_ns=9500, cause="nobody"),
    ]
    write_trace(tmp_path / "trace.json", [(1, events)])
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    [begin, end] = [row for row in rows if row["ph"] in "sf"]
    assert (begin["ts"], end["ts"], begin["id"]) == (0.0, 4.5, end["id"])
    tracks = {row["args"]["name"]: row["tid"] for row in rows if row["ph"] == "M"}
    assert (begin["tid"], end["tid"]) == (tracks["nvme_to_ram"], tracks["stall"])
