"""Dropout of every kind that transformers has, switched off."""

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
    """Make a model compute the same in training as in evaluation.

    Modules of dropout get the probability 0. So does every number of a module that is called after
    dropout (or layerdrop), which architectures hand to functions, and every such value of the
    configurations that the model's parts read. The model's own configuration stays, so that it is
    saved as it was. The dropout of an adapter's factors is asked for by a key of its own, and
    stays.
    """
    configs: dict[int, Any] = {}
    for name, module in model.named_modules():
        if _OF_ADAPTER in name:
            continue
        if isinstance(module, _DROPOUTS):
            module.p = 0.0
        _zero_probabilities(module)
        config = getattr(module, "config", None)
        if module is model or not hasattr(config, "to_dict"):
            continue
        if id(config) not in configs:
            configs[id(config)] = copy.deepcopy(config)
            _zero_probabilities(configs[id(config)])
        module.config = configs[id(config)]


def _zero_probabilities(owner: object) -> None:
    """Set every probability of dropout among the attributes of an object to 0."""
    for name, value in vars(owner).items():
        is_probability = isinstance(value, float) and 0.0 < value < 1.0
        if is_probability and "drop" in name:
            setattr(owner, name, 0.0)
