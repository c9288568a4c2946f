"""The reference of keys: default, type and meaning of each, from its YAML, else its schema."""

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
from collections.abc import Mapping, Sequence
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


@dataclasses.dataclass
class _Row:
    """A key as a YAML or a schema writes it."""

    key: str
    default: str
    meaning: str


@dataclasses.dataclass(frozen=True)
class Entry:
    """A key as the help shows it."""

    key: str
    default: str
    """As the YAML writes it; `???`: it must be given; `computed`: it follows from other keys."""
    type: str
    meaning: str


def top_level() -> list[Entry]:
    """List the keys of the top level, such as `lr`."""
    hints = typing.get_type_hints(RunConfig)
    rows = _commented_keys(_text("config"))
    return [_entry("", row, hints) for row in rows if row.key in hints and row.key not in CHOICES]


def defaults() -> dict[str, tuple[str, str]]:
    """Return the default choice and the purpose of each group, from the defaults list."""
    matches = re.findall(r"^ *- (?:override )?([\w/]+): (\w+)(?: *# (.*))?$", _text("config"), re.M)
    return {group: (choice, meaning) for group, choice, meaning in matches}


def head(group: str, choice: str) -> str:
    """Describe a choice in a sentence or two: the comment at the begin of its YAML.

    For a registered choice: the first paragraph of its class's docstring.
    """
    row = foreign_choices(group).get(choice)
    if row is not None:
        text = inspect.cleandoc(row.target.__doc__ or "")  # not `getdoc`, which reads base classes
        return " ".join(text.partition("\n\n")[0].split())
    comment: list[str] = []
    for line in _text(f"{group}/{choice}").splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.removeprefix("#").strip())
    return " ".join(comment)


def entries(group: str, choice: str) -> list[Entry]:
    """List the keys of a choice: first from its YAML, then the others of its schema.

    Meaning and default of a key come from the YAML, else from the docstring and the default of the
    field. A registered choice has no YAML. The key `name` is left out if it is that of the choice.
    """
    schema = CHOICES[group][choice]
    hints = typing.get_type_hints(schema)
    rows = {}
    if choice not in foreign_choices(group):
        for row in _commented_keys(_text(f"{group}/{choice}")):
            if row.key in hints:
                rows[row.key] = row
    # A key that the YAML leaves out, such as one of a registered choice.
    for key, value in schema_defaults(schema).items():
        if key not in rows and key != "name":
            default = value if isinstance(value, str) else json.dumps(value)  # as YAML writes it
            rows[key] = _Row(key, default, _field_docstring(schema, key))
    prefix = f"{group.replace('/', '.')}."
    name_of_choice = ("name", choice)  # says nothing new
    return [
        _entry(prefix, row, hints)
        for row in rows.values()
        if (row.key, row.default) != name_of_choice
    ]


def type_name(hint: Any) -> str:
    """Name a type for people: `int | None` is "whole number or null", an Enum its values."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        names = [type_name(member) for member in typing.get_args(hint)]
        return " or ".join(dict.fromkeys(names))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return ", ".join(f"`{member.value}`" for member in hint)
    if origin in (tuple, list, Sequence):
        return "list"
    if origin in (dict, Mapping):
        return "mapping"
    return _NAMES.get(hint, "any")


def _entry(prefix: str, row: _Row, hints: Mapping[str, object]) -> Entry:
    """Add type and prefix, such as `optimizer.`, to a row.

    `${dialect:DEFAULT}` and `${default_warmup:RATIO}` are shown as their argument, any other
    interpolation as `computed`.
    """
    default = _RESOLVER.sub(r"\1", row.default)
    if default.startswith("${"):
        default = "computed"
    return Entry(f"{prefix}{row.key}", default, type_name(hints[row.key]), row.meaning)


def _field_docstring(schema: type[object], key: str) -> str:
    """Return the docstring below a field of a dataclass; empty if it has none.

    Python does not keep docstrings of fields, so the source of the class is parsed: the string
    expression right after the field. The first class of the MRO with the field decides.
    """
    for owner in schema.__mro__:
        if key not in inspect.get_annotations(owner):
            continue
        module = ast.parse(textwrap.dedent(inspect.getsource(owner)))
        statements = module.body[0].body  # type: ignore[attr-defined]
        for statement, next_statement in itertools.pairwise(statements):
            name = getattr(getattr(statement, "target", None), "id", "")
            if name == key and isinstance(next_statement, ast.Expr):
                return " ".join(ast.literal_eval(next_statement.value).split())
    return ""


def _text(name: str) -> str:
    """Read a YAML of the package, such as `optimizer/lamb`, as text."""
    return read_text(config_dir() / f"{name}.yaml")


def _commented_keys(text: str) -> list[_Row]:
    r"""List the top-level keys of a YAML text, each with its default as written and its comment.

    The comment stands beside the key, or in the lines above it; indented comment lines below the
    key continue it. An empty line ends a comment above.

    Example:
        >>> text = "# Peak learning rate.\nlr: 1e-3\nseed: 0  # Of weights\n  # and data."
        >>> [(row.key, row.default, row.meaning) for row in _commented_keys(text)]
        [('lr', '1e-3', 'Peak learning rate.'), ('seed', '0', 'Of weights and data.')]
    """
    rows: list[_Row] = []
    comment_above = ""
    for line in text.splitlines():
        # 1. `key: default  # comment`. The comment beside it wins over one above.
        if match := _KEY.match(line):
            meaning = match[3] or comment_above
            rows.append(_Row(match[1], (match[2] or "").strip(), meaning.strip()))
            comment_above = ""
        # 2. An indented comment continues that of the last key.
        elif rows and (match := re.match(r"\s+#(.*)", line)):
            last = rows[-1]
            last.meaning = f"{last.meaning} {match[1].strip()}".strip()
        # 3. A comment at the margin belongs to the next key, unless an empty line follows.
        elif line.startswith("# "):
            comment_above = f"{comment_above} {line[2:]}".strip()
        elif not line.strip():
            comment_above = ""
    return rows
