"""What decides which ids a tokenizer gives: part of the address of cached tokens."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> str:
    """Write everything that decides which ids a tokenizer gives, as text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # How long a text may be is set anew at each call; the last call is no part of what the tokenizer is.
        return json.dumps({**json.loads(backend.to_str()), "truncation": None, "padding": None}, sort_keys=True)
    settings = sorted(map(str, tokenizer.init_kwargs.items()))
    return f"{type(tokenizer).__qualname__} {sorted(tokenizer.get_vocab().items())} {settings}"


def ids_below(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return one more than the largest id that a tokenizer gives."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)
