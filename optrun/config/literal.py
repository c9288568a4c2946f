"""Tokens of the command line as Hydra reads them, with paths taken as they stand."""

from __future__ import annotations

import functools
import os
from fnmatch import fnmatchcase
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from optrun.config.groups import GROUPS
from optrun.config.original_cwd import PATHS

_PLACES = ("resume", "branch_from", "hydra.run.dir", "hydra.sweep.dir", "out")


def parse_token(token: str) -> Override:
    """Parse one override.

    The value of a key that holds a path is taken literally where it can be nothing else.

    Raises:
        HydraException: It is none.
    """
    return _parsed(_with_literal_path(token))


@functools.lru_cache(maxsize=1024)
def _parsed(token: str) -> Override:
    """Parse several times a command line; Hydra's parser takes a millisecond for each."""
    return OverridesParser.create().parse_overrides([token])[0]


def _with_literal_path(token: str) -> str:
    """Quote a path that Hydra's grammar would read as something else, or not at all.

    A value that names a file or folder means it. Any other may be a list, a glob or several values
    of a sweep; what Hydra cannot read is a path as well, which the key's reader then misses by
    name.
    """
    key, _, value = token.partition("=")
    if not value or not _holds_path(key.lstrip("+")):
        return token
    there = "${" not in value and _is_there(value)
    try:
        override = _parsed(token)
        literal = there and (override.is_sweep_override() or override.value() != value)
    except HydraException:
        literal = there or value[0] not in "[{('\""
    return f"{key}={quote_path(value)}" if literal else token


def _is_there(value: str) -> bool:
    try:
        return os.path.lexists(Path(value).expanduser())
    except RuntimeError:  # of `~name`, where nobody has this name
        return False


def _holds_path(key: str) -> bool:
    group = key.partition(".")[0]
    named = {
        f"{group}.{path}"
        for schema in GROUPS.get(group, {}).values()
        for path in getattr(schema, "PATHS", ())
    }
    return any(
        fnmatchcase(key, form)
        for path in (*_PLACES, *PATHS, *named)
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
