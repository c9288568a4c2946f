"""Forward passes of training and evaluation, without what generation needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_PADDING_CHECK = "warn_if_padding_and_no_attention_mask"


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode inside this context, without gradients.

    At the end the model and all its modules get the mode that the model had.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


@contextmanager
def without_cache_and_padding_check(model: nn.Module) -> Iterator[None]:
    """Switch off the key-value cache and the check for padding inside this context.

    The check reads ids from the device, which waits for all kernels launched before; every padded
    batch of optrun has a mask. `transformers.Trainer` switches the cache off, too. `generate` uses
    it whatever the configuration says. Configurations and modules are restored at the end.

    Args:
        model: A transformers model; its submodules may have configurations of their own, as T5's
            decoder has.
    """
    cached_configs: dict[int, Any] = {}  # by identity: modules share them
    checked_modules = []
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None):
            cached_configs[id(config)] = config
        if hasattr(module, _PADDING_CHECK):
            checked_modules.append(module)
    for config in cached_configs.values():
        config.use_cache = False
    for module in checked_modules:
        setattr(module, _PADDING_CHECK, _check_nothing)
    try:
        yield
    finally:
        for config in cached_configs.values():
            config.use_cache = True
        for module in checked_modules:
            delattr(module, _PADDING_CHECK)


def _check_nothing(*_: object) -> None:
    """Replace the check for padding.

    Its warning would not be shown: the logger of transformers is silent.
    """
