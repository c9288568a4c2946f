"""Which choice a configuration is.

Told by its dataclass, and saved beside its values where the name does not say it.

A name is free: in a choice of the user's own, built on one of ours, it is the user's. So code never
goes by it; it goes by the kind, and a run directory holds that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from omegaconf import DictConfig, OmegaConf

from optrun.base.errors import ConfigError, did_you_mean

KIND = "kind"
"""Beside `name` in the values of a run: the choice of ours that another name stands for."""

Schemas = Mapping[str, type[Any]]
"""The choices of a group and their dataclasses."""


def kind_of(group: str, schemas: Schemas, config: Any) -> str:
    """Name the choice that a configuration is, by its class.

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
    kinds = [choice for choice, known in schemas.items() if known is schema]
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
    return dict(values) if kind == values.get("name") else {KIND: kind, **values}


def saved_kind(group: str, schemas: Schemas, values: Mapping[str, object]) -> str:
    """Name the choice that saved values are of.

    Runs of earlier versions have no kind in them: there the name says it where it is a choice with
    these keys, else the keys do.

    Raises:
        ConfigError: There is no such choice, or more than one has these keys.
    """
    name = str(values["name"])
    if KIND in values:
        kind = str(values[KIND])
        if kind not in schemas:
            raise ConfigError(
                f"{group}.{KIND}={kind}: no such {group}. {did_you_mean(kind, schemas)}"
            )
        return kind
    fitting = {
        choice: schema
        for choice, schema in schemas.items()
        if set(values) <= set(schema.__dataclass_fields__)
    }
    if name in fitting or (name in schemas and not fitting):
        return name
    sizes = {choice: _size_before_kinds(schema) for choice, schema in fitting.items()}
    nearest = {
        fitting[choice]: choice for choice, size in sizes.items() if size == min(sizes.values())
    }
    if len(nearest) == 1:
        return next(iter(nearest.values()))
    hint = (
        f"Write `{KIND}: {' or '.join(nearest.values())}` beside it."
        if nearest
        else did_you_mean(name, schemas)
    )
    raise ConfigError(
        f"{group}.name={name}: its {KIND} was not saved, and its keys do not tell. {hint}"
    )


def _size_before_kinds(schema: type) -> int:
    """Count the keys that a run without a saved kind can have.

    Those that came later tell no choice from another.
    """
    later: frozenset[str] = getattr(schema, "SINCE_KINDS", frozenset())
    return len({field.name for field in fields(schema)} - later)
