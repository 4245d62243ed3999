"""Draws figures over steps as lines, whose text stays small however long the run is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

from megatier.byte_counts import UNITS
from megatier.report.html import CELL_MAX, NUM_TONES, legend
from megatier.report.svg import Point, plain, text, ticks

WIDTH = 580
HEIGHT = 230
"""Pixels of a chart."""
LEFT = 64
RIGHT = 552
TOP = 10
BOTTOM = 200
"""Pixels of the edges of what is drawn inside; numbers stand left of it and below it."""
POINTS_MAX = 400
"""Points of a line at most. More are drawn as means of equally many steps each, with a band from the least to the
most."""
DOTS_MAX = 30
"""A line of at most so many points has a dot for each."""
COLUMNS_MAX = 100
"""Columns that show figures under the pointer."""
SCALE_HEIGHT = 16
"""Pixels of a further row of numbers below."""
TICKS_MAX = 6
"""Numbers at an axis, at most, or one more."""
HEADROOM = 0.04
"""Share of the height that stays free above the largest figure."""
VALUE_MAX = 1e100
"""Larger figures leave a gap, as do those that are not finite, because their differences must have a logarithm."""
BYTE_UNITS = (*UNITS[1:], ("B", 1))
"""Units of an axis, the largest first."""


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """A figure over steps. What is not finite leaves a gap."""

    name: str
    """Its name in the legend."""
    points: Sequence[Point]
    """Steps and figures."""
    is_dashed: bool = False
    """Whether it shows a figure as it should be. It has the colour of the line before it then, which shows it as it is.
    """


@dataclass(frozen=True, slots=True)
class Mark:
    """An event of some steps, drawn as a dashed upright line at each."""

    name: str
    """Its name in the legend."""
    steps: Sequence[float]
    """The steps at which it happened."""
    tone: int
    """The number of its colour (`html.NUM_TONES`)."""


@dataclass(frozen=True, slots=True, eq=False)
class Scale:
    """Another measure of the way than steps, such as tokens, whose numbers stand below those of the steps."""

    name: str
    at: Callable[[float], str]
    """Gives what to write at a step."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Neighbouring points, drawn as one."""

    x: float
    """The mean of the steps."""
    low: float
    """The least figure."""
    mean: float
    """The mean of the figures."""
    high: float
    """The greatest figure."""


def byte_unit(most: float) -> tuple[str, int]:
    """Return the unit in which so many bytes are a small number, and its bytes."""
    for unit, scale in BYTE_UNITS:
        if most >= scale:
            return unit, scale
    return BYTE_UNITS[-1]


def draw(
    title: str,
    lines: Sequence[Line],
    marks: Sequence[Mark] = (),
    scales: Sequence[Scale] = (),
    *,
    from_zero: bool = True,
) -> str:
    """Return a chart with its legend; empty if no line has a finite point.

    Args:
        title: what is shown, with its unit.
        lines: those without a finite point are left out.
        marks: things that happened at steps.
        scales: rows of numbers below those of the steps.
        from_zero: whether the axis begins at 0; False: at the least value.
    """
    # A run of millions of steps has more points than pixels, so neighbours are drawn as one.
    runs_of = {line: _buckets(line.points) for line in _distinct(lines)}
    buckets = [bucket for runs in runs_of.values() for run in runs for bucket in run]
    if not buckets:
        return ""

    axes = _Axes.of(buckets, from_zero=from_zero)
    parts = [*axes.draw(scales)]
    entries = []
    tone = -1

    # A dashed line keeps the colour of the line before it, so the tone goes on with the others alone.
    for line, runs in runs_of.items():
        if not runs:
            continue
        tone += not line.is_dashed
        style = f"tone{tone % NUM_TONES}"
        for run in runs:
            parts += _run(run, axes, style, is_dashed=line.is_dashed)
        if line.is_dashed:
            style += " dashed"
        entries.append((style, line.name))

    for mark in marks:
        style = f"tone{mark.tone} dashed"
        entries.append((style, mark.name))
        parts.append(_draw_mark(mark, axes, style))

    # The pointers are above all else, since SVG gives a pointer what was drawn last.
    parts += _pointers(lines, axes)
    height = HEIGHT + SCALE_HEIGHT * len(scales)
    name = plain(title)
    svg = f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{name}">'
    head = f"<div><p><b>{name}</b></p>"
    rows = [head, legend(entries), f'<div class="wide">{svg}', *parts, "</svg></div></div>"]
    return "\n".join(rows)


