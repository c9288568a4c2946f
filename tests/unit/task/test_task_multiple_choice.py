"""A text and choices: the batch, the loss and the labels are those of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForMultipleChoice, BertConfig
from transformers.utils.generic import ModelOutput

from optrun.base.errors import ConfigError
from optrun.task.facts import data_facts

Make = Callable[..., Any]
ROWS = {
    "text": ["the cat sat", "Anna went to Paris and Berlin", "a mat"],
    "choices": [["on a mat", "with Bob"], ["and Berlin", "on a mat with the cat"], ["a", "b"]],
    "label": ["with Bob", "and Berlin", "b"],
}


def test_the_loss_is_that_of_transformers(
    make_task: Make, make_source: Make, tokenizer: Make
) -> None:
    source = make_source(ROWS)
    task = make_task("multiple_choice", source)
    assert [int(task.train[n]["labels"]) for n in range(3)] == [1, 0, 1]
    batch = task.collate([task.train[n] for n in range(3)])
    assert batch["input_ids"].shape[:2] == (3, 2)
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=320,
    )
    model = AutoModelForMultipleChoice.from_config(config).eval()
    with torch.no_grad():
        outputs = model(**batch)
    scores = []
    for text, choices in zip(ROWS["text"], ROWS["choices"], strict=True):
        alone = [tokenizer("pair")(text, choice, return_tensors="pt") for choice in choices]
        scores.append(
            [model(**{name: ids[None] for name, ids in one.items()}).logits.item() for one in alone]
        )
    assert outputs.logits.tolist() == [pytest.approx(row, abs=1e-6) for row in scores]
    wanted = torch.nn.functional.cross_entropy(torch.tensor(scores), torch.tensor([1, 0, 1]))
    assert float(task.loss(outputs, batch)) == pytest.approx(float(wanted), rel=1e-5)
    assert task.weight(batch) == 3
    predicted, there = task.predictions(outputs, batch)
    assert (predicted.tolist(), there.tolist()) == (outputs.logits.argmax(1).tolist(), [1, 0, 1])
    facts = data_facts(task, source, tokenizer("pair")).train
    assert (facts.examples, facts.labels, facts.span) == (3, {}, None), "places are no labels"


UNEQUAL = {
    "text": ["the cat sat", "Anna went to Paris and Berlin", "a mat"],
    "choices": [
        ["on a mat", "with Bob"],
        ["and Berlin", "on a mat with the cat", "a", "Bob"],
        ["a", "b", "the cat"],
    ],
    "label": ["with Bob", "Bob", "a"],
}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_rows_of_unequal_choices_are_what_they_are_alone(
    smoothing: float, make_task: Make, make_source: Make, tokenizer: Make
) -> None:
    """Loss, gradients and predictions of a batch are those of its rows one by one.

    Which transformers computes.
    """
    task = make_task("multiple_choice", make_source(UNEQUAL))
    task.label_smoothing = smoothing
    assert any("from 2 to 4 choices" in note for note in task.notes)
    batch = task.collate([task.train[n] for n in range(3)])
    assert batch["input_ids"].shape[:2] == (3, 4)
    assert task.sizes(batch) == (int(task.train.lengths.sum()), 3)
    values = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    torch.manual_seed(0)
    model = (
        AutoModelForMultipleChoice.from_config(BertConfig(vocab_size=320, **values)).double().eval()
    )
    outputs = model(**batch)
    loss = task.loss(outputs, batch)
    loss.backward()
    grads = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    total, best = 0.0, []
    for text, choices, label in zip(*UNEQUAL.values(), strict=True):
        ids = tokenizer("pair")([text] * len(choices), choices, padding=True, return_tensors="pt")
        logits = model(**{name: each[None] for name, each in ids.items()}).logits
        best.append(int(logits.argmax()))
        target = torch.tensor([choices.index(label)])
        each = torch.nn.functional.cross_entropy(logits, target, label_smoothing=smoothing) / 3
        each.backward()
        total += float(each.detach())
    assert float(loss.detach()) == pytest.approx(total, rel=1e-9)
    for grad, param in zip(grads, model.parameters(), strict=True):
        assert torch.allclose(grad, param.grad, rtol=1e-6, atol=1e-12)
    predicted, there = task.predictions(outputs, batch)
    assert (predicted.tolist(), there.tolist()) == (best, [1, 3, 0])
    metrics = task.evaluation()
    with torch.no_grad():
        metrics.update(model(**batch), batch)
    if not smoothing:
        assert metrics.compute()["loss"] == pytest.approx(total, rel=1e-6)
    sums, counts = task.loss_by_example(outputs, batch)
    assert (sums.shape, counts.tolist()) == ((3,), [1, 1, 1])


def test_sources_of_unequal_choices_are_judged_as_unequal_rows_are(
    make_task: Make, make_source: Make
) -> None:
    """In each source all rows have as many, and a batch has rows of both."""
    four = {name: [column[1]] for name, column in UNEQUAL.items()}
    first, second = (
        make_task("multiple_choice", make_source(ROWS)),
        make_task("multiple_choice", make_source(four)),
    )
    first.join([first, second])
    batch = first.collate([first.train[0], second.train[0]])
    values = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    model = AutoModelForMultipleChoice.from_config(BertConfig(vocab_size=320, **values)).eval()
    with torch.no_grad():
        outputs = model(**batch)
    assert first.logits(outputs, batch).isinf().tolist() == [
        [False, False, True, True],
        [False] * 4,
    ]
    wanted = [
        torch.nn.functional.cross_entropy(outputs.logits[row, :own], batch["labels"][row])
        for row, own in ((0, 2), (1, 4))
    ]
    assert float(first.loss(outputs, batch)) == pytest.approx(float(sum(wanted)) / 2, rel=1e-5)


def test_a_choice_that_is_the_padding_token_alone_is_one(
    make_task: Make, make_source: Make
) -> None:
    """A tokenizer may mark no ends, and pad with the mark that a choice is."""
    task = make_task("multiple_choice", make_source(UNEQUAL))
    ids = [[np.array([task.padding])] * count for count in (2, 3)]
    batch = task.collate([{"input_ids": each, "labels": np.int64(1)} for each in ids])
    outputs = ModelOutput(logits=torch.zeros(2, 3))
    assert task.logits(outputs, batch).isinf().tolist() == [[False, False, True], [False] * 3]
    assert float(task.loss(outputs, batch)) == pytest.approx((math.log(2) + math.log(3)) / 2)
    assert task.sizes(batch) == (5, 2)


def test_a_question_stands_before_each_choice(
    make_task: Make, make_source: Make, tokenizer: Make
) -> None:
    rows = {**ROWS, "question": ["where", "what", "which"], "label": [0, 1, 0]}
    task = make_task(
        "multiple_choice", make_source(rows, text_column="text", text_pair_column="question")
    )
    wanted = tokenizer("pair")("the cat sat", "where on a mat")["input_ids"]
    assert task.train[0]["input_ids"][0].tolist() == wanted


@pytest.mark.parametrize(
    ("rows", "facts"),
    [
        (
            {"label": ["with Bob", "Berlin", "b"]},
            ["row 2 has the label 'Berlin'", "is none of them", "from 0 to 1"],
        ),
        ({"label": [0, 2, 1]}, ["row 2 has the label 2", "from 0 to 1"]),
        ({"label": [0.0, 0.5, 1.0]}, ["row 2 has the label 0.5"]),
        (
            {"choices": [["a", "b"], ["a", "b", "c"], ["a", "b"]], "label": [0, 1, 2]},
            ["row 3 has the label 2", "0 to 1"],
        ),
        ({"choices": [["a"], ["b"], ["c"]]}, ["row 1 has 1 choices", "two or more"]),
        ({"choices": [["a", "b"], ["a", None], ["a", "b"]]}, ["row 2", "a missing choice"]),
        ({"choices": ["a", "b", "c"]}, ["data.choices_column=choices", "no lists of texts"]),
        (
            {"choices": [["a", "a"], ["a", "b"], ["a", "b"]], "label": ["a", "a", "a"]},
            ["row 1", "more than once"],
        ),
    ],
)
def test_what_does_not_fit(rows: Any, facts: list[str], make_task: Make, make_source: Make) -> None:
    with pytest.raises(ConfigError) as refused:
        make_task("multiple_choice", make_source({**ROWS, "label": [0, 1, 0], **rows}))
    for fact in facts:
        assert fact in str(refused.value)
