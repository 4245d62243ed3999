"""The site's page of all settings, made from what `megatier train --help` shows. Other pages link to its entries."""

from __future__ import annotations

import posixpath
import re
from typing import TYPE_CHECKING, Any

from megatier.config.lora import LoraConfig
from megatier.config.schema import CONFIG_SECTIONS
from megatier.config.section import settings_of

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

FIRST = """# Settings

Each setting of a config, with what it takes, its default, and what it does. The [guide](guide.md) explains settings by
their use. SIZE is a number with its unit, such as 96GiB. N is a whole number, X any number. LIST is a YAML list, or on
the command line values with commas between them. KEYS is a section. `null` means that the setting is not set.
"""
SECTIONS: dict[str, Any] = CONFIG_SECTIONS | {LoraConfig.NAME: LoraConfig}
HEADINGS = {each.name: each.name.replace(".", "") for section in SECTIONS.values() for each in settings_of(section)}
NAME = "|".join(map(re.escape, HEADINGS))
# Blocks of code, headings and links stay as they are.
NAMED = re.compile(rf"^```.*?^```$|^#[^\n]*$|\[[^\]]*\]\(\S+\)|`(megatier train --help|{NAME})(: [^`]*)?`", re.M | re.S)


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the page."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "settings.md", content=settings_page()))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make the settings that a page names links."""
    return with_links(markdown, posixpath.relpath("settings.md", posixpath.dirname(page.file.src_uri) or "."))


def with_links(text: str, target: str) -> str:
    """Return Markdown in which each setting in code leads to its heading in the page of settings, which is `target`."""
    return NAMED.sub(lambda at: f"[{at[0]}]({target}#{HEADINGS.get(at[1], 'settings')})" if at[1] else at[0], text)


def settings_page() -> str:
    """Return the page, in Markdown."""
    parts = [FIRST]
    for name, section in SECTIONS.items():
        parts.append(f"## {name}\n\n{section.__doc__.splitlines()[0]}\n")
        for each in settings_of(section):
            # Patterns such as *.norm are no emphasis, and a page is a link.
            doc = re.sub(r"[*\[\]]", r"\\\g<0>", each.doc)
            doc = re.sub(r"\bdocs/(\w+)\.md", r"[\1](\1.md)", doc)
            doc = re.sub(rf"(?<![\w.`])({NAME})(?![\w`]|\.\w)", r"`\1`", doc)
            parts.append(f"### `{each.name}`\n\n`{each.takes}`, default `{each.default}`\n\n{doc}\n")
    return "\n".join(parts)
