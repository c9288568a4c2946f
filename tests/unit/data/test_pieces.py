"""A long text in pieces has the tokens of the whole, whatever tokenizer and whatever text."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from optrun.data import pieces
from optrun.data.pieces import Pieces, fast_ids, is_long, word_ends
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


def _fast(
    model: Any, trainer: Any, train: list[str] | None = None, **parts: Any
) -> PreTrainedTokenizerFast:
    made = Tokenizer(model)
    for name, part in parts.items():
        setattr(made, name, part)
    made.train_from_iterator(train or [PLAIN], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="</s>")


def _unigram() -> PreTrainedTokenizerFast:
    trainer = trainers.UnigramTrainer(
        vocab_size=120, unk_token="<unk>", special_tokens=["<unk>", "</s>"], show_progress=False
    )
    return _fast(
        models.Unigram(),
        trainer,
        pre_tokenizer=pre_tokenizers.Metaspace(),
        normalizer=normalizers.NFKC(),
    )


def _without_words() -> PreTrainedTokenizerFast:
    """As Llama 2's: the whole text is one word."""
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>", "</s>"], show_progress=False
    )
    spaces = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return _fast(models.BPE(unk_token="<unk>", byte_fallback=True), trainer, pre_tokenizer=spaces)


def _after_a_normalizer() -> PreTrainedTokenizerFast:
    """As Gemma's: there are no spaces left to split at."""
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>", "</s>"], show_progress=False
    )
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


def _bpe(train: list[str] | None = None, size: int = 300, **parts: Any) -> PreTrainedTokenizerFast:
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<unk>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    return _fast(models.BPE(unk_token="<unk>"), trainer, train, **parts)


def _split(
    pattern: str, behavior: str = "isolated", *, invert: bool = False, words: Any = None
) -> Any:
    parts = [pre_tokenizers.Split(Regex(pattern), behavior, invert), *([words] if words else [])]
    return lambda: _bpe(
        pre_tokenizer=pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(use_regex=False)])
    )


def _added(*tokens: AddedToken, **parts: Any) -> Any:
    def made() -> Any:
        tokenizer = _bpe(
            **({"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False)} | parts)
        )
        tokenizer.add_tokens(list(tokens))
        return tokenizer

    return made


def _llama() -> PreTrainedTokenizerFast:
    """As Llama 2's: no words, and no token goes on from a letter to a space."""
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "</s>", "▁"], show_progress=False
    )
    made = _fast(models.BPE(unk_token="<unk>"), trainer, pre_tokenizer=pre_tokenizers.Metaspace())
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme="first", split=False
    )
    return made


def _old_llama() -> PreTrainedTokenizerFast:
    made = _llama()
    made.backend_tokenizer.pre_tokenizer = None
    made.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return made


def _bert() -> PreTrainedTokenizerFast:
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["<unk>", "</s>"], show_progress=False
    )
    parts = {
        "normalizer": normalizers.BertNormalizer(),
        "pre_tokenizer": pre_tokenizers.BertPreTokenizer(),
    }
    return _fast(models.WordPiece(unk_token="<unk>"), trainer, **parts)


def _starcoder() -> PreTrainedTokenizerFast:
    parts = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=True),
    ]
    return _bpe(pre_tokenizer=pre_tokenizers.Sequence(parts), normalizer=normalizers.NFKC())


def _xlm() -> PreTrainedTokenizerFast:
    made = _unigram()
    parts = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    made.backend_tokenizer.normalizer = normalizers.Replace(Regex(" {2,}"), " ")
    return made


