"""Tables in files of Excel."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from optrun.base.errors import ConfigError
from tests.unit.data.test_formats import read, zipped


def workbook(path: Path, *sheets: list[list[Any]]) -> Path:
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    for number, rows in enumerate(sheets):
        sheet = book.active if number == 0 else book.create_sheet()
        for row in rows:
            sheet.append(row)
    book.save(path)
    return path


def test_a_workbook(tmp_path: Path) -> None:
    path = workbook(
        tmp_path / "a.xlsx",
        [["text", "label"], ["007", 1], [None, None], ["b", 2.5], ["c", True]],
        [["x"]],
    )
    rows, notes = read(path, {})
    assert rows == {"text": ["007", "b", "c"], "label": ["1", "2.5", "True"]}
    assert "'Sheet', is read; 'Sheet1' are not" in notes
    assert read(workbook(tmp_path / "b.xlsx", [["a", 1]]), {"column_names": ["text", "label"]})[0][
        "text"
    ] == ["a"]


@pytest.mark.parametrize(
    ("rows", "facts"),
    [
        ([["text", None, "label"], ["a", "b", "c"]], ["names of the columns", "data.column_names"]),
        ([["text", "text"], ["a", "b"]], ["each once"]),
        ([["text"], ["a", "b"]], ["row 1", "more cells"]),
        (
            [["Reviews of May"], [], ["text", "label"], ["a", "b"]],
            ["'Reviews of May' alone", "a title, delete it"],
        ),
        ([["text"], ["=1+1"]], ["row 2", "formula without a value", "=1+1"]),
        ([], ["names of the columns"]),
    ],
)
def test_a_workbook_that_is_no_table(
    rows: list[list[Any]], facts: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        read(workbook(tmp_path / "a.xlsx", rows), {})
    assert [fact for fact in facts if fact not in str(refused.value)] == [], refused.value


def test_a_workbook_without_its_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    (tmp_path / "a.xlsx").write_bytes(zipped(xl__workbook_xml="x"))
    with pytest.raises(ConfigError, match=r"pip install 'optrun\[excel\]'"):
        read(tmp_path / "a.xlsx", {})
