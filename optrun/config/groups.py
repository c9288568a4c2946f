"""Configuration groups: each choice by its name, with the dataclass of its values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from optrun.base.bounded_yaml import yaml_mapping
from optrun.base.errors import ConfigError, did_you_mean, nearest
from optrun.base.plain import PlainDict
from optrun.config import registry
from optrun.config.default_warmup import outside_a_run
from optrun.config.dialects import own_default
from optrun.config.foreign_names import NOT_OFFERED, translate_choice
from optrun.config.paths import config_dir
from optrun.config.schema import (
    adapter,
    checkpoint,
    clip,
    data,
    distributed,
    model,
    optimizer,
    param_groups,
    parametrization,
    scheduler,
    sweeper,
    task,
    tracking,
    training,
)

# The tables themselves, not copies: a plugin adds to them.
GROUPS: dict[str, Mapping[str, type[Any]]] = {
    "task": task.SCHEMAS,
    "data": data.SCHEMAS,
    "model": model.SCHEMAS,
    "adapter": adapter.SCHEMAS,
    "parametrization": parametrization.SCHEMAS,
    "param_groups": param_groups.SCHEMAS,
    "optimizer": optimizer.SCHEMAS,
    "scheduler": scheduler.SCHEMAS,
    "clip": clip.SCHEMAS,
    "training": training.SCHEMAS,
    "checkpoint": checkpoint.SCHEMAS,
    "tracking": tracking.SCHEMAS,
    "distributed": distributed.SCHEMAS,
}
CHOICES: dict[str, Mapping[str, type[Any]]] = GROUPS | {"hydra/sweeper": sweeper.SCHEMAS}
"""Those, and of Hydra's own groups the one that has schemas."""


def keys_of(group: str) -> set[str]:
    """Collect the dotted keys of all choices of a group."""
    return {
        f"{group}.{field.name}"
        for schema in GROUPS[group].values()
        for field in dataclasses.fields(schema)
    }


def choices_with(group: str, key: str) -> list[str]:
    """List the choices of a group with a given key."""
    return sorted(
        choice
        for choice, schema in GROUPS[group].items()
        if any(field.name == key for field in dataclasses.fields(schema))
    )


def complete_choices(group: str) -> dict[str, registry.Choice]:
    """Find the choices of a group that come from plugins or packages, so without a YAML here.

    Their values are their schemas' defaults.
    """
    if group not in registry.GROUPS:
        return {}
    rows = registry.choices(registry.GROUPS[group])
    return {name: row for name, row in rows.items() if row.origin is not None}


def default_values(group: str, choice: str) -> PlainDict:
    """Return a choice's values before anything changes them, a dialect included.

    Interpolations as written.
    """
    row = complete_choices(group).get(choice)
    if row is not None:
        return row.values()
    values = registry.schema_defaults(CHOICES[group][choice])
    values |= yaml_mapping(config_dir() / group / f"{choice}.yaml")
    return {
        str(key): outside_a_run(own_default(value))
        for key, value in values.items()
        if key != "defaults"
    }


def no_such_choice(group: str, name: object, options: Sequence[str]) -> ConfigError:
    """Build the error for an unknown choice of a group.

    It gives the nearest names, and all of them.
    """
    if str(name).startswith("["):
        return ConfigError(
            f"{group}={name}: a run has one {group}. Give one of {', '.join(sorted(options))}."
        )
    answer = translate_choice(group, str(name))
    if answer is not None and answer.startswith(NOT_OFFERED):
        return ConfigError(f"{group}={name}: {answer}.")
    near = did_you_mean(str(name), options)
    close = nearest(str(name), options)
    is_choice = answer is not None and answer.split()[0].partition("=")[2] in options
    if answer is not None and is_choice and not (close and "path=" in answer):
        near = f"Did you mean {answer}?"
        close = [answer]
    every = f" Choices: {', '.join(sorted(options))}." if close else ""
    plugin_hint = " For one of your own, add --plugin FILE.py." if group in registry.GROUPS else ""
    return ConfigError(f"{group}={name}: no such {group}. {near}{every}{plugin_hint}")
