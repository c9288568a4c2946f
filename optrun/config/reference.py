"""The reference of keys: default, type and meaning of each, from its YAML.

Else from its schema.
"""

import ast
import dataclasses
import enum
import inspect
import itertools
import json
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from optrun.base.reading import read_text
from optrun.config.groups import CHOICES as CHOICES
from optrun.config.groups import foreign_choices
from optrun.config.paths import config_dir
from optrun.config.registry import schema_defaults
from optrun.config.schema.run import RunConfig

_NAMES = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    type(None): "null",
}
_RESOLVER = re.compile(r"^\$\{(?:dialect|default_warmup):(.*)\}$")
"""A default that a dialect or a short run changes; the usual one is shown."""
_KEY = re.compile(r"([a-z_]\w*):(?: (.*?))?(?:(?:^|\s+)# (.*))?$")


class _Row(typing.NamedTuple):
    """One key as a YAML or a schema writes it."""

    key: str
    default: str
    meaning: str


@dataclasses.dataclass(frozen=True)
class Entry:
    """One key for people."""

    key: str
    default: str
    """As the YAML writes it; `???`: it must be given; `computed`: it follows from other keys."""
    type: str
    meaning: str


def top_level() -> list[Entry]:
    """List the keys of the top level, such as `lr`."""
    hints = typing.get_type_hints(RunConfig)
    rows = _commented(_text("config"))
    return [_entry("", row, hints) for row in rows if row.key in hints and row.key not in CHOICES]


def defaults() -> dict[str, tuple[str, str]]:
    """Return the default choice and the purpose of each group."""
    matches = re.findall(r"^ *- (?:override )?([\w/]+): (\w+)(?: *# (.*))?$", _text("config"), re.M)
    return {group: (choice, meaning) for group, choice, meaning in matches}


def head(group: str, choice: str) -> str:
    """Describe a choice in a sentence or two."""
    row = foreign_choices(group).get(choice)
    if row is not None:
        text = inspect.cleandoc(row.target.__doc__ or "")  # its own, and not of its base
        return " ".join(text.partition("\n\n")[0].split())
    lines = _text(f"{group}/{choice}").splitlines()
    end = next(n for n, line in enumerate(lines) if not line.startswith("#"))
    return " ".join(line.removeprefix("#").strip() for line in lines[:end])


def entries(group: str, choice: str) -> list[Entry]:
    """List the keys of a choice: those of its YAML in its order, then those of its schema alone.

    Meaning and default of a key come from the YAML, else from the docstring and the default of the
    field. A choice in `foreign_choices` is read from its schema alone, since it has no YAML of its
    own. A key with the name of the choice as its value, `name: lamb`, is left out.
    """
    schema = CHOICES[group][choice]
    hints = typing.get_type_hints(schema)
    text = "" if choice in foreign_choices(group) else _text(f"{group}/{choice}")
    rows = {row.key: row for row in _commented(text) if row.key in hints}
    for key, value in schema_defaults(schema).items():
        if key not in rows and key != "name":
            default = value if isinstance(value, str) else json.dumps(value)  # as YAML writes it
            rows[key] = _Row(key, default, _docstring(schema, key))
    return [
        _entry(f"{group.replace('/', '.')}.", row, hints)
        for row in rows.values()
        if row.default != choice
    ]


def type_name(hint: Any) -> str:
    """Name a type for people: `int | None` is a whole number or null, an Enum is its values."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_name(argument) for argument in arguments))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return ", ".join(f"`{member.value}`" for member in hint)
    if origin in (tuple, list, Sequence):
        return "list"
    if origin in (dict, Mapping):
        return "mapping"
    return _NAMES.get(hint, "any")


def _entry(prefix: str, row: _Row, hints: Mapping[str, object]) -> Entry:
    """Complete a row by the type of its key, which gets a prefix such as `optimizer.`."""
    default = _RESOLVER.sub(r"\1", row.default)
    if default.startswith("${"):
        default = "computed"
    return Entry(f"{prefix}{row.key}", default, type_name(hints[row.key]), row.meaning)


def _docstring(schema: type[object], key: str) -> str:
    """Return the docstring below a field of a dataclass or its bases; empty if it has none."""
    for owner in schema.__mro__:
        if key not in inspect.get_annotations(owner):
            continue
        source = ast.parse(textwrap.dedent(inspect.getsource(owner)))
        body = source.body[0].body  # type: ignore[attr-defined]
        for field, below in itertools.pairwise(body):
            name = getattr(getattr(field, "target", None), "id", "")
            if name == key and isinstance(below, ast.Expr):
                return " ".join(ast.literal_eval(below.value).split())
    return ""


def _text(name: str) -> str:
    """Read a YAML of the package, such as `optimizer/lamb`, as text."""
    return read_text(config_dir() / f"{name}.yaml")


def _commented(text: str) -> Iterator[_Row]:
    """Yield the top-level keys of a file, each with its default as written and its comment.

    The comment stands beside, below or above the key.
    """
    key = ""
    default = ""
    comment = ""
    above = ""
    for line in [*text.splitlines(), "end: 0"]:
        if match := _KEY.match(line):
            if key:
                yield _Row(key, default, comment.strip())
            key = match[1]
            default = (match[2] or "").strip()
            comment = match[3] or above
            above = ""
        elif match := re.match(r"\s+#(.*)", line):
            comment += " " + match[1].strip()
        elif line.startswith("# "):
            above = f"{above} {line[2:]}".strip()
        elif not line.strip():
            above = ""
