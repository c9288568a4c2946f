"""Parametrization: the tuned width and depth, and the scaling from there."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

TransferDecay = StrEnum("TransferDecay", ["independent", "torch"])
"""What weight decay keeps as lr is scaled: its share of a weight in each step, or the optimizer's
coefficient."""


@dataclass(kw_only=True)
class ParametrizationConfig:
    """Base class of the choices of this group."""

    name: str


@dataclass(kw_only=True)
class StandardParametrizationConfig(ParametrizationConfig):
    """Weights and learning rates as model and optimizer have them, whatever the width."""


@dataclass(kw_only=True)
class MupConfig(ParametrizationConfig):
    """Maximal update parametrization.

    Initial weights, lr, decay and eps by how much larger than the base they are.
    """

    base: dict[str, Any]
    """Keys of `model.config` at which lr was tuned; the base is the model with these."""
    weight_decay: TransferDecay


SCHEMAS: dict[str, type[ParametrizationConfig]] = {
    "standard": StandardParametrizationConfig,
    "mup": MupConfig,
}


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two mappings, also nested ones; values of `above` win.

    Example:
        >>> merged({"a": 1, "b": {"c": 1, "d": 2}}, {"b": {"d": 3}})
        {'a': 1, 'b': {'c': 1, 'd': 3}}
    """
    result = dict(below)
    for key, value in above.items():
        inner: Any = below.get(key)
        is_nested = isinstance(inner, Mapping) and isinstance(value, Mapping)
        result[key] = merged(inner, value) if is_nested else value
    return result
