"""Write docs/reference/configuration.md from the schemas and conf/: python -m tests.docs.configuration."""

from __future__ import annotations

import enum
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from optrun.config import store
from optrun.config.schema import sweeper
from optrun.config.schema.run import RunConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "configuration.md"
NAMES = {str: "text", int: "whole number", float: "number", bool: "true or false", type(None): "null"}
INTRODUCTION = """\
# Configuration

Every key, its default, its type and its meaning, written by `make docs` from the schemas in `optrun/config/schema/` and
the comments in `conf/`; do not edit it. A key is set by `group.key=value`, a choice by `group=choice`, a key at the top
level by `key=value`. `???` has no default and must be given. `optrun --cfg job --resolve` shows what would run,
[questions.md](../questions.md) says why some defaults are what they are.
"""

DIALECT = re.compile(r"^\$\{dialect:(.*)\}$")
"""A default that some dialect has otherwise; the page shows optrun's own."""


def page() -> str:
    """Render the whole reference."""
    groups = {**store.GROUPS, "hydra/sweeper": sweeper.SCHEMAS}
    conf = store.config_dir()
    primary = (conf / "config.yaml").read_text(encoding="utf-8")
    top = dict(_entries(primary))
    hints = typing.get_type_hints(RunConfig)
    rows = {key: entry for key, entry in top.items() if key in hints and key not in groups}
    parts = [INTRODUCTION, "## Top level\n", _table("", rows, hints)]
    for group, schemas in groups.items():
        chosen = re.search(
            rf"^ *- (?:override )?{group}: (\w+)(?: *# (.*))?$", (conf / "config.yaml").read_text(), re.M
        )
        meaning = f": {chosen[2]}" if chosen and chosen[2] else ""
        parts.append(f"## `{group}`{meaning}\n")
        for choice, schema in schemas.items():
            text = (conf / group / f"{choice}.yaml").read_text(encoding="utf-8")
            mark = " (default)" if chosen and chosen[1] == choice else ""
            parts.append(f"### `{group}={choice}`{mark}\n\n{_cell(_head(text))}\n")
            keys = {key: entry for key, entry in _entries(text) if key != "defaults" and entry[0] != choice}
            parts.append(_table(f"{group.replace('/', '.')}.", keys, typing.get_type_hints(schema)) if keys else "")
    return "\n".join(part for part in parts if part)


def _table(prefix: str, entries: Mapping[str, tuple[str, str]], hints: Mapping[str, Any]) -> str:
    lines = ["| key | default | type | meaning |", "| --- | --- | --- | --- |"]
    for key, (default, comment) in entries.items():
        shown = f"`{_cell(default, code=True)}`"
        lines.append(f"| `{prefix}{key}` | {shown} | {_cell(type_name(hints[key]), code=True)} | {_cell(comment)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str, *, code: bool = False) -> str:
    return text.replace("|", "\\|") if code else re.sub(r"([\\|<>*])", r"\\\1", text)


def type_name(hint: Any) -> str:
    """Name a type for people: `int | None` is a whole number or null, an Enum is its values."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_name(one) for one in arguments))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return ", ".join(f"`{member.value}`" for member in hint)
    if origin in (tuple, list, Sequence):
        return "list"
    if origin in (dict, Mapping):
        return "mapping"
    return NAMES.get(hint, "any")


def _head(text: str) -> str:
    """Join the comment lines that a file begins with."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return " ".join(lines)


def _entries(text: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Read the keys of the top level: default as written, and the comment beside, below or above it."""
    key, default, comment, above = "", "", "", ""
    for line in [*text.splitlines(), "end: 0"]:
        if match := re.match(r"([a-z_]\w*):(?: (.*?))?(?:(?:^|\s+)# (.*))?$", line):
            if key:
                yield key, (DIALECT.sub(r"\1", default), comment.strip())
            key, default, comment = match[1], (match[2] or "").strip(), match[3] or above
            above = ""
        elif match := re.match(r"\s+#(.*)", line):
            comment += " " + match[1].strip()
        elif line.startswith("# "):
            above = f"{above} {line[2:]}".strip()
        elif not line.strip():
            above = ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
