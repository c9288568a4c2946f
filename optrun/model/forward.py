"""Forward passes over whole batches.

Without what a decoder does for the next token, or for a person who forgot a mask.

`transformers.Trainer` switches the cache off, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_PADDING_CHECK = "warn_if_padding_and_no_attention_mask"


@contextmanager
def lean_forward(model: nn.Module) -> Iterator[None]:
    """Let forward passes keep no keys and values, and not look for padding; everything is put back.

    The look for padding reads ids from the device, which waits for all that was launched there;
    where something is padded, a batch of optrun's has a mask. `generate` asks for keys and values
    by itself, whatever the configuration says.

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
