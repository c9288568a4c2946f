"""Parse overrides as Hydra does, but take paths and texts literally."""

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
from optrun.base.reading import expand_home
from optrun.config import registry
from optrun.config.groups import CHOICES, GROUPS
from optrun.config.original_cwd import PATHS
from optrun.config.schema.run import RunConfig
from optrun.config.types import in_yaml

_PLAIN = re.compile(r"[^\s,'\"\[\](){}$\\\\]+")
"""A word without special characters of Hydra's grammar."""
_NAME = re.compile(r"(?!(true|false|null|inf|nan)$)[a-z_][\w./-]*", re.IGNORECASE | re.ASCII)
"""A text that Hydra's grammar reads as that text."""
_MAYBE_NUMBER = re.compile(r"[-+.\d]|(true|false|inf|nan)$", re.IGNORECASE)
"""The begin of what Hydra may read as a number or boolean."""
_TEXTS_OF_HYDRA = ("hydra.job.name",)
_PLACES = ("resume", "branch_from", "hydra.run.dir", "hydra.sweep.dir", "out")
"""Keys that hold the path of a run, a sweep or an output."""


def parse_token(token: str) -> Override:
    """Parse one override; paths and texts are taken literally.

    The value of a text key is what was typed, even if Hydra would read a number. The value of a
    path key is taken literally if it can be nothing else.

    Raises:
        HydraException: The token is no override.
    """
    return _parse_cached(_with_literal_text(_with_literal_path(token)))


def _with_literal_text(token: str) -> str:
    """Quote the value of a text key if Hydra would read a number or boolean.

    A list, and several values of a sweep, are quoted one by one; other tokens stay as they are.

    Example:
        >>> _with_literal_text("data.text_column=1_0"), _with_literal_text("seed=10")
        ("data.text_column='1_0'", 'seed=10')
        >>> _with_literal_text("data.column_names=[text,1e5]")
        "data.column_names=[text,'1e5']"
    """
    # 1. The words of the value: one, or several of a list or sweep.
    key, equals, value = token.partition("=")
    is_list = value.startswith("[") and value.endswith("]")
    if is_list:
        value = value[1:-1]
    items = [item.strip() for item in value.split(",")]
    # 2. Nothing to quote: no value, a quoted value or a function, words that Hydra reads as typed,
    # or a key that takes numbers.
    if not equals or not all(map(_PLAIN.fullmatch, items)):
        return token
    if not any(map(changes_text, items)) or not takes_text(key.lstrip("+")):
        return token
    # 3. Quote the words that Hydra would respell.
    texts = ",".join(quote_path(item) if changes_text(item) else item for item in items)
    if is_list:
        return f"{key}=[{texts}]"
    return f"{key}={texts}"


def changes_text(word: str) -> bool:
    """Tell whether Hydra reads a word as a number or boolean and respells it.

    `1` would stay 1 as a text; `1_0`, `1e5` and `true` would become 10, 100000.0 and True.
    """
    if not _MAYBE_NUMBER.match(word):
        return False
    try:
        value = _parse_cached(f"key={word}").value()
    except HydraException:
        return False
    return isinstance(value, bool | int | float) and str(value) != word


def takes_text(key: str) -> bool:
    """Tell whether a key takes a text, a list of texts or a path in every choice of its group.

    False for keys inside a mapping, and for a key that no choice has.

    Example:
        >>> takes_text("data.text_column"), takes_text("lr"), takes_text("data.nothing")
        (True, False, False)
    """
    if key in _TEXTS_OF_HYDRA or _holds_path(key):
        return True
    group, _, name = key.rpartition(".")
    if not group:
        schemas: list[type] = [RunConfig]
    elif group in ("hydra.sweeper", *GROUPS):
        schemas = list(CHOICES[group.replace(".", "/")].values())
    elif group.startswith("callbacks."):
        row = registry.find("callback", group.removeprefix("callbacks."))
        schemas = [] if row is None else [row.schema]
    else:
        return False
    hints = [_hints(schema)[name] for schema in schemas if name in _hints(schema)]
    return bool(hints) and all(map(_is_text, hints))


