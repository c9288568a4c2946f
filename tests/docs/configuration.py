"""Write docs/reference/configuration.md from the schemas and conf/.

Python -m tests.docs.configuration.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from optrun.config import reference
from optrun.config.reference import Entry

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "configuration.md"
INTRODUCTION = """\
# Configuration

Every key, its default, its type and its meaning. `make docs` writes this page from the schemas in
`optrun/config/schema/` and the comments in `conf/`. A key is set by
`group.key=value`, a choice by `group=choice`, a key at the top level by `key=value`. `???` has no
default and must be given. `optrun --cfg job --resolve` shows what would run,
[questions.md](../questions.md) says why some defaults are what they are.
"""


def page() -> str:
    """Render the whole reference."""
    parts = [INTRODUCTION, "## Top level\n", _table(reference.top_level())]
    for group, choices in reference.CHOICES.items():
        default, meaning = reference.defaults().get(group, ("", ""))
        parts.append(f"## `{group}`{f': {meaning}' if meaning else ''}\n")
        for choice in choices:
            mark = " (default)" if choice == default else ""
            parts.append(
                f"### `{group}={choice}`{mark}\n\n{_cell(reference.head(group, choice))}\n"
            )
            rows = reference.entries(group, choice)
            parts.append(_table(rows) if rows else "")
    return "\n".join(part for part in parts if part)


def _table(entries: Iterable[Entry]) -> str:
    lines = ["| key | default | type | meaning |", "| --- | --- | --- | --- |"]
    for each in entries:
        shown = f"`{_cell(each.default, code=True)}`"
        lines.append(
            f"| `{each.key}` | {shown} | {_cell(each.type, code=True)} | {_cell(each.meaning)} |"
        )
    return "\n".join(lines) + "\n"


def _cell(text: str, *, code: bool = False) -> str:
    return text.replace("|", "\\|") if code else re.sub(r"([\\|<>*])", r"\\\1", text)


if __name__ == "__main__":
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
