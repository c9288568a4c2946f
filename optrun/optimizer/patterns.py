"""Regular expressions over parameter names: which tensors an exclusion list means."""

from __future__ import annotations

import re
from collections.abc import Sequence

from optrun.base.errors import nearest


def _compile(option: str, pattern: str) -> re.Pattern[str]:
    """Compile a regular expression; raise ValueError with the option if it is invalid."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{option}: {pattern!r} is no regular expression: {error}.") from error


def match_names(
    option: str, patterns: Sequence[str], names: Sequence[str], *, must_match: bool = True
) -> set[str]:
    """Collect the names matched by at least one pattern (`re.search`, case-sensitive).

    Args:
        option: The argument the patterns came from, for messages.
        patterns: Regular expressions.
        names: Parameter names to search.
        must_match: Refuse a pattern that is found in no name: most likely it is misspelt.

    Raises:
        ValueError: A pattern is no regular expression, or matches nothing; then the message lists
            names that look like it.

    Example:
        >>> sorted(match_names("exclude_from_weight_decay", ["bias$"], ["fc.weight", "fc.bias"]))
        ['fc.bias']
    """
    matched: set[str] = set()
    for pattern in patterns:
        expression = _compile(option, pattern)
        hits = {name for name in names if expression.search(name)}
        if not hits and must_match:
            similar = nearest(pattern, names) or list(names)[:3]
            raise ValueError(
                f"{option}: {pattern!r} matches none of {len(names)} parameter names (such as"
                f" {', '.join(similar)}). Fix the pattern, remove it, or pass"
                " unmatched_patterns='ignore'."
            )
        matched |= hits
    return matched