def _draw_mark(mark: Mark, axes: _Axes, style: str) -> str:
    """Return the upright lines of a mark, as far as they are within the axes."""
    # Marks on one pixel are one line, so that thousands of them stay a small page.
    places: set[int] = set()
    for step in mark.steps:
        if axes.first <= step <= axes.last:
            places.add(round(axes.x(step)))

    lines = [f"M{x} {TOP}V{BOTTOM}" for x in sorted(places)]
    path = "".join(lines)
    return f'<path class="{style}" d="{path}"/>'


def draw_bytes(title: str, lines: Sequence[Line]) -> str:
    """Return a chart of bytes, in the unit that fits; empty if no line has a finite point."""
    # A step that lacks a size has NaN, which is not less than anything.
    sizes = [size for line in lines for _, size in line.points]
    finite = [size for size in sizes if size < math.inf]
    unit, scale = byte_unit(max(finite, default=0.0))

    scaled = []
    for line in lines:
        points = [(step, size / scale) for step, size in line.points]
        scaled.append(replace(line, points=points))
    return draw(f"{title}, {unit}", scaled)


@dataclass(frozen=True, slots=True)
class _Axes:
    """The places of steps and values in a chart."""

    first: float
    last: float
    low: float
    high: float

    @classmethod
    def of(cls, buckets: Sequence[_Bucket], *, from_zero: bool) -> _Axes:
        """Return axes that show all buckets, with some room above them."""
        # By least and greatest figures and not by means, so that no spike leaves the chart.
        low = min(bucket.low for bucket in buckets)
        high = max(bucket.high for bucket in buckets)
        if from_zero:
            low = min(low, 0.0)

        # All figures may be equal, and then there is no range to scale by.
        if high <= low and from_zero:
            high = low + 1
        elif high <= low:
            high = low + 0.5
            low -= 0.5
        high += HEADROOM * (high - low)

        steps = [bucket.x for bucket in buckets]
        return cls(min(steps), max(steps), low, high)

    def x(self, step: float) -> float:
        """Return the pixels of a step; the middle if there is but one step."""
        num_steps = self.last - self.first
        if not num_steps:
            return (LEFT + RIGHT) / 2
        share = (step - self.first) / num_steps
        return LEFT + share * (RIGHT - LEFT)

    def y(self, value: float) -> float:
        """Return the pixels of a value."""
        share = (value - self.low) / (self.high - self.low)
        return BOTTOM - share * (BOTTOM - TOP)

    def draw(self, scales: Sequence[Scale]) -> Iterator[str]:
        """Yield level lines with their values, and numbers of steps, with further rows of numbers below."""
        for tick in _ticks(self.low, self.high):
            y = self.y(tick)
            yield f'<path class="grid" d="M{LEFT} {y:.1f}H{RIGHT}"/>'

            # Letters stand on their y, so a number beside a line goes 4 pixels down to have its middle there.
            yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:,.10g}</text>'

        # There is nothing between two steps, so their numbers are whole.
        steps = [*_ticks(self.first, self.last, least=1.0)]
        y = BOTTOM + 18
        for step in steps:
            yield self._number(step, y, f"{step:,.0f}")
        yield text(LEFT - 8, y, "step", "end")

        for scale in scales:
            y += SCALE_HEIGHT
            yield text(LEFT - 8, y, scale.name, "end")
            for step in steps:
                yield self._number(step, y, plain(scale.at(step)))

    def _number(self, step: float, y: float, label: str) -> str:
        """Return the text below a step."""
        return f'<text x="{self.x(step):.1f}" y="{y}" text-anchor="middle">{label}</text>'


