"""Build the configuration of a choice in Python: its name, the values of its YAML, and keywords.

The command line goes through Hydra. Python callers of `build_scheduler`, `build_clip` and
`build_param_groups` come here, so that a default is written down once, in `conf/`, and a misspelt
keyword is refused by both.
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
        config_or_name: A ready configuration, which is returned, or the name of a choice.
        options: Values that differ from the YAML; none beside a ready configuration.

    Returns:
        An instance of one of `schemas`, its ranges checked.

    Raises:
        TypeError: `config_or_name` is neither, options are given with a ready configuration, or a
            value has another type than its field.
        ConfigError: Unknown choice, unknown or missing key, value out of range.
    """
    if isinstance(config_or_name, str):
        return _build_choice(group, schemas, config_or_name, options)
    if not isinstance(config_or_name, tuple(schemas.values())):
        raise TypeError(
            f"{group}: expected the name of a choice or its configuration, got"
            f" {type(config_or_name).__name__}."
        )
    if options:
        raise TypeError(
            f"{group}: {sorted(options)} are given beside a ready configuration; set them there."
        )
    return config_or_name


def _build_choice(
    group: str, schemas: Mapping[str, type[ConfigT]], name: str, options: Mapping[str, object]
) -> ConfigT:
    """Build the configuration of a choice from the values of its YAML and some options.

    Raises:
        TypeError: An option has another type than its field.
        ConfigError: Unknown choice, unknown or missing key, value out of range.
    """
    if name not in schemas:
        raise ConfigError(f"{group}={name}: no such choice. {did_you_mean(name, schemas)}")
    # 1. The keys.
    schema = schemas[name]
    keys = [field.name for field in dataclasses.fields(schema)]  # type: ignore[arg-type]
    valid = [key for key in keys if key != "name"]
    for key in options:
        if key not in valid:
            raise ConfigError(
                f"{group}.{key}: {group}={name} has no such key. {did_you_mean(key, valid)}"
            )
    # 2. The values: `???` must be replaced by an option.
    values = default_values(group, name) | dict(options)
    for key in keys:
        if values.get(key, "???") == "???":
            raise ConfigError(f"{group}.{key} is missing: {group}={name} needs a value for it.")
    # 3. The types; values of a YAML are right, but have names in place of members of an Enum.
    hints = get_type_hints(schema)
    for key, value in values.items():
        values[key] = _enum_member(f"{group}.{key}", hints[key], value)
        if key in options:
            values[key] = _convert_to_type_of_field(f"{group}.{key}", schema, key, values[key])
    return schema(**values)


def _convert_to_type_of_field(key: str, schema: type[object], name: str, value: object) -> object:
    """Check the type of a value, and convert a text to it, as Hydra does on the command line.

    For a field of type float the text `1e-3` becomes 0.001, and `fast` is refused. Numbers of
    NumPy, functions and tensors pass unchanged. A list or mapping is only checked to be one; the
    schema checks the items.

    Args:
        key: Dotted key, for messages.
        schema: The dataclass.
        name: Name of the field.
        value: What was given for it.

    Raises:
        TypeError: The value has another type.
    """
    if hasattr(value, "item"):  # a number of NumPy's, which OmegaConf does not know
        return value
    checked = value
    if isinstance(value, list | tuple):
        checked = []
    elif isinstance(value, Mapping):
        checked = {}
    typed_node = OmegaConf.structured(schema)
    try:
        typed_node[name] = checked  # checks the type, and converts a text to it
    except UnsupportedValueType:  # a function or a tensor, which the schema refuses
        return value
    except OmegaConfBaseException as error:
        raise TypeError(
            f"{key}={value!r}: expected {expected_type(error)}, got {type(value).__name__}."
        ) from error
    if isinstance(value, str):
        return typed_node[name]
    return value


def _enum_member(key: str, hint: object, value: object) -> object:
    """Return the member of the field's Enum with this name, as Hydra does.

    A value that is no text, or that is for a field without an Enum, is returned unchanged.

    Args:
        key: Dotted key, for messages.
        hint: Type of the field, such as `Precision` or `Precision | None`.
        value: Such as `bf16`.

    Raises:
        ConfigError: The Enum has no such member; the message lists all.
    """
    if not isinstance(value, str):
        return value
    for kind in (hint, *get_args(hint)):  # `Shape`, or `Shape | None`
        if isinstance(kind, type) and issubclass(kind, Enum):
            names = kind.__members__
            if value not in names:
                raise ConfigError(
                    f"{key}={value}: expected one of {', '.join(names)}."
                    f" {did_you_mean(value, names)}"
                )
            return names[value]
    return value
