"""`callbacks.NAME={KEY: VALUE}`.

Classes that hear of the training loop's steps, each with a schema of its own.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from optrun.base.errors import ConfigError, did_you_mean
from optrun.config import registry
from optrun.config.schema.checks import build

SCHEMAS: Mapping[str, type[Any]] = registry.own("callback", {})
"""Rows of callbacks: name to schema and `module:attribute` of the class.

Others come by registration.
"""


def callback_configs(callbacks: Mapping[str, object]) -> dict[str, Any]:
    """Check the callbacks of a configuration against the schemas of their rows.

    Args:
        callbacks: Name to keys and values; null stands for no keys.

    Returns:
        Name to an instance of the schema, in the same order.

    Raises:
        ConfigError: A name or a key that there is not, a missing value, or one of another type or
            out of range.
    """
    return {name: _typed(str(name), values) for name, values in callbacks.items()}


def _typed(name: str, values: object) -> Any:
    key = f"callbacks.{name}"
    if name not in SCHEMAS:
        hint = " ".join(
            ["no callback of this name is registered.", did_you_mean(name, SCHEMAS)]
        ).strip()
        raise ConfigError(
            f"{key}: {hint} A file that registers one is named on the command line: --plugin"
            " FILE.py"
        )
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
    names = [field.name for field in fields(schema)]
    if names:
        return f"{{{names[0]}: VALUE}}"
    return "{}"
