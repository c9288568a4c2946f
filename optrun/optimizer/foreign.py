"""Optimizers of the pytorch-optimizer library, by their name there; an extra."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from optrun.errors import ConfigError, did_you_mean
from optrun.optimizer.arguments import known_keys
from optrun.optimizer.groups import DESCRIPTIVE_KEYS


def build_pytorch_optimizer(
    name: str, param_groups: Sequence[Mapping[str, Any]], *, lr: float, **options: Any
) -> Optimizer:
    """Build an optimizer of pytorch-optimizer.

    Args:
        name: As in that library's `load_optimizer`; case does not matter.
        param_groups: Group dicts with (name, parameter) pairs.
        lr: Base learning rate.
        **options: Its keywords, all checked against its constructor.

    Raises:
        ConfigError: Where the library is not installed, does not know the name, or groups name other optimizers.
        TypeError: For a keyword its constructor does not have.
    """
    if importlib.util.find_spec("pytorch_optimizer") is None:
        raise ConfigError(
            'optimizer=pytorch_optimizer needs the library of that name: pip install "optrun[optimizers]".'
        )
    library = importlib.import_module("pytorch_optimizer")
    known = {cls.__name__.lower(): cls for cls in vars(library).values() if _is_optimizer(cls)}
    if name.lower() not in known:
        raise ConfigError(
            f"optimizer.name={name}: pytorch_optimizer has no such optimizer. {did_you_mean(name, known)}"
        )
    cls = known[name.lower()]
    keywords = set(inspect.signature(cls).parameters)
    if not {"params", "lr"} <= keywords:
        raise ConfigError(
            f"optimizer.name={name}: pytorch_optimizer's {cls.__name__} is not built from parameters and a learning "
            "rate; those that wrap another optimizer or take the model are not offered here."
        )
    keywords -= {"params", "kwargs"}
    groups = [dict(group) for group in param_groups]
    if "weight_decay" not in keywords:
        for entry in (options, *groups):
            if entry.get("weight_decay") == 0:
                del entry["weight_decay"]
    known_keys(options, keywords, f"pytorch_optimizer's {cls.__name__}")
    for group in groups:
        if "optimizer" in group:
            raise ConfigError(
                f"a parameter group asks for optimizer={group['optimizer']}, which goes with optrun's own optimizers "
                "and torch's, not with optimizer=pytorch_optimizer."
            )
        known_keys(group, {*keywords, *DESCRIPTIVE_KEYS, "params"}, f"a parameter group of {cls.__name__}")
    built = cls(groups, lr=lr, **options)
    assert isinstance(built, Optimizer)
    return built


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Optimizer) and value.__module__.startswith("pytorch_optimizer")
