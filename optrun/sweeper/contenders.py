"""A space per optimizer: `search.NAME.KEY=VALUES` holds for that optimizer alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from optrun.base.errors import ConfigError, did_you_mean
from optrun.config import overrides as overrides_of
from optrun.config.hydra_internals import Hydra
from optrun.config.overrides import SEARCH
from optrun.sweeper.jobs import merged, param_overrides

_EXAMPLE = "search.adamw.lr='tag(log, interval(1e-4, 1e-2))'"
_NOT_OWN = ("seed", "optimizer", "resume", "hydra", "search")
"""What is one for all optimizers, or is none of theirs."""


@dataclass(frozen=True)
class Contender:
    """The search space and overrides of one optimizer."""

    name: str
    """Of the optimizer; empty where the sweep tells none apart."""
    overrides: Sequence[str]
    """Fixed ones and ranges, checked by name."""
    own_keys: frozenset[str] = frozenset()
    """Keys that were given for this optimizer."""


def search_overrides(search: Mapping[str, object]) -> list[str]:
    """Write `hydra.sweeper.search` of a file as overrides; keys may be nested or dotted.

    Raises:
        ConfigError: A value is a list, or an optimizer has no keys.

    Example:
        >>> search_overrides({"lamb": {"lr": "1e-3,2e-3", "optimizer": {"eps": 1e-6}}})
        ['search.lamb.lr=1e-3,2e-3', 'search.lamb.optimizer.eps=1e-06']
    """
    for name, values in search.items():
        if not isinstance(values, Mapping) or not values:
            raise ConfigError(
                f"hydra.sweeper.search.{name}={values}: expected keys and values, such as "
                f"{name}: {{lr: 'tag(log, interval(1e-4, 1e-2))'}}."
            )
    return param_overrides(search, "hydra.sweeper.search", SEARCH)


def contenders_of(
    hydra: Hydra,
    checked: Callable[[Sequence[str]], list[str]],
    common: Sequence[str],
    own_tokens: Sequence[str],
) -> list[Contender]:
    """Split a sweep into one contender for each optimizer.

    Args:
        hydra: Composes the choices.
        checked: Checks overrides of a sweep by name.
        common: Overrides for all, checked by name.
        own_tokens: `search.NAME.KEY=VALUES`; empty: all optimizers share one space.

    Returns:
        One contender for each value of `optimizer=`, else for each name in `own_tokens`, else a
        single one without a name. A value for one optimizer wins over a value for all.

    Raises:
        ConfigError: The message names an unknown optimizer or key.
    """
    if not own_tokens:
        return [Contender("", list(common))]
    options = list(hydra.config_loader.get_group_options("optimizer"))
    spaces: dict[str, list[str]] = {}
    for token in own_tokens:
        name, assignment = _taken_apart(token, options)
        spaces.setdefault(name, []).append(assignment)
    optimizer_tokens = [token for token in common if token.lstrip("+").startswith("optimizer=")]
    names = list(spaces)
    if optimizer_tokens:
        names = overrides_of.values_of(*overrides_of.parse(optimizer_tokens[:1]))
        if len(set(names)) < len(names):
            raise ConfigError(f"{optimizer_tokens[0]}: an optimizer stands there twice.")
    for name in spaces:
        if name not in names:
            raise ConfigError(
                f"search.{name}: {optimizer_tokens[0]} does not try {name}. Add it there, or leave"
                f" search.{name} out."
            )
    shared = [token for token in common if token not in optimizer_tokens]
    return [_contender(checked, name, shared, spaces.get(name, [])) for name in names]


def _taken_apart(token: str, options: Sequence[str]) -> tuple[str, str]:
    """Split `search.NAME.KEY=VALUES` into the name and `KEY=VALUES`."""
    path, equals, values = token.partition("=")
    name, _, key = path.removeprefix(SEARCH).partition(".")
    if not equals or not key or not name:
        raise ConfigError(f"{token}: expected search.OPTIMIZER.KEY=VALUES, such as {_EXAMPLE}.")
    if name not in options:
        raise ConfigError(f"{path}: no such optimizer: {name}. {did_you_mean(name, options)}")
    if key.replace("/", ".").partition(".")[0] in _NOT_OWN and not key.startswith("optimizer."):
        raise ConfigError(
            f"{path}: {key} is one for all optimizers. Give {key}=... without search.{name}."
        )
    return name, f"{key}={values}"


def _contender(
    checked: Callable[[Sequence[str]], list[str]],
    name: str,
    shared: Sequence[str],
    own_tokens: Sequence[str],
) -> Contender:
    """Build the contender of one optimizer; errors name the key in `search.NAME`."""
    own_keys = frozenset(token.partition("=")[0] for token in own_tokens)
    try:
        overrides = checked([f"optimizer={name}", *merged(shared, own_tokens)])
    except ConfigError as error:
        separator = "." if any(str(error).startswith(key) for key in own_keys) else ": "
        raise ConfigError(f"search.{name}{separator}{error}") from error
    return Contender(name, overrides, own_keys)