LOCAL: dict[str, Callable[[], Any]] = {
    "ours": TOKENIZERS["byte-level"],
    "pair": TOKENIZERS["pair"],
    "unigram": _unigram,
    "xlm": _xlm,
    "llama 2": _llama,
    "old llama 2": _old_llama,
    "bert": _bert,
    "starcoder": _starcoder,
    "mask": _added(
        AddedToken("<mask>", lstrip=True, rstrip=True),
        AddedToken("=fox>", lstrip=True, single_word=True),
    ),
    **{
        f"pattern {number}": _split(pattern)
        for number, pattern in enumerate(sorted(pieces._PATTERNS))
    },
}
"""Tokenizers whose words end for certain in many places."""
GPT_2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
FAR: dict[str, Callable[[], Any]] = {
    "quotes": _split(r'"[^"]*"', words=GPT_2),
    "brackets": _split(r"\([^()]*\)", words=GPT_2),
    "fences": _split(r"```[^`]*```", words=GPT_2),
    "quotes removed": _split(r'"[^"]*"', "removed", words=GPT_2),
    "lines": _split(r"\n", "merged_with_next", words=None),
    "from the end": _split(r"x(?=[^q]*q)|\w+|\W", words=None),
    "words merged": _split(sorted(pieces._PATTERNS)[0], "contiguous"),
    "of one length": lambda: _bpe(pre_tokenizer=pre_tokenizers.FixedLength(5)),
    "far normalizer": lambda: _bpe(
        pre_tokenizer=GPT_2,
        normalizer=normalizers.Replace(Regex(r'"[^"]*"'), "quoted words"),
    ),
    "spaces are letters": lambda: _bpe(
        pre_tokenizer=pre_tokenizers.Whitespace(), normalizer=normalizers.Replace(" ", "x")
    ),
    "bytes before words": lambda: _bpe(
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.ByteLevel(use_regex=False), pre_tokenizers.Whitespace()]
        )
    ),
    "token of two words": _added(AddedToken("quick brown")),
    "token that is a word": _added(AddedToken("fox", single_word=True)),
    "token that takes spaces": _added(AddedToken("fox", rstrip=True)),
    "token under a normal form": _added(
        AddedToken("quick\u00a0brown", normalized=True), normalizer=normalizers.NFKC()
    ),
    "merges across": TOKENIZERS["without words"],
    "merges after a normalizer": TOKENIZERS["after a normalizer"],
    "dropout": lambda: _fast(
        models.BPE(dropout=0.1), trainers.BpeTrainer(vocab_size=99, show_progress=False)
    ),
}
"""Tokenizers for which a text may not be cut: a mark counts far behind it, or no place is certain.
"""
MARKED = "".join(
    f'{"字" * (n % 3)} "a quote\n of {n} words" (x {n}，y) ```z\n```  fox jumps，汉字，end. '
    for n in range(9)
)


def cut_ids(text: str, tokenizer: Any, ends: str) -> np.ndarray:
    return np.concatenate([ids for ids, _ in Pieces(text, tokenizer, ends).pieces()])


