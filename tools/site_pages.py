"""What `mkdocs build` does to the pages of docs/, so that the same files read well on GitHub and on the site.

README.md is the site's first page. A link that leaves docs/ leads to the repository; if mkdocs.yml names none, the path
stands there instead, since the site does not have that file.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README.md to the pages."""
    from mkdocs.structure.files import File

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the links of a page into those of the site."""
    return for_site(markdown, page.file.src_uri, config.repo_url)


def for_site(text: str, page: str, repository: str | None) -> str:
    """Return the text of a page of the site with links that work there."""
    source = "README.md" if page == "index.md" else f"docs/{page}"

    def changed(link: re.Match[str]) -> str:
        words, target = link.groups()
        name, mark, heading = target.partition("#")
        if "://" in target or not name:
            return link[0]

        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), name))
        if path == "README.md" or path.startswith("docs/"):
            there = "index.md" if path == "README.md" else path.removeprefix("docs/")
            return f"[{words}]({posixpath.relpath(there, posixpath.dirname(page) or '.')}{mark}{heading})"
        if repository:
            return f"[{words}]({repository.rstrip('/')}/blob/main/{path}{mark}{heading})"
        return f"`{path}`" if words.strip("/` ") in path else f"{words} (`{path}`)"

    # Odd parts are blocks of code.
    parts = FENCED.split(text)
    return "".join(part if number % 2 else LINK.sub(changed, part) for number, part in enumerate(parts))
