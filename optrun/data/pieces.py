"""Token ids of a long text, made of pieces of it: the same ids, in the memory of a few pieces, on all cores.

A tokenizer keeps some hundred bytes for each token of what it is given at once: a text of 20 MB takes 3.6 GB. So pieces
are encoded that overlap, and joined where both agree: at the beginning of a word in the middle of the overlap, with the
same tokens at the same places before and after it. What a tokenizer makes of a word does not depend on what is that far
away, since it splits texts into words first; where one does not, or nothing agrees, the text is encoded as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from optrun.data.encoded import Unseamed

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

    from optrun.data.long_text import LongText

PIECE = 1 << 16
"""Characters of a piece."""
OVERLAP = 1 << 11
"""Characters that a piece reads into each neighbour."""
AGREE = 16
"""Tokens on either side of a seam that have to be the same."""
_AT_ONCE = 32
"""Pieces that are encoded together."""
_NEAR = 64
"""Tokens on either side of a border among which a seam is looked for."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece that is encoded, and where in the text it begins."""

    encoding: Encoding
    begin: int
    ids: np.ndarray
    """Of all its tokens; shape (tokens,), int32."""

    def near(self, border: int) -> dict[int, _Token]:
        """Tokens around a character of the text, by their number in the piece."""
        at = next((at for at in range(border, border + OVERLAP // 2) if self._token_at(at) is not None), None)
        if at is None:
            return {}
        middle = self._token_at(at) or 0
        return {
            number: _Token(int(self.ids[number]), self.begin + chars[0], self.encoding.token_to_word(number))
            for number in range(max(0, middle - _NEAR), min(len(self.ids), middle + _NEAR))
            if (chars := self.encoding.token_to_chars(number)) is not None
            and abs(self.begin + chars[0] - border) < OVERLAP // 2
        }

    def _token_at(self, character: int) -> int | None:
        found: int | None = self.encoding.char_to_token(character - self.begin)
        return found


@dataclass(frozen=True, slots=True)
class _Token:
    id: int
    start: int
    """Character of the text."""
    word: int | None
    """Number of its word in the piece."""


def is_long(text: str | LongText, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a text is worth encoding in pieces, and its tokenizer says where its tokens and words begin."""
    return len(text) > 2 * PIECE and bool(tokenizer.is_fast)


def long_ids(text: str | LongText, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Encode a text without special tokens around it.

    Args:
        text: Of any length.
        tokenizer: A fast one.

    Returns:
        Its ids, shape (tokens,), int32: those of `tokenizer(text, add_special_tokens=False)`.
    """
    row = Pieces(text, tokenizer, [], [])
    try:
        return np.concatenate([np.zeros(0, np.int32), *row.pieces()])
    except Unseamed:
        return row.whole()


@dataclass(frozen=True, slots=True)
class Pieces:
    """The ids of a text, a few pieces in memory at a time.

    Attributes:
        text: Of any length.
        tokenizer: A fast one.
        before: Ids that stand before it.
        after: Ids behind it.
    """

    text: str | LongText
    tokenizer: PreTrainedTokenizerBase
    before: Sequence[int]
    after: Sequence[int]

    @property
    def characters(self) -> int:
        """Of the text."""
        return len(self.text)

    @property
    def step(self) -> int:
        """Characters of each piece: the first of `pieces` is what stands before the text."""
        return PIECE

    def whole(self) -> np.ndarray:
        """All ids, made at once; shape (tokens,), int32."""
        found = self.tokenizer(str(self.text), add_special_tokens=False, verbose=False)["input_ids"]
        return np.array([*self.before, *found, *self.after], dtype=np.int32)

    def pieces(self) -> Iterator[np.ndarray]:
        """All ids, one piece after another.

        Raises:
            Unseamed: Two pieces have nothing in common where they overlap.
        """
        yield np.array(self.before, dtype=np.int32)
        borders = list(range(0, len(self.text), PIECE))
        last: _Piece | None = None
        begin = 0  # first token of `last` that has not been taken
        for first in range(0, len(borders), _AT_ONCE):
            for piece in _encode(self.text, borders[first : first + _AT_ONCE], self.tokenizer):
                if last is not None:
                    seam = _seam(last, piece, piece.begin + OVERLAP)
                    if seam is None:
                        raise Unseamed
                    yield last.ids[begin : seam[0]]
                    begin = seam[1]
                last = piece
        if last is not None:
            yield last.ids[begin:]
        yield np.array(self.after, dtype=np.int32)


def fast_ids(texts: list[str], tokenizer: PreTrainedTokenizerBase, *, special: bool) -> list[list[int]]:
    """Ids of texts of any length, none of them cut: what the tokenizer gives, at the speed of its library."""
    if not tokenizer.is_fast:
        found = tokenizer(texts, add_special_tokens=special, return_attention_mask=False, verbose=False)["input_ids"]
        return list(found)
    backend: Any = _uncut(tokenizer)
    return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=special)]


def _uncut(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The library's tokenizer, which cuts and pads nothing; transformers sets both anew at each of its calls."""
    backend: Any = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return backend


def _encode(text: str | LongText, borders: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[_Piece]:
    begins = [max(0, border - OVERLAP) for border in borders]
    parts = [text[begin : border + PIECE + OVERLAP] for begin, border in zip(begins, borders, strict=True)]
    encodings: Any = _uncut(tokenizer).encode_batch(parts, add_special_tokens=False)
    return [
        _Piece(encoding, begin, np.array(encoding.ids, dtype=np.int32))
        for encoding, begin in zip(encodings, begins, strict=True)
    ]


def _seam(left: _Piece, right: _Piece, border: int) -> tuple[int, int] | None:
    """Where to go over from one piece to the next: a token of each, the nearest to the border that will do."""
    one, other = left.near(border), right.near(border)
    places = {token.start: number for number, token in reversed(other.items()) if _begins_word(other, number)}
    for number in sorted(one, key=lambda number: abs(one[number].start - border)):
        there = places.get(one[number].start)
        if there is not None and _begins_word(one, number) and _agree(one, other, number, there):
            return number, there
    return None


def _begins_word(tokens: Mapping[int, _Token], number: int) -> bool:
    return number - 1 in tokens and tokens[number].word != tokens[number - 1].word


def _agree(one: Mapping[int, _Token], other: Mapping[int, _Token], a: int, b: int) -> bool:
    """Whether the tokens on either side are the same, and words begin among them on both sides, at the same ones."""
    words = [0, 0]
    for step in range(-AGREE, AGREE):
        mine, yours = one.get(a + step), other.get(b + step)
        if mine is None or yours is None or (mine.id, mine.start) != (yours.id, yours.start):
            return False
        if step not in (-AGREE, 0):
            if _begins_word(one, a + step) != _begins_word(other, b + step):
                return False
            words[step > 0] += _begins_word(one, a + step)
    return all(words)
