"""The sentence below the figures of classes says which of them the metric f1 is."""

from __future__ import annotations

import numpy as np
import pytest

from optrun.runner.class_tables import explain_f1, figures_table
from optrun.task.class_table import table_of_classes, table_of_counts


@pytest.mark.parametrize(
    ("labels", "meaning"),
    [
        (["ham", "spam"], "eval/f1 is the f1 of spam, the second class"),
        (["a", "b", "c"], "eval/f1 is the macro mean: every class counts the same"),
    ],
)
def test_f1_of_classes(labels: list[str], meaning: str) -> None:
    table = figures_table(table_of_classes(labels, np.eye(len(labels), dtype=int)))
    assert explain_f1(table) == meaning


def test_f1_of_entities() -> None:
    table = figures_table(table_of_counts("entity", ["PER", "LOC"], np.ones((3, 2), dtype=int)))
    assert explain_f1(table) == "eval/f1 is the micro mean: all entities are counted together"
