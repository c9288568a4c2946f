"""Types of JSON and YAML mappings, and dotted names in them."""

from collections.abc import Iterable, Mapping
from typing import Any

PlainDict = dict[str, Any]
"""An object of JSON, or a mapping of YAML: plain values by name."""

PlainMapping = Mapping[str, Any]
"""The same, only read."""


def lookup(values: object, *keys: str) -> Any:
    """Find the value below some keys; None if there is none.

    Example:
        >>> lookup({"metrics": {"last": 1.5}}, "metrics", "last")
        1.5
        >>> lookup({"metrics": None}, "metrics", "last")
    """
    for key in keys:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def is_inside_any(name: str, outer_names: Iterable[str]) -> bool:
    """Tell whether a dotted name is one of some names, or inside of one of them.

    Example:
        >>> is_inside_any("data.eval.dev", ["data.eval"])
        True
        >>> is_inside_any("data.eval_fraction", ["data.eval"])
        False
    """
    return any(name == outer or name.startswith(f"{outer}.") for outer in outer_names)


def flat(values: Mapping[str, object], prefix: str = "") -> PlainDict:
    """Map dotted names to leaf values; lists are leaves.

    Example:
        >>> flat({"lr": 0.1, "clip": {"max_norm": 1.0}})
        {'lr': 0.1, 'clip.max_norm': 1.0}
    """
    leaves: PlainDict = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            leaves.update(flat(value, f"{name}."))
        else:
            leaves[name] = value
    return leaves
