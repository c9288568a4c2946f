"""Suggestions for patterns without a matching parameter name."""

from collections.abc import Iterable

from optrun.base.errors import did_you_mean

SHOWN = 6
"""Number of example names if none is near."""


def near_names(pattern: str, names: Iterable[str]) -> str:
    """Suggest names close to a pattern, or show at most 6 examples spread over the model.

    Names of modules, such as `bert.pooler`, are suggested too.

    Args:
        pattern: A regular expression that matches no name.
        names: Dotted parameter names.

    Example:
        >>> near_names("clasifier", ["bert.pooler.weight", "classifier.weight"])
        'Did you mean classifier?'
        >>> near_names("zzz", ["bert.pooler.weight", "classifier.weight"])
        'Names are such as bert.pooler.weight, classifier.weight.'
    """
    prefixes: set[str] = set()  # `bert`, `bert.pooler` and `bert.pooler.weight` of the last
    first_of_module: dict[str, str] = {}  # module -> its first parameter
    for name in names:
        parts = name.split(".")
        prefixes.update(".".join(parts[:end]) for end in range(1, len(parts) + 1))
        first_of_module.setdefault(".".join(parts[:-1]), name)
    examples = list(first_of_module.values())
    step = max(1, len(examples) // SHOWN)
    shown = ", ".join(examples[::step][:SHOWN])
    plain_pattern = pattern.replace("\\", "").strip("^$")
    return did_you_mean(plain_pattern, prefixes, f"Names are such as {shown}.")
