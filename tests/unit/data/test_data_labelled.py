"""Data sets with labels that need no download.

Their rules, their splits, a package that is missing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from optrun.base.errors import ConfigError
from optrun.config.schema.data import SCHEMAS
from optrun.data.build import load_source
from optrun.data.source import Source
from optrun.data.stdlib_lines import kinds, logical_lines

CODE = '''\
"""A docstring stands on a line of its own, and is longer than a token may be."""
class Reader(Base):
    def read(self, size=1):  # in bytes
        if self.closed or not size:
            raise ValueError("closed")
        return self.file.read(size)
    x = 1
'''


def source(name: str, **values: object) -> Source:
    return load_source(SCHEMAS[name](name=name, **values), seed=0, documents=False)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Ten files, each with a line of its own besides those that all have."""
    files = [tmp_path / f"m{index}.py" for index in range(10)]
    for index, path in enumerate(files):
        path.write_text(f"{CODE}\ndef only_{index}(a): pass\nfrom here import m{index}\n")
    monkeypatch.setattr("optrun.data.stdlib.stdlib_files", lambda: files)
    return files


def test_kinds_of_tokens(library: list[Path]) -> None:
    found = {
        " ".join(token.string for token in line): kinds(line) for line in logical_lines(library[0])
    }
    assert found["class Reader ( Base ) :"] == [
        "keyword",
        "definition",
        "operator",
        "name",
        "operator",
        "operator",
    ]
    line = "def read ( self , size = 1 ) :  # in bytes"
    told = dict(zip(line.split()[:10], found[line.replace("  ", " ")], strict=False))
    assert (told["def"], told["read"], told["self"], told["1"]) == (
        "keyword",
        "definition",
        "name",
        "number",
    )
    assert found[line.replace("  ", " ")][-1] == "comment"
    line = "return self . file . read ( size )"
    assert found[line] == [
        "keyword",
        "name",
        "operator",
        "attribute",
        "operator",
        "call",
        "operator",
        "name",
        "operator",
    ]
    assert found['raise ValueError ( "closed" )'][3] == "string"
    assert not any("docstring" in text or text == "x = 1" for text in found), (
        "too long a token, too short a line"
    )


def test_a_file_that_is_no_python_ends_early(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("a = b + c\nd = (\n")
    assert [line[0].string for line in logical_lines(path)] == ["a"]


def test_tokens_and_statements(library: list[Path]) -> None:
    tokens = source("stdlib_tokens", eval_fraction=0.2)
    train, held = tokens.train.rows, tokens.eval_sets[""].rows
    assert [len(row["tokens"]) for row in train] == [len(row["labels"]) for row in train]
    own = [
        {row["tokens"][1] for row in rows if row["tokens"][1].startswith("only_")}
        for rows in (train, held)
    ]
    assert [len(names) for names in own] == [8, 2], "split by files, and each line stands once"
    assert not own[0] & own[1]
    statements = source("stdlib_statements", eval_fraction=0.2).train.rows
    assert {"text": "self . closed or not size :", "label": "if"} in list(statements)
    assert set(statements["label"]) == {"class", "def", "if", "raise", "return", "from"}
    assert len(source("stdlib_statements", eval_fraction=0).eval_sets[""].rows) == 0


def test_digits() -> None:
    digits = source("digits", eval_fraction=0.25)
    train, held = digits.train.rows, digits.eval_sets[""].rows
    assert (len(train), len(held)) == (1348, 449)
    assert set(train["label"]) == set(held["label"]) == set("0123456789")
    pixels = np.asarray(train[0]["image"])
    assert (pixels.shape, pixels.dtype, pixels.max()) == ((8, 8), np.uint8, 255)


def test_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigError, match=r"data=digits.*scikit-learn.*optrun\[benchmark\]"):
        source("digits")