def _whole(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return found


@pytest.mark.parametrize("kind", LOCAL)
def test_pieces_are_the_whole_at_the_real_constants(kind: str) -> None:
    tokenizer = LOCAL[kind]()
    drawn = random.Random(kind)
    parts = [PLAIN[:900], MARKED, TEXTS["odd"][:500], PLAIN[900:5000]]
    text = "".join(drawn.choices(parts, k=100))
    assert is_long(text)
    ends = word_ends(tokenizer)
    assert ends
    made = list(Pieces(text, tokenizer, ends).pieces())
    assert np.concatenate([ids for ids, _ in made]).tolist() == _whole(tokenizer, text)
    assert len(made) > 3, "it is cut"
    assert max(np.diff([end for _, end in made])) < pieces.PIECE + 5000


@pytest.mark.parametrize("kind", LOCAL)
def test_pieces_are_the_whole_of_any_text(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut wherever it may be cut."""
    monkeypatch.setattr(pieces, "PIECE", 1)
    monkeypatch.setattr(pieces, "_NEAR", 7)
    tokenizer = LOCAL[kind]()
    ends = word_ends(tokenizer)
    for name, text in {**TEXTS, "marked": MARKED}.items():
        text = text[:2000]
        assert cut_ids(text, tokenizer, ends).tolist() == _whole(tokenizer, text), name
    drawn = random.Random(kind)
    alphabet = "ab 字汉，。\n  x\"(é́'s0k▁<mask> fox"
    for _ in range(60):
        text = "".join(drawn.choices(alphabet, k=drawn.randint(0, 90)))
        assert cut_ids(text, tokenizer, ends).tolist() == _whole(tokenizer, text), text


@pytest.mark.parametrize("kind", FAR)
def test_a_tokenizer_that_may_look_far_encodes_the_whole(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE", 50)
    tokenizer = FAR[kind]()
    assert word_ends(tokenizer) == ""
    assert kind == "dropout" or fast_ids([MARKED], tokenizer, special=False)[0] == _whole(
        tokenizer, MARKED
    )


@pytest.mark.parametrize("seed", range(30))
def test_random_tokenizers_are_cut_only_where_it_makes_no_difference(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts, vocabulary and added tokens drawn together: whatever is taken for local is."""
    monkeypatch.setattr(pieces, "PIECE", 5)
    drawn = random.Random(seed)
    every: list[Any] = [
        *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pieces._PATTERNS),
        *(pre_tokenizers.Metaspace(split=split) for split in (True, False)),
        *(
            pre_tokenizers.ByteLevel(use_regex=words, add_prefix_space=words)
            for words in (True, False)
        ),
        *(
            pre_tokenizers.BertPreTokenizer(),
            pre_tokenizers.Whitespace(),
            pre_tokenizers.WhitespaceSplit(),
        ),
        *(
            pre_tokenizers.Digits(),
            pre_tokenizers.Punctuation(drawn.choice(["isolated", "contiguous", "removed"])),
        ),
    ]
    normal: list[Any] = [
        *(
            normalizers.NFC(),
            normalizers.NFKD(),
            normalizers.Lowercase(),
            normalizers.StripAccents(),
        ),
        *(
            normalizers.BertNormalizer(),
            normalizers.Prepend("▁"),
            normalizers.Replace(" ", "▁"),
            normalizers.Strip(),
        ),
        *(
            normalizers.Replace(Regex(" {2,}"), drawn.choice(" ▁x")),
            normalizers.Replace(drawn.choice('".x '), "a b"),
        ),
    ]
    parts: dict[str, Any] = {
        "pre_tokenizer": pre_tokenizers.Sequence(drawn.choices(every, k=drawn.randint(1, 3)))
    }
    if drawn.random() < 0.6:
        parts["normalizer"] = normalizers.Sequence(drawn.choices(normal, k=drawn.randint(1, 2)))
    tokenizer = _bpe([MARKED], drawn.randint(260, 500), **parts)
    content = drawn.choice(["fox", " a", "b ", "a b", "字", "，y", "<m>", "\n"])
    flags = {
        name: drawn.random() < 0.5 for name in ("lstrip", "rstrip", "single_word", "normalized")
    }
    tokenizer.add_tokens([AddedToken(content, **flags)])
    ends = word_ends(tokenizer)
    for _ in range(20 if ends else 0):
        text = "".join(
            drawn.choice(("a", "b", " ", "字", "，", "\n", "fox ", '"', "<m>", " x", "é", "7"))
            for _ in range(60)
        )
        assert cut_ids(text, tokenizer, ends).tolist() == _whole(tokenizer, text), (
            text,
            parts,
            content,
            flags,
        )


@pytest.mark.parametrize("kind", ["ours", "pair", "unigram", "llama 2", "bert"])
def test_a_place_without_words_costs_what_is_around_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run of a letter across a border once had the whole text encoded at once.

    22 GB of memory for 1 GB of it.
    """
    monkeypatch.setattr(pieces, "PIECE", 1500)
    tokenizer = LOCAL[kind]()
    ends = word_ends(tokenizer)
    for run in (300, 3000, 9000):
        for place in (0, 4000, len(PLAIN)):
            text = PLAIN[:place] + "y" * run + PLAIN[place:] + PLAIN
            made = list(Pieces(text, tokenizer, ends).pieces())
            assert np.concatenate([ids for ids, _ in made]).tolist() == _whole(tokenizer, text)
            assert max(np.diff([end for _, end in made])) <= 1600 + run


def test_slow_tokenizers_and_short_texts_are_left_to_the_tokenizer() -> None:
    tokenizer: Any = type("Slow", (), {"is_fast": False})()
    assert word_ends(tokenizer) == ""
    assert not is_long("x" * 2 * pieces.PIECE)
    assert is_long("x" * (2 * pieces.PIECE + 1))
