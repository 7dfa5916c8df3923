"""Hook of mkdocs that writes llms.txt, the list of the site's pages for language models, and each page's Markdown.

The list follows the navigation of mkdocs.yml and has the first sentence of each page (https://llmstxt.org).
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page

_parts: list[str] = []


def on_nav(nav: Navigation, config: MkDocsConfig, **_: object) -> Navigation:
    """Collect the lines of llms.txt. Pages of the API are generated, so their links lead to HTML."""
    _parts[:] = [f"# {config.site_name}\n\n> {config.site_description}\n"]
    single = [item for item in nav.items if isinstance(item, Page)]
    _parts.append(_lines("Pages", single))
    _parts.extend(_lines(item.title, _pages_of(item)) for item in nav.items if isinstance(item, Section))
    return nav


def _pages_of(section: Section) -> list[Page]:
    pages = [[item] if isinstance(item, Page) else _pages_of(item) for item in section.children]
    return [page for part in pages for page in part]


def _lines(title: str, pages: list[Page]) -> str:
    lines = [f"- [{page.title}]({_address(page)}){_first_sentence(page)}" for page in pages]
    return "\n".join([f"\n## {title}\n", *lines, ""])


def _text(page: Page) -> str:
    return Path(page.file.abs_src_path).read_text(encoding="utf-8")


def _address(page: Page) -> str:
    return page.url if ":::" in _text(page) else page.file.src_uri


def _first_sentence(page: Page) -> str:
    """Return the first sentence after the title, without links; empty if no sentence follows the title."""
    _, _, text = _text(page).partition("\n\n")
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(text.partition("\n\n")[0].split()))
    sentence = re.match(r"((?!```|:::)[\w`].*?[.:])( |$)", plain)
    return f": {sentence[1].rstrip('.:')}" if sentence else ""


def on_post_build(config: MkDocsConfig) -> None:
    """Write llms.txt and the Markdown files that it links to."""
    site, docs = Path(config.site_dir), Path(config.docs_dir)
    for source in docs.rglob("*.md"):
        target = site / source.relative_to(docs)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    (site / "llms.txt").write_text("".join(_parts), encoding="utf-8")
