"""Encode a long text in pieces of whole lines.

A tokenizer keeps some hundred bytes for each token of what it is given at once: a text of 20 MB
takes over 3 GB. Where a tokenizer joins characters across a line end, or begins every text with a
space, the ids at a cut differ from those of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

PIECE = 1 << 18
"""Characters of a piece, at least."""
_AT_ONCE = 8
"""Pieces that are encoded together."""


def is_long(text: str) -> bool:
    """Tell whether a text is encoded in pieces."""
    return len(text) > 2 * PIECE


def piece_borders(text: str) -> Iterator[int]:
    """Yield the begin of each piece, and the end of the last one.

    A piece ends behind a line end, else at a space, else after twice the size of a piece.
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


@dataclass(frozen=True, slots=True)
class LongText:
    """The ids of a long text, a few pieces in memory at a time.

    Attributes:
        text: Of any length.
        tokenizer: Any.
        before: Ids that stand before it.
        after: Ids behind it.
    """

    text: str
    tokenizer: PreTrainedTokenizerBase
    before: Sequence[int] = ()
    after: Sequence[int] = ()

    @property
    def characters(self) -> int:
        """Of the text."""
        return len(self.text)

    def pieces(self) -> Iterator[tuple[np.ndarray, int]]:
        """Yield the ids of each piece, with the number of characters encoded so far."""
        yield np.array(self.before, dtype=np.int32), 0
        spans = pairwise(piece_borders(self.text))
        while batch := list(islice(spans, _AT_ONCE)):
            parts = [self.text[begin:end] for begin, end in batch]
            encoded = encode_uncut(parts, self.tokenizer, special=False)
            for (_, end), ids in zip(batch, encoded, strict=True):
                yield np.array(ids, dtype=np.int32), end
        yield np.array(self.after, dtype=np.int32), len(self.text)


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
