"""Keys and values of attention, which a decoder keeps for the next token: of no use where all tokens are given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def no_key_value_cache(model: nn.Module) -> Iterator[None]:
    """Let forward passes keep no keys and values, as `transformers.Trainer` does; the configuration is put back.

    `generate` asks for them by itself, whatever the configuration says.

    Args:
        model: A transformers model; parts of it may have configurations of their own, as T5's decoder has.
    """
    configs = {id(config): config for part in model.modules() if (config := getattr(part, "config", None)) is not None}
    changed = [config for config in configs.values() if getattr(config, "use_cache", None)]
    for config in changed:
        config.use_cache = False
    try:
        yield
    finally:
        for config in changed:
            config.use_cache = True
