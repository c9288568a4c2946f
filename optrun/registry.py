"""Every choice that can be made by its name: one row each, whoever brings it.

A row has the name, the schema (a dataclass: keys, types, ranges, and facts that are known without torch) and the target
(a class or function). optrun's own rows name their target as text, so that a configuration composes without torch;
rows of others come by the decorators here, from a plugin file, an installed package or a program that imports optrun.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from optrun.errors import ConfigError, did_you_mean

Target = TypeVar("Target", bound=Callable[..., Any])

KINDS = ("optimizer", "scheduler", "task", "metric", "data", "tracker", "callback")
"""What can be registered. The decorator of each is `register_<kind>`, its entry-point group `optrun.<kind>s`."""


@dataclass(frozen=True)
class Choice:
    """One row."""

    kind: str
    name: str
    schema: type[Any]
    """A dataclass; `optimizer=NAME` has its fields as keys."""
    target: Any
    """A class or function, or `module:attribute` of one."""
    origin: str | None = None
    """Who brought it: a file, a module or a distribution; None: optrun itself."""

    def load(self) -> Any:
        """Import the target."""
        if not isinstance(self.target, str):
            return self.target
        module, _, attribute = self.target.partition(":")
        return getattr(importlib.import_module(module), attribute)


_ROWS: dict[str, dict[str, Choice]] = {kind: {} for kind in KINDS}
_SCHEMAS: dict[str, dict[str, type[Any]]] = {kind: {} for kind in KINDS}
_origin: list[str] = []
"""Who is being loaded; the last counts."""


def add(choice: Choice) -> None:
    """Add a row.

    Raises:
        ConfigError: The kind is unknown, or the name is taken.
    """
    if choice.kind not in KINDS:
        raise ConfigError(f"{choice.kind}: nothing of this kind can be registered. {did_you_mean(choice.kind, KINDS)}")
    taken = _ROWS[choice.kind].get(choice.name)
    if taken is not None:
        raise ConfigError(
            f"{choice.kind}={choice.name}: {choice.origin or 'optrun'} registers a name that is taken by "
            f"{taken.origin or 'optrun itself'}. Choose another name."
        )
    _ROWS[choice.kind][choice.name] = choice
    _SCHEMAS[choice.kind][choice.name] = choice.schema


def own(kind: str, rows: Mapping[str, tuple[type[Any], str]]) -> dict[str, type[Any]]:
    """Add optrun's own rows of a kind.

    Args:
        kind: One of `KINDS`.
        rows: Name -> schema and `module:attribute` of the target.

    Returns:
        As `schemas`.
    """
    for name, (schema, target) in rows.items():
        add(Choice(kind, name, schema, target))
    return schemas(kind)


def schemas(kind: str) -> dict[str, type[Any]]:
    """The schemas of a kind by name; the dict grows as rows are added, and is not for writing."""
    return _SCHEMAS[kind]


def choices(kind: str) -> Mapping[str, Choice]:
    """The rows of a kind by name, those added later too."""
    return MappingProxyType(_ROWS[kind])


def register(kind: str, name: str, schema: type[Any]) -> Callable[[Target], Target]:
    """Return the decorator that adds a class or function to a kind; the decorated object is unchanged."""

    def decorate(target: Target) -> Target:
        add(Choice(kind, name, schema, target, _origin[-1] if _origin else target.__module__))
        return target

    return decorate
