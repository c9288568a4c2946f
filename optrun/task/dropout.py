"""Disable every kind of dropout that models of transformers have."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

_OF_ADAPTER = "lora_dropout"
_DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


def disable_dropout(model: nn.Module) -> None:
    """Disable the dropout of a model, for the same outputs in training as in evaluation.

    Changes the model in place: the probability of each dropout module becomes 0, and so does each
    attribute of a module that is a float between 0 and 1 with "drop" in its name. Submodules get a
    copy of their configuration with such values set to 0; the model's own configuration stays, so
    that it is saved unchanged. The dropout of LoRA, `adapter.lora_dropout`, stays, too.
    """
    copies: dict[int, Any] = {}  # of each configuration, by its id
    for name, module in model.named_modules():
        if _OF_ADAPTER in name:
            continue
        # 1. The module itself.
        if isinstance(module, _DROPOUTS):
            module.p = 0.0
        _zero_probabilities(module)

        # 2. The configuration from which a submodule reads probabilities when it runs.
        config = getattr(module, "config", None)
        if module is model or not hasattr(config, "to_dict"):
            continue
        if id(config) not in copies:
            copies[id(config)] = copy.deepcopy(config)
            _zero_probabilities(copies[id(config)])
        module.config = copies[id(config)]


def _zero_probabilities(instance: object) -> None:
    """Set attributes with "drop" in their name to 0 if they are floats between 0 and 1."""
    for name, value in vars(instance).items():
        is_probability = isinstance(value, float) and 0.0 < value < 1.0
        if is_probability and "drop" in name:
            setattr(instance, name, 0.0)
