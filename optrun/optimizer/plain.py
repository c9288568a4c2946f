"""Optimizers that know nothing of optrun: what they are asked, and tried for, before a model is trained with them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from torch.optim import Optimizer

from optrun.base.errors import ConfigError
from optrun.optimizer.averaged import averages
from optrun.optimizer.groups import DESCRIPTIVE_KEYS, known_keys
from optrun.optimizer.rehearsal import Build, rehearse, rehearse_shards

ALWAYS_READ = DESCRIPTIVE_KEYS | {"params", "lr", "weight_decay"}
"""Keys of a group that need not be among an optimizer's defaults."""

NO_SHARDS = (
    "Give distributed=ddp, where each rank holds whole parameters, or another optimizer, such as optimizer=adamw."
)
"""What to do where an optimizer cannot take shards."""


def build_plain(
    choice: str, cls: Any, param_groups: Sequence[Mapping[str, Any]], *, lr: float, **options: Any
) -> Optimizer:
    """Build a registered torch optimizer, tried before on small stand-ins with the same options.

    Args:
        choice: Its name.
        cls: Takes parameters, `lr` and the options.
        param_groups: Group dicts with (name, parameter) pairs.
        lr: Base learning rate.
        **options: The fields of its schema.

    Raises:
        ConfigError: It fails, an option would be ignored, or it would not come back from a checkpoint.
        TypeError: For an option that its constructor does not have.
    """
    keywords = set(inspect.signature(cls).parameters) - {"params"}
    options = without_no_decay(options, keywords)
    groups = [without_no_decay(group, keywords) for group in param_groups]
    known_keys(options, keywords, cls.__name__)
    refuse_group_keys(choice, cls, groups, keywords)

    def build(own_groups: Sequence[Mapping[str, Any]]) -> Optimizer:
        built: Any = cls([dict(group) for group in own_groups], lr=lr, **options)
        if averages(built):
            built.train()
        assert isinstance(built, Optimizer)
        return built

    def refuse(built: Optimizer) -> None:
        for group in groups:
            refuse_unread_keys(built, group)

    hint = "Mend it, or take another optimizer."
    return tried(build, groups, refuse=refuse, key=f"optimizer={choice}", owner=cls.__name__, hint=hint)


def tried(
    build: Build,
    groups: Sequence[Mapping[str, Any]],
    *,
    key: str,
    owner: str,
    hint: str,
    refuse: Callable[[Optimizer], None] = lambda _: None,
) -> Optimizer:
    """Build an optimizer that steps, obeys and comes back from a checkpoint; on shards, where the parameters are some.

    Args:
        build: Makes it over groups.
        groups: Of the run.
        key: What chose it, such as `optimizer=mine`.
        owner: What it is called in messages.
        hint: What to do where it does not.
        refuse: Looks at what was built.

    Raises:
        ConfigError: It does not, with what it does instead.
    """
    try:
        built = build([dict(group) for group in groups])
        refuse(built)
        rehearse(build, groups)
    except Exception as error:  # whatever it raises, it does so before anything is trained
        raise ConfigError(
            f"{key}: tried on small parameters, {owner} cannot be used like this: {_reason(error)}. {hint}"
        ) from error
    try:
        rehearse_shards(build, groups)
    except Exception as error:
        raise ConfigError(
            f"{key}: tried on small shards, {owner} cannot train with distributed=fsdp: {_reason(error)}. {NO_SHARDS}"
        ) from error
    return built


def _reason(error: Exception) -> str:
    if isinstance(error, ConfigError):
        return str(error).rstrip(".")
    first = str(error).strip().split("\n", 1)[0]
    return ": ".join(part for part in ("it fails", type(error).__name__, first.rstrip(".")) if part)


def without_no_decay(options: Mapping[str, Any], keywords: Set[str]) -> dict[str, Any]:
    """Drop a weight decay of 0 for an optimizer that has none; any other is left, to be refused."""
    none = "weight_decay" not in keywords and options.get("weight_decay") == 0
    return {key: value for key, value in options.items() if not (none and key == "weight_decay")}


def refuse_group_keys(
    choice: str, cls: type[Optimizer], groups: Sequence[Mapping[str, Any]], keywords: Set[str]
) -> None:
    """Refuse a group with another optimizer, or an option that this one does not have."""
    for group in groups:
        if "optimizer" in group:
            raise ConfigError(
                f"a parameter group asks for optimizer={group['optimizer']}, which goes with optrun's own optimizers "
                f"and torch's, not with optimizer={choice}."
            )
        known_keys(group, {*keywords, *DESCRIPTIVE_KEYS, "params"}, f"a parameter group of {cls.__name__}")


def refuse_unread_keys(built: Optimizer, group: Mapping[str, Any], own: Set[str] = frozenset()) -> None:
    """Refuse a group's key that its optimizer keeps on itself, for all groups alike."""
    for key in group.keys() - {*built.defaults, *own, *ALWAYS_READ}:
        raise ConfigError(f"it takes {key} for all parameters alike: that of a rule would be ignored")
