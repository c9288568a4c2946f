"""Regular expressions over parameter names: which tensors an exclusion list means."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from optrun.base.errors import nearest


def compiled(option: str, patterns: Iterable[str]) -> list[re.Pattern[str]]:
    """Compile patterns; refuse an invalid regular expression.

    Raises:
        ValueError: With the option, the pattern and what `re` says about it.
    """
    out = []
    for pattern in patterns:
        try:
            out.append(re.compile(pattern))
        except re.error as error:
            raise ValueError(f"{option}: {pattern!r} is no regular expression: {error}.") from error
    return out


def matching(
    option: str, patterns: Sequence[str], names: Sequence[str], *, must_match: bool = True
) -> set[str]:
    """Collect the names matched by at least one pattern (`re.search`, case-sensitive).

    Args:
        option: The argument the patterns came from, for the message.
        patterns: Regular expressions.
        names: Parameter names to search.
        must_match: Refuse a pattern that is found in no name: most likely it is misspelt.

    Raises:
        ValueError: For a pattern that matches nothing, with names that look like it.

    Example:
        >>> sorted(matching("exclude_from_weight_decay", ["bias$"], ["fc.weight", "fc.bias"]))
        ['fc.bias']
    """
    matched: set[str] = set()
    for text, pattern in zip(patterns, compiled(option, patterns), strict=True):
        hits = {name for name in names if pattern.search(name)}
        if not hits and must_match:
            close = nearest(text, names) or list(names)[:3]
            raise ValueError(
                f"{option}: {text!r} matches none of {len(names)} parameter names (such as"
                f" {', '.join(close)}). Fix the pattern, remove it, or pass"
                " unmatched_patterns='ignore'."
            )
        matched |= hits
    return matched
