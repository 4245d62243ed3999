"""Charts: lines where their figures are, gaps, bands of long runs, numbers inside the picture."""

from __future__ import annotations

import itertools
import math
import re
from xml.etree import ElementTree

import pytest

from megatier.report.chart import (
    BOTTOM,
    COLUMNS_MAX,
    LEFT,
    POINTS_MAX,
    RIGHT,
    TICKS_MAX,
    TOP,
    WIDTH,
    Line,
    Mark,
    Scale,
    byte_unit,
    draw,
)


def elements(chart: str, tag: str, tone: str) -> list[ElementTree.Element]:
    """Of a class, in order."""
    found = ElementTree.fromstring(chart).iter(tag)
    return [element for element in found if (element.get("class") or "") == tone]


def points(path: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", path.get("d") or "")]


def numbers(chart: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(chart).iter("text")]


def test_draw_line_lies_where_its_figures_are() -> None:
    chart = draw("a", [Line("x", [(1, 0.0), (2, 52.0), (3, 104.0)])])
    [path] = elements(chart, "path", "tone0")
    (x0, y0), (x1, y1), (x2, y2) = points(path)
    assert (x0, x1, x2) == (LEFT, (LEFT + RIGHT) / 2, RIGHT)
    assert y0 == BOTTOM
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.11)
    assert TOP < y2 < TOP + 10, "a little room above the largest"
    assert len(elements(chart, "circle", "fill-tone0")) == 3
    assert numbers(chart) == ["0", "20", "40", "60", "80", "100", "1", "2", "3", "step"]


def test_draw_what_is_not_finite_leaves_a_gap() -> None:
    figures = [1.0, 2.0, math.nan, 3.0, math.inf, 1e308, 4.0, 5.0]
    chart = draw("a", [Line("x", list(enumerate(figures)))])
    assert [len(points(path)) for path in elements(chart, "path", "tone0")] == [2, 1, 2]


def test_draw_of_many_steps_with_many_gaps_stays_small() -> None:
    figures = [(step, 1.0 if step % 2 else math.nan) for step in range(20_000)]
    assert len(draw("a", [Line("x", figures)])) < 20_000


def test_draw_without_a_finite_point_is_empty() -> None:
    assert draw("a", [Line("x", [(1, math.nan)]), Line("y", [])]) == ""


def test_draw_of_many_steps_is_means_inside_a_band() -> None:
    chart = draw("a", [Line("x", [(step, 5.0 if step == 700 else 1.0) for step in range(10_000)])])
    [path], [band] = elements(chart, "path", "tone0"), elements(chart, "path", "band fill-tone0")
    assert len(points(path)) <= POINTS_MAX
    assert min(y for _, y in points(band)) < TOP + 10, "a single step is not lost"
    assert len(chart) < 40_000


def test_draw_lines_that_would_hide_one_another_become_one() -> None:
    same = [(1.0, 2.0), (2.0, 3.0)]
    chart = draw("a", [Line("x", same), Line("y", [(1.0, 1.0)]), Line("z", list(same))])
    assert re.findall(r"</i>([^<]*)", chart) == ["x, z", "y"]


def test_draw_what_should_be_is_dashed_in_the_colour_of_what_is() -> None:
    chart = draw("a", [Line("x", [(1, 2), (2, 2)]), Line("planned", [(1, 3), (2, 3)], is_dashed=True)])
    assert len(elements(chart, "path", "tone0 dashed")) == 1


def test_draw_marks_are_upright_lines_inside() -> None:
    chart = draw("a", [Line("x", [(1, 2), (5, 2)])], [Mark("went on", [0, 3, 9], tone=7)])
    [mark] = elements(chart, "path", "tone7 dashed")
    assert mark.get("d") == f"M{(LEFT + RIGHT) // 2} {TOP}V{BOTTOM}"


@pytest.mark.parametrize(("low", "high"), [(0, 1e-9), (1.93, 5.94), (0, 7), (-3, 12_345_678), (2, 2), (0, 0)])
@pytest.mark.parametrize("from_zero", [True, False])
def test_draw_numbers_are_few_and_inside(low: float, high: float, from_zero: bool) -> None:
    chart = draw("a", [Line("x", [(1, low), (200_000, high)])], from_zero=from_zero)
    texts = list(ElementTree.fromstring(chart).iter("text"))
    left = [text for text in texts if text.get("text-anchor") == "end" and text.text != "step"]
    assert 2 <= len(left) <= TICKS_MAX + 1
    assert all(TOP <= float(text.get("y") or 0) <= BOTTOM + 5 for text in left)
    heights = [float(text.get("y") or 0) for text in left]
    assert all(above - below >= 20 for above, below in itertools.pairwise(heights))
    below = [text for text in texts if text.get("text-anchor") == "middle"]
    assert all(float(text.get("x") or 0) + 3.5 * len(text.text or "") <= WIDTH for text in below)


@pytest.mark.parametrize(("most", "unit"), [(0, "B"), (1023, "B"), (1 << 20, "MiB"), (5 << 30, "GiB")])
def test_byte_unit_fits_the_size(most: float, unit: str) -> None:
    assert byte_unit(most)[0] == unit


def test_draw_names_its_figures_under_the_pointer_in_columns_that_leave_no_gap() -> None:
    chart = draw("a", [Line("x", [(1, 1.5), (2, math.nan), (3, 2.25)]), Line("y", [(3, 7.0)])])
    columns = re.findall(r'pointer" x="([\d.]+)" y="\d+" width="([\d.]+)".*?<title>(.*?)</title>', chart)
    assert [words for _, _, words in columns] == ["step 1: x 1.5", "step 2: ", "step 3: x 2.25, y 7"]
    ends = [float(left) + float(width) for left, width, _ in columns]
    assert (float(columns[0][0]), ends[-1]) == (LEFT, RIGHT)
    assert [float(left) for left, _, _ in columns[1:]] == pytest.approx(ends[:-1], abs=0.11)
    many = draw("a", [Line("x", [(step, 1.0) for step in range(10_000)])])
    assert many.count("<title>") <= COLUMNS_MAX + 1


def test_draw_further_scales_stand_below_the_steps() -> None:
    chart = draw("a", [Line("x", [(1, 1.0), (3, 2.0)])], scales=[Scale("tokens", lambda step: f"{step:.0f}k")])
    assert ">tokens</text>" in chart
    assert re.findall(r">(\d+k)</text>", chart) == ["1k", "2k", "3k"]
