"""Tables in the layouts that people have, and the task that their columns make."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, Features, Value

from optrun.base.errors import ConfigError
from optrun.data.column_roles import roles_of

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


def text(count: int = 6) -> str:
    return " ".join(random.choice(WORDS) for _ in range(count))


def turns() -> list[dict[str, str]]:
    return [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]


def shared() -> list[dict[str, str]]:
    return [{"from": "human", "value": text()}, {"from": "gpt", "value": text()}]


def words() -> list[str]:
    return text().split()


def tags() -> list[str]:
    return [random.choice(("O", "B-X")) for _ in range(6)]


def of(*values: Any) -> Callable[[], Any]:
    return lambda: random.choice(values)


SHAPES: dict[str, tuple[dict[str, Callable[[], Any]], str, dict[str, str]]] = {
    "text and label": (
        {"text": text, "label": of("a", "b")},
        "sequence_classification",
        {"text_column": "text", "label_column": "label"},
    ),
    "other names": (
        {"id": lambda: random.random(), "review": text, "verdict": of("good", "bad")},
        "sequence_classification",
        {"text_column": "review", "label_column": "verdict"},
    ),
    "names nobody knows": (
        {"was": text, "wie": of("a", "b")},
        "sequence_classification",
        {"text_column": "was", "label_column": "wie"},
    ),
    "names in capitals": (
        {"Text": text, "LABEL": of(0, 1)},
        "sequence_classification",
        {"text_column": "Text", "label_column": "LABEL"},
    ),
    "numbers as labels": (
        {"text": text, "label": of(0, 1, 2)},
        "sequence_classification",
        {"text_column": "text", "label_column": "label"},
    ),
    "fractions": (
        {"text": text, "score": lambda: round(random.random(), 3)},
        "sequence_classification",
        {"text_column": "text", "label_column": "score"},
    ),
    "pairs": (
        {"premise": text, "hypothesis": text, "label": of("yes", "no")},
        "sequence_classification",
        {"text_column": "premise", "text_pair_column": "hypothesis", "label_column": "label"},
    ),
    "a title beside the text": (
        {"title": lambda: text(2), "body": lambda: text(20), "topic": of("a", "b")},
        "sequence_classification",
        {"text_column": "body", "label_column": "topic"},
    ),
    "messages": ({"messages": turns}, "sft", {"messages": "messages"}),
    "messages and a source": (
        {"messages": turns, "source": of("a", "b")},
        "sft",
        {"messages": "messages"},
    ),
    "ShareGPT": ({"conversations": shared}, "sft", {"conversations": "conversations"}),
    "Alpaca": (
        {"instruction": text, "input": of("", "x"), "output": text},
        "sft",
        {name: name for name in ("instruction", "output", "input")},
    ),
    "prompt and completion": (
        {"prompt": text, "completion": text},
        "sft",
        {"prompt": "prompt", "completion": "completion"},
    ),
    "preferences": (
        {"prompt": text, "chosen": text, "rejected": text},
        "preference",
        {name: name for name in ("prompt", "chosen", "rejected")},
    ),
    "preferences of chats": (
        {"chosen": turns, "rejected": turns},
        "preference",
        {name: name for name in ("chosen", "rejected")},
    ),
    "pairs for search": (
        {"query": text, "positive": text},
        "embedding",
        {"query": "query", "positive": "positive"},
    ),
    "triplets": (
        {"anchor": text, "positive": text, "negative": text},
        "embedding",
        {name: name for name in ("anchor", "positive", "negative")},
    ),
    "words and tags": (
        {"tokens": words, "ner_tags": tags},
        "token_classification",
        {"text_column": "tokens", "label_column": "ner_tags"},
    ),
    "words and tags by other names": (
        {"id": text, "worte": words, "marken": tags},
        "token_classification",
        {"text_column": "worte", "label_column": "marken"},
    ),
    "source and target": (
        {"source": text, "target": text},
        "seq2seq_lm",
        {"text_column": "source", "target_column": "target"},
    ),
    "an article and its summary": (
        {"article": lambda: text(30), "highlights": text},
        "seq2seq_lm",
        {"text_column": "article", "target_column": "highlights"},
    ),
    "paths of images": (
        {"file": lambda: f"{random.random()}.png", "label": of("cat", "dog")},
        "image_classification",
        {"image_column": "file", "label_column": "label"},
    ),
    "a prompt and its response": (
        {"prompt": text, "response": text},
        "seq2seq_lm",
        {"text_column": "prompt", "target_column": "response"},
    ),
    "several labels": (
        {"text": text, "labels": lambda: random.sample("abc", 2)},
        "sequence_classification",
        {"text_column": "text", "label_column": "labels"},
    ),
    "a column for each label": (
        {"text": text, "toxic": of(0, 1), "rude": of("0", "1")},
        "sequence_classification",
        {"text_column": "text", "toxic": "toxic", "rude": "rude"},
    ),
    "texts alone": ({"text": text}, "causal_lm", {"text_column": "text"}),
    "texts and numbers": (
        {"n": lambda: random.random(), "body": text},
        "causal_lm",
        {"text_column": "body"},
    ),
}


SEVERAL = "task.problem_type=multi_label_classification"
OVERRIDES = {
    "fractions": ["task.problem_type=regression"],
    "several labels": [SEVERAL],
    "a column for each label": ["data.label_columns=[toxic,rude]", SEVERAL],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_table(shape: str) -> None:
    random.seed(0)
    columns, task, expected = SHAPES[shape]
    found = roles_of(
        Dataset.from_list([{name: make() for name, make in columns.items()} for _ in range(40)])
    )
    assert (found.task, dict(found.columns)) == (task, expected)
    assert list(found.overrides) == OVERRIDES.get(shape, [])


def test_declared_classes_are_the_labels() -> None:
    features = Features(
        {"text": Value("string"), "kind": ClassLabel(names=["a", "b"]), "page": Value("int64")}
    )
    rows = Dataset.from_dict(
        {"text": [text() for _ in range(9)], "kind": [0, 1, 0] * 3, "page": [1, 2, 3] * 3}, features
    )
    assert roles_of(rows).columns == {"text_column": "text", "label_column": "kind"}


def test_numbers_alone_make_no_task() -> None:
    with pytest.raises(ConfigError, match=r"make no task.*Columns: a, b"):
        roles_of(Dataset.from_dict({"a": [1, 2], "b": [0.5, 1.5]}))


def test_rows_with_choices_make_no_task() -> None:
    """Their label says nothing about the question alone."""
    rows = {"question": ["a", "b"], "choices": [["c", "d"], ["e", "f"]], "answer": [0, 1]}
    with pytest.raises(ConfigError, match=r"choices holds texts in lists or objects"):
        roles_of(Dataset.from_dict(rows))
