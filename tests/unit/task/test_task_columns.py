"""Each column of the rows changes the examples, or is named once as not read, for every task."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from datasets import Dataset
from PIL import Image

from optrun.base.errors import ConfigError
from optrun.config.choice import choice
from optrun.config.schema.data import SCHEMAS as DATA
from optrun.config.schema.task import SCHEMAS as TASKS
from optrun.data.build import load_source
from optrun.data.source import Source
from optrun.task import Task
from tests.unit.task.conftest import SENTENCE

Row = dict[str, Any]
WORDS = SENTENCE.split()
COUNT = 12
KINDS = ["csv", "tsv", "json", "jsonl", "parquet", "arrow", "streamed jsonl", "streamed parquet"]
CHATML = {"chat_template": "chatml"}
BESIDE: Row = {"id": 7, "url": "http", "meta": {"lang": "en"}, "scores": [0.5], "weight": 1.0}
"""Columns that people have beside those of any task."""


def words(number: int, first: int = 0) -> str:
    return " ".join(WORDS[(first + number + place) % len(WORDS)] for place in range(4))


def turn(role: str, text: str) -> Row:
    return {"role": role, "content": text}


def chat(number: int) -> list[Row]:
    return [turn("user", words(number)), turn("assistant", words(number, 5))]


def shared(number: int) -> list[Row]:
    return [
        {"from": "human", "value": words(number)},
        {"from": "gpt", "value": words(number, 5)},
    ]


# case: task, its options, options of the data, a row
CASES: dict[str, tuple[str, Row, Row, Callable[[int], Row]]] = {
    "texts": ("causal_lm", {}, {}, lambda n: {"text": words(n)}),
    "a text by its key": (
        "causal_lm",
        {},
        {"text_column": "body"},
        lambda n: {"body": words(n), "title": words(n, 3)},
    ),
    "masked": ("masked_lm", {}, {}, lambda n: {"text": words(n)}),
    "classes": (
        "sequence_classification",
        {},
        {},
        lambda n: {"text": words(n), "label": "ab"[n % 2]},
    ),
    "pairs of texts": (
        "sequence_classification",
        {},
        {"text_column": "premise", "text_pair_column": "hypothesis"},
        lambda n: {"premise": words(n), "hypothesis": words(n, 3), "label": "ab"[n % 2]},
    ),
    "several labels": (
        "sequence_classification",
        {"problem_type": "multi_label_classification"},
        {},
        lambda n: {"text": words(n), "labels": ["a", "b"] if n % 2 else ["a"]},
    ),
    "a column for each label": (
        "sequence_classification",
        {"problem_type": "multi_label_classification"},
        {"label_columns": ["bad", "rude"]},
        lambda n: {"text": words(n), "bad": n % 2, "rude": n % 3 % 2},
    ),
    "numbers": (
        "sequence_classification",
        {"problem_type": "regression"},
        {},
        lambda n: {"text": words(n), "label": n / 7},
    ),
    "tags": (
        "token_classification",
        {},
        {},
        lambda n: {"tokens": words(n).split(), "tags": ["O", "B-X", "O", "O"]},
    ),
    "targets": ("seq2seq_lm", {}, {}, lambda n: {"text": words(n), "target": words(n, 4)}),
    "turns": ("sft", CHATML, {}, lambda n: {"messages": chat(n), "system": words(n, 8)}),
    "ShareGPT": ("sft", CHATML, {}, lambda n: {"conversations": shared(n), "system": words(n, 8)}),
    "Alpaca": (
        "sft",
        CHATML,
        {},
        lambda n: {
            "instruction": words(n),
            "output": words(n, 2),
            "input": words(n, 3),
            "system": words(n, 8),
            "history": [[words(n, 4), words(n, 6)]],
        },
    ),
    "prompt and completion": (
        "sft",
        CHATML,
        {},
        lambda n: {"prompt": words(n), "completion": words(n, 2)},
    ),
    "preferences": (
        "preference",
        CHATML,
        {},
        lambda n: {
            "prompt": [turn("user", words(n))],
            "chosen": [turn("assistant", words(n, 2))],
            "rejected": [turn("assistant", words(n, 3))],
            "system": words(n, 8),
        },
    ),
    "compared": (
        "embedding",
        {},
        {},
        lambda n: {"anchor": words(n), "positive": words(n, 2), "negative": words(n, 5)},
    ),
    "compared by a score": (
        "embedding",
        {"loss": "cosent"},
        {},
        lambda n: {"sentence1": words(n), "sentence2": words(n, 2), "score": n / COUNT},
    ),
}


def changed(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, dict):
        return {key: changed(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [changed(item) for item in value]
    if isinstance(value, str):
        swaps = {"a": "b", "b": "a", "O": "B-X", "B-X": "O"}
        fixed = ("user", "assistant", "human", "gpt")
        return value if value in fixed else swaps.get(value, f"{value} things")
    return 1 - value if value in (0, 1) else value / 2


def examples_of(
    make_task: Callable[..., Task], make_source: Callable[..., Source], case: str, rows: list[Row]
) -> tuple[str, list[str]]:
    """The digest of all examples, and what is told."""
    name, options, data, _ = CASES[case]
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    source = make_source(columns, max_length=256, **data)
    task = make_task(name, source, **options)
    assert len(task.train) > 0
    return task.train.fingerprint() + task.eval.fingerprint(), source.notes


@pytest.mark.parametrize("case", CASES)
def test_each_column_is_read_or_named(
    make_task: Callable[..., Task], make_source: Callable[..., Source], case: str
) -> None:
    """Beside the task's own columns stand those that people have for other purposes."""
    rows = [{**CASES[case][3](number), **BESIDE} for number in range(COUNT)]
    before, notes = examples_of(make_task, make_source, case, rows)
    told = [note for note in notes if "not read" in note]
    assert len(told) == 1, notes
    unread = told[0].partition(": not read by ")[2].partition(": ")[2].split(", ")
    assert set(unread) >= set(BESIDE)
    for column in rows[0]:
        others = [dict(row) for row in rows]
        others[0][column] = changed(others[0][column])
        try:
            after, _ = examples_of(make_task, make_source, case, others)
        except ConfigError:  # a value that this column must not have
            is_read = True
        else:
            is_read = after != before
        assert is_read == (column not in unread), column


