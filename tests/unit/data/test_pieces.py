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


def _fast(model: Any, trainer: Any, train: list[str] | None = None, **parts: Any) -> PreTrainedTokenizerFast:
    made = Tokenizer(model)
    for name, part in parts.items():
        setattr(made, name, part)
    made.train_from_iterator(train or [PLAIN], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="</s>")


def _unigram() -> PreTrainedTokenizerFast:
    trainer = trainers.UnigramTrainer(
        vocab_size=120, unk_token="<unk>", special_tokens=["<unk>", "</s>"], show_progress=False
    )
    return _fast(models.Unigram(), trainer, pre_tokenizer=pre_tokenizers.Metaspace(), normalizer=normalizers.NFKC())


def _without_words() -> PreTrainedTokenizerFast:
    """As Llama 2's: the whole text is one word."""
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "</s>"], show_progress=False)
    spaces = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return _fast(models.BPE(unk_token="<unk>", byte_fallback=True), trainer, pre_tokenizer=spaces)


def _after_a_normalizer() -> PreTrainedTokenizerFast:
    """As Gemma's: there are no spaces left to split at."""
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "</s>"], show_progress=False)
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    split: Any = pre_tokenizers.Split(" ", "merged_with_previous")
    return _fast(models.BPE(unk_token="<unk>"), trainer, normalizer=spaces, pre_tokenizer=split)


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "byte-level": lambda: train_tokenizer(lambda: iter([PLAIN]), vocab_size=400, kind="stream"),
    "pair": lambda: train_tokenizer(lambda: iter([PLAIN]), vocab_size=400, kind="pair"),
    "unigram": _unigram,
    "without words": _without_words,
    "after a normalizer": _after_a_normalizer,
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_pieces_are_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE", 1500)
    monkeypatch.setattr(pieces, "OVERLAP", 400)
    tokenizer = TOKENIZERS[kind]()
    for name, text in TEXTS.items():
        found, whole = long_ids(text, tokenizer), tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        assert found.dtype == np.int32
        assert found.tolist() == whole, name


class Watched:
    """A tokenizer that notes how long the texts are that it is given."""

    is_fast = True

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.longest = 0

    @property
    def backend_tokenizer(self) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer.backend_tokenizer, name)

    def encode_batch(self, texts: Any, **options: Any) -> Any:
        self.longest = max(self.longest, *map(len, texts))
        return self.tokenizer.backend_tokenizer.encode_batch(texts, **options)

    def __call__(self, text: Any, **options: Any) -> Any:
        self.longest = max(self.longest, len(text))
        return self.tokenizer(text, **options)


@pytest.mark.parametrize("kind", ["byte-level", "without words", "after a normalizer"])
def test_no_text_of_words_is_encoded_as_a_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE", 1500)
    monkeypatch.setattr(pieces, "OVERLAP", 400)
    watched: Any = Watched(TOKENIZERS[kind]())
    for name in ("words", "odd", "special", "no spaces"):
        assert is_long(TEXTS[name] * 3, watched)
        long_ids(TEXTS[name], watched)
        assert watched.longest <= 1500 + 800, name


@pytest.mark.parametrize("kind", ["byte-level", "pair", "unigram", "without words"])
def test_a_place_without_words_costs_what_is_around_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run of a letter across a border once had the whole text encoded at once: 22 GB of memory for 1 GB of it."""
    monkeypatch.setattr(pieces, "PIECE", 1500)
    monkeypatch.setattr(pieces, "OVERLAP", 400)
    tokenizer = TOKENIZERS[kind]()
    watched: Any = Watched(tokenizer)
    for run in (300, 1000, 3000, 9000):
        for place in (0, 4000, 6000, len(PLAIN)):
            text = PLAIN[:place] + "y" * run + PLAIN[place:] + PLAIN
            watched.longest = 0
            assert long_ids(text, watched).tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
            assert watched.longest <= 4 * max(1500, 1.5 * run) + 800, (run, place)


@pytest.mark.parametrize("seed", range(20))
def test_merges_without_words_are_joined_anywhere(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merges are learnt from, and applied to, letters drawn from few: runs and merges across every border."""
    monkeypatch.setattr(pieces, "PIECE", 300)
    monkeypatch.setattr(pieces, "OVERLAP", 200)
    drawn = random.Random(seed)
    letters = "ab c字"[: drawn.randint(2, 5)]
    texts = ["".join(drawn.choice(letters) for _ in range(length)) for length in (3000, 5000)]
    size = drawn.randint(8, 120)
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<unk>", "</s>"], show_progress=False)
    tokenizer = _fast(models.BPE(unk_token="<unk>", fuse_unk=seed % 2 == 0), trainer, train=texts[:1])
    texts += [texts[1].replace("a", "é", 1000), texts[1].replace("b", "</s>")]
    watched: Any = Watched(tokenizer)
    for text in texts[1:]:
        assert long_ids(text, watched).tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert watched.longest < 3000


def test_slow_tokenizers_and_short_texts_are_left_to_the_tokenizer() -> None:
    tokenizer: Any = type("Slow", (), {"is_fast": False})()
    assert not is_long("x" * 10**6, tokenizer)
    tokenizer.is_fast = True
    assert not is_long("x" * pieces.PIECE, tokenizer)
    assert is_long("x" * (2 * pieces.PIECE + 1), tokenizer)
