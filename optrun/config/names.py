"""Suggestions for patterns without a matching parameter name."""

from collections.abc import Iterable

from optrun.base.errors import did_you_mean

SHOWN = 6
"""Names shown as examples where none is near."""


def near_names(pattern: str, names: Iterable[str]) -> str:
    """Suggest names close to a pattern, or show examples spread over the model.

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
    first_of_module: dict[str, str] = {}
    for name in every:
        first_of_module.setdefault(name.rsplit(".", 1)[0], name)
    examples = list(first_of_module.values())
    step = max(1, len(examples) // SHOWN)
    shown = ", ".join(examples[::step][:SHOWN])
    return did_you_mean(plain, stems, f"Names are such as {shown}.")
