"""Configuration -> clip."""

from __future__ import annotations

from optrun.config.choice import choice
from optrun.config.schema.clip import (
    SCHEMAS,
    ClipConfig,
    GlobalNormClipConfig,
    NormClipConfig,
    ValueClipConfig,
)
from optrun.optimizer.clip.clips import Clip, Rule, clip_by_global_norm, clip_by_norm, clip_by_value


def build_clip(config_or_name: ClipConfig | str, **options: object) -> Clip:
    """Build the clip of a configuration or a name; it also measures the norm of the gradients.

    Args:
        config_or_name: A configuration, or the name of a choice: `none`, `global_norm`, `norm`,
            `value`.
        **options: Beside a name: keys of that choice, such as `max_norm=0.5`.

    Returns:
        Called as `clip(optimizer)` after the backward pass, once per optimizer step.

    Raises:
        ConfigError: Unknown choice or key, or a value out of range.
        TypeError: Options beside a configuration.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, -4.0])
        >>> build_clip("value", max_value=3.5)(torch.optim.SGD([weight]))
        tensor(5.)
        >>> weight.grad
        tensor([ 3.0000, -3.5000])
    """
    config = choice("clip", SCHEMAS, config_or_name, options)
    rules: list[Rule] = []
    if isinstance(config, ValueClipConfig | NormClipConfig) and config.max_value is not None:
        # Symmetric by default.
        low = -config.max_value if config.min_value is None else config.min_value
        rules.append(clip_by_value(low, config.max_value))
    if isinstance(config, GlobalNormClipConfig):
        rules.append(clip_by_global_norm(config.max_norm, config.eps))
    elif isinstance(config, NormClipConfig):
        rules.append(clip_by_norm(config.max_norm, config.eps))
    return Clip(config.name, rules)
