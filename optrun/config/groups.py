"""Configuration groups: each choice by its name, with the dataclass of its values."""

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

# The mappings themselves, not copies: a plugin adds to them.
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
"""Those, and the only group of Hydra's with schemas of ours."""


def keys_of(group: str) -> set[str]:
    """Collect the dotted keys of all choices of a group, such as `optimizer.betas`."""
    return {
        f"{group}.{field.name}"
        for schema in GROUPS[group].values()
        for field in dataclasses.fields(schema)
    }


def choices_with(group: str, key: str) -> list[str]:
    """List the choices of a group with a key; `key` is without the group."""
    return sorted(
        choice
        for choice, schema in GROUPS[group].items()
        if key in [field.name for field in dataclasses.fields(schema)]
    )


def foreign_choices(group: str) -> dict[str, registry.Choice]:
    """Map the choices of a group by plugins and packages to their registry rows.

    They have no YAML; their values are the defaults of their schemas.
    """
    if group not in registry.GROUPS:
        return {}
    rows = registry.choices(registry.GROUPS[group])
    return {name: row for name, row in rows.items() if row.origin is not None}


def default_values(group: str, choice: str) -> PlainDict:
    """Return the values of a choice, by key without the group, as if it stood alone.

    The defaults of the schema come first, then the YAML. `${dialect:DEFAULT}` becomes its default
    and `${default_warmup:RATIO}` null; other interpolations stay as written.
    """
    row = foreign_choices(group).get(choice)
    if row is not None:
        return row.values()
    values = registry.schema_defaults(CHOICES[group][choice])
    values |= yaml_mapping(config_dir() / group / f"{choice}.yaml")
    values.pop("defaults", None)
    return {str(key): outside_a_run(own_default(value)) for key, value in values.items()}


def no_such_choice(group: str, name: object, options: Sequence[str]) -> ConfigError:
    """Build the error for an unknown choice of a group.

    It suggests the choice that another program calls so, or the nearest names, and lists all.

    Args:
        group: Such as `optimizer`.
        name: The unknown choice.
        options: Every valid choice.

    Example:
        >>> print(no_such_choice("data", "fils", ["files", "hub"]))  # doctest: +ELLIPSIS
        data=fils: no such data. Did you mean files? Choices: files, hub...
        >>> print(no_such_choice("data", "mine.csv", ["files", "hub"]))  # doctest: +ELLIPSIS
        data=mine.csv: no such data. Did you mean data=files data.train=mine.csv? Choices: ...
    """
    choices = ", ".join(sorted(options))
    name = str(name)
    # 1. A list of choices.
    if name.startswith("["):
        return ConfigError(f"{group}={name}: a run has one {group}. Give one of {choices}.")
    # 2. A choice of another program that optrun does not offer: the translation says so.
    translation = translate_choice(group, name)  # such as "data=files data.train=mine.csv", or None
    if translation is not None and translation.startswith(NOT_OFFERED):
        return ConfigError(f"{group}={name}: {translation}.")
    # 3. The near names and all choices; all choices alone if none is near.
    hint = did_you_mean(name, options)
    if nearest(name, options):
        hint += f" Choices: {choices}."
        # A name near a choice is a typing error rather than a path.
        if translation is not None and "path=" in translation:
            translation = None
    # 4. Instead of these the translation, if its choice is valid here.
    if translation is not None:
        translated_choice = translation.split()[0].partition("=")[2]
        if translated_choice in options:
            hint = f"Did you mean {translation}? Choices: {choices}."
    if group in registry.GROUPS:
        hint += " For one of your own, add --plugin FILE.py."
    return ConfigError(f"{group}={name}: no such {group}. {hint}")