def test_nothing_is_said_if_all_is_read(
    make_task: Callable[..., Task], make_source: Callable[..., Source]
) -> None:
    for case, (_, _, _, row) in CASES.items():
        if case == "a text by its key":
            continue
        _, notes = examples_of(make_task, make_source, case, [row(number) for number in range(9)])
        assert not [note for note in notes if "not read" in note], case


def written(kind: str, rows: list[Row], folder: Path) -> Path:
    """Write rows as a file of a kind."""
    path = folder / f"rows.{kind}"
    table = Dataset.from_list(rows)
    if kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "parquet":
        table.to_parquet(path)
    elif kind == "arrow":
        with pa.ipc.new_file(path, table.data.table.schema) as writer:
            writer.write_table(table.data.table)
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with path.open("w", newline="") as file:
            delimiter = "\t" if kind == "tsv" else ","
            csv.writer(file, delimiter=delimiter).writerows(
                [list(rows[0]), *(row.values() for row in rows)]
            )
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_a_file_are_read_or_named(
    make_task: Callable[..., Task],
    make_source: Callable[..., Source],
    kind: str,
    tmp_path: Path,
) -> None:
    """Every format of files says the same as rows in memory, streamed or not."""
    streaming = kind.startswith("streamed ")
    kind = kind.removeprefix("streamed ")
    for case, (name, options, data, row) in CASES.items():
        sets = options.get("problem_type") == "multi_label_classification"
        if streaming and (sets or not TASKS[name].READS_STREAMS):
            continue  # refused before anything is read
        rows = [{**row(number), **BESIDE} for number in range(COUNT)]
        if kind in ("csv", "tsv"):
            rows = [{key: row[key] for key in row if key not in ("meta", "scores")} for row in rows]
            if any(isinstance(cell, list) for cell in rows[0].values()):
                continue  # a table has no lists
        _, notes = examples_of(make_task, make_source, case, rows)
        path = str(written(kind, rows, tmp_path))
        files = {"train": path, "eval": path, "max_length": 256, "streaming": streaming, **data}
        config = choice("data", DATA, "files", files)
        source = load_source(config, seed=0, documents=False)
        make_task(name, source, **options)
        told = [note.partition(": ")[2] for note in source.notes if "not read" in note]
        assert told == [note.partition(": ")[2] for note in notes if "not read" in note], case
        assert len(told) == 1, case


def test_columns_of_conll_are_read_or_named(make_task: Callable[..., Task], tmp_path: Path) -> None:
    """Those between a word and its tag are named by their numbers."""
    for beside, told in (
        ([], []),
        (["NN"], ["column 2 is not read"]),
        (["NN", "I-NP"], ["columns 2 to 3 are not read"]),
    ):
        path = tmp_path / f"{len(beside)}.conll"
        lines = [
            "".join(
                " ".join([word, *beside, "OB"[number % 2]]) + "\n" for word in words(number).split()
            )
            for number in range(COUNT)
        ]
        path.write_text("\n".join(lines))
        files = {"train": str(path), "eval": str(path), "max_length": 256}
        source = load_source(choice("data", DATA, "files", files), seed=0, documents=False)
        make_task("token_classification", source)
        notes = [note for note in source.notes if "not read" in note]
        assert [note.partition(": ")[2].partition(":")[0] for note in notes] == 2 * told


def test_columns_beside_images_are_named(
    make_task: Callable[..., Task], make_source: Callable[..., Source]
) -> None:
    pictures = [Image.new("RGB", (8, 8), (20 * number, 0, 0)) for number in range(COUNT)]
    columns = {key: [value] * COUNT for key, value in BESIDE.items()}
    labels = ["ab"[number % 2] for number in range(COUNT)]
    source = make_source({"image": pictures, "label": labels, **columns}, image_column="image")
    make_task("image_classification", source)
    told = [note for note in source.notes if "not read" in note]
    assert len(told) == 1
    assert told[0].endswith(": " + ", ".join(BESIDE))
