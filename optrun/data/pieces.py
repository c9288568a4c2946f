"""Token ids of a long text, made of pieces of it: the same ids, in the memory of a few pieces, on all cores.

A tokenizer keeps some hundred bytes for each token of what it is given at once: a text of 20 MB takes 3.6 GB. So
pieces are encoded that overlap, and joined where both agree: at the beginning of a word in the middle of the overlap,
with the same tokens at the same places before and after it. What a tokenizer makes of a word does not depend on what
is that far away, since it splits texts into words first.

Byte-pair encoding that does not split into words (Llama 2's, Gemma's) can be joined at any token that agrees: if
every two neighbouring tokens are the encoding of their own text, the sequence is the encoding of the whole, since a
merge across a border would have happened between the two alone.

Where nothing agrees, as inside a long run of one letter, both pieces are encoded anew as a longer one. Other models
that do not split (Unigram without words) encode the text as a whole.
"""

from __future__ import annotations

from collections import deque
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
_GROWTH = 4
"""Times as long as a piece is its successor, where it does not fit to its neighbour."""
_NEAR = 64
"""Tokens on either side of a border among which a seam is looked for."""
_WORDS = "one two\n3.4 (five), it's\tsix_seven 字 "


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece that is encoded, with what it reads into its neighbours."""

    encoding: Encoding
    start: int
    """Its first character in the text."""
    stop: int
    """One past its last."""
    begin: int
    """The first character that was encoded."""
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
        return np.concatenate([ids for ids, _ in row.pieces()])
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

    def whole(self) -> np.ndarray:
        """All ids, made at once; shape (tokens,), int32."""
        found = self.tokenizer(str(self.text), add_special_tokens=False, verbose=False)["input_ids"]
        return np.array([*self.before, *found, *self.after], dtype=np.int32)

    def pieces(self) -> Iterator[tuple[np.ndarray, int]]:
        """All ids, one piece after another, with the characters that have been encoded.

        Raises:
            Unseamed: A piece has other tokens where more of the text follows.
        """
        yield np.array(self.before, dtype=np.int32), 0
        anywhere = _merges_only(self.tokenizer)
        ready: deque[_Piece] = deque()
        last: _Piece | None = None
        at = begin = 0  # characters that are in pieces up to `last`, and its first token that has not been taken
        while at < len(self.text):
            if not ready:
                starts = range(at, len(self.text), PIECE)[:_AT_ONCE]
                ready.extend(self._encode(starts, PIECE))
            piece = ready.popleft()
            if last is None:
                last = piece
            elif seam := _seam(last, piece, anywhere=anywhere):
                yield last.ids[begin : seam[0]], at
                last, begin = piece, seam[1]
            else:
                last = self._longer(last, begin)
                while ready and ready[0].start < last.stop:
                    ready.popleft()
            at = last.stop
        if last is not None:
            yield last.ids[begin:], at
        yield np.array(self.after, dtype=np.int32), at

    def _longer(self, piece: _Piece, begin: int) -> _Piece:
        """A piece that goes on, of which the tokens before `begin` have been given already."""
        (longer,) = self._encode([piece.start], _GROWTH * (piece.stop - piece.start))
        if not np.array_equal(longer.ids[: begin + AGREE], piece.ids[: begin + AGREE]):
            raise Unseamed
        return longer

    def _encode(self, starts: Sequence[int], length: int) -> list[_Piece]:
        """Pieces of so many characters, of which the last one of the text has fewer."""
        size = len(self.text)
        begins = [max(0, start - OVERLAP) for start in starts]
        stops = [min(start + length, size) for start in starts]
        parts = [self.text[begin : stop + OVERLAP] for begin, stop in zip(begins, stops, strict=True)]
        encodings: Any = _uncut(self.tokenizer).encode_batch(parts, add_special_tokens=False)
        return [
            _Piece(encoding, start, stop, begin, np.array(encoding.ids, dtype=np.int32))
            for encoding, start, stop, begin in zip(encodings, starts, stops, begins, strict=True)
        ]


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


def _merges_only(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether tokens are made by merging neighbours alone, without a split into words before it."""
    from tokenizers.models import BPE

    backend: Any = tokenizer.backend_tokenizer
    if not isinstance(backend.model, BPE) or backend.model.dropout:
        return False
    for words in (_WORDS, _WORDS * 2000):  # the second is longer than a piece: some split by length alone
        text = words if backend.normalizer is None else backend.normalizer.normalize_str(words)
        if backend.pre_tokenizer is not None and len(backend.pre_tokenizer.pre_tokenize_str(text)) > 1:
            return False
    return True


def _seam(left: _Piece, right: _Piece, *, anywhere: bool) -> tuple[int, int] | None:
    """Where to go over from one piece to the next: a token of each, the nearest to the border that will do."""
    border = right.start
    one, other = left.near(border), right.near(border)
    places = {token.start: number for number, token in reversed(other.items())}
    for number in sorted(one, key=lambda number: abs(one[number].start - border)):
        there = places.get(one[number].start)
        if there is not None and _agree(one, other, number, there) and (anywhere or _words_agree(one, number)):
            return number, there
    return None


def _agree(one: Mapping[int, _Token], other: Mapping[int, _Token], a: int, b: int) -> bool:
    """Whether the tokens on either side are the same, and words begin at the same ones."""
    for step in range(-AGREE, AGREE):
        mine, yours = one.get(a + step), other.get(b + step)
        if mine is None or yours is None or (mine.id, mine.start) != (yours.id, yours.start):
            return False
        if step > -AGREE and _begins_word(one, a + step) != _begins_word(other, b + step):
            return False
    return True


def _words_agree(tokens: Mapping[int, _Token], number: int) -> bool:
    """Whether words begin here and among the tokens that agree, on both sides."""
    sides = (range(number - AGREE + 1, number), range(number + 1, number + AGREE))
    return _begins_word(tokens, number) and all(any(_begins_word(tokens, at) for at in side) for side in sides)


def _begins_word(tokens: Mapping[int, _Token], number: int) -> bool:
    return number - 1 in tokens and tokens[number].word != tokens[number - 1].word
