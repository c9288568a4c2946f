"""What is found out of all rows is found once.

A warm start reads none of them, and says the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optrun.base.errors import ConfigError
from optrun.config.choice import choice
from optrun.config.schema.data import SCHEMAS as DATA
from optrun.config.schema.task import SCHEMAS as TASKS
from optrun.data import cached_arrays, examples, packing
from optrun.data.cache import pop_discard_messages
from optrun.data.cached_arrays import array_to_texts, rows_without_marks, texts_to_array
from optrun.data.examples import InMemory
from optrun.data.files import load_files
from optrun.model.tokenizer import train_tokenizer
from optrun.task import Task, build_task, chat_task, data_facts
from optrun.task.data_check import describe_data

SENTENCE = "the cat sat on a mat while Anna Smith went to Paris and Berlin with Bob"
KINDS = {"seq2seq_lm": "seq2seq", "sft": "chat"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPTRUN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Any]:
    """Task, what is known of its data, and a digest, of rows in two files."""
    tokenizers: dict[str, Any] = {}

    def begun(
        task: str, rows: list[dict[str, Any]], **options: Any
    ) -> tuple[Task, Any, list[str], list[str]]:
        for name in ("train", "held"):
            path = tmp_path / f"{name}.jsonl"
            text = "".join(json.dumps(row) + "\n" for row in rows)
            if not path.exists() or path.read_text() != text:
                path.write_text(text)
        data: Any = choice(
            "data",
            DATA,
            "files",
            {
                "train": str(tmp_path / "train.jsonl"),
                "eval": str(tmp_path / "held.jsonl"),
                "max_length": options.pop("max_length", 32),
                **{
                    name: options.pop(name)
                    for name in ("text_column", "label_column", "label_columns")
                    if name in options
                },
            },
        )
        source = load_files(data, documents=False)
        kind = KINDS.get(task, "pair")
        if kind not in tokenizers:
            tokenizers[kind] = train_tokenizer(
                lambda: iter([SENTENCE] * 3), vocab_size=320, kind=kind
            )
        made = build_task(
            choice("task", TASKS, task, options), data, source, tokenizers[kind], seed=0
        )
        found = data_facts.collect_data_facts(made, source, tokenizers[kind])
        whole = [made.train, *made.eval_sets.values()]
        return made, found, made.notes + describe_data(found), [one.fingerprint() for one in whole]

    return begun


def same(one: Any, other: Any) -> bool:
    """Whether two splits have equal examples in equal order."""
    return [InMemory([one[at]]).fingerprint() for at in range(len(one))] == [
        InMemory([other[at]]).fingerprint() for at in range(len(other))
    ]


def forbid(monkeypatch: pytest.MonkeyPatch, *places: tuple[Any, str]) -> None:
    for owner, name in places:
        monkeypatch.setattr(
            owner, name, lambda *_, name=name, **__: pytest.fail(f"{name}: it is known")
        )


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=12), st.integers(1, 9))
def test_rows_without_marks_are_those_of_a_plain_loop(rows: list[list[int]], piece: int) -> None:
    offsets = np.cumsum([0, *map(len, rows)])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cached_arrays, "_VALUES_AT_ONCE", piece)
        found = rows_without_marks(np.array([*chain.from_iterable(rows)], dtype=np.uint16), offsets)
    assert found.tolist() == [number for number, row in enumerate(rows) if not any(row[1:])]


def test_texts_come_back() -> None:
    texts = ["", "ä\0", "b ", "\ud800"]
    assert array_to_texts(texts_to_array(texts)) == texts


CHATS = [
    {"prompt": "the cat " * length, "completion": "sat on a mat"}
    for length in (1, 9, 2, 3, 1, 9, 4, 2)
]


@pytest.mark.parametrize("packed", [False, True])
def test_a_warm_start_reads_no_targets_and_packs_nothing(
    start: Any, cache: Path, packed: bool
) -> None:
    options = {"packing": packed, "overlong_rows": "drop", "max_length": 16}
    cold = start("sft", CHATS, **options)
    assert any("left out" in note for note in cold[2])
    with pytest.MonkeyPatch.context() as patched:
        places = [
            (examples.Examples, "_fingerprint"),
            (data_facts, "_count_members"),
            (packing.Packed, "_fingerprint"),
        ]
        forbid(
            patched,
            *places,
            (packing, "best_fit"),
            (chat_task, "rows_without_marks"),
            (examples, "write_ids"),
        )
        warm = start("sft", CHATS, **options)
    assert warm[1:] == cold[1:]
    assert same(cold[0].train, warm[0].train)
    if not packed:
        return
    blocks = [cold[0].train[number] for number in range(len(cold[0].train))]
    (order,) = cache.glob("packing/*/order.npy")
    order.write_bytes(order.read_bytes()[:-1] + b"\7")
    pop_discard_messages()
    again = start("sft", CHATS, **options)
    assert any(
        "packing" in told and "order.npy has changed" in told for told in pop_discard_messages()
    )
    assert again[1:] == cold[1:]
    assert same(blocks, again[0].train)


def test_other_rows_are_other_targets(start: Any) -> None:
    start("sft", CHATS, overlong_rows="drop", max_length=16)
    with pytest.raises(ConfigError, match=r"row 2 of data\.train has .* tokens, and its prompt"):
        start("sft", CHATS, max_length=16)
    made, _, notes, _ = start("sft", CHATS[:1], max_length=16)
    assert len(made.train) == 1
    assert not any("left out" in note for note in notes)


SETS = {"problem_type": "multi_label_classification"}
LABELLED = [
    {
        "text": text,
        "label": label,
        "target": "mat",
        "tags": [str(label), "x"][: label - 1],
        "two": label == 2,
        "ten": 1,
        "words": text.split(),
        "marks": list("xy")[: len(text.split())],
    }
    for text, label in (("the cat", 2), (" ", 10), ("Anna", 2), ("Bob", 10), ("", 1))
]


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("sequence_classification", {}),
        ("sequence_classification", {"problem_type": "regression"}),
        ("sequence_classification", {**SETS, "label_column": "tags"}),
        ("sequence_classification", {**SETS, "label_columns": ["ten", "two"]}),
        ("seq2seq_lm", {}),
        ("token_classification", {"label_column": "marks", "text_column": "words"}),
    ],
)
def test_a_warm_start_reads_no_rows(start: Any, task: str, options: dict[str, Any]) -> None:
    cold = start(task, LABELLED, **options)
    if task == "sequence_classification":
        assert "data.train: 2 of 5 rows have no text in column text" in cold[2]
        labels: Any = {"regression": [2, 10, 2, 10, 1], None: [1, 2, 1, 2, 0]}.get(
            options.get("problem_type")
        )
        if "label_column" in options:  # 10, 2, x
            labels = [[0, 1, 0], [1, 0, 1], [0, 1, 0], [1, 0, 1], [0, 0, 0]]
        if "label_columns" in options:
            labels = [[1, 1], [1, 0], [1, 1], [1, 0], [1, 0]]
        assert [cold[0].train[number]["labels"].tolist() for number in range(5)] == labels
    from datasets import Dataset

    reads: list[Any] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Dataset, "iter", lambda self, batch_size: pytest.fail("rows are known"))
        getitem = Dataset.__getitem__
        patched.setattr(
            Dataset, "__getitem__", lambda self, key: reads.append(key) or getitem(self, key)
        )
        warm = start(task, LABELLED, **options)
    assert all(isinstance(key, slice) and key.stop <= 100 for key in reads), (
        "the first rows, for the kinds of columns"
    )
    assert warm[1:] == cold[1:]
    assert same(cold[0].train, warm[0].train)


def test_what_is_wrong_is_told_again(start: Any) -> None:
    missing = [*LABELLED, {"text": "a", "label": None, "target": ""}]
    for task, said in (
        ("sequence_classification", "row 6 has no value in column label"),
        ("seq2seq_lm", "no text in"),
    ):
        for _ in range(2):
            with pytest.raises(ConfigError, match=said):
                start(task, missing)
