"""Contenders: optimizers with their own search spaces, from `search.NAME.KEY=VALUES`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from optrun.base.errors import ConfigError, did_you_mean
from optrun.config import overrides as overrides_of
from optrun.config.hydra_internals import Hydra
from optrun.config.overrides import SEARCH
from optrun.sweeper.jobs import merged, param_overrides

_EXAMPLE = "search.adamw.lr='tag(log, interval(1e-4, 1e-2))'"
_SAME_FOR_ALL = ("seed", "optimizer", "resume", "hydra", "search")
"""Groups and keys that may not differ between optimizers."""


@dataclass(frozen=True)
class Contender:
    """One optimizer of a comparison, with its overrides and search space."""

    name: str
    """The optimizer; empty if all optimizers share one space."""
    overrides: Sequence[str]
    """Fixed overrides and ranges, checked by name."""
    own_keys: frozenset[str] = frozenset()
    """Keys that `search.NAME` sets for this optimizer alone."""


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
    check: Callable[[Sequence[str]], list[str]],
    common: Sequence[str],
    search_tokens: Sequence[str],
) -> list[Contender]:
    """Split a sweep into one contender for each optimizer.

    The optimizers are those of `optimizer=`; without it those in `search_tokens`. A value for one
    optimizer wins over a value for all. Without `search_tokens` the result is a single contender
    without a name: all optimizers share one space.

    Of `["optimizer=lamb,adamw", "seed=0", "lr=1e-3"]` and `["search.lamb.lr=1e-2,2e-2"]` lamb gets
    the overrides `optimizer=lamb seed=0 lr=1e-2,2e-2`, and adamw `optimizer=adamw seed=0 lr=1e-3`.

    Args:
        hydra: Lists the optimizers.
        check: Checks overrides of a sweep by name, and returns them.
        common: Overrides for all optimizers, checked by name.
        search_tokens: `search.NAME.KEY=VALUES`.

    Raises:
        ConfigError: An optimizer or key is unknown, an optimizer is listed twice, or `search.NAME`
            is for an optimizer that is not listed.
    """
    if not search_tokens:
        return [Contender("", list(common))]
    # 1. What each optimizer has of its own: name -> `KEY=VALUES`, such as lamb -> ["lr=1e-2,2e-2"].
    known_optimizers = list(hydra.config_loader.get_group_options("optimizer"))
    spaces: dict[str, list[str]] = {}
    for token in search_tokens:
        name, assignment = _split_search_token(token, known_optimizers)
        spaces.setdefault(name, []).append(assignment)
    # 2. Which optimizers are compared: those that `optimizer=` lists, else those of step 1.
    optimizer_tokens = [token for token in common if token.lstrip("+").startswith("optimizer=")]
    names = list(spaces)
    if optimizer_tokens:
        names = overrides_of.values_of(*overrides_of.parse(optimizer_tokens[:1]))
        if len(set(names)) < len(names):
            raise ConfigError(f"{optimizer_tokens[0]}: list each optimizer once.")
    for name in spaces:
        if name not in names:  # only an `optimizer=` can leave it out
            raise ConfigError(
                f"search.{name}: {optimizer_tokens[0]} does not list {name}. Add it there, or leave"
                f" search.{name} out."
            )
    # 3. One contender for each, in the order in which they are listed.
    shared = [token for token in common if token not in optimizer_tokens]
    return [_build_contender(check, name, shared, spaces.get(name, [])) for name in names]


def _split_search_token(token: str, known_optimizers: Sequence[str]) -> tuple[str, str]:
    """Split `search.NAME.KEY=VALUES` into the name and `KEY=VALUES`.

    Such as `search.lamb.optimizer.eps=1e-6,1e-8` into `lamb` and `optimizer.eps=1e-6,1e-8`.

    Raises:
        ConfigError: It has another form, the optimizer is unknown, or the key must be the same for
            all optimizers.
    """
    path, equals, values = token.partition("=")
    name, _, key = path.removeprefix(SEARCH).partition(".")
    if not equals or not key or not name:
        raise ConfigError(f"{token}: expected search.OPTIMIZER.KEY=VALUES, such as {_EXAMPLE}.")
    if name not in known_optimizers:
        hint = did_you_mean(name, known_optimizers)
        raise ConfigError(f"{path}: there is no optimizer {name}. {hint}")
    first_part = key.replace("/", ".").partition(".")[0]
    if first_part in _SAME_FOR_ALL and not key.startswith("optimizer."):
        raise ConfigError(
            f"{path}: {key} must be the same for all optimizers. Give {key}=... without"
            f" search.{name}."
        )
    return name, f"{key}={values}"


def _build_contender(
    check: Callable[[Sequence[str]], list[str]],
    name: str,
    shared: Sequence[str],
    assignments: Sequence[str],
) -> Contender:
    """Build the contender of one optimizer; its own assignments win over shared overrides.

    Raises:
        ConfigError: An override is wrong; the message names the key in `search.NAME`.
    """
    own_keys = frozenset(token.partition("=")[0] for token in assignments)
    try:
        overrides = check([f"optimizer={name}", *merged(shared, assignments)])
    except ConfigError as error:
        # `lr: ...` becomes `search.lamb.lr: ...`; other messages follow `search.lamb: `.
        names_own_key = str(error).startswith(tuple(own_keys))
        separator = "." if names_own_key else ": "
        raise ConfigError(f"search.{name}{separator}{error}") from error
    return Contender(name, overrides, own_keys)
