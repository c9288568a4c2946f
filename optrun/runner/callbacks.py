"""The user's callbacks, built by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from optrun.base.errors import ConfigError, did_you_mean
from optrun.config import registry
from optrun.config.schema.callbacks import callback_configs
from optrun.training.callback import HOOKS


def build_callbacks(configs: Mapping[str, object]) -> dict[str, object]:
    """Build the callbacks of a configuration, in its order.

    Args:
        configs: Name to keys and values; checked against the schema of the row that the name has.

    Returns:
        Configuration key to callback.

    Raises:
        ConfigError: One cannot be built, or has a hook that there is not.
    """
    built: dict[str, object] = {}
    for name, config in callback_configs(configs).items():
        key, row = f"callbacks.{name}", registry.choices("callback")[name]
        try:
            built[key] = row.load()(**{field.name: getattr(config, field.name) for field in fields(config)})
        except ConfigError:
            raise
        except Exception as error:  # whatever a user's class raises
            raise ConfigError(f"{key}: cannot be built: {type(error).__name__}: {error}") from error
        for hook in dir(built[key]):
            if hook.startswith("on_") and hook not in HOOKS:
                raise ConfigError(f"{key}: {hook} is no hook of the training loop. {did_you_mean(hook, HOOKS)}")
    return built
