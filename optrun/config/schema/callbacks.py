"""`callbacks.NAME={KEY: VALUE}`: classes called at the steps of the training loop."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from optrun.base.errors import ConfigError, did_you_mean
from optrun.config import registry
from optrun.config.schema.checks import build

SCHEMAS: Mapping[str, type[Any]] = registry.add_builtin("callback", {})
"""Rows of callbacks: name to schema and `module:attribute` of the class.

Others come by registration.
"""


def callback_configs(callbacks: Mapping[str, object]) -> dict[str, Any]:
    """Check the callbacks of a configuration against their schemas.

    Args:
        callbacks: Name to keys and values; null stands for no keys.

    Returns:
        Name to an instance of the schema, in the same order.

    Raises:
        ConfigError: A name or key is unknown, or a value is missing, has another type or is out of
            range.
    """
    return {name: _build_config(str(name), values) for name, values in callbacks.items()}


def _build_config(name: str, values: object) -> Any:
    """Build the configuration of one callback, an instance of its schema.

    Raises:
        ConfigError: See `callback_configs`.
    """
    key = f"callbacks.{name}"
    if name not in SCHEMAS:
        sentences = (
            "no callback of this name is registered.",
            did_you_mean(name, SCHEMAS),
            "Name the file that registers it on the command line: --plugin FILE.py",
        )
        raise ConfigError(f"{key}: {' '.join(filter(None, sentences))}")
    schema = SCHEMAS[name]
    if values is not None and not isinstance(values, Mapping):
        raise ConfigError(
            f"{key}={values}: expected a mapping of its keys, such as {key}={_example(schema)}."
        )
    keys = [field.name for field in fields(schema)]
    for option in values or ():
        if option not in keys:
            raise ConfigError(f"{key}.{option}: no such key. {did_you_mean(str(option), keys)}")
    return build(schema, values or {}, key)


def _example(schema: type[Any]) -> str:
    """Write a mapping with the first key of a schema, such as `{every: VALUE}`."""
    names = [field.name for field in fields(schema)]
    if names:
        return f"{{{names[0]}: VALUE}}"
    return "{}"
