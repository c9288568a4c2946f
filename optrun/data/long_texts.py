"""Encode a long text in pieces of whole lines.

A tokenizer keeps some hundred bytes for each token of what it is given at once: a text of 20 MB
takes over 3 GB. Where a tokenizer joins characters across a line end, or begins every text with a
space, the ids at a cut differ from those of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, pairwise
from typing import TYPE_CHECKING

import numpy as np

from optrun.data.heartbeat import send_heartbeat

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

PIECE = 1 << 18
"""Characters of a piece, at least."""
_PIECES_AT_ONCE = 8
"""Pieces that are encoded together."""


def is_long(text: str) -> bool:
    """Tell whether a text is encoded in pieces."""
    return len(text) > 2 * PIECE


def piece_borders(text: str) -> Iterator[int]:
    """Yield the begin of each piece, and the end of the last one.

    A piece has 262,144 to 524,288 characters. It ends behind the first line end among these, else
    at the first space, else where it is longest. A text of up to 524,288 characters is one piece.
    """
    at = 0
    while len(text) - at > 2 * PIECE:
        yield at
        near = at + PIECE
        far = at + 2 * PIECE
        line_end = text.find("\n", near, far)
        space = text.find(" ", near, far)
        if line_end >= 0:
            at = line_end + 1
        elif space >= 0:
            at = space
        else:
            at = far
    yield at
    yield len(text)


def encode_long(text: str, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Encode a text in pieces, a few at a time, without special tokens; shape (tokens,), int32."""
    ids = []
    spans = pairwise(piece_borders(text))
    while batch := list(islice(spans, _PIECES_AT_ONCE)):
        send_heartbeat()
        parts = [text[begin:end] for begin, end in batch]
        encoded = encode_uncut(parts, tokenizer, special=False)
        ids += [np.array(row, dtype=np.int32) for row in encoded]
    return np.concatenate(ids)


def encode_uncut(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, *, special: bool
) -> list[list[int]]:
    """Encode texts of any length without cutting them, at the speed of the tokenizers library."""
    if not tokenizer.is_fast:
        encoded = tokenizer(
            texts, add_special_tokens=special, return_attention_mask=False, verbose=False
        )
        return list(encoded["input_ids"])
    backend: Tokenizer = tokenizer.backend_tokenizer
    backend.no_truncation()  # transformers sets both anew at each of its calls
    backend.no_padding()
    encodings = backend.encode_batch_fast(texts, add_special_tokens=special)
    return [encoding.ids for encoding in encodings]
