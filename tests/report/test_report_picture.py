"""The picture of a step: rows, colours, figures and ticks of an SVG that needs nothing else."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatier.errors import ConfigError
from megatier.report.picture import (
    COLOURS,
    LANES,
    LEFT,
    PLOT,
    STALL_COLOUR_OTHER,
    STALL_COLOURS,
    draw,
    lane_uses,
    read_trace,
    step_seconds,
)
from megatier.report.svg import WIDTH
from megatier.trace.events import TraceEvent, write_trace

MS = 1_000_000
SVG = "{http://www.w3.org/2000/svg}"
STEP = [
    TraceEvent(lane="stall", name="a", start_ns=0, end_ns=20 * MS, cause="nvme_to_ram"),
    TraceEvent(lane="nvme_to_ram", name="a/weight", start_ns=0, end_ns=15 * MS, num_bytes=4096),
    TraceEvent(lane="ram_to_gpu", name="a/weight", start_ns=15 * MS, end_ns=20 * MS, num_bytes=4096),
    TraceEvent(lane="compute", name="a forward 0", start_ns=20 * MS, end_ns=50 * MS),
    TraceEvent(lane="compute", name="a backward 0", start_ns=50 * MS, end_ns=90 * MS),
    TraceEvent(lane="update", name="a", start_ns=90 * MS, end_ns=100 * MS),
]


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def spans(svg: str, colour: str) -> list[tuple[float, float]]:
    """Where spans of a colour begin and end, in pixels from the start of the axis."""
    paths = [p for p in ElementTree.fromstring(svg).iter(f"{SVG}path") if p.get("stroke") == colour]
    found = [re.findall(r"M([\d.]+) [\d.]+H([\d.]+)", path.get("d") or "") for path in paths]
    return [(float(left) - LEFT, float(right) - LEFT) for left, right in itertools.chain.from_iterable(found)]


# ---------------------------------------------------------------------- drawing


def test_draw_needs_nothing_but_itself() -> None:
    svg = draw(STEP, "step 3")
    root = ElementTree.fromstring(svg)
    assert root.get("width") == str(WIDTH)
    assert {element.tag.removeprefix(SVG) for element in root.iter()} == {"svg", "title", "rect", "text", "path"}
    assert "href" not in svg
    background = next(root.iter(f"{SVG}rect"))
    assert (background.get("width"), background.get("height")) == (root.get("width"), root.get("height"))
    assert background.get("fill") == "#ffffff"


def test_draw_spans_lie_where_and_as_long_as_they_were() -> None:
    svg, pixels_per_ms = draw(STEP, "step"), PLOT / 100
    for colour, start, end in (
        (STALL_COLOURS["nvme_to_ram"], 0, 20),
        (COLOURS["forward"], 20, 50),
        (COLOURS["backward"], 50, 90),
        (COLOURS["update"], 90, 100),
    ):
        assert spans(svg, colour) == [pytest.approx((start * pixels_per_ms, end * pixels_per_ms), abs=0.1)]
    assert len(spans(svg, COLOURS["transfer"])) == 2


def test_draw_rows_stand_in_a_fixed_order_and_others_after() -> None:
    lanes = ["zeta", *reversed(LANES), "load"]
    events = [
        TraceEvent(lane=lane, name="a forward 0", start_ns=i * MS, end_ns=(i + 1) * MS) for i, lane in enumerate(lanes)
    ]
    found = texts(draw(events, "step"))
    assert [text for text in found[found.index("at once") :] if text in lanes] == [*LANES, "load", "zeta"]


def test_draw_figures_say_how_long_each_lane_was_busy() -> None:
    found = texts(draw(STEP, "step"))
    assert "100 ms in all; compute busy 70.0 %, stalled 20 ms, host 10 ms" in found
    assert "stall: nvme_to_ram 20 ms" in found
    assert found[found.index("compute") :][1:3] == ["70 ms", "70.0 %"]
    assert found[found.index("nvme_to_ram") :][1:3] == ["15 ms", "15.0 %"]


def test_draw_of_a_whole_step_shows_its_seconds_and_names_what_is_idle() -> None:
    whole = TraceEvent(lane="step", name="step 3", start_ns=-10 * MS, end_ns=190 * MS)
    earlier = TraceEvent(lane="ram_to_nvme", name="a", start_ns=-40 * MS, end_ns=0)
    events = [*STEP, whole, earlier]
    found = texts(draw(events, "step"))
    assert step_seconds(events) == 0.2
    assert "200 ms in all; compute busy 35.0 %, stalled 20 ms, host 110 ms" in found
    assert "idle" in found
    assert "step" not in [use.lane for use in lane_uses(events)]
    assert min(left for left, _ in spans(draw(events, "step"), COLOURS["transfer"])) == 0


def test_draw_stalls_alone_still_have_the_compute_row() -> None:
    svg = draw([TraceEvent(lane="stall", name="a", start_ns=0, end_ns=MS, cause="somebody")], "step")
    assert "compute" in texts(svg)
    assert spans(svg, STALL_COLOUR_OTHER) == [(0, PLOT)]


def test_draw_short_stall_in_compute_stays_visible_on_top() -> None:
    events = [
        TraceEvent(lane="stall", name="a", start_ns=500 * MS, end_ns=500 * MS + 1, cause="update"),
        TraceEvent(lane="compute", name="a forward 0", start_ns=0, end_ns=1000 * MS),
    ]
    svg = draw(events, "step")
    [(left, right)] = spans(svg, STALL_COLOURS["update"])
    assert right - left == pytest.approx(0.3, abs=0.11)
    assert svg.index(f'stroke="{STALL_COLOURS["update"]}"') > svg.index(f'stroke="{COLOURS["forward"]}"')


def test_draw_text_is_escaped() -> None:
    hostile = "<script>&\"'\x00\ud800</script>"
    events = [
        TraceEvent(lane="<b>&", name=hostile, start_ns=0, end_ns=MS),
        TraceEvent(lane="stall", name=hostile, start_ns=0, end_ns=MS, cause="</text>&"),
    ]
    found = texts(draw(events, hostile))
    assert {"<script>&\"'\ufffd\ufffd</script>", "<b>&", "stall: </text>& 1 ms"} <= set(found)
    draw(events, hostile).encode("utf-8")


def test_draw_long_names_are_cut() -> None:
    found = texts(draw([TraceEvent(lane="l" * 99, name="a", start_ns=0, end_ns=MS)], "t" * 999))
    assert found[0] == "t" * 109 + "…"
    assert "l" * 14 + "…" in found


def test_draw_legend_of_every_cause_stays_inside_and_above_the_rows() -> None:
    events = [
        TraceEvent(lane="stall", name="a", start_ns=i * MS, end_ns=(i + 1) * MS, cause=cause)
        for i, cause in enumerate(LANES)
    ]
    entries = [t for t in ElementTree.fromstring(draw(events, "")).iter(f"{SVG}text") if "stall:" in (t.text or "")]
    assert len(entries) == len(LANES)
    assert all(float(entry.get("x") or 0) + 6 * len(entry.text or "") < WIDTH for entry in entries)
    assert len({(entry.get("x"), entry.get("y")) for entry in entries}) == len(LANES)


def test_draw_thousands_of_spans_make_a_small_file() -> None:
    events = [
        TraceEvent(
            lane=lane,
            name="model.layers.0/exp_avg_sq",
            start_ns=(start := number * 9 * MS + shift * MS),
            end_ns=start + 4 * MS,
        )
        for number in range(5000 // len(LANES))
        for shift, lane in enumerate(LANES)
    ]
    assert len(draw(events, "step")) < 150_000


def test_draw_without_events_is_an_empty_picture() -> None:
    assert "0 ms in all; compute busy -, stalled 0 ms, host 0 ms" in texts(draw([], "step"))


@pytest.mark.parametrize(
    ("end_ns", "expected"),
    [
        (MS // 2, ["0 ms", "0.05 ms", "0.1 ms"]),
        (100 * MS, ["0 ms", "10 ms", "20 ms"]),
        (999 * MS, ["0 ms", "100 ms", "200 ms"]),
        (7_850 * MS, ["0 s", "1 s", "2 s"]),
        (2_100 * MS, ["0 s", "0.5 s", "1 s"]),
        (228_000 * MS, ["0 s", "50 s", "100 s"]),
    ],
)
def test_draw_ticks_are_round(end_ns: int, expected: list[str]) -> None:
    found = texts(draw([TraceEvent(lane="x", name="a", start_ns=7 * MS, end_ns=7 * MS + end_ns)], ""))
    ticks = found[found.index("100.0 %") + 2 :]
    assert ticks[:3] == expected
    assert 5 <= len(ticks) <= 11


# ---------------------------------------------------------------------- adding up


def test_lane_uses_overlapping_spans_count_once_and_are_told() -> None:
    events = [
        TraceEvent(lane="nvme_to_ram", name="a", start_ns=start * MS, end_ns=end * MS)
        for start, end in ((0, 10), (2, 4), (5, 16), (20, 25))
    ]
    [use] = lane_uses(events)
    assert (use.lane, use.busy_seconds, use.span_seconds, use.at_once) == ("nvme_to_ram", 0.021, 0.028, "1.3")
    assert "1.3" in texts(draw(events, "step"))
    assert step_seconds(events) == 0.025


def test_lane_uses_stalls_are_not_busy() -> None:
    uses = {use.lane: use for use in lane_uses(STEP)}
    assert list(uses) == ["nvme_to_ram", "ram_to_gpu", "compute", "update"]
    assert (uses["compute"].busy_seconds, uses["compute"].at_once) == (0.07, "")


# ---------------------------------------------------------------------- reading


def test_read_trace_gives_back_what_was_written(tmp_path: Path) -> None:
    later = [TraceEvent(lane="update", name="é", start_ns=3_600_000_000_000_123, end_ns=3_600_000_000_009_456)]
    write_trace(tmp_path / "trace.json", [(7, STEP), (8, later)])
    assert read_trace(tmp_path / "trace.json") == {7: STEP, 8: later}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "not JSON",
        "[]",
        "{}",
        "null",
        '{"traceEvents": 3}',
        '{"traceEvents": ["a"]}',
        '{"traceEvents": [{"ph": "X", "tid": 0, "ts": 1, "dur": 1, "name": "of another program", "args": {}}]}',
        b"\xff\xfe\x00",
    ],
)
def test_read_trace_of_something_else_is_refused(content: str | bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=r"trace\.json is no trace of megatier"):
        read_trace(path)


@pytest.mark.parametrize("length", [-5.0, float("nan"), float("inf"), "1", None])
def test_read_trace_with_an_impossible_span_is_refused(length: object, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, [(1, STEP)])
    rows = json.loads(path.read_text())
    rows["traceEvents"][-1]["dur"] = length
    path.write_text(json.dumps(rows))
    with pytest.raises(ConfigError, match="no trace of megatier"):
        read_trace(path)


def test_read_trace_missing_file_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*No such file.*--output\.trace true"):
        read_trace(tmp_path / "trace.json")
