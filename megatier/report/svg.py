"""The parts of our pictures: SVG that needs no other file, no script, no font and no library."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from xml.sax.saxutils import escape

INK = "#1f2933"
PAPER = "#ffffff"
TRACK = "#eef1f5"
"""Colours of text and lines, of the ground, and of an empty row."""
WIDTH = 1200
"""Pixels of a picture's width."""
TEXT_MAX = 110
"""Characters of a line."""
LETTER = 6.8
"""Pixels of a letter on average, at most. A viewer's own font decides, so leave room."""
UNPRINTABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML cannot hold, escaped or not."""

Point = tuple[float, float]
"""Two numbers that belong together: a step and a figure, or the ends of a span."""


def page(height: float, title: str, parts: Iterable[str]) -> str:
    """Return a whole picture: white, with its title at the top (down to y = 36), and the parts."""
    heading = plain(title)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" '
            f'viewBox="0 0 {WIDTH} {height:g}" font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, '
            f'sans-serif" font-size="12" fill="{INK}">',
            f"<title>{heading}</title>",
            f'<rect width="{WIDTH}" height="{height:g}" fill="{PAPER}"/>',
            f'<text x="16" y="28" font-size="16" font-weight="600">{heading}</text>',
            *parts,
            "</svg>",
            "",
        ]
    )


def text(x: float, y: float, label: str, anchor: str = "start", most: int = TEXT_MAX, colour: str = "") -> str:
    """Return words that start, end or have their middle at x.

    Args:
        x: pixels of the anchor.
        y: pixels of the line on which the words stand.
        label: cut to `most` characters.
        anchor: `start`, `middle` or `end`.
        most: characters, at most.
        colour: a colour of their own; empty: that of the picture.
    """
    fill = f' fill="{colour}"' if colour else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{fill}>{plain(label, most)}</text>'


def bar(x: float, y: float, width: float, height: float, colour: str) -> str:
    """Return a filled rectangle; x and y are of its upper left corner."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:.4g}" height="{height:g}" fill="{colour}"/>'


def grid_line(x: float, top: float, bottom: float) -> str:
    """Return an upright line across rows."""
    return f'<path d="M{x:.1f} {top:g}V{bottom:g}" stroke="{INK}" stroke-opacity="0.2"/>'


def plain(content: str, most: int = TEXT_MAX) -> str:
    """Return text as XML takes it, cut to so many characters."""
    # XML takes no control characters, not even escaped, and names come from files.
    content = UNPRINTABLE.sub("\ufffd", content)
    if len(content) > most:
        content = content[: most - 1] + "…"

    # Escaped after the cut, which could go through the middle of an entity.
    return escape(content)


def ticks(most: float) -> list[float]:
    """Return 6 to 11 round numbers from 0 to at most a given one, which is above 0."""
    exponent = math.floor(math.log10(most / 10))
    power = 10.0**exponent

    # The least of 1, 2, 5, 10 times a power of ten of which ten steps reach the end.
    # A billionth either way is rounding, and must not cost a tick.
    reached = most * (1 - 1e-9)
    step = power
    for digit in (2, 5, 10):
        if step * 10 < reached:
            step = power * digit
    num_steps = math.floor(most / step + 1e-9)
    return [index * step for index in range(num_steps + 1)]
