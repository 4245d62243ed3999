"""Draws the placement: a column for each unit in forward order, a row for each kind, coloured by home tier."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatier.report.history import RunStart
from megatier.report.html import legend
from megatier.report.svg import WIDTH, plain, text
from megatier.tier import STATE_KINDS, Kind

LEFT = 110
TOP = 8
"""Pixels of the place where cells begin."""
ROW = 26
CELL_WIDTH_MAX = 90
"""Pixels of a column, at most."""
GAP = 1
NAMED_MIN = 34
"""Pixels of a column from which its cells name their tier."""
NAMES_MAX = 40
"""Columns that are all named, at most; of more, some are."""
UNIT_NAME_MAX = 18
"""Characters of a unit's name."""
LETTER_HEIGHT = 5.5
"""Pixels that a letter of a slanted name goes down, at most."""
KINDS_SHOWN = (*map(str, STATE_KINDS), str(Kind.GRAD))
MEANINGS = {"gpu": "gpu", "ram": "ram", "nvme": "nvme", "slot": "in a slot until its update"}
"""Meanings of the colours, by class."""


def draw(opening: RunStart) -> str:
    """Return the map with its legend."""
    homes_of = opening.homes
    used_kinds = set().union(*homes_of.values())
    kinds = [kind for kind in KINDS_SHOWN if kind in used_kinds]
    bottom = TOP + ROW * len(kinds)
    width = min(CELL_WIDTH_MAX, (WIDTH - LEFT) / max(len(homes_of), 1))

    parts = []
    for number, kind in enumerate(kinds):
        y = TOP + ROW * number
        parts.append(text(LEFT - 10, y + 17, kind, "end"))
        for column, (unit, homes) in enumerate(homes_of.items()):
            # A frozen unit has no moments and no gradient, so its column has gaps.
            if kind in homes:
                x = LEFT + column * width
                parts += _cell(x, y, width, homes[kind], f"{unit} {kind}")

    # Nearly every name begins with the same word, and there is little room for letters.
    names = [unit.removeprefix("model.") for unit in homes_of]
    parts += _names(names, width, bottom)
    longest = max(map(len, names), default=0)
    height = bottom + 24 + LETTER_HEIGHT * min(UNIT_NAME_MAX, longest)

    # The legend has no colour that the map has not.
    used = {tier for homes in homes_of.values() for tier in homes.values()}
    colours = []
    for tier, meaning in MEANINGS.items():
        if tier in used:
            colours.append((f"{tier} square", meaning))

    svg = f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="what lies where">'
    rows = [legend(colours), f'<div class="map wide">{svg}', *parts, "</svg></div>"]
    return "\n".join(rows)


def _cell(x: float, y: float, width: float, tier: str, block: str) -> Iterator[str]:
    """Yield a block; a pointer over it shows its name."""
    # Among thousands of units a cell is thinner than its gap, and still must be seen.
    shown = max(width - GAP, 0.5)
    size = f'width="{shown:.2f}" height="{ROW - GAP}"'
    name = plain(f"{block}: {tier}")

    # The tier is read from a file, and a class of another name would be a cell without colour.
    tone = tier if tier in MEANINGS else "slot"
    yield f'<rect class="{tone}" x="{x:.2f}" y="{y}" {size}><title>{name}</title></rect>'
    if width >= NAMED_MIN:
        middle = x + width / 2
        place = f'x="{middle:.1f}" y="{y + 17}" text-anchor="middle"'
        yield f'<text class="label" {place}>{plain(tier, 5)}</text>'


def _names(names: list[str], width: float, top: float) -> Iterator[str]:
    """Yield names of units, slanted, below their columns; if there are many units, so many that they keep apart."""
    # Names of thousands of units would lie on top of each other.
    every = max(1, math.ceil(len(names) / NAMES_MAX))
    y = top + 14
    for column in range(0, len(names), every):
        x = LEFT + (column + 0.5) * width
        place = f'x="{x:.1f}" y="{y}" text-anchor="end"'
        slanted = f'transform="rotate(-50 {x:.1f} {y})"'
        name = plain(names[column], UNIT_NAME_MAX)
        yield f"<text {place} {slanted}>{name}</text>"
