"""The parts of our pages: one HTML file that needs no other, no script, no font and no network; light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from megatier.report.picture import COLOURS, STALL_COLOURS
from megatier.report.svg import INK, PAPER, TRACK, plain

NUM_TONES = 8
"""Number of colours of lines, whose classes are `tone0` to `tone7`."""
TIER_TONES = ("gpu", "ram", "nvme", "slot")
"""Classes of the colours of places."""
CELL_MAX = 400
"""Characters of a cell."""

IN_THE_DARK = {
    INK: "var(--ink)",
    PAPER: "var(--paper)",
    TRACK: "var(--track)",
    COLOURS["compute"]: "#8c97a3",
    STALL_COLOURS["update"]: "#e0607f",
    STALL_COLOURS["update_gpu"]: "#b061a0",
}
"""Colours of a picture that would not be seen on a dark ground, and what they become there."""

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2933; --dim: #5b6470; --track: #eef1f5; --rule: #d5dae1;
  --tone0: #2f6fb5; --tone1: #c8640a; --tone2: #2f8f4e; --tone3: #c02942; --tone4: #7b4fb3; --tone5: #11838c;
  --tone6: #b83f86; --tone7: #6b7580; --gpu: #28803f; --ram: #2f6fb5; --nvme: #b35605; --slot: #6b7580;
  --label: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14181d; --ink: #e4e8ed; --dim: #a3adb8; --track: #222931; --rule: #39424d;
    --tone0: #6fa9e8; --tone1: #f2a04c; --tone2: #63c384; --tone3: #f27b86; --tone4: #b99bea; --tone5: #56c4cc;
    --tone6: #ec8fc5; --tone7: #a3adb8; --gpu: #3f9e60; --ram: #4a86c8; --nvme: #cf7a26; --slot: #7d8894;
    --label: #0d1014; }
}
body { margin: 0 auto; max-width: 1240px; padding: 16px 20px 48px; background: var(--paper); color: var(--ink);
  font: 14px/1.45 system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }
h1 { font-size: 22px; margin: 8px 0 2px; overflow-wrap: anywhere; } h2 { font-size: 16px; margin: 32px 0 8px; }
p { margin: 4px 0 8px; max-width: 75em; overflow-wrap: anywhere; } .dim { color: var(--dim); }
.cards { display: flex; flex-wrap: wrap; gap: 10px; margin: 16px 0; }
.cards div { flex: 1 1 150px; background: var(--track); border-radius: 6px; padding: 8px 12px; }
.cards b { display: block; font-size: 19px; font-weight: 600; overflow-wrap: anywhere; }
.cards span { color: var(--dim); }
.row { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 0 32px; }
.wide { overflow-x: auto; background: linear-gradient(to right, var(--paper) 30%, transparent) left / 40px 100%,
  linear-gradient(to left, var(--paper) 30%, transparent) right / 40px 100%,
  linear-gradient(to right, var(--rule), transparent) left / 12px 100%,
  linear-gradient(to left, var(--rule), transparent) right / 12px 100%; background-repeat: no-repeat;
  background-attachment: local, local, scroll, scroll; }
.wide svg { min-width: 900px; } .wide svg.chart { min-width: 520px; } .pointer { fill: transparent; }
svg { display: block; width: 100%; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 4px 0 8px; }
th, td { padding: 3px 14px 3px 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--rule); }
th { font-weight: 600; color: var(--dim); }
th:first-child, td:first-child { text-align: left; }
ul.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; list-style: none; margin: 0 0 4px; padding: 0; }
ul.legend i { display: inline-block; width: 14px; height: 4px; margin-right: 6px; vertical-align: middle; }
ul.legend i.square { height: 12px; } ul.legend i.dashed { height: 0; background: none; border-top: 2px dashed; }
.chart text, .map text { fill: var(--dim); font-size: 12px; } .chart .grid { stroke: var(--rule); }
.chart path { fill: none; stroke-width: 1.6; stroke-linejoin: round; } .chart .band { stroke: none; opacity: 0.22; }
.chart .dashed { stroke-dasharray: 6 4; } .map .label { fill: var(--label); }
pre { overflow-x: auto; background: var(--track); padding: 10px 14px; border-radius: 6px; font-size: 12px; }
summary { cursor: pointer; }
"""


