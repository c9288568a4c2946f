"""Causal, masked and sequence-to-sequence language models.

What a batch holds, and what it is weighted by.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from optrun.base.errors import ConfigError
from optrun.data import long_texts
from optrun.data.loader import BatchLoader, EpochPlan
from optrun.data.randomness import generator
from optrun.data.source import Source
from optrun.task import Task
from optrun.task.evaluation import IGNORED, TokenMetrics
from optrun.task.seq2seq_lm import Seq2SeqLm
from optrun.task.tokens import ids_around_text, tokenizer_key

TEXTS = [
    "the cat sat on a mat",
    "Anna Smith went to Paris and Berlin with Bob",
    "",
    "unbelievable things happened",
] * 5
Make = Callable[..., Any]


def all_ids(examples: Any) -> np.ndarray:
    return np.concatenate([examples[index]["input_ids"] for index in range(len(examples))])


def test_packed_documents_lose_and_double_nothing(
    make_source: Make, make_task: Make, tokenizer: Make
) -> None:
    task = make_task("causal_lm", make_source({"text": TEXTS}, max_length=7))
    words = tokenizer("stream")
    expected = [
        id_ for text in TEXTS if text for id_ in [*words(text)["input_ids"], words.eos_token_id]
    ]
    assert all_ids(task.eval).tolist() == expected[: len(all_ids(task.eval))]
    assert len(expected) - len(all_ids(task.eval)) < 2
    assert {len(task.train[index]["input_ids"]) for index in range(len(task.train))} == {7}


def test_rows_end_unless_they_were_cut(make_source: Make, make_task: Make, tokenizer: Make) -> None:
    source = make_source({"text": TEXTS}, max_length=7)
    task = make_task("causal_lm", source, packing=False)
    end = tokenizer("stream").eos_token_id
    whole = [tokenizer("stream")(text)["input_ids"] for text in TEXTS if text]
    assert len(task.train) == len(whole)
    for index, ids in enumerate(whole):
        row = task.train[index]["input_ids"].tolist()
        assert row == (ids[:7] if len(ids) >= 7 else [*ids, end])


def test_documents_begin_as_the_tokenizer_begins_them(
    make_source: Make, make_task: Make, tokenizer: Make
) -> None:
    words = tokenizer("stream")
    plain = [words(text)["input_ids"] for text in TEXTS if text]
    end = words.eos_token_id
    begin = words.convert_tokens_to_ids("<|pad|>")  # any token of its own, as <s> of Llama
    words.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|pad|> $A", special_tokens=[("<|pad|>", begin)]
    )
    assert words("Anna")["input_ids"][0] == begin
    packed = make_task("causal_lm", make_source({"text": TEXTS}, max_length=7), words)
    expected = [id_ for ids in plain for id_ in [begin, *ids, end]]
    assert all_ids(packed.eval).tolist() == expected[: len(all_ids(packed.eval))]
    rows = make_task("causal_lm", make_source({"text": TEXTS}, max_length=7), words, packing=False)
    for index, ids in enumerate(plain):
        assert rows.train[index]["input_ids"].tolist() == [begin, *ids, end][:7]
    assert ids_around_text(tokenizer("pair")) == (
        [tokenizer("pair").cls_token_id],
        [tokenizer("pair").sep_token_id],
    )
    assert ids_around_text(tokenizer("seq2seq")) == ([], [tokenizer("seq2seq").eos_token_id])


def test_causal_batch(make_source: Make, make_task: Make, tokenizer: Make) -> None:
    task = make_task(
        "causal_lm", make_source({"text": ["the cat sat", "a mat on the cat sat"]}), packing=False
    )
    batch = task.collate([task.train[0], task.train[1]])
    lengths = batch["attention_mask"].sum(-1)
    assert (
        batch["labels"][batch["attention_mask"] == 1]
        == batch["input_ids"][batch["attention_mask"] == 1]
    ).all()
    assert (batch["labels"][batch["attention_mask"] == 0] == IGNORED).all()
    assert (
        batch["input_ids"][batch["attention_mask"] == 0] == tokenizer("stream").pad_token_id
    ).all()
    assert task.weight(batch) == int((lengths - 1).sum())
    assert task.count_tokens_and_examples(batch) == (int(lengths.sum()), 2)
    assert "attention_mask" not in task.collate([task.train[0], task.train[0]])


@pytest.mark.parametrize("packing", [True, False])
def test_no_text_is_refused(make_source: Make, make_task: Make, packing: bool) -> None:
    for texts in (["", ""], [None, ""]):
        with pytest.raises(ConfigError, match=r"data.train: no text of two tokens"):
            make_task(
                "causal_lm",
                make_source({"text": texts, "other": [1, 2]}, text_column="text"),
                packing=packing,
            )


def test_too_short_rows_are_left_out_and_counted(make_source: Make, make_task: Make) -> None:
    source = make_source({"text": ["the cat sat", "", "a mat"]})
    task = make_task("masked_lm", source, packing=False)
    assert len(task.train) == 2
    assert not source.notes  # an empty text is no row of text at all


def masked(make_source: Make, make_task: Make) -> Task:
    task: Task = make_task(
        "masked_lm", make_source({"text": TEXTS}, max_length=16), mlm_probability=0.3
    )
    return task


def test_masks_are_a_function_of_seed_epoch_and_index(make_source: Make, make_task: Make) -> None:
    task = masked(make_source, make_task)

    def batches(workers: int, start: int) -> list[Any]:
        feed = BatchLoader(task.train, task.transform, task.collate, seed=3, workers=workers)
        stream = feed.training(EpochPlan(len(task.train), 4, 1, seed=3), start)
        made = [next(stream)[0] for _ in range(6)]
        stream.close()  # type: ignore[attr-defined]
        return [{name: tensor.tolist() for name, tensor in batch.items()} for batch in made]

    whole = batches(0, 0)
    assert batches(2, 0) == whole
    assert batches(0, 2)[:4] == whole[2:]
    example = task.train[0]
    one, two = (
        task.transform(example, generator(3, "example", epoch, 0))["labels"].tolist()
        for epoch in (0, 1)
    )
    assert one != two


def test_what_is_masked(make_source: Make, make_task: Make, tokenizer: Make) -> None:
    task = masked(make_source, make_task)
    words = tokenizer("pair")
    special = set(words.all_special_ids)
    ids = np.array([index for index in range(len(words)) if index not in special] * 200)
    ids[0] = words.cls_token_id
    made = task.transform({"input_ids": ids}, generator(0, "example"))
    targets = made["labels"] != IGNORED
    assert (made["labels"][targets] == ids[targets]).all()
    assert (made["input_ids"][~targets] == ids[~targets]).all()
    assert not special.intersection(ids[targets].tolist())
    share = targets.mean()
    assert abs(share - 0.3) < 4 * math.sqrt(0.3 * 0.7 / len(ids))
    count = int(targets.sum())
    hidden = int((made["input_ids"][targets] == words.mask_token_id).sum())
    kept = int((made["input_ids"][targets] == ids[targets]).sum())
    assert abs(hidden / count - 0.8) < 4 * math.sqrt(0.16 / count)
    assert abs(kept / count - 0.1) < 4 * math.sqrt(0.09 / count) + 1 / len(words)
    assert not (special - {words.mask_token_id}).intersection(made["input_ids"][targets].tolist())


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32))
def test_every_example_has_a_target(seed: int) -> None:
    from optrun.task.masked_lm import MaskedLm

    task = MaskedLm.__new__(MaskedLm)
    task.special, task.ordinary = np.array([0, 1]), np.array([2, 3, 4])
    task.mask, task.probability = 1, 0.01
    made = task.transform({"input_ids": np.array([0, 2, 3, 1])}, np.random.default_rng(seed))
    assert (made["labels"] != IGNORED).sum() >= 1
    none = task.transform({"input_ids": np.array([0, 1])}, np.random.default_rng(seed))
    assert (none["labels"] == IGNORED).all()


def test_masked_lm_needs_a_mask_token(make_source: Make, make_task: Make, tokenizer: Make) -> None:
    with pytest.raises(ConfigError, match="no mask token"):
        make_task("masked_lm", make_source({"text": TEXTS}), tokenizer("stream"))


def pairs(make_source: Make, **options: Any) -> Source:
    rows = {"text": ["the cat sat", "Anna"], "target": ["sat cat the", "went to Paris"]}
    source: Source = make_source(rows, **options)
    return source


def test_a_target_ends_and_is_padded_out_of_the_loss(
    make_source: Make, make_task: Make, tokenizer: Make
) -> None:
    task = make_task("seq2seq_lm", pairs(make_source))
    words = tokenizer("seq2seq")
    batch = task.collate([task.train[0], task.train[1]])
    rows = [words(text)["input_ids"] for text in ("sat cat the", "went to Paris")]
    assert all(row[-1] == words.eos_token_id for row in rows)
    for made, row in zip(batch["labels"].tolist(), rows, strict=True):
        assert made == row + [IGNORED] * (len(made) - len(row))
    assert task.weight(batch) == sum(map(len, rows))
    assert task.count_tokens_and_examples(batch) == (
        int(batch["attention_mask"].sum()) + sum(map(len, rows)),
        2,
    )
    assert (
        batch["input_ids"][0, : int(batch["attention_mask"][0].sum())].tolist()
        == words("the cat sat")["input_ids"]
    )


def test_lengths_of_text_and_target_are_two_things(make_source: Make, make_task: Make) -> None:
    task = make_task("seq2seq_lm", pairs(make_source, max_length=4), max_target_length=3)
    assert {len(task.train[index]["labels"]) for index in range(2)} == {3}
    assert max(len(task.train[index]["input_ids"]) for index in range(2)) == 4
    assert task.needs().max_length == 4


def test_seq2seq_columns(make_source: Make, make_task: Make) -> None:
    source = make_source({"en": ["the cat"], "de": ["a mat"]}, text_column="en", target_column="de")
    assert list(Seq2SeqLm.vocabulary(source)) == ["the cat", "a mat"]
    assert len(make_task("seq2seq_lm", source).train) == 1
    with pytest.raises(ConfigError, match=r"data.target_column is needed: .*Columns: en, de"):
        make_task("seq2seq_lm", make_source({"en": ["the cat"], "de": ["a mat"]}))
    with pytest.raises(
        ConfigError, match=r"data.eval: row 2 has no text in column target: nothing to produce"
    ):
        make_task(
            "seq2seq_lm",
            make_source(
                {"text": ["a"], "target": ["b"]}, {"text": ["a", "a"], "target": ["b", None]}
            ),
        )
    with pytest.raises(
        ConfigError, match=r"data.label_column=x: task=seq2seq_lm does not use this key"
    ):
        make_task(
            "seq2seq_lm", make_source({"text": ["a"], "target": ["b"], "x": [1]}, label_column="x")
        )


def test_token_metrics_are_means_over_tokens_not_batches() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 5, 7)
    labels = torch.randint(0, 7, (3, 5))
    labels[0, 2:] = IGNORED
    whole = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    evaluation = TokenMetrics(shift=False)
    for part in (slice(0, 1), slice(1, 3)):
        loss = torch.nn.functional.cross_entropy(logits[part].flatten(0, 1), labels[part].flatten())
        evaluation.update(SimpleNamespace(loss=loss, logits=logits[part]), {"labels": labels[part]})
    nothing = torch.full((1, 5), IGNORED)
    evaluation.update(
        SimpleNamespace(loss=torch.tensor(math.nan), logits=logits[:1]), {"labels": nothing}
    )
    found = evaluation.compute()
    assert found["loss"] == pytest.approx(float(whole), rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(float(whole)), rel=1e-6)
    targets = labels != IGNORED
    assert found["accuracy"] == pytest.approx(
        float((logits.argmax(-1) == labels)[targets].float().mean())
    )


def test_no_token_gives_no_number() -> None:
    assert all(math.isnan(value) for value in TokenMetrics(shift=True).compute().values())


def test_shifted_accuracy() -> None:
    labels = torch.tensor([[5, 1, 2]])
    logits = torch.nn.functional.one_hot(torch.tensor([[1, 2, 0]]), 7).float()
    evaluation = TokenMetrics(shift=True)
    evaluation.update(SimpleNamespace(loss=torch.tensor(0.5), logits=logits), {"labels": labels})
    assert evaluation.compute()["accuracy"] == 1.0


def test_a_tokenizer_is_the_same_whatever_it_was_last_asked(tokenizer: Make) -> None:
    words = tokenizer("pair")
    before = tokenizer_key(words)
    words(["a", "b c d"], truncation=True, max_length=3, padding=True)
    assert tokenizer_key(words) == before
    assert tokenizer_key(tokenizer("stream")) != before


@pytest.mark.parametrize("name", ["causal_lm", "masked_lm"])
def test_long_documents_are_encoded_in_pieces_alike(
    make_source: Make, make_task: Make, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [" ".join(TEXTS) * 20, "Bob", " ".join(reversed(TEXTS)) * 20]
    found = []
    for piece in (long_texts.PIECE, 1000):
        monkeypatch.setattr(long_texts, "PIECE", piece)
        monkeypatch.setenv(
            "OPTRUN_CACHE", str(tmp_path / str(piece))
        )  # else the first is read again
        task = make_task(name, make_source({"text": texts}), packing=True)
        found.append((all_ids(task.train), task.train.fingerprint()))
    assert (found[0][0] == found[1][0]).all()
    assert found[0][1] == found[1][1]