@functools.cache
def _hints(schema: type) -> dict[str, Any]:
    return get_type_hints(schema)


def _is_text(hint: Any) -> bool:
    """Tell whether a type is `str`, a list of `str`, or one of these or None."""
    if hint is str:
        return True
    arguments = get_args(hint)
    if get_origin(hint) in (list, tuple, Sequence):
        return all(item in (str, Ellipsis) for item in arguments)
    union_members = [member for member in arguments if member is not type(None)]
    return bool(union_members) and all(map(_is_text, union_members))


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
    """Quote the value of a path key if Hydra would misread it or reject it.

    A value that is an existing file or folder means it. Any other may be a list, a glob or several
    values of a sweep. What Hydra cannot read is a path too, unless it begins like a list, a
    mapping, a function or a quoted text; whoever opens it reports it missing.

    Example:
        >>> _with_literal_path("data.train=rows(1).csv"), _with_literal_path("data.train=a,b")
        ("data.train='rows(1).csv'", 'data.train=a,b')
    """
    key, _, value = token.partition("=")
    if not value or not _holds_path(key.lstrip("+")):
        return token
    exists = "${" not in value and os.path.lexists(expand_home(value))  # not an interpolation
    try:
        override = _parse_cached(token)
    except HydraException:  # quotes do not mend a list or mapping: its own error is clearer
        is_path = exists or value[0] not in "[{('\""
    else:  # such as `a,b.csv`, which Hydra reads as two values
        is_misread = override.is_sweep_override() or override.value() != value
        is_path = exists and is_misread
    if is_path:
        return f"{key}={quote_path(value)}"
    return token


def _holds_path(key: str) -> bool:
    """Tell whether a key, or the key of the mapping around it, holds a path.

    These are `_PLACES`, `PATHS` and the `PATHS` of the schemas of its group; `*` stands for a name.

    Example:
        >>> _holds_path("data.train"), _holds_path("data.eval.dev"), _holds_path("data.max_length")
        (True, True, False)
    """
    group = key.partition(".")[0]
    path_keys = [*_PLACES, *PATHS]
    for schema in GROUPS.get(group, {}).values():
        path_keys += [f"{group}.{path}" for path in getattr(schema, "PATHS", ())]
    return any(fnmatchcase(key, path) or fnmatchcase(key, f"{path}.*") for path in path_keys)


def quoted(text: str) -> str:
    """Quote a path or name for Hydra's grammar, unless it is read as it stands."""
    is_plain = re.fullmatch(r"[A-Za-z_./]([\w./ -]*[\w./-])?", text, re.ASCII)
    if is_plain and text.lower() not in registry.NO_TEXTS:
        return text
    return quote_path(text)


def quote_path(path: Path | str, mark: str = "'") -> str:
    r"""Quote a path, or any text, as a value of Hydra's grammar.

    In that grammar backslashes before a quote, also before the last one, must be doubled, and a
    quote inside gets one before it; any other backslash means itself.

    Example:
        >>> print(quote_path("a\\b"), quote_path("it's"), quote_path("end\\", '"'))
        'a\b' 'it\'s' "end\\"
    """
    escaped = []
    for text in str(path).split(mark):
        backslashes_at_end = len(text) - len(text.rstrip("\\"))
        escaped.append(text + "\\" * backslashes_at_end)
    return mark + f"\\{mark}".join(escaped) + mark


def in_grammar(value: object) -> str:
    r"""Write a value in Hydra's grammar; a text is quoted only if it must be.

    Example:
        >>> print(in_grammar({"a": [1, 2.5, True, None, "text", "true", "a\\b"]}))
        {a:[1,2.5,true,null,text,'true','a\b']}
    """
    if value is None or isinstance(value, bool):
        return str(in_yaml(value))
    if isinstance(value, str):
        return value if _NAME.fullmatch(value) else quote_path(value)
    if isinstance(value, list | tuple):
        return f"[{','.join(map(in_grammar, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{in_grammar(item)}" for key, item in value.items()) + "}"
    return repr(value)
