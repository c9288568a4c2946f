"""A configuration from Python.

A choice by its name, with the values of its YAML, and keywords on top.

The command line goes through Hydra. Python callers of `build_scheduler`, `build_clip` and
`build_param_groups` come here, so that a default is written down once, in `conf/`, and a misspelt
keyword is refused in both worlds.
"""

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import TypeVar, get_args, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException, UnsupportedValueType

from optrun.base.errors import ConfigError, did_you_mean
from optrun.config.groups import default_values
from optrun.config.types import expected_type

ConfigT = TypeVar("ConfigT")


def choice(
    group: str,
    schemas: Mapping[str, type[ConfigT]],
    config_or_name: ConfigT | str,
    options: Mapping[str, object],
) -> ConfigT:
    """Build the configuration for a builder, from a choice and its options.

    Args:
        group: Configuration group, for messages and as the folder below `conf/`.
        schemas: Choice name -> dataclass.
        config_or_name: A ready configuration, or the name of a choice.
        options: Values that differ from the YAML; none beside a ready configuration.

    Returns:
        An instance of one of `schemas`, its ranges checked.

    Raises:
        TypeError: `config_or_name` is neither, options stand beside a ready configuration, or a
            value is of another type than its field.
        ConfigError: Unknown choice, unknown or missing key, value out of range.
    """
    if not isinstance(config_or_name, str):
        if not isinstance(config_or_name, tuple(schemas.values())):
            raise TypeError(
                f"{group}: expected the name of a choice or its configuration, got"
                f" {type(config_or_name).__name__}."
            )
        if options:
            raise TypeError(
                f"{group}: {sorted(options)} stand beside a ready configuration; set them there."
            )
        return config_or_name
    if config_or_name not in schemas:
        raise ConfigError(
            f"{group}={config_or_name}: no such choice. {did_you_mean(config_or_name, schemas)}"
        )
    schema = schemas[config_or_name]
    names = [field.name for field in dataclasses.fields(schema)]  # type: ignore[arg-type]
    for key in options:
        if key not in names or key == "name":
            valid = [name for name in names if name != "name"]
            raise ConfigError(
                f"{group}.{key}: {group}={config_or_name} has no such key."
                f" {did_you_mean(key, valid)}"
            )
    values = default_values(group, config_or_name) | dict(options)
    missing = [name for name in names if values.get(name) == "???" or name not in values]
    if missing:
        raise ConfigError(f"{group}.{missing[0]}: {group}={config_or_name} needs a value for it.")
    hints = get_type_hints(schema)
    for key, value in values.items():
        values[key] = _enum_member(f"{group}.{key}", hints[key], value)
        if key in options:
            values[key] = _of_its_type(f"{group}.{key}", schema, key, values[key])
    return schema(**values)


def _of_its_type(key: str, schema: type[object], name: str, value: object) -> object:
    """Check the type of a value, as Hydra does for the command line; a text is converted.

    Numbers of NumPy, functions and tensors pass unchanged. Of a list or mapping only the kind is
    checked; the schema checks the items.

    Raises:
        TypeError: The value has another type.
    """
    if hasattr(value, "item"):  # a number of numpy's, which OmegaConf does not know
        return value
    fields = OmegaConf.structured(schema)
    # The schema itself checks the items of a list or a mapping, and names the wrong one.
    container: object = value
    if isinstance(value, list | tuple):
        container = []
    elif isinstance(value, Mapping):
        container = {}
    try:
        fields[name] = container
    except UnsupportedValueType:  # a function, a tensor: whoever takes it says so
        return value
    except OmegaConfBaseException as error:
        raise TypeError(
            f"{key}={value!r}: expected {expected_type(error)}, got {type(value).__name__}."
        ) from error
    if isinstance(value, str):
        return fields[name]
    return value


def _enum_member(key: str, hint: object, value: object) -> object:
    """Look up the member of an Enum by its name, as Hydra does.

    Anything but a text, or a text for a field without an Enum, is returned unchanged.

    Raises:
        ConfigError: The Enum has no such member; the message lists all.
    """
    kinds = [
        kind
        for kind in (hint, *get_args(hint))
        if isinstance(kind, type) and issubclass(kind, Enum)
    ]
    if not kinds or not isinstance(value, str):
        return value
    members = kinds[0].__members__
    if value not in members:
        raise ConfigError(
            f"{key}={value}: expected one of {', '.join(members)}. {did_you_mean(value, members)}"
        )
    return members[value]
