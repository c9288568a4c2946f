"""Tokens of the command line as Hydra reads them, with paths and texts taken as they stand."""

import functools
import os
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from optrun.base.errors import ConfigError
from optrun.config import registry
from optrun.config.groups import CHOICES, GROUPS
from optrun.config.original_cwd import PATHS
from optrun.config.schema.run import RunConfig

_PLAIN = re.compile(r"[^\s,'\"\[\](){}$\\\\]+")
"""A word without signs of Hydra's grammar."""
_NAME = re.compile(r"(?!(true|false|null|inf|nan)$)[a-z_][\w./-]*", re.IGNORECASE | re.ASCII)
"""A text that Hydra's grammar reads as that text."""
_MAYBE_NUMBER = re.compile(r"[-+.\d]|(true|false|inf|nan)$", re.IGNORECASE)
"""What Hydra may read as another value than a text."""
_TEXTS_OF_HYDRA = ("hydra.job.name",)
_PLACES = ("resume", "branch_from", "hydra.run.dir", "hydra.sweep.dir", "out")


def parse_token(token: str) -> Override:
    """Parse one override.

    The value of a key that takes a text is what was typed, also if it reads as a number. That of a
    key that holds a path is taken literally if it can be nothing else.

    Raises:
        HydraException: It is none.
    """
    return _parse_cached(_with_literal_text(_with_literal_path(token)))


def _with_literal_text(token: str) -> str:
    """Quote the value of a text key if Hydra would read a number or boolean.

    Of several values of a sweep, and of a list, each is looked at by itself.

    Example:
        >>> _with_literal_text("data.text_column=1_0"), _with_literal_text("seed=10")
        ("data.text_column='1_0'", 'seed=10')
        >>> _with_literal_text("data.column_names=[text,1e5]")
        "data.column_names=[text,'1e5']"
    """
    key, equals, value = token.partition("=")
    is_list = value.startswith("[") and value.endswith("]")
    pieces = [piece.strip() for piece in (value[1:-1] if is_list else value).split(",")]
    if not equals or not all(map(_PLAIN.fullmatch, pieces)) or not any(map(changes_text, pieces)):
        return token
    if not takes_text(key.lstrip("+")):
        return token
    texts = ",".join(quote_path(piece) if changes_text(piece) else piece for piece in pieces)
    if is_list:
        return f"{key}=[{texts}]"
    return f"{key}={texts}"


def changes_text(piece: str) -> bool:
    """Tell whether Hydra reads a word as a number or a truth value with another text.

    `1` stays the text 1 where a text is meant; `1_0`, `1e5` and `true` would become others.
    """
    if not _MAYBE_NUMBER.match(piece):
        return False
    try:
        value = _parse_cached(f"key={piece}").value()
    except HydraException:
        return False
    return isinstance(value, bool | int | float) and str(value) != piece


def takes_text(key: str) -> bool:
    """Tell whether a key takes a text, a list of texts or a path in every choice of its group.

    False for keys inside a mapping, and for a key that no choice has.
    """
    if key in _TEXTS_OF_HYDRA or _holds_path(key):
        return True
    group, _, name = key.rpartition(".")
    schemas: list[type] = [RunConfig]
    if group in ("hydra.sweeper", *GROUPS):
        schemas = list(CHOICES[group.replace(".", "/")].values())
    elif group.startswith("callbacks."):
        row = registry.find("callback", group.removeprefix("callbacks."))
        schemas = [] if row is None else [row.schema]
    elif group:
        return False
    hints = [_hints(schema)[name] for schema in schemas if name in _hints(schema)]
    return bool(hints) and all(map(_is_text, hints))


@functools.cache
def _hints(schema: type) -> dict[str, Any]:
    return get_type_hints(schema)


def _is_text(hint: Any) -> bool:
    """Tell whether a type is text, a list of texts, or one of these or None."""
    if get_origin(hint) in (list, tuple, Sequence):
        return all(item in (str, Ellipsis) for item in get_args(hint))
    members = [member for member in get_args(hint) if member is not type(None)]
    return hint is str or (bool(members) and all(map(_is_text, members)))


@functools.lru_cache(maxsize=1024)
def _parse_cached(token: str) -> Override:
    """Parse one override with Hydra's parser; cached, since each call takes a millisecond."""
    try:
        return OverridesParser.create().parse_overrides([token])[0]
    except AttributeError as error:
        raise ConfigError(
            f"{token}: python -O and PYTHONOPTIMIZE leave Hydra unable to read functions such as"
            " range(). Start without them, or list the values."
        ) from error


def _with_literal_path(token: str) -> str:
    """Quote a path if Hydra would misread it or reject it.

    A value that names a file or folder means it. Any other may be a list, a glob or several values
    of a sweep; what Hydra cannot read is a path as well, which the key's reader then misses by
    name.
    """
    key, _, value = token.partition("=")
    if not value or not _holds_path(key.lstrip("+")):
        return token
    exists = "${" not in value and _path_exists(value)
    try:
        override = _parse_cached(token)
        literal = exists and (override.is_sweep_override() or override.value() != value)
    except HydraException:
        literal = exists or value[0] not in "[{('\""
    if literal:
        return f"{key}={quote_path(value)}"
    return token


def _path_exists(value: str) -> bool:
    try:
        return os.path.lexists(Path(value).expanduser())
    except RuntimeError:  # of `~name`, where nobody has this name
        return False


def _holds_path(key: str) -> bool:
    group = key.partition(".")[0]
    schema_paths = {
        f"{group}.{path}"
        for schema in GROUPS.get(group, {}).values()
        for path in getattr(schema, "PATHS", ())
    }
    return any(
        fnmatchcase(key, form)
        for path in (*_PLACES, *PATHS, *schema_paths)
        for form in (path, f"{path}.*")
    )


def quote_path(path: Path | str, mark: str = "'") -> str:
    r"""Quote a path, or any text, as a value of Hydra's grammar.

    There a backslash means itself unless a quote follows.

    Example:
        >>> print(quote_path("a\\b"), quote_path("it's"), quote_path("end\\", '"'))
        'a\b' 'it\'s' "end\\"
    """
    pieces = str(path).split(mark)
    escaped = [piece + "\\" * (len(piece) - len(piece.rstrip("\\"))) for piece in pieces]
    return mark + f"\\{mark}".join(escaped) + mark


def in_grammar(value: object) -> str:
    r"""Write a value in Hydra's grammar; a text is quoted only if it must be.

    Example:
        >>> print(in_grammar({"a": [1, 2.5, True, None, "text", "true", "a\\b"]}))
        {a:[1,2.5,true,null,text,'true','a\b']}
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value if _NAME.fullmatch(value) else quote_path(value)
    if isinstance(value, list | tuple):
        return f"[{','.join(map(in_grammar, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{in_grammar(item)}" for key, item in value.items()) + "}"
    return repr(value)
