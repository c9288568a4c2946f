"""A law: every cell's text is what the file says, in every format, streamed or not."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from optrun.config.schema.data import FilesConfig
from optrun.data.build import load_source
from optrun.data.columns import cell_text, texts
from optrun.data.stream import StreamRows

WORDS = [
    "2024-03-01",
    "2024-03-01T10:00:00Z",
    "2024-03-01 10:00:00+02:00",
    "10:30",
    "007",
    "1e5",
    "1_0",
    "0x10",
    "1.50",
    "NA",
    "null",
    "None",
    "nan",
    "true",
    "False",
    "inf",
    "a\u2028b",
    "a\x85b\x0bc\x0cd\x1ce",
    "#win=free",
    "# id = 1",
    "café \U0001f600",
    "cafe\u0301",
    "10\u00a0000",
    "a\\nb",
    '"quoted"',
    "'single'",
    "[1, 2]",
    '{"a": 1}',
    "=SUM(A1)",
    "${HOME}",
    " spaces around ",
]
PER_LINE = ["\\", "a\\"]
"""Texts of formats without quotes."""
LINES = ["a\nb", "a\r\nb", 'say "x", y', "a\tb", ""]
"""Texts that need quotes."""


def csv_of(words: list[str]) -> bytes:
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([["text", "label"], *([word, "x"] for word in words)])
    return out.getvalue().encode()


def tsv_of(words: list[str]) -> bytes:
    return (
        "".join(f"{word}\tx\n" for word in ["text", *words])
        .replace("text\tx", "text\tlabel")
        .encode()
    )


def jsonl_of(words: list[str]) -> bytes:
    rows = [{"text": word, "label": "x"} for word in words]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def json_of(words: list[str]) -> bytes:
    return json.dumps([{"text": word, "label": "x"} for word in words], indent=2).encode()


def parquet_of(words: list[str]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"text": words, "label": ["x"] * len(words)}), out)
    return out.getvalue()


def arrow_of(words: list[str]) -> bytes:
    out = io.BytesIO()
    table = pa.table({"text": words, "label": ["x"] * len(words)})
    with pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()


def lines_of(words: list[str]) -> bytes:
    return "".join(f"{word}\n" for word in words).encode()


FORMATS: dict[str, tuple[str, Callable[[list[str]], bytes], list[str]]] = {
    "csv": (".csv", csv_of, WORDS + LINES),
    "tsv": (".tsv", tsv_of, WORDS + PER_LINE),
    "jsonl": (".jsonl", jsonl_of, WORDS + PER_LINE + LINES),
    "json": (".json", json_of, WORDS + PER_LINE + LINES),
    "parquet": (".parquet", parquet_of, WORDS + PER_LINE + LINES),
    "arrow": (".arrow", arrow_of, WORDS + PER_LINE + LINES),
    "text": (".txt", lines_of, WORDS + PER_LINE),
}
STREAMED = ("jsonl", "parquet")


@pytest.mark.parametrize("kind", FORMATS)
def test_a_text_is_what_the_file_says(kind: str, tmp_path: Path) -> None:
    ending, write, words = FORMATS[kind]
    path = tmp_path / f"a{ending}"
    path.write_bytes(write(words))
    config = FilesConfig(name="files", train=str(path), eval=None, eval_fraction=0)
    split = load_source(config, seed=0, documents=False).train
    assert list(texts(split, "text")) == words


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("kind", FORMATS)
def test_a_column_of_one_text_is_a_column_of_texts(kind: str, word: str, tmp_path: Path) -> None:
    """Readers that infer types look at whole columns: each text alone, ten times."""
    ending, write, words = FORMATS[kind]
    if word not in words:
        pytest.skip("this format has no such text")
    path = tmp_path / f"a{ending}"
    path.write_bytes(write([word] * 10))
    config = FilesConfig(name="files", train=str(path), eval=None, eval_fraction=0)
    split = load_source(config, seed=0, documents=False).train
    assert list(texts(split, "text")) == [word] * 10


@pytest.mark.parametrize("words", [WORDS + LINES, *([word] * 3 for word in WORDS[:12])])
@pytest.mark.parametrize("kind", STREAMED)
def test_a_streamed_text_is_what_the_file_says(kind: str, words: list[str], tmp_path: Path) -> None:
    ending, write, _ = FORMATS[kind]
    path = tmp_path / f"a{ending}"
    path.write_bytes(write(words))
    config = FilesConfig(name="files", train=str(path), eval=None, eval_fraction=0, streaming=True)
    rows = load_source(config, seed=0, documents=False).train.rows
    assert isinstance(rows, StreamRows)
    assert rows.features["text"].dtype == "string"
    assert [cell_text(row, "text") for row in rows] == words


def test_nested_cells_are_what_the_file_says(tmp_path: Path) -> None:
    """Keys that a turn lacks are not added to it, and numbers keep their digits."""
    cells = [
        [{"role": "user", "content": "2024-03-01"}, {"role": "assistant", "content": "007"}],
        [
            {"role": "user", "content": "x", "weight": 0},
            {"arguments": {"id": 2**70, "x": 0.1 + 0.2}},
        ],
        [{"arguments": {"id": "one"}}, None, [[1], []]],
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"messages": cell}) + "\n" for cell in cells))
    for streaming in (False, True):
        config = FilesConfig(
            name="files", train=str(path), eval=None, eval_fraction=0, streaming=streaming
        )
        rows = load_source(config, seed=0, documents=False).train.rows
        assert [row["messages"] for row in rows] == cells


def test_words_of_conll_are_what_the_file_says(tmp_path: Path) -> None:
    words = [word for word in WORDS if " " not in word]
    path = tmp_path / "a.conll"
    path.write_text(
        "# id = 1\n" + "".join(f"{word} O\n" for word in words) + "\n#\tO\n#a\tO\n", newline=""
    )
    config = FilesConfig(name="files", train=str(path), eval=None, eval_fraction=0)
    source = load_source(config, seed=0, documents=False)
    assert source.train.rows["tokens"][:] == [words, ["#", "#a"]]
    assert any("1 lines of comments left out" in note for note in source.notes)
