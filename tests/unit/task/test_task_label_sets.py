"""Any number of labels.

Read from lists and from columns, and judged as scikit-learn and transformers judge them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn
from transformers import AutoModelForSequenceClassification, BertConfig
from transformers.utils.generic import ModelOutput

from optrun.base.errors import ConfigError
from optrun.task.class_weights import class_weights
from optrun.task.data_facts import collect_data_facts
from optrun.task.label_sets import LabelSetMetrics

Make = Callable[..., Any]
TEXTS = ["the cat", "a mat", "Anna went", "to Paris", "and Berlin"]
LISTS = [["b"], ["a", "b"], [], ["c", "a"], ["b"]]
COLUMNS = {"a": [0, 1, 0, 1, 0], "b": [1, 1, 0, 0, 1], "c": ["0", "0", "0", "1", "0"]}
WANTED = [[0, 1, 0], [1, 1, 0], [0, 0, 0], [1, 0, 1], [0, 1, 0]]
SEVERAL = {"problem_type": "multi_label_classification"}


def task_of(make_task: Make, source: Any, **options: Any) -> Any:
    return make_task("sequence_classification", source, **{**SEVERAL, **options})


@pytest.mark.parametrize("form", ["lists", "columns"])
def test_labels_are_read(form: str, make_task: Make, make_source: Make, tokenizer: Make) -> None:
    lists = form == "lists"
    rows = {"text": TEXTS, **({"label": LISTS} if lists else COLUMNS)}
    source = make_source(rows, **({} if lists else {"label_columns": ["a", "b", "c"]}))
    task = task_of(make_task, source)
    assert task.labels == ["a", "b", "c"]
    batch = task.collate([task.train[n] for n in range(5)])
    assert batch["labels"].tolist() == WANTED
    assert batch["labels"].dtype == torch.float32
    facts = collect_data_facts(task, source, tokenizer("pair"))
    assert facts.train.labels == {"a": 2, "b": 3, "c": 1}
    assert task.needs().config["problem_type"] == "multi_label_classification"


def model_and_batch(task: Any) -> tuple[Any, Any]:
    config = BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=320,
        **task.needs().config,
    )
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(config).eval(), task.collate(
        [task.train[n] for n in range(5)]
    )


def test_the_loss_is_that_of_transformers(make_task: Make, make_source: Make) -> None:
    task = task_of(make_task, make_source({"text": TEXTS, "label": LISTS}))
    model, batch = model_and_batch(task)
    with torch.no_grad():
        outputs = model(**batch)
    wanted = torch.nn.BCEWithLogitsLoss()(outputs.logits, torch.tensor(WANTED, dtype=torch.float32))
    assert float(task.loss(outputs, batch)) == pytest.approx(float(wanted), rel=1e-6)
    assert task.weight(batch) == 5
    halves = [
        {name: values[part] for name, values in batch.items()}
        for part in (slice(0, 2), slice(2, 5))
    ]
    by_parts = sum(task.loss(model(**half), half).item() * task.weight(half) for half in halves) / 5
    assert by_parts == pytest.approx(float(wanted), rel=1e-5)


def test_weights_are_those_of_positives(make_task: Make, make_source: Make) -> None:
    task = task_of(make_task, make_source({"text": TEXTS, "label": LISTS}))
    weights = class_weights("balanced", task.labels, {"a": 2, "b": 3, "c": 1}, 5)
    assert weights is not None
    assert weights.tolist() == pytest.approx([3 / 2, 2 / 3, 4])
    task.class_weights = weights
    model, batch = model_and_batch(task)
    with torch.no_grad():
        outputs = model(**batch)
    wanted = torch.nn.BCEWithLogitsLoss(pos_weight=weights)(outputs.logits, batch["labels"])
    assert float(task.loss(outputs, batch)) == pytest.approx(float(wanted), rel=1e-6)
    assert task.weight(batch) == 5
    with pytest.raises(ConfigError, match="every training example has the label b"):
        class_weights("balanced", task.labels, {"a": 2, "b": 5, "c": 1}, 5)


def test_metrics_are_those_of_scikit_learn() -> None:
    randomness = np.random.default_rng(0)
    logits, labels = (
        randomness.normal(size=(60, 4)),
        (randomness.random((60, 4)) < 0.4).astype(np.int64),
    )
    logits[:, 3], labels[:, 3] = -1, 0  # neither predicted nor there
    parts = [LabelSetMetrics([*"abcd"]), LabelSetMetrics([*"abcd"])]
    for at, part in zip((slice(0, 25), slice(25, 60)), parts, strict=True):
        outputs = ModelOutput(loss=torch.tensor(0.5), logits=torch.tensor(logits[at]))
        part.update(outputs, {"labels": torch.tensor(labels[at], dtype=torch.float32)})
    parts[0].merge([part.partial() for part in parts])
    made = (logits > 0).astype(np.int64)
    wanted = {
        "loss": 0.5,
        "f1_micro": sklearn.f1_score(labels, made, average="micro"),
        "f1_macro": sklearn.f1_score(labels, made, average="macro", zero_division=0),
        "exact_match": sklearn.accuracy_score(labels, made),
    }
    assert parts[0].compute() == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("rows", "options", "facts"),
    [
        (
            {"label": ["a", "b", "a", "b", "a"]},
            {},
            ["row 1 has 'a' there", "expects a list of labels", "label_columns"],
        ),
        ({"label": [["a"], ["b"], None, ["a"], []]}, {}, ["row 3 has no value"]),
        ({"label": [["a"], ["a"], [], ["a"], []]}, {}, ["one label only (a)"]),
        (
            {"a": [1, 0, 2, 0, 1], "b": [1] * 5},
            {"label_columns": ["a", "b"]},
            ["row 3 has 2 in column a", "expected 1"],
        ),
        (
            {"a": [1] * 5, "b": [1] * 5},
            {"label_columns": ["a", "bb"]},
            ["label_columns=bb", "Did you mean b?"],
        ),
        ({"a": [1] * 5}, {"label_columns": ["a"]}, ["two columns or more"]),
        (
            {"a": [1] * 5, "b": [0] * 5},
            {"label_columns": ["a", "b"], "label_column": "b"},
            ["data.label_column"],
        ),
    ],
)
def test_what_is_no_labels(
    rows: Any, options: Any, facts: list[str], make_task: Make, make_source: Make
) -> None:
    with pytest.raises(ConfigError) as refused:
        task_of(make_task, make_source({"text": TEXTS, **rows}, **options))
    for fact in facts:
        assert fact in str(refused.value)


def test_several_columns_need_the_problem_type(make_task: Make, make_source: Make) -> None:
    with pytest.raises(ConfigError, match="multi_label_classification"):
        make_task(
            "sequence_classification",
            make_source({"text": TEXTS, **COLUMNS}, label_columns=["a", "b"]),
        )
    with pytest.raises(ConfigError, match="f1_micro, f1_macro and exact_match"):
        task_of(make_task, make_source({"text": TEXTS, "label": LISTS}), metrics=["accuracy"])
