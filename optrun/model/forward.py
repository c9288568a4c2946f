"""Forward passes of training and evaluation, without what generation needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_PADDING_CHECK = "warn_if_padding_and_no_attention_mask"


@contextmanager
def without_cache_and_padding_check(model: nn.Module) -> Iterator[None]:
    """Switch off the key-value cache and the check for padding inside this context.

    The check reads ids from the device, which waits for all kernels launched before; every padded
    batch of optrun has a mask. `transformers.Trainer` switches the cache off, too. `generate` uses
    it whatever the configuration says. Configurations and modules are restored at the end.

    Args:
        model: A transformers model; parts of it may have configurations of their own, as T5's
            decoder has.
    """
    parts = list(model.modules())
    configs = {
        id(config): config
        for part in parts
        if (config := getattr(part, "config", None)) is not None
    }
    caching = [config for config in configs.values() if getattr(config, "use_cache", None)]
    checking = [part for part in parts if hasattr(part, _PADDING_CHECK)]
    for config in caching:
        config.use_cache = False
    for part in checking:
        setattr(part, _PADDING_CHECK, _no_check)
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True
        for part in checking:
            delattr(part, _PADDING_CHECK)


def _no_check(*_: object) -> None:
    """Check nothing: the logger of transformers is silent here anyway."""
