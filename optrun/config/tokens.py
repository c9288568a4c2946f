"""Keys of `key=value` tokens, read without Hydra's grammar."""

from collections.abc import Iterable

OTHER_LENGTH = {
    "training.max_steps": "training.num_train_epochs",
    "training.num_train_epochs": "training.max_steps",
}
"""Key for the length of a run -> the key that gives way to it."""


def key_of(token: str) -> str:
    """Read the key of an override, without the signs before it.

    Example:
        >>> key_of("++model.config.n_layer=2"), key_of("~callbacks.mine")
        ('model.config.n_layer', 'callbacks.mine')
    """
    return token.partition("=")[0].lstrip("+~")


def is_typed(key: str, tokens: Iterable[str]) -> bool:
    """Tell whether an override among these sets a key."""
    return any(key_of(token) == key for token in tokens)
