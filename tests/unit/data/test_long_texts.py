"""A long text is encoded in pieces that end with a line: no character is lost or read twice."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from optrun.base.errors import ConfigError
from optrun.data import formats, long_texts
from optrun.data.long_texts import encode_long, is_long, piece_borders
from tests.running import read_files, sentence

PLAIN = "\n".join(sentence(number) for number in range(200))


def byte_level() -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([PLAIN], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        (PLAIN, "\n"),
        (PLAIN.replace("\n", " "), " "),
        ("y" * 5000, "y"),
        ("", ""),
        ("short", ""),
    ],
)
def test_pieces_end_with_a_line(text: str, ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_texts, "PIECE", 100)
    parts = [text[begin:end] for begin, end in pairwise(piece_borders(text))]
    assert "".join(parts) == text
    assert max(map(len, parts)) <= 200
    for part, following in pairwise(parts):
        before = following[:1] if ends == " " else part[-1:]
        assert before == ends
        assert len(part) >= 100


def test_cut_at_line_ends_the_ids_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_texts, "PIECE", 300)
    tokenizer = byte_level()
    text = "".join(random.Random(0).choices(PLAIN.splitlines(keepends=True), k=300))
    assert is_long(text)
    whole = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    assert encode_long(text, tokenizer).tolist() == whole


def test_a_text_larger_than_memory_is_refused(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "largest_document", lambda: 5_000)
    (tmp_path / "a.txt").write_text(PLAIN)
    assert read_files("data.train", str(tmp_path / "a.txt"), documents=False)
    with pytest.raises(ConfigError, match=r"a\.txt: a text of .* bytes.*split -C"):
        read_files("data.train", str(tmp_path / "a.txt"), documents=True)
