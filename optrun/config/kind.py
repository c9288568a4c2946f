"""The kind of a configuration: the choice of optrun that it is or builds on.

A name is free: a choice of the user's, built on one of ours, has its own. So code never asks for
the name, but for the kind, which a run directory saves beside the name.
"""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from optrun.base.errors import ConfigError, did_you_mean

KIND = "kind"
"""Beside `name` in the values of a run: the choice of ours that another name stands for."""

Schemas = Mapping[str, type[Any]]
"""The choices of a group and their dataclasses."""


def kind_of(group: str, schemas: Schemas, config: Any) -> str:
    """Name the registered choice a configuration is or builds on, by its class.

    If several choices share the class, and so their behaviour, its name decides, else the first.

    Args:
        group: For messages.
        schemas: The group's choices.
        config: An instance of one of the classes, or its node in a composed configuration.

    Raises:
        ConfigError: No choice has the class, since a file builds on none; or the configuration has
            the name of another choice.
    """
    if isinstance(config, DictConfig):
        schema = OmegaConf.get_type(config)
        name = str(OmegaConf.select(config, "name"))
    else:
        schema = type(config)
        name = str(config.name)
    choices = [choice for choice in schemas if schemas[choice] is schema]
    if not choices:
        raise ConfigError(
            f"{group}={name}: builds on no choice of {group}. Begin its file with the one that it"
            f" changes, such as `defaults: [{next(iter(schemas))}, _self_]`; expected one of"
            f" {', '.join(schemas)}."
        )
    if name in choices:
        return name
    if name in schemas:
        raise ConfigError(
            f"{group}.name={name}: that is the name of another {group}, and this one is"
            f" {choices[0]}. Write {group}={name} to choose it, or give yours a name that no choice"
            " has."
        )
    return choices[0]


def with_kind(
    group: str, schemas: Schemas, node: DictConfig, values: Mapping[str, object]
) -> dict[str, object]:
    """Return the plain values of a group as they are saved: with `kind`, if its name is another.

    The values of a file `optimizer/mine.yaml` that builds on lamb, named `mine`, get the item
    `"kind": "lamb"` at the front.

    Args:
        group: For messages.
        schemas: The group's choices.
        node: The group in a composed configuration; its class is the schema of its kind.
        values: The same, plain.

    Raises:
        ConfigError: As `kind_of`.
    """
    kind = kind_of(group, schemas, node)
    if kind == values.get("name"):
        return dict(values)
    return {KIND: kind, **values}


def saved_kind(group: str, schemas: Schemas, values: Mapping[str, object]) -> str:
    """Name the choice of ours behind saved values: their `kind`, or else their `name`.

    Raises:
        ConfigError: The group has no such choice.
    """
    key = KIND if KIND in values else "name"
    kind = str(values[key])
    if kind not in schemas:
        raise ConfigError(f"{group}.{key}={kind}: no such {group}. {did_you_mean(kind, schemas)}")
    return kind
