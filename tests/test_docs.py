"""The commands and the Python of the documents run as they stand, page by page, from top to bottom.

A block behind `<!-- not run by the tests: REASON -->` is reported as skipped: it needs a GPU, a network, a large
machine or a long time. One behind `<!-- needs PACKAGE -->` runs where that package is, and may warn.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shlex
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatier.cli import main
from megatier.measure import drive_probe, link_probe

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
STARTS = {
    "docs/guide.md": "megatier train examples/quickstart.yaml ",
    "docs/measuring.md": "megatier bench ",
    "docs/data.md": "megatier train examples/quickstart.yaml --data.files ",
    "docs/embedding.md": "import torch",
}
"""What readers of these pages type first."""
LONG = ("docs/adapters.md", "docs/models.md")
"""Pages whose commands run for long: in the slow tests."""
FENCE = re.compile(
    r"^(?:<!-- (?:not run by the tests: (?P<reason>.+?)|needs (?P<package>\w+)) -->\n)?"
    r"```(?P<language>sh|python)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    code: str
    reason: str | None
    """Why the tests do not run it."""
    package: str | None
    """What it needs beyond the tests' own."""

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> Iterator[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start("code")) + 1
        yield Block(page, line, found["language"], found["code"], found["reason"], found["package"])


def commands(block: Block) -> Iterator[list[str]]:
    for line in block.code.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with the examples, where `bench` moves little memory, and believes what it sees."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    small = functools.partial(link_probe.probe_links, copy_bytes=1 << 20, update_elements=1 << 16, matmul_size=256)
    monkeypatch.setattr(link_probe, "probe_links", small)
    monkeypatch.setattr(drive_probe, "drive_flags", lambda figures: ())


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] * (page in LONG))
        for page in PAGES
        if any(block.reason is None for block in blocks(page))
    ],
)
def test_page_runs_as_it_stands(page: str, workplace: None) -> None:
    if page == "docs/trainers.md":
        pytest.importorskip("accelerate")
    names: dict[str, object] = {"__name__": page}
    for block in blocks(page):
        if block.reason is not None or (block.package and importlib.util.find_spec(block.package) is None):
            continue
        if block.language == "python":
            with warnings.catch_warnings():
                if block.package:
                    warnings.simplefilter("default")
                exec(compile("\n" * (block.line - 1) + block.code, page, "exec"), names)
            continue
        for program, *words in commands(block):
            assert program == "megatier", block.name
            assert main(words) == 0, block.name


@pytest.mark.parametrize(
    "block", [each for page in PAGES for each in blocks(page) if each.reason], ids=lambda b: b.name
)
def test_block_that_only_a_reader_runs(block: Block) -> None:
    pytest.skip(f"{block.name}: {block.reason}")


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", *PAGES])
def test_lines_of_page_are_at_most_120_columns_wide(page: str) -> None:
    lines = enumerate((ROOT / page).read_text(encoding="utf-8").splitlines(), start=1)
    # Markdown cannot break a row of a table.
    assert [number for number, line in lines if len(line) > 120 and not line.startswith("|")] == []


def test_benchmarks_are_at_most_150_lines() -> None:
    # Stories and levers belong in the log.
    assert len((ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("page", STARTS)
def test_page_of_each_user_begins_with_what_works(page: str) -> None:
    first = next(blocks(page))
    assert first.reason is None
    assert first.code.startswith(STARTS[page])
    assert "```" not in (ROOT / page).read_text(encoding="utf-8").partition(f"```{first.language}\n")[0]
