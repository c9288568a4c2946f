"""Build optimizers that are no `NamedOptimizer`: of pytorch-optimizer, or of a plugin."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from torch.optim import Optimizer

from optrun.base.errors import ConfigError, did_you_mean
from optrun.base.options import Group, Options, ParamGroup
from optrun.config.foreign_names import table
from optrun.config.schema.optimizer import SCHEMAS
from optrun.config.schema.optimizer_base import refuse_few_bits
from optrun.optimizer.evaluation_weights import has_evaluation_weights
from optrun.optimizer.groups import DESCRIPTIVE_KEYS, refuse_unknown_keys
from optrun.optimizer.round_trip import build_checked

LIBRARY = "pytorch_optimizer"

_READ_BY_OPTRUN = DESCRIPTIVE_KEYS | {"params", "lr", "weight_decay"}
"""Keys of a group that optrun reads itself, so that an optimizer need not know them."""


def library_class(name: str) -> type[Optimizer]:
    """Find the class of pytorch-optimizer behind `optimizer.class_name`.

    Args:
        name: Name of the class; case does not matter.

    Raises:
        ConfigError: The library is not installed or has no class of this name; it is torch's own;
            or it is not offered, because it would not work as its name says (`NOT_OFFERED`).
    """
    if importlib.util.find_spec(LIBRARY) is None:
        raise ConfigError(
            "optimizer=pytorch_optimizer needs the library of that name: pip install"
            ' "optrun[optimizers]".'
        )
    classes: dict[str, type[Optimizer]] = {}  # by name in lower case
    for member in vars(importlib.import_module(LIBRARY)).values():
        if isinstance(member, type) and issubclass(member, Optimizer):
            classes[member.__name__.lower()] = member
    where = f"optimizer.class_name={name}"
    if name.lower() not in classes:
        refuse_few_bits("optimizer.class_name", name)
        raise ConfigError(
            f"{where}: pytorch_optimizer has no such optimizer. {did_you_mean(name, classes)}"
        )
    cls = classes[name.lower()]
    if not cls.__module__.startswith(LIBRARY):
        instead = name.lower() if name.lower() in SCHEMAS else "adamw"
        raise ConfigError(f"{where}: that is torch's own. Take optimizer={instead}.")
    # Name -> why it is not offered, and what to take instead.
    not_offered = table()["pytorch_optimizer"]
    if name.lower() in not_offered:
        why, instead = not_offered[name.lower()]
        raise ConfigError(
            f"{where}: not offered: pytorch_optimizer's {cls.__name__} {why}. Take {instead}."
        )
    if not {"params", "lr"} <= inspect.signature(cls).parameters.keys():
        raise ConfigError(
            f"{where}: pytorch_optimizer's {cls.__name__} is not built from parameters and a"
            " learning rate; those that wrap another optimizer or take the model are not offered"
            " here. Take another, such as optimizer=adamw."
        )
    return cls


def build_pytorch_optimizer(
    class_name: str, param_groups: Sequence[Group], *, lr: float, **options: object
) -> Optimizer:
    """Build an optimizer of pytorch-optimizer, and check a round trip of its state.

    Args:
        class_name: Name of its class there; case does not matter.
        param_groups: Group dicts with (name, parameter) pairs; `kwargs` of a group are keywords for
            it alone.
        lr: Base learning rate.
        **options: Keywords of its constructor.

    Raises:
        ConfigError: As `library_class` and `build_checked`; or a group names another optimizer, or
            has an option that the class takes for all parameters alike.
        TypeError: An option that the class does not take.
    """
    cls = library_class(class_name)
    groups = [{**group, **group.get("kwargs", {})} for group in param_groups]
    for group in groups:
        group.pop("kwargs", None)
    return build_foreign(
        cls,
        groups,
        options,
        lr=lr,
        key=f"optimizer.class_name={class_name}",
        owner=f"pytorch_optimizer's {cls.__name__}",
        hint="Change optimizer.kwargs, or choose another optimizer.",
    )


def build_foreign(
    cls: Any,
    param_groups: Sequence[Group],
    options: Options,
    *,
    lr: float,
    key: str,
    owner: str,
    hint: str,
) -> Optimizer:
    """Build an optimizer that is no `NamedOptimizer`, and check a round trip of its state.

    If it has methods `eval` and `train`, `train` is called.

    Args:
        cls: Its class, which takes parameters, `lr` and the options.
        param_groups: Group dicts with (name, parameter) pairs.
        options: Other keywords; a `weight_decay` of 0 is left out if the class has no such keyword.
        lr: Base learning rate.
        key: See `build_checked`, as for `owner` and `hint`.
        owner: Name of the class in messages.
        hint: Last sentence of a message.

    Raises:
        ConfigError: As `build_checked`; or a group names another optimizer, or has an option that
            the class takes for all parameters alike.
        TypeError: An option that the class does not take.
    """
    keywords = _named_keywords(cls)
    options = _without_zero_decay(options, keywords)
    groups = [_without_zero_decay(group, keywords) for group in param_groups]
    # 1. Refuse options that the class does not take.
    refuse_unknown_keys(options, keywords, owner)
    for group in groups:
        if "optimizer" in group:
            raise ConfigError(
                f"a parameter group asks for optimizer={group['optimizer']}: only optrun's own"
                f" optimizers and torch's can be combined, and {key} is neither. Remove it from the"
                " rule, or choose another optimizer for the run."
            )
        refuse_unknown_keys(group, {*keywords, *_READ_BY_OPTRUN}, f"a group of {owner}")

    # 2. Build it, and a small copy of it for the round trip.
    def build(groups: Sequence[ParamGroup]) -> Optimizer:
        optimizer: Any = cls([dict(group) for group in groups], lr=lr, **options)
        if has_evaluation_weights(optimizer):
            optimizer.train()
        assert isinstance(optimizer, Optimizer)
        return optimizer

    optimizer = build_checked(build, groups, key=key, owner=owner, hint=hint)
    # 3. Refuse options of single groups that it does not read from groups: its defaults lack them.
    for group in groups:
        for option in group.keys() - {*optimizer.defaults, *_READ_BY_OPTRUN}:
            raise ConfigError(
                f"{owner} takes one {option} for all parameters, so that of a rule would be"
                " ignored. Remove it from the rule."
            )
    return optimizer


def _named_keywords(cls: type[Optimizer]) -> set[str]:
    """Collect the keywords of a constructor by name, without `params` and `**kwargs`."""
    parameters = inspect.signature(cls).parameters
    names = {key for key, value in parameters.items() if value.kind is not value.VAR_KEYWORD}
    return names - {"params"}


def _without_zero_decay(options: Options, keywords: Iterable[str]) -> dict[str, object]:
    """Copy options; leave out a `weight_decay` of 0 if the optimizer has no such keyword.

    Another value stays, and is refused later.
    """
    if "weight_decay" in keywords or options.get("weight_decay") != 0:
        return dict(options)
    return {key: value for key, value in options.items() if key != "weight_decay"}
