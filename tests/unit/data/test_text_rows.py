"""Texts as rows: what tasks ask of a Dataset, answered alike and without importing datasets."""

from __future__ import annotations

import copy
import sys

import numpy as np
import pytest
from datasets import Dataset

from optrun.config.choice import choice
from optrun.config.schema.data import SCHEMAS
from optrun.data.build import load_source
from optrun.data.columns import text_column, texts
from optrun.data.stdlib import stdlib_files
from optrun.data.text_rows import TextRows

TEXTS = ["a\n", "", "ü", "d", "7"]


@pytest.mark.parametrize(
    "ask",
    [
        len,
        list,
        lambda rows: list(rows["text"]),
        lambda rows: (rows[0], rows[-1], rows[1:3], rows[[3, 0]]),
        lambda rows: list(rows.select(np.array([4, 0]))["text"]),
        lambda rows: list(rows.select([])),
        lambda rows: rows.select_columns(["text"])[:100]["text"],
        lambda rows: list(rows.iter(batch_size=2)),
        lambda rows: (rows.column_names, list(rows.features), rows.features["text"].dtype),
        lambda rows: list(rows.map(lambda row: {"length": len(row["text"])})["length"]),
        lambda rows: list(copy.deepcopy(rows)),
    ],
)
def test_rows_answer_as_a_dataset_does(ask: object) -> None:
    assert callable(ask)
    assert ask(TextRows(TEXTS)) == ask(Dataset.from_dict({"text": TEXTS}))


def test_rows_refuse_as_a_dataset_does() -> None:
    for rows in (TextRows(TEXTS), Dataset.from_dict({"text": TEXTS})):
        with pytest.raises(IndexError):
            rows[len(TEXTS)]
        with pytest.raises((KeyError, ValueError), match="no"):
            rows["no"]
        with pytest.raises(ValueError, match="no"):
            rows.select_columns(["no"])


def test_the_default_data_are_read_without_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    few = stdlib_files()[::50]
    monkeypatch.setattr("optrun.data.stdlib.stdlib_files", lambda: few)
    monkeypatch.setitem(sys.modules, "datasets", None)  # an import of it fails
    with pytest.raises(ImportError):
        import datasets  # noqa: F401
    made = load_source(choice("data", SCHEMAS, "stdlib", {}), seed=0, documents=True)
    assert list(texts(made.train, text_column(made, made.train)))
