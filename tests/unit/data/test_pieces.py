"""A long text in pieces has the tokens of the whole, whatever tokenizer and whatever text."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from optrun.data import pieces
from optrun.data.pieces import is_long, long_ids
from optrun.model.tokenizer import train_tokenizer
from tests.running import sentence

SIZE = 30_000
PLAIN = "\n".join(sentence(number) for number in range(200))
DRAWN = random.Random(0)
ODD = [
    "a ",
    "\n",
    "  ",
    "字",
    "é",
    "e\u0301",
    "0",
    " 12",
    '"',
    "'s ",
    "\t",
    "_x",
    "\r\n",
    "👩\u200d👧",
    "[SEP] ",
    "</s>",
]
TEXTS = {
    "words": PLAIN,
    "odd": "".join(DRAWN.choice(ODD) for _ in range(SIZE // 2)),
    "one word": "".join(DRAWN.choice("abcde") for _ in range(SIZE)),
    "spaces": (" " * 500 + "x") * 60,
    "newlines": "\n" * SIZE + "end",
    "no spaces": "汉字测试，没有空格。" * (SIZE // 10),
    "special": "text <|endoftext|> [SEP] </s> more " * (SIZE // 36),
    "short": "one two",
    "empty": "",
}


def _fast(model: Any, trainer: Any, **parts: Any) -> PreTrainedTokenizerFast:
    made = Tokenizer(model)
    for name, part in parts.items():
        setattr(made, name, part)
    made.train_from_iterator([PLAIN], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="</s>")


def _unigram() -> PreTrainedTokenizerFast:
    trainer = trainers.UnigramTrainer(
        vocab_size=120, unk_token="<unk>", special_tokens=["<unk>", "</s>"], show_progress=False
    )
    return _fast(models.Unigram(), trainer, pre_tokenizer=pre_tokenizers.Metaspace(), normalizer=normalizers.NFKC())


def _without_words() -> PreTrainedTokenizerFast:
    """As Llama 2's: the whole text is one word."""
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "</s>"], show_progress=False)
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _fast(models.BPE(unk_token="<unk>"), trainer, normalizer=spaces)


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "byte-level": lambda: train_tokenizer(lambda: iter([PLAIN]), vocab_size=400, kind="stream"),
    "pair": lambda: train_tokenizer(lambda: iter([PLAIN]), vocab_size=400, kind="pair"),
    "unigram": _unigram,
    "without words": _without_words,
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_pieces_are_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE", 1500)
    monkeypatch.setattr(pieces, "OVERLAP", 400)
    tokenizer = TOKENIZERS[kind]()
    for name, text in TEXTS.items():
        text = text[: 6000 if kind == "without words" else SIZE]
        found, whole = long_ids(text, tokenizer), tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        assert found.dtype == np.int32
        assert found.tolist() == whole, name


def test_a_text_of_words_is_never_encoded_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE", 1500)
    monkeypatch.setattr(pieces, "OVERLAP", 400)
    tokenizer, longest = TOKENIZERS["byte-level"](), []

    class Watched:
        is_fast = True

        @property
        def backend_tokenizer(self) -> Any:
            return self

        def no_truncation(self) -> None: ...
        def no_padding(self) -> None: ...
        def encode_batch(self, texts: Any, **options: Any) -> Any:
            longest.extend(map(len, texts))
            return tokenizer.backend_tokenizer.encode_batch(texts, **options)

        def __call__(self, text: Any, **options: Any) -> Any:
            longest.append(len(text))
            return tokenizer(text, **options)

    watched: Any = Watched()
    for name in ("words", "odd", "special", "no spaces"):
        assert is_long(TEXTS[name] * 3, watched)
        long_ids(TEXTS[name], watched)
        assert max(longest) <= 1500 + 800, name


def test_slow_tokenizers_and_short_texts_are_left_to_the_tokenizer() -> None:
    tokenizer: Any = type("Slow", (), {"is_fast": False})()
    assert not is_long("x" * 10**6, tokenizer)
    tokenizer.is_fast = True
    assert not is_long("x" * pieces.PIECE, tokenizer)
    assert is_long("x" * (2 * pieces.PIECE + 1), tokenizer)
