"""The choice of a group behind a configuration.

Told by its dataclass, and saved beside its values where the name does not say it.

A name is free: in a choice of the user's own, built on one of ours, it is the user's. So code never
goes by it; it goes by the kind, and a run directory holds that.
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
    """Name the choice of a configuration by its class.

    Args:
        group: For messages.
        schemas: The group's choices.
        config: An instance of one of them, or its node in a composed configuration.

    Returns:
        A key of `schemas`. Where choices share a class, and so what is done with them, the one of
        its name.

    Raises:
        ConfigError: No choice of that class, as for a file that is built on none; or it has the
            name of another one.
    """
    composed = isinstance(config, DictConfig)
    schema = OmegaConf.get_type(config) if composed else type(config)
    name = str(OmegaConf.select(config, "name") if composed else config.name)
    kinds = [choice for choice, choice_schema in schemas.items() if choice_schema is schema]
    if not kinds:
        raise ConfigError(
            f"{group}={name}: built on no choice of {group}. Begin its file with the one it"
            f" changes, such as `defaults: [{next(iter(schemas))}, _self_]`; expected one of"
            f" {', '.join(schemas)}."
        )
    if name in kinds:
        return name
    if name in schemas:
        raise ConfigError(
            f"{group}.name={name}: that is the name of another {group}, and this one is {kinds[0]}."
            f" {group}={name} chooses it; a name of your own is one that no other has."
        )
    return kinds[0]


def with_kind(
    group: str, schemas: Schemas, node: DictConfig, values: Mapping[str, object]
) -> dict[str, object]:
    """Return the plain values of a group as they are saved: with its kind, if the name is another.

    Raises:
        ConfigError: As `kind_of`.
    """
    kind = kind_of(group, schemas, node)
    if kind == values.get("name"):
        return dict(values)
    return {KIND: kind, **values}


def saved_kind(group: str, schemas: Schemas, values: Mapping[str, object]) -> str:
    """Name the choice of saved values: their kind, or else their name.

    Raises:
        ConfigError: There is no such choice.
    """
    key = KIND if KIND in values else "name"
    kind = str(values[key])
    if kind not in schemas:
        raise ConfigError(f"{group}.{key}={kind}: no such {group}. {did_you_mean(kind, schemas)}")
    return kind
