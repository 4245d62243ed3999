"""No link within the repository is dead: neither the file nor the heading that it names."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from test_docs import ROOT

PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for page in (
        *ROOT.glob("*.md"),
        *(page for folder in ("docs", "bench", ".github") for page in (ROOT / folder).rglob("*.md")),
    )
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"\bdocs/[\w./-]+\.(?:md|svg|png)\b")
"""A page of docs that a source file names."""


def anchor(heading: str) -> str:
    """The name that GitHub gives a heading: lower case, without punctuation, spaces as hyphens."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@functools.cache
def anchors(page: Path) -> frozenset[str]:
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    return frozenset(anchor(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE))


def is_dead(page: Path, target: str) -> bool:
    """Whether a link of a page names no file, or no heading of it."""
    name, _, heading = target.partition("#")
    linked = (page.parent / name).resolve() if name else page
    if not linked.exists():
        return True
    return bool(heading) and heading not in anchors(linked)


@pytest.mark.parametrize("page", PAGES)
def test_links_of_page_lead_somewhere(page: str) -> None:
    text = FENCED.sub("", (ROOT / page).read_text(encoding="utf-8"))
    targets = [target for target in LINK.findall(text) if "://" not in target]
    dead = [target for target in targets if is_dead(ROOT / page, target)]
    assert not dead, f"{page} links to what is not there: {dead}"


@pytest.mark.parametrize("folder", ["megatier", "native", "bench", "tools", "tests", "examples"])
def test_pages_that_sources_name_are_there(folder: str) -> None:
    sources = [
        path
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".c", ".h", ".yaml", ".sh"} and "results" not in path.parts
    ]
    assert sources, f"{folder} has no sources: the test would prove nothing"
    named = {(path, name) for path in sources for name in NAMED.findall(path.read_text(encoding="utf-8"))}
    dead = sorted(f"{path.relative_to(ROOT)}: {name}" for path, name in named if not (ROOT / name).exists())
    assert not dead


def test_link_to_missing_heading_is_dead() -> None:
    page = ROOT / "docs" / "models.md"
    assert is_dead(page, "#no-such-heading")
    assert is_dead(page, "no_such_page.md")
    assert not is_dead(page, "#proven")


@pytest.mark.parametrize("page", [page for page in PAGES if "/log/" not in page and page != "CHANGELOG.md"])
def test_source_files_that_page_names_are_there(page: str) -> None:
    text = FENCED.sub("", (ROOT / page).read_text(encoding="utf-8"))
    folders = ("megatier", "native", "tests", "bench", "tools")
    sources = ["/" + str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.[pch]*")]
    named = re.findall(r"`([\w/]+\.(?:py|c|h))`", text)
    assert [name for name in named if not any(source.endswith("/" + name) for source in sources)] == []