def _rules() -> Iterator[str]:
    """Yield rules of the style, one for each colour."""
    for number in range(NUM_TONES):
        tone = f"tone{number}"
        colour = f"var(--{tone})"
        yield f".chart .{tone} {{ stroke: {colour}; }} .chart .fill-{tone} {{ fill: {colour}; }}"
        yield f"i.{tone} {{ background: {colour}; color: {colour}; }}"

    for tone in TIER_TONES:
        colour = f"var(--{tone})"
        yield f".map .{tone} {{ fill: {colour}; }} i.{tone} {{ background: {colour}; }}"

    # A picture has its colours as attributes, so that it can be read alone. A rule of the page wins over an attribute.
    yield "@media (prefers-color-scheme: dark) {"
    for colour, dark in IN_THE_DARK.items():
        yield f'.timeline [fill="{colour}"] {{ fill: {dark}; }} .timeline [stroke="{colour}"] {{ stroke: {dark}; }}'
    yield "}"


def page(title: str, parts: Iterable[str]) -> str:
    """Return a whole page; the parts stand below its heading."""
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{plain(title)}</title>",
            f"<style>{STYLE}",
            *_rules(),
            "</style></head><body>",
            f"<h1>{plain(title)}</h1>",
            *parts,
            "</body></html>\n",
        ]
    )


def section(heading: str, *parts: str) -> str:
    """Return a heading with parts below it."""
    return "\n".join([f"<section><h2>{plain(heading)}</h2>", *parts, "</section>"])


def note(text: str) -> str:
    """Return a paragraph, dim, about what a figure means or why a section is empty."""
    return f'<p class="dim">{plain(text, CELL_MAX)}</p>'


def cards(figures: Iterable[tuple[str, str, str]]) -> str:
    """Return large figures: the name, the figure, and a remark in small letters."""
    divs = []
    for name, figure, detail in figures:
        remark = plain(detail, CELL_MAX)
        head = f"<span>{plain(name)}</span><b>{plain(figure)}</b>"
        divs.append(f"<div>{head}<span>{remark}</span></div>")
    return f'<div class="cards">{"".join(divs)}</div>'


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose first column holds names and whose others hold figures."""
    # All text is escaped where it becomes HTML: names of units, files and settings may hold anything.
    head = "".join(f"<th>{plain(name)}</th>" for name in columns)
    lines = []
    for row in rows:
        cells = [f"<td>{plain(cell, CELL_MAX)}</td>" for cell in row]
        joined = "".join(cells)
        lines.append(f"<tr>{joined}</tr>")
    body = "\n".join(lines)

    # A wide table scrolls inside its own frame, so that a narrow screen need not scroll the whole page.
    return f'<div class="wide"><table><tr>{head}</tr>\n{body}</table></div>'


def row(*parts: str) -> str:
    """Return parts side by side, as far as there is room for them; empty if all parts are."""
    if not any(parts):
        return ""
    cells = (f"<div>{part}</div>" for part in parts)
    return f'<div class="row">{"".join(cells)}</div>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Return names with their colours, given as (class, name)."""
    items = (f'<li><i class="{tone}"></i>{plain(name)}</li>' for tone, name in entries)
    return f'<ul class="legend">{"".join(items)}</ul>'


def details(summary: str, text: str) -> str:
    """Return text as it is, below a line that opens it."""
    # Settings are given whole: a text that is cut could not be used as a config again.
    whole = plain(text, len(text))
    return f"<details><summary>{plain(summary)}</summary><pre>{whole}</pre></details>"
