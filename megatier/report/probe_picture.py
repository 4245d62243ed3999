"""Draws what `megatier bench` measured: rates as bars, and a long write as a curve.

The picture has a section for each drive, all over one scale, one for the links, and one for AdamW.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatier.byte_counts import format_bytes
from megatier.measure.drive_probe import DriveFigures
from megatier.measure.drive_traffic import SUSTAINED_STEP_BYTES
from megatier.measure.link_probe import LinkFigures
from megatier.report.svg import bar, grid_line, page, text, ticks

LEFT = 230
PLOT = 640
"""Pixels: where bars begin, and how long the longest is."""
COLUMNS_RIGHT = (964, 1064, 1184)
"""Pixels at which the columns of figures end."""
ROW = 26
BAR = 18
INNER = 8
"""Pixels from row to row, of a bar's height, and of the height of the bar inside it."""
CURVE = 150
"""Pixels of the height of the long write."""
PROBE_NAME_MAX = 32
"""Characters of a row's name."""
STEP_MIN = 2
"""Steps of a long write that make a curve, at least."""

READ = "#2f6fb5"
WRITE = "#ee8a22"
MIXED = "#5b6470"
INSIDE = "#1f2933"
FLAG = "#d00000"
TO_GPU_COLOUR = "#2f6fb5"
TO_RAM_COLOUR = "#ee8a22"
UPDATE_COLOUR = "#2f9e55"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A row of a section."""

    name: str
    """Its name, left of the bar."""
    value: float
    """Length of the bar, in the unit of its section."""
    inner: float
    """Value of the bar that is drawn inside, dark; 0: there is none."""
    colour: str
    """Its colour."""
    figures: tuple[str, ...]
    """Its figures, one for each column of the section."""


def draw(drives: Sequence[DriveFigures], links: LinkFigures, title: str) -> str:
    """Return everything that was measured, as an SVG.

    Args:
        drives: the drives as they were measured.
        links: links and processors.
        title: stands above the picture; a long one is cut.
    """
    parts: list[str] = []
    y = 64.0
    columns = ("GB/s", "p50 a block", "p99 a block")

    # One scale for all drives, so that their bars can be compared.
    rows_of = [_drive_bars(drive) for drive in drives]
    fastest = max((row.value for rows in rows_of for row in rows), default=0.0)
    for drive, rows in zip(drives, rows_of, strict=True):
        parts += _section(_write_heading(drive), columns, rows, drive.flags, y, fastest)
        y += _section_height(len(rows), drive.flags)
        if len(drive.sustained_bytes_per_s) >= STEP_MIN:
            parts += _curve(drive, y)
            y += CURVE + 76

    for heading, rows, flags in (
        ("copies, GB/s (inner bar: both ways at once)", _copy_bars(links), links.flags),
        ("AdamW on the CPU, Gparam/s (inner bar: beside copies both ways)", _update_bars(links), ()),
    ):
        # The inner bar may be the longer one by chance, and neither may leave the plot.
        most = max(max(row.value, row.inner) for row in rows)
        parts += _section(heading, ("alone", "beside others"), rows, flags, y, most)
        y += _section_height(len(rows), flags)
    return page(y - 20, title, parts)


def _write_heading(drive: DriveFigures) -> str:
    access = "O_DIRECT" if drive.is_direct else "page cache"
    return (
        f"{drive.directory}: {drive.device}, {drive.file_system}, {access}, blocks of {format_bytes(drive.block_bytes)}"
    )


def _drive_bars(drive: DriveFigures) -> list[Bar]:
    bars = []
    for (name, flow), colour in zip(drive.flows.items(), (READ, WRITE, MIXED), strict=True):
        rate = flow.bytes_per_s / 1e9
        figures = (f"{rate:.2f}", f"{flow.p50_ms:.1f} ms", f"{flow.p99_ms:.1f} ms")
        bars.append(
            Bar(
                name=name,
                value=rate,
                inner=0.0,
                colour=colour,
                figures=figures,
            )
        )
    return bars


def _copy_bars(links: LinkFigures) -> list[Bar]:
    # The rates of each GPU are those to it and those to RAM, in turn.
    colours = itertools.cycle((TO_GPU_COLOUR, TO_RAM_COLOUR))
    return [_draw_comparison(*rates, colour) for rates, colour in zip(links.copy_rates, colours, strict=False)]


def _update_bars(links: LinkFigures) -> list[Bar]:
    bars = []
    for update in links.updates:
        name = f"{update.threads} thread"
        if update.threads > 1:
            name += "s"
        bars.append(_draw_comparison(name, update.parameters_per_s, update.shared_parameters_per_s, UPDATE_COLOUR))
    return bars


def _draw_comparison(name: str, alone: float, shared: float, colour: str) -> Bar:
    return Bar(
        name=name,
        value=alone / 1e9,
        inner=shared / 1e9,
        colour=colour,
        figures=(f"{alone / 1e9:.2f}", f"{shared / 1e9:.2f}"),
    )


def _section_height(num_bars: int, flags: Sequence[str]) -> float:
    return 74 + ROW * num_bars + 18 * len(flags)


def _section(
    heading: str, columns: Sequence[str], bars: Sequence[Bar], flags: Sequence[str], y: float, most: float
) -> Iterator[str]:
    """Yield a heading, flags, and bars with their figures. A bar of the full length would stand for `most`."""
    yield text(16, y, heading)
    for flag in flags:
        y += 18
        yield text(16, y, f"not to be believed: {flag}", colour=FLAG)
    top = y + 14
    yield from _ticks_across(most, top, top + ROW * len(bars))
    for right, name in zip(COLUMNS_RIGHT, columns, strict=False):
        yield text(right, y, name, "end")
    for index, row in enumerate(bars):
        middle = top + ROW * (index + 0.5)
        yield text(LEFT - 10, middle + 4, row.name, "end", PROBE_NAME_MAX)
        width = PLOT * row.value / most
        yield bar(LEFT, middle - BAR / 2, width, BAR, row.colour)
        if row.inner:
            inner_width = PLOT * row.inner / most
            yield bar(LEFT, middle - INNER / 2, inner_width, INNER, INSIDE)

        # Sections of links have fewer columns than those of drives.
        for right, figure in zip(COLUMNS_RIGHT, row.figures, strict=False):
            yield text(right, middle + 4, figure, "end")


def _ticks_across(most: float, top: float, bottom: float) -> Iterator[str]:
    """Yield upright lines at round numbers up to `most`, which is at the right end, with their numbers below."""
    for tick in ticks(most):
        x = LEFT + PLOT * tick / most
        yield grid_line(x, top, bottom + 4)
        yield text(x, bottom + 20, f"{tick:g}", "middle")


def _curve(drive: DriveFigures, y: float) -> Iterator[str]:
    """Yield the rate of each GiB of the long write over what was written; where the write cache ends, a line."""
    rates = [rate / 1e9 for rate in drive.sustained_bytes_per_s]
    most = max(rates)
    top = y + 14.0
    bottom = top + CURVE
    yield text(16, y, "sustained write: GB/s of each GiB, over GiB written")

    def level_of(rate: float) -> float:
        return bottom - CURVE * rate / most

    # Half of the ticks, as this plot is low.
    for tick in ticks(most)[::2]:
        level = level_of(tick)
        yield text(LEFT - 10, level + 4, f"{tick:g}", "end")
        yield f'<path d="M{LEFT} {level:.1f}H{LEFT + PLOT}" stroke="#1f2933" stroke-opacity="0.2"/>'

    # A block may be larger than the step of a rate, and then each rate is of one block.
    step_gib = max(SUSTAINED_STEP_BYTES, drive.block_bytes) / (1 << 30)
    total_gib = len(rates) * step_gib
    yield from _ticks_across(total_gib, bottom, bottom)

    # Steps and no slanted lines, because a rate is the mean over its whole step.
    path = f"M{LEFT} {level_of(rates[0]):.1f}"
    for index, rate in enumerate(rates, 1):
        right = LEFT + PLOT * index / len(rates)
        path += f"V{level_of(rate):.1f}H{right:.1f}"
    yield f'<path d="{path}" fill="none" stroke="{WRITE}" stroke-width="2"/>'

    knee = "no knee"
    if drive.knee_bytes is not None:
        knee = f"write cache ends after {format_bytes(drive.knee_bytes)}"
        x = LEFT + PLOT * drive.knee_bytes / (1 << 30) / total_gib
        yield f'<path d="M{x:.1f} {top:g}V{bottom:g}" stroke="{FLAG}" stroke-dasharray="4 3"/>'

    right = COLUMNS_RIGHT[-1]
    yield text(right, top + 10, f"{min(rates):.2f} to {most:.2f} GB/s", "end")
    yield text(right, top + 28, knee, "end")
