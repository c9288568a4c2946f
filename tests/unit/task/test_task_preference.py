"""Preferences: rows of every layout, what is refused, and losses that add up over pairs."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from optrun.base.errors import ConfigError
from optrun.config.choice import choice
from optrun.config.schema.chat_tasks import PreferenceLoss
from optrun.config.schema.task import SCHEMAS
from optrun.task.preference import MEASURES
from tests.unit.task.test_document_masking import decoder
from tests.unit.task.test_task_sft import said

Make = Callable[..., Any]
TEXTS = {
    "prompt": ["the cat", "Anna", "Bob"],
    "chosen": [" sat", " went to Paris", " and"],
    "rejected": [" Berlin on a mat", " sat", " things"],
}
TURNS = {
    "prompt": [said("Hi"), said("a mat?", "yes", "why?", system="Bob")],
    "chosen": [
        [{"role": "assistant", "content": text}] for text in ("the cat", "unbelievable things")
    ],
    "rejected": [[{"role": "assistant", "content": text}] for text in ("Berlin", "Anna")],
}


def referred(task: Any, model: Any) -> Any:
    """The task with its reference, by a model."""
    task.train.reference = task.reference(model, task.train, 2, lambda batch: batch, nullcontext)
    return task


@pytest.fixture
def model() -> Any:
    return decoder("gpt2").eval()


def test_layouts_of_one_pair_are_one(make_source: Make, make_task: Make) -> None:
    whole = {
        name: [[*p, *a] for p, a in zip(TURNS["prompt"], TURNS[name], strict=True)]
        for name in ("chosen", "rejected")
    }
    named = {"prompt": ["Hi", "why?"], **whole}  # a text beside turns says nothing that they do not
    renamed = {
        "question": TURNS["prompt"],
        **{name: TURNS[name] for name in ("chosen", "rejected")},
    }
    batches = []
    for rows, options in (
        (TURNS, {}),
        (whole, {}),
        (named, {}),
        (renamed, {"text_column": "question"}),
    ):
        task = make_task(
            "preference", make_source(rows, max_length=200, **options), chat_template="chatml"
        )
        batches.append(task.collate([task.train[0], task.train[1]]))
    for other in batches[1:]:
        assert all(torch.equal(batches[0][name], other[name]) for name in batches[0])


@pytest.mark.parametrize("loss", [loss.value for loss in PreferenceLoss])
def test_losses_add_up_over_pairs(
    make_source: Make, make_task: Make, model: Any, loss: str
) -> None:
    task = referred(
        make_task("preference", make_source(TEXTS, max_length=64), loss_type=loss), model
    )
    examples = [task.train[index] for index in range(3)]
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.1)
        together = task.collate(examples)
        outputs = task.forward(model, together)
        whole, measured = task.loss(outputs, together), task.measure(outputs, together)
        singles = [task.collate([example]) for example in examples]
        each = [task.forward(model, batch) for batch in singles]
        mean = (
            sum(float(task.loss(one, batch)) for one, batch in zip(each, singles, strict=True)) / 3
        )
        sums = sum(task.measure(one, batch) for one, batch in zip(each, singles, strict=True))
    assert task.weight(together) == 3
    assert float(whole) == pytest.approx(mean, rel=1e-5)
    assert torch.allclose(measured, torch.as_tensor(sums), rtol=1e-4, atol=1e-4)
    assert len(measured) == len(MEASURES)


def test_the_start_prefers_nothing(
    make_source: Make, make_task: Make, tokenizer: Make, model: Any
) -> None:
    task = referred(make_task("preference", make_source(TEXTS, max_length=64), beta=0.5), model)
    batch = task.collate([task.train[index] for index in range(3)])
    with torch.no_grad():
        outputs = task.forward(model, batch)
    assert float(task.loss(outputs, batch)) == pytest.approx(math.log(2), abs=1e-5)
    assert task.measure(outputs, batch)[3] == pytest.approx(0, abs=1e-4)
    assert "chosen: the cat« sat" in task.shown(tokenizer("chat"))


@pytest.mark.parametrize(
    ("rows", "facts"),
    [
        ({"prompt": ["a"], "chosen": ["b"]}, ["no column rejected", "Columns: prompt, chosen"]),
        (
            {"prompt": ["a"], "chosen": ["b"], "reject": ["c"]},
            ["Did you mean reject? Call it rejected"],
        ),
        ({"messages": [said("a", "b")]}, ["no column chosen"]),
        (
            {**TEXTS, "rejected": TEXTS["chosen"]},
            ["the same in every row, 3 of 3", "Take rows with equal answers out"],
        ),
        ({**TEXTS, "rejected": ["a", "", "b"]}, ["row 2", "empty rejected answer"]),
        ({"chosen": ["a"], "rejected": [said("a")]}, ["str and list"]),
        (
            {"chosen": [said("a", "b")], "rejected": [said("c", "d")]},
            ["has no prompt", "share no first turn"],
        ),
        ({**TEXTS, "prompt": [said("a")] * 3}, ["row 1", "text and a list of turns"]),
        (
            {"prompt": [said("a")], "chosen": [said("b")], "rejected": [said("c")]},
            ["no turn of the assistant"],
        ),
        (
            {**TEXTS, "prompt": ["the cat " * 40] * 3},
            ["max_length=64", "its prompt is longer", "overlong_rows=drop"],
        ),
    ],
)
def test_rows_that_are_none(
    make_source: Make, make_task: Make, rows: Any, facts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_task("preference", make_source(rows, max_length=64), chat_template="chatml")
    for fact in facts:
        assert fact in str(caught.value)


def test_some_pairs_alike_are_told(make_source: Make, make_task: Make) -> None:
    rows = {**TEXTS, "rejected": [TEXTS["chosen"][0], *TEXTS["rejected"][1:]]}
    task = make_task("preference", make_source(rows, max_length=64))
    assert any("the same in 1 of 3 rows, first in row 1" in note for note in task.notes)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"beta": 0.0}, ["task.beta=0.0", "above 0"]),
        ({"label_smoothing": 0.1}, ["task.label_smoothing=0.1", "loss_type=robust"]),
        ({"label_smoothing": 0.5, "loss_type": "robust"}, ["[0, 0.5)"]),
        ({"simpo_gamma": -1.0}, ["task.simpo_gamma=-1.0"]),
        ({"loss_type": "sigmod"}, ["loss_type", "sigmoid"]),
    ],
)
def test_options_that_are_none(options: dict[str, Any], facts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        choice("task", SCHEMAS, "preference", options)
    for fact in facts:
        assert fact in str(caught.value)
