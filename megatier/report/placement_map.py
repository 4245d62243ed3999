"""The placement as a map: a column for each unit in forward order, a row for each kind, coloured by home tier."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatier.report.history import RunStart
from megatier.report.html import legend
from megatier.report.svg import plain
from megatier.tier import STATE_KINDS, Kind

WIDTH = 1200
LEFT = 110
TOP = 8
"""Pixels of the map's width, and of the place where its cells begin."""
ROW = 26
CELL_MAX = 90
"""Pixels of a column, at most."""
GAP = 1
NAMED_MIN = 34
"""Pixels of a column from which its cells name their tier."""
NAMES_MAX = 40
"""Columns that are all named, at most; of more, some are."""
NAME_MAX = 18
"""Characters of a unit's name."""
LETTER_HEIGHT = 5.5
"""Pixels that a letter of a slanted name goes down, at most."""
KINDS = (*map(str, STATE_KINDS), str(Kind.GRAD))
MEANINGS = {"gpu": "gpu", "ram": "ram", "nvme": "nvme", "slot": "in a slot until its update"}
"""Meanings of the colours, by class."""


def draw(opening: RunStart) -> str:
    """Return the map with its legend."""
    kinds = [kind for kind in KINDS if any(kind in homes for homes in opening.homes.values())]
    units = list(opening.homes)
    bottom = TOP + ROW * len(kinds)
    width = min(CELL_MAX, (WIDTH - LEFT) / max(len(units), 1))
    parts = []
    for number, kind in enumerate(kinds):
        y = TOP + ROW * number
        parts.append(f'<text x="{LEFT - 10}" y="{y + 17}" text-anchor="end">{kind}</text>')
        for column, unit in enumerate(units):
            if kind in opening.homes[unit]:
                parts += _cell(LEFT + column * width, y, width, opening.homes[unit][kind], f"{unit} {kind}")

    names = [unit.removeprefix("model.") for unit in units]
    parts += _names(names, width, bottom)
    height = bottom + 24 + LETTER_HEIGHT * min(NAME_MAX, max(map(len, names), default=0))
    used = {tier for homes in opening.homes.values() for tier in homes.values()}
    shown = legend((f"{tier} square", MEANINGS[tier]) for tier in MEANINGS if tier in used)
    svg = f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="what lies where">'
    return "\n".join([shown, f'<div class="map wide">{svg}', *parts, "</svg></div>"])


def _cell(x: float, y: float, width: float, tier: str, words: str) -> Iterator[str]:
    """Yield a block; a pointer over it shows its name."""
    size = f'width="{max(width - GAP, 0.5):.2f}" height="{ROW - GAP}"'
    tone = tier if tier in MEANINGS else "slot"
    yield f'<rect class="{tone}" x="{x:.2f}" y="{y}" {size}><title>{plain(f"{words}: {tier}")}</title></rect>'
    if width >= NAMED_MIN:
        yield f'<text class="label" x="{x + width / 2:.1f}" y="{y + 17}" text-anchor="middle">{plain(tier, 5)}</text>'


def _names(names: list[str], width: float, top: float) -> Iterator[str]:
    """Yield names of units, slanted, below their columns; if there are many units, so many that they keep apart."""
    every = math.ceil(len(names) / NAMES_MAX)
    for column in range(0, len(names), every or 1):
        x = LEFT + (column + 0.5) * width
        y = top + 14
        name = plain(names[column], NAME_MAX)
        yield f'<text x="{x:.1f}" y="{y}" text-anchor="end" transform="rotate(-50 {x:.1f} {y})">{name}</text>'
