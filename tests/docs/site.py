"""Prepare pages for the site.

A link out of docs/ has no page there, so its words stay without it.
"""

from __future__ import annotations

import re

OUTSIDE = re.compile(
    r"\[([^\]]+)\]\((?:\.\./)+(?:optrun|conf|tests|examples|benchmarks|README|CONTRIBUTING|CHANGELOG)[^)]*\)"
)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace links to files that are no page by their words; MkDocs calls this for every page."""
    return OUTSIDE.sub(r"\1", markdown)
