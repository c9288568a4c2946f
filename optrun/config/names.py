"""Suggestions for patterns without a matching parameter name."""

from __future__ import annotations

from collections.abc import Iterable

from optrun.base.errors import nearest

SHOWN = 6
"""Names shown as examples where none is near."""


def near_names(pattern: str, names: Iterable[str]) -> str:
    """Suggest names close to a pattern, or some examples.

    Args:
        pattern: A regular expression that was found in no name.
        names: Dotted parameter names.

    Example:
        >>> near_names("clasifier", ["bert.pooler.weight", "classifier.weight"])
        'Did you mean classifier?'
        >>> near_names("zzz", ["bert.pooler.weight", "classifier.weight"])
        'Names are such as bert.pooler.weight, classifier.weight.'
    """
    plain = pattern.replace("\\", "").strip("^$")
    every = list(names)
    stems: set[str] = set()
    for name in every:
        pieces = name.split(".")
        stems.update(".".join(pieces[:end]) for end in range(1, len(pieces) + 1))
    close = nearest(plain, stems)
    if close:
        return f"Did you mean {' or '.join(close)}?"
    by_branch = {name.rsplit(".", 1)[0]: name for name in reversed(every)}
    examples = list(reversed(by_branch.values()))
    step = max(1, len(examples) // SHOWN)
    return f"Names are such as {', '.join(examples[::step][:SHOWN])}."
