"""Token ids of a long text, made of pieces of it.

The same ids, in the memory of a few pieces, on all cores.

A tokenizer keeps some hundred bytes for each token of what it is given at once: a text of 20 MB
takes over 3 GB. So a
text is cut where one of its words ends for certain: behind a letter and before a space, say. Each
piece is encoded behind the letter that stands before it, whose tokens are dropped. What a tokenizer
does at the beginning of a text, such as to add a space, it does to that letter.

A cut is certain if every part of the tokenizer is one that is listed here. The normalizers and
pre-tokenizers of the list look at neighbouring characters alone, and no token that was added
reaches across a cut. A tokenizer with any other part may pair quotes or brackets that are far
apart, and encodes the text as a whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.normalizers import Normalizer
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedTokenizerBase

    from optrun.data.long_text import LongText

State = Mapping[str, Any]
"""A part of a tokenizer, as its own library writes it as JSON."""
PIECE = 1 << 16
"""Characters of a piece, at least."""
_AT_ONCE = 32
"""Pieces that are encoded together."""
_NEAR = 1 << 12
"""Characters among which a place to cut is looked for at once."""
_LETTERS = "A-Za-z\u0410-\u0418\u041a-\u0438\u043a-\u044f\u4e00-\u9fff\uac00-\ud7a3"
"""Latin, Cyrillic, Chinese and Hangul, of which each is made of letters alone under every Unicode normal form."""
_MARKS = " \n\uff0c\u3002\u3001"
"""Before these, words of letters end.

White space, and the comma, full stop and enumeration comma of Chinese.
"""
_END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PATTERNS = {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    rf"{_END}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}",  # cl100k, Llama 3
    rf"{_END}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}",  # Qwen 2
    rf"{_END}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",  # Qwen 3.5
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_END}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_END}?|\p{{N}}{{1,3}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",  # o200k
    r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",  # CLIP
}
"""Of which no match goes on from a letter to one of the marks."""
_DROP_SPACE = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}
_NORMALIZERS = {
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Lowercase",
    "StripAccents",
    "BertNormalizer",
    "Nmt",
    "Prepend",
    "Strip",
}


def is_long(text: str | LongText) -> bool:
    """Tell whether a text is worth encoding in pieces."""
    return len(text) > 2 * PIECE


def word_ends(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return characters before which a word that ends with a letter ends for certain; empty.

    None is known.

    Args:
        tokenizer: Of any kind.
    """
    if not tokenizer.is_fast:
        return ""
    backend: Tokenizer = tokenizer.backend_tokenizer
    normalizers, splitters = (_parts(part) for part in (backend.normalizer, backend.pre_tokenizer))
    model = (
        json.loads(backend.model.__getstate__())
        if type(backend.model).__name__ != "Unigram"
        else {}
    )
    drops = bool(splitters) and splitters[0]["type"] in _DROP_SPACE
    if (
        model.get("dropout")
        or not _normalized_alone(backend, normalizers, drops)
        or _added_across(backend)
    ):
        return ""
    marks: set[str] = set()
    changed = False  # spaces are something else from here on
    for part in splitters:
        ends = _ends_of(part)
        if ends is None:
            return ""
        marks |= set() if changed else set(ends)
        changed = changed or part["type"] in ("ByteLevel", "Metaspace")
    spaces = any(
        part["type"] == "Replace" and part["pattern"] == {"String": " "} for part in normalizers
    )
    if marks and not spaces:
        kept = (
            set(" ") if any(part["type"] == "Precompiled" for part in normalizers) else set(_MARKS)
        )
        return "".join(sorted(marks & kept))
    spaces = spaces or any(part["type"] == "Metaspace" for part in splitters)
    return " " if not marks and _merges_apart(model, splitters, "▁" if spaces else " ") else ""


def _parts(part: Normalizer | PreTokenizer | None) -> list[State]:
    """List what a normalizer or a pre-tokenizer does, one after another."""

    def flat(state: State) -> Iterator[State]:
        inside = state.get("normalizers") or state.get("pretokenizers")
        if state["type"] != "Sequence":
            yield state
        for each in inside or ():
            yield from flat(each)

    return [] if part is None else list(flat(json.loads(part.__getstate__())))


