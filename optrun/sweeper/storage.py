"""Turn the error of a study's database into one message."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from optrun.base.errors import ConfigError, OptrunError, StorageError

_OF_THE_URL = (ValueError, ImportError)
"""No database of that name, no driver for it, or one that Optuna has no more."""


@contextlib.contextmanager
def translated_errors(name: str) -> Iterator[None]:
    """Turn the error of a database on opening into one message.

    Args:
        name: How the message names it.

    Raises:
        ConfigError: A URL that means nothing, or asks for a package.
        StorageError: It cannot be opened.
    """
    try:
        yield
    except OptrunError:
        raise
    except Exception as error:
        kinds = {
            kind.__name__
            for kind in type(error).__mro__
            if kind.__module__.startswith(("sqlalchemy.", "optuna."))
        }
        if not kinds and not isinstance(error, _OF_THE_URL):
            raise
        wrong = isinstance(error, _OF_THE_URL) or "ArgumentError" in kinds
        raise (ConfigError if wrong else StorageError)(f"{name}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    """Cut an error to its first line, without user and password of a database."""
    lines = str(error).strip().splitlines()
    return re.sub(r"//[^/\s]*@", "//", lines[0]) if lines else type(error).__name__
