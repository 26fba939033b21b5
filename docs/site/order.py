"""A hook of mkdocs: order the sections of the site for a reader, who wants to do something first and to know why last."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

ORDER = ("Documentation", "Guide", "Concepts", "Reference", "Contribute", "Glossary", "Decisions", "Experiment log")


def on_nav(nav: Any, config: Any, files: Any) -> Any:
    """Sort the top level, and link each page with the next one anew."""
    nav.items.sort(key=lambda item: ORDER.index(item.title) if item.title in ORDER else len(ORDER))
    nav.pages[:] = [page for item in nav.items for page in pages_of(item)]
    for page in nav.pages:
        page.previous_page = page.next_page = None
    for page, following in pairwise(nav.pages):
        page.next_page, following.previous_page = following, page
    return nav


def pages_of(item: Any) -> list[Any]:
    """Return the pages of a section in order, or the page itself."""
    return [item] if item.is_page else [page for child in item.children or () for page in pages_of(child)]