def _normalized_alone(backend: Tokenizer, normalizers: Sequence[State], drops_space: bool) -> bool:
    """Tell whether what stands before and behind a cut is normalized by itself, letters to letters."""
    replaces = False
    for part in normalizers:
        known = part["type"] in {*_NORMALIZERS, "Precompiled"}
        if part["type"] == "Replace":
            replaces, text = True, part["pattern"].get("String")
            known = part["pattern"] == {"Regex": " {2,}"} or (
                text == " " and part["content"] == "▁"
            )
            known = known or (text is not None and not re.search(f"[{_LETTERS}{_MARKS}]", text))
        if not known:
            return False
    if not normalizers:
        return True
    normalize = backend.normalizer.normalize_str
    letters = normalize(
        "".join(re.findall(f"[{_LETTERS}]", "".join(map(chr, range(0xD800)))))
    ).removeprefix("▁")
    if drops_space and not replaces:  # BERT's, which puts spaces around each Chinese character
        letters = "".join(letters.split())
    between = (normalize(f"a{mark}b").removeprefix("▁") for mark in _MARKS)
    return letters.isalpha() and all(re.fullmatch(r"a[\W_]b", text) for text in between)


def _added_across(backend: Tokenizer) -> bool:
    """Tell whether an added token may end at a cut or beyond.

    What is taken for it depends on all before it.
    """
    across = re.compile(rf"\w([\s▁{_MARKS}]|\Z)")
    for token in backend.get_added_tokens_decoder().values():
        text = token.content
        normal = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
        if across.search(text) or across.search(normal):
            return True
    return False


def _ends_of(part: State) -> str | None:
    """Return the marks before which a pre-tokenizer always ends a word of letters; None.

    It may not be local.
    """
    kind = part["type"]
    if kind == "Split":
        known = part["pattern"].get("Regex") in _PATTERNS and part["behavior"] in (
            "Isolated",
            "Removed",
        )
        return _MARKS if known else "" if part["pattern"] == {"String": " "} else None
    if kind == "ByteLevel":
        return _MARKS if part["use_regex"] else ""
    if kind == "Metaspace":
        return " " if part["split"] else ""
    known_ends = {"BertPreTokenizer": _MARKS, "Whitespace": _MARKS, "WhitespaceSplit": " \n"}
    return known_ends.get(kind, "" if kind in ("Digits", "Punctuation") else None)


def _merges_apart(model: State, splitters: Sequence[State], space: str) -> bool:
    """Tell whether byte-pair encoding without words, as Llama 2's and Gemma's, merges no letter and space.

    Merges before and behind a border do not touch each other if no token reaches across it.
    """
    if model.get("type") != "BPE" or any(
        part["type"] not in ("Metaspace", "Split") for part in splitters
    ):
        return False
    if model["continuing_subword_prefix"] or model["end_of_word_suffix"] or model["ignore_merges"]:
        return False
    vocabulary = model["vocab"]
    return space in vocabulary and not any(
        re.search(f"[^{space}]{space}", token) for token in vocabulary
    )


@dataclass(frozen=True, slots=True)
class Pieces:
    """The ids of a text, a few pieces in memory at a time.

    Attributes:
        text: Of any length.
        tokenizer: A fast one.
        ends: Its `word_ends`; not empty.
        before: Ids that stand before it.
        after: Ids behind it.
    """

    text: str | LongText
    tokenizer: PreTrainedTokenizerBase
    ends: str
    before: Sequence[int] = ()
    after: Sequence[int] = ()

    @property
    def characters(self) -> int:
        """Of the text."""
        return len(self.text)

    def pieces(self) -> Iterator[tuple[np.ndarray, int]]:
        """Yield all ids, one piece after another, with the characters that have been encoded."""
        yield np.array(self.before, dtype=np.int32), 0
        every = pairwise(self._borders())
        while borders := list(islice(every, _AT_ONCE)):
            parts = [self.text[max(0, begin - 1) : end] for begin, end in borders]
            found = fast_ids(parts, self.tokenizer, special=False)
            letters = fast_ids([part[:1] for part in parts], self.tokenizer, special=False)
            for (begin, end), ids, letter in zip(borders, found, letters, strict=True):
                yield np.array(ids[len(letter) if begin else 0 :], dtype=np.int32), end
        yield np.array(self.after, dtype=np.int32), len(self.text)

    def _borders(self) -> Iterator[int]:
        """Yield where pieces begin, and where the last one ends."""
        cut = re.compile(f"(?<=[{_LETTERS}])(?=[{self.ends}][{_LETTERS}])")
        at = 0
        while at < len(self.text):
            yield at
            at += PIECE
            while at < len(self.text):
                found = cut.search(self.text[at - 1 : at + _NEAR])
                if found:
                    at += found.start() - 1
                    break
                at += _NEAR - 1
        yield len(self.text)


def fast_ids(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, *, special: bool
) -> list[list[int]]:
    """Encode texts of any length, none of them cut.

    The tokenizer's ids, at the speed of its library.
    """
    if not tokenizer.is_fast:
        found = tokenizer(
            texts, add_special_tokens=special, return_attention_mask=False, verbose=False
        )["input_ids"]
        return list(found)
    backend: Tokenizer = tokenizer.backend_tokenizer
    backend.no_truncation()  # transformers sets both anew at each of its calls
    backend.no_padding()
    return [
        encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=special)
    ]