def _pointers(lines: Sequence[Line], axes: _Axes) -> Iterator[str]:
    """Yield columns that show the figures of a step while a pointer is over them, at most COLUMNS_MAX and a few."""
    figures = [(line.name, dict(line.points)) for line in lines if line.points]
    steps = sorted({step for _, points in figures for step in points})
    every = math.ceil(len(steps) / COLUMNS_MAX)
    chosen = set(steps[::every])

    # A line of few points, such as held-out losses, has dots, and a dot without its figure is of no use.
    for _, points in figures:
        if len(points) <= DOTS_MAX:
            chosen.update(points)

    # A column ends half-way to its neighbours, so there is one under every place of the pointer.
    shown = sorted(chosen)
    places = [axes.x(step) for step in shown]
    middles = [(one + two) / 2 for one, two in pairwise(places)]
    borders = [LEFT, *middles, RIGHT]
    for step, (left, right) in zip(shown, pairwise(borders), strict=True):
        # SVG draws no rectangle of width 0, and then nothing would be under the pointer.
        width = max(right - left, 0.1)
        size = f'x="{left:.1f}" y="{TOP}" width="{width:.1f}" height="{BOTTOM - TOP}"'

        # A browser shows the title of a shape under the pointer, without any script.
        title = plain(_said(step, figures), CELL_MAX)
        yield f'<rect class="pointer" {size}><title>{title}</title></rect>'


def _said(step: float, figures: Sequence[tuple[str, Mapping[float, float]]]) -> str:
    """Return the figures of a step in words, without those that leave a gap."""
    said = []
    for name, points in figures:
        value = points.get(step, math.nan)
        if abs(value) < VALUE_MAX:
            said.append(f"{name} {value:,.5g}")
    return f"step {step:,.0f}: {', '.join(said)}"


def _distinct(lines: Sequence[Line]) -> list[Line]:
    """Return lines that do not hide one another: equal ones become one with all names, but for dashed ones."""
    distinct: list[Line] = []
    for line in lines:
        twins = [number for number, other in enumerate(distinct) if other.points == line.points]

        # A dashed line lets the one below it be seen.
        if line.is_dashed or not twins:
            distinct.append(line)
            continue
        twin = distinct[twins[0]]
        distinct[twins[0]] = replace(twin, name=f"{twin.name}, {line.name}")
    return distinct


def _ticks(low: float, high: float, least: float = 0.0) -> Iterator[float]:
    """Yield round numbers from low to high, at most TICKS_MAX or one more; low alone if both are equal."""
    if high <= low:
        yield low
        return

    # The second tick of an axis that begins at 0 is a round step.
    step = max(ticks(high - low)[1], least)
    while (high - low) / step > TICKS_MAX:
        step *= 2

    # A limit that is a round number itself gets its tick although the division misses it by a rounding.
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    for index in range(first, last + 1):
        yield index * step


def _buckets(points: Sequence[Point]) -> list[list[_Bucket]]:
    """Return the runs of points between gaps, in all at most POINTS_MAX buckets."""
    size = max(1, math.ceil(len(points) / POINTS_MAX))
    runs = []
    run: list[_Bucket] = []
    for start in range(0, len(points), size):
        group = points[start : start + size]

        # A point that is not finite is left out of its bucket. A bucket of such points alone is a gap.
        finite = [point for point in group if abs(point[1]) < VALUE_MAX]
        if not finite:
            run = []
            continue
        if not run:
            runs.append(run)
        xs, ys = zip(*finite, strict=True)
        bucket = _Bucket(
            x=fmean(xs),
            low=min(ys),
            mean=fmean(ys),
            high=max(ys),
        )
        run.append(bucket)
    return runs


def _run(run: Sequence[_Bucket], axes: _Axes, tone: str, *, is_dashed: bool) -> Iterator[str]:
    """Yield a line without a gap, its band if there is one, and dots if there are few points."""
    # Buckets of one point each have no spread to show.
    if any(bucket.low < bucket.high for bucket in run):
        # The edge of the band goes along the greatest figures and back along the least.
        edge = [(bucket.x, bucket.high) for bucket in run]
        edge += [(bucket.x, bucket.low) for bucket in reversed(run)]
        yield f'<path class="band fill-{tone}" d="{_path(edge, axes)}Z"/>'

    means = [(bucket.x, bucket.mean) for bucket in run]
    style = f"{tone} dashed" if is_dashed else tone
    yield f'<path class="{style}" d="{_path(means, axes)}"/>'

    # Dots of a long line would hide it.
    if is_dashed or len(run) > DOTS_MAX:
        return
    for step, value in means:
        x = axes.x(step)
        y = axes.y(value)
        yield f'<circle class="fill-{tone}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>'


def _path(points: Sequence[Point], axes: _Axes) -> str:
    places = [f"{axes.x(x):.1f} {axes.y(y):.1f}" for x, y in points]
    return "M" + "L".join(places)
