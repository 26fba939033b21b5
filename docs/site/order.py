"""Hooks of mkdocs: order the site for a reader, who wants to do something first and to know why last; name what is not on the site."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

ORDER = ("README.md", "Guide", "Concepts", "Reference", "Contribute", "glossary.md", "Decisions", "log.md")


def on_nav(nav: Any, config: Any, files: Any) -> Any:
    """Sort the top level, and each section as its README lists its pages; link each page with the next one anew."""
    nav.items.sort(key=lambda item: ORDER.index(item.file.src_uri if item.is_page else item.title))  # a page has no title yet
    for section in nav.items:
        if not section.is_page:
            readme = next(page.file for page in section.children if page.file.name == "index")
            text = Path(readme.abs_src_path).read_text()
            section.children.sort(key=lambda page, text=text: text.find(f"({Path(page.file.src_uri).name})"))  # the README itself: -1
    nav.pages[:] = [page for item in nav.items for page in pages_of(item)]
    for page in nav.pages:
        page.previous_page = page.next_page = None
    for page, following in pairwise(nav.pages):
        page.next_page, following.previous_page = following, page
    return nav


def pages_of(item: Any) -> list[Any]:
    """Return the pages of a section in order, or the page itself."""
    return [item] if item.is_page else [page for child in item.children or () for page in pages_of(child)]


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Name a file beside docs/ in place of a link to it: the site does not have it."""

    def named(link: re.Match[str]) -> str:
        return link[1] if link[2] in link[1] else f"{link[1]} (`{link[2]}`)"

    return re.sub(r"\[([^]]*)\]\(\.\./\.\./([^)#]*)[^)]*\)", named, markdown)
