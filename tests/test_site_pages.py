"""The pages of docs/ on the site: where their links lead, and what is found from the first page on."""

from __future__ import annotations

import re

import settings_page
import site_pages
from test_docs import ROOT

from megatier.cli import train


def test_link_within_docs_stays_as_it_is() -> None:
    text = "[a](guide.md#your-first-run) [b](#here) [c](https://pytorch.org)"
    assert site_pages.for_site(text, "models.md", None) == text


def test_link_between_readme_and_docs_leads_to_the_page_of_the_site() -> None:
    assert site_pages.for_site("![a](docs/pictures/tiers.svg)", "index.md", None) == "![a](pictures/tiers.svg)"
    assert site_pages.for_site("[a](../README.md#quick-start)", "guide.md", None) == "[a](index.md#quick-start)"
    assert site_pages.for_site("[a](../../README.md)", "decisions/0001.md", None) == "[a](../index.md)"


def test_link_that_leaves_docs_leads_to_the_repository_or_is_a_path() -> None:
    text = "See [the list](../bench/results/README.md)."
    assert site_pages.for_site(text, "benchmarks.md", None) == "See the list (`bench/results/README.md`)."
    found = site_pages.for_site(text, "benchmarks.md", "https://host/megatier")
    assert found == "See [the list](https://host/megatier/blob/main/bench/results/README.md)."
    assert site_pages.for_site("[LICENSE](LICENSE)", "index.md", None) == "`LICENSE`"


def test_link_in_a_block_of_code_is_no_link() -> None:
    text = "```python\n[a](../bench)\n```"
    assert site_pages.for_site(text, "guide.md", None) == text


def test_page_of_settings_has_each_setting_that_the_help_shows() -> None:
    shown = re.findall(r"^  --(\S+)", "\n".join(train.settings()), re.MULTILINE)
    headed = re.findall(r"^### `(.*)`$", settings_page.settings_page(), re.MULTILINE)
    assert headed[: len(shown)] == shown
    assert {name.rpartition(".")[0] for name in headed[len(shown) :]} == {"model.lora"}


def test_setting_in_code_leads_to_its_heading_on_the_page_of_settings() -> None:
    text = "`train.steps`, `tiers.ram: 96GiB` and `megatier train --help`"
    assert settings_page.with_links(text, "../settings.md") == (
        "[`train.steps`](../settings.md#trainsteps), [`tiers.ram: 96GiB`](../settings.md#tiersram) and "
        "[`megatier train --help`](../settings.md#settings)"
    )
    for text in ("# On `train.steps`", "```\n`train.steps`\n```", "[`train.steps`](guide.md)", "`train.step`"):
        assert settings_page.with_links(text, "settings.md") == text


def test_index_of_decisions_names_each_decision() -> None:
    folder = ROOT / "docs" / "decisions"
    named = re.findall(r"\]\(([\w.-]+\.md)\)", (folder / "README.md").read_text(encoding="utf-8"))
    assert named == sorted(path.name for path in folder.glob("0*.md"))
