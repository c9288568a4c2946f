"""What people really hand over: odd csv, odd json, odd names.

Nothing is guessed, nothing is dropped in silence.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optrun.base.errors import ConfigError
from optrun.data import cache as cache_module
from optrun.data.cache import pop_discard_messages
from optrun.data.formats import check_file, format_of
from tests.running import read_files


def rows(path: Path, *, documents: bool = False) -> dict[str, list[Any]]:
    return dict(read_files("data.train", str(path), documents=documents)[:])


def refusal(path: Path | str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_files("data.train", str(path), documents=False)
    return str(caught.value)


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_csv_fields_are_texts_as_they_stand(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.csv",
        'text,label\nNA,007\n"a ""q"" b",null\n"x\ny",None\n5" disk,1.0\n,nan\n"",True\n',
    )
    assert rows(path) == {
        "text": ["NA", 'a "q" b', "x\ny", '5" disk', None, None],
        "label": ["007", "null", "None", "1.0", "nan", "True"],
    }


def test_tsv_fields_keep_their_quotes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", 'text\tlabel\n"a\t1\nsay "b" now\t2\n')
    assert rows(path) == {"text": ['"a', 'say "b" now'], "label": ["1", "2"]}


def test_byte_order_mark_crlf_and_empty_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b"\xef\xbb\xbftext,label\r\na,1\r\n\r\nb,2\r\n")
    assert rows(path) == {"text": ["a", "b"], "label": ["1", "2"]}


@pytest.mark.parametrize(
    ("ending", "squeeze"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)]
)
@pytest.mark.parametrize("kind", ["csv", "jsonl", "txt"])
def test_compressed(tmp_path: Path, kind: str, ending: str, squeeze: Any) -> None:
    plain = {"csv": "text\na\n", "jsonl": '{"text": "a"}\n', "txt": "a\n"}[kind]
    assert rows(write(tmp_path / f"a.{kind}.{ending}", squeeze(plain.encode()))) == {"text": ["a"]}


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.tuples(
            st.text(
                st.characters(exclude_categories=("Cs",), exclude_characters="\x00\r"), min_size=1
            ),
            st.text("abc,\"\n' ", min_size=1),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_csv_reads_what_csv_wrote(tmp_path: Path, table: list[tuple[str, str]]) -> None:
    out = io.StringIO(newline="")
    writer = csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow(["text", "label"])
    writer.writerows(table)
    path = write(tmp_path / "a.csv", out.getvalue())
    assert rows(path) == {
        "text": [first for first, _ in table],
        "label": [second for _, second in table],
    }


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", "", "the file is empty"),
        ("a.csv", "\n\n", "no header line"),
        ("a.csv", "text,label\n", "no rows"),
        ("a.csv", "text,label\na,b,1\n", "Expected 2 columns, got 3"),
        ("a.csv", "text,label\na\n", "Expected 2 columns, got 1"),
        ("a.csv", 'text,label\n"unclosed,1\nb,2\n', "cannot be read as csv"),
        ("a.csv", "text,text\na,1\n", "two columns are called 'text'"),
        ("a.csv", b"text,label\n\x81,1\n", "not UTF-8"),
        ("a.csv", "text,label\na\0,1\n".encode("utf-16"), "zero bytes"),
        ("a.csv.gz", b"\x1f\x8b not gzip", "cannot be read as csv"),
        ("a.jsonl.gz", b"\x1f\x8b not gzip", "cannot be read as json"),
        ("a.json", "[]", "no rows"),
        ("a.json", "3", "cannot be read as json"),
        ("a.jsonl", '{"text": "a"}\n{"text":', "cannot be read as json"),
        ("a.txt", b"\x8f\n", "not UTF-8"),
        ("a.parquet", b"junk", "cannot be read as parquet"),
        ("a.xyz", "x", "unknown format"),
        ("noending", "x", "unknown format"),
    ],
)
def test_refusals_name_the_file(tmp_path: Path, name: str, content: str | bytes, said: str) -> None:
    message = refusal(write(tmp_path / name, content))
    assert said in message
    assert str(tmp_path / name) in message
    assert "\n" not in message


def test_json_in_its_forms(tmp_path: Path) -> None:
    listed = write(
        tmp_path / "a.json",
        json.dumps([{"text": "a", "label": True}, {"text": "b", "label": False}]),
    )
    assert rows(listed) == {"text": ["a", "b"], "label": [True, False]}
    lines = write(
        tmp_path / "a.jsonl", '{"text": "a", "label": 1}\n\n{"text": null, "label": 2.5}\n'
    )
    assert rows(lines) == {"text": ["a", None], "label": [1.0, 2.5]}
    words = write(
        tmp_path / "b.jsonl", '{"tokens": ["a", "b"], "tags": [0, 1]}\n{"tokens": [], "tags": []}\n'
    )
    assert rows(words) == {"tokens": [["a", "b"], []], "tags": [[0, 1], []]}


def test_text_by_line_and_as_one_document(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbfab\r\n\r\ncd\x0be\n")
    assert rows(path) == {"text": ["ab", "", "cd\x0be"]}
    (whole,) = rows(path, documents=True)["text"]
    assert whole.split() == ["ab", "cd", "e"]


def test_parquet_keeps_declared_labels(tmp_path: Path) -> None:
    from datasets import ClassLabel, Dataset, Features, Value

    features = Features({"text": Value("string"), "label": ClassLabel(names=["no", "yes"])})
    Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features).to_parquet(
        str(tmp_path / "a.parquet")
    )
    read = read_files("data.train", str(tmp_path / "a.parquet"), documents=False)
    assert read.features["label"].names == ["no", "yes"]


def test_lists_and_globs_in_order_and_once(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write(tmp_path / f"{name}.txt", f"{name}\n")
    given = [str(tmp_path / "c.txt"), str(tmp_path / "*.txt")]
    assert read_files("data.train", given, documents=False)["text"][:] == ["c", "a", "b"]


def test_a_name_with_brackets_is_a_name(tmp_path: Path) -> None:
    assert rows(write(tmp_path / "a[1].txt", "x\n")) == {"text": ["x"]}
    assert rows(write(tmp_path / "a[1].csv", "t\nx\n")) == {"t": ["x"]}


def test_no_such_file_says_what_is_near(tmp_path: Path) -> None:
    for name in ("train.csv", "empty.csv", "dev.csv"):
        write(tmp_path / name, "text\na\n")
    assert f"Did you mean {tmp_path / 'train.csv'}?" in refusal(tmp_path / "trian.csv")
    assert "no file matches this glob" in refusal(tmp_path / "*.tsv")
    assert "this is a folder" in refusal(tmp_path)


def test_formats_are_not_mixed_and_columns_agree(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", "text,label\na,1\n")
    write(tmp_path / "b.csv", "label,text\n1,a\n")
    write(tmp_path / "c.txt", "a\n")
    with pytest.raises(ConfigError, match="several formats"):
        read_files(
            "data.train", [str(tmp_path / "a.csv"), str(tmp_path / "c.txt")], documents=False
        )
    with pytest.raises(ConfigError, match="same columns"):
        read_files(
            "data.train", [str(tmp_path / "a.csv"), str(tmp_path / "b.csv")], documents=False
        )


def test_changed_content_is_read_anew_though_size_and_time_are_the_same(tmp_path: Path) -> None:
    for name, first, second in (("a.csv", "t\naa\n", "t\nbb\n"), ("a.txt", "aa\n", "bb\n")):
        path = write(tmp_path / name, first)
        os.utime(path, (1, 1))
        before = rows(path)
        write(path, second)
        os.utime(path, (1, 1))
        assert rows(path) != before


@pytest.mark.parametrize("harm", ["flipped", "cut"])
@pytest.mark.parametrize(
    ("name", "content"), [("a.csv", "text\nthe cat\n"), ("a.jsonl", '{"text": "the cat"}\n')]
)
def test_damaged_rows_in_the_cache_are_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str, harm: str
) -> None:
    """One flipped bit made another text of it; a cut file was put down to the user's own."""
    monkeypatch.setenv("OPTRUN_CACHE", str(tmp_path / "cache"))
    (tmp_path / name).write_text(content)
    assert rows(tmp_path / name) == {"text": ["the cat"]}
    pop_discard_messages()
    (kept,) = (tmp_path / "cache").rglob("*.arrow")
    whole = kept.read_bytes()
    kept.write_bytes(
        whole.replace(b"the cat", b"the bat") if harm == "flipped" else whole[: len(whole) // 2]
    )
    assert rows(tmp_path / name) == {"text": ["the cat"]}
    assert kept.name in pop_discard_messages()[0]


def test_a_cache_that_cannot_be_written_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = write(tmp_path / "a_file", "in the way")
    monkeypatch.setenv("OPTRUN_CACHE", str(blocked / "cache"))
    assert rows(write(tmp_path / "a.csv", "t\nx\n")) == {"t": ["x"]}
    assert rows(write(tmp_path / "a.jsonl", '{"t": "x"}\n')) == {"t": ["x"]}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", b"caf\x81\n"),
        ("a.jsonl", b"<!DOCTYPE html>\n"),
        ("a.csv", b'{"a": 1}\n'),
    ],
)
def test_a_refusal_is_looked_up_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes
) -> None:
    """A later optrun may read what this one refuses; that a file is fine is known."""
    monkeypatch.setenv("OPTRUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache_module, "YOUNG_SECONDS", -1)
    path, asked = write(tmp_path / name, content), []
    kind = format_of("data.train", path, None)
    with pytest.raises(ConfigError):
        check_file("data.train", path, kind)
    fine = replace(kind, check=lambda *_: asked.append(1) or ("utf-8", ""))
    for _ in range(3):
        check_file("data.train", path, fine)
    assert len(asked) == 1


def test_what_another_package_reads_is_read_anew_by_another_version_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTRUN_CACHE", str(tmp_path / "cache"))
    paths = [write(tmp_path / "a.csv", "text\nx\n"), write(tmp_path / "a.jsonl", '{"text": "x"}\n')]
    for name in ("one", "other"):
        monkeypatch.setattr(cache_module, "version", lambda _, name=name: name)
        for path in paths:
            rows(path)
    assert len(list(tmp_path.glob("cache/rows/*"))) == 4


@pytest.mark.parametrize(
    ("name", "lines", "row"),
    [
        ("a.csv", ["text,label", "a,x", "b,y", "c,d,e"], 3),
        ("a.csv", ["text,label", '"a\nb",x', "", "b,y", "c,d,e", "f,g"], 3),
        ("a.tsv", ["text\tlabel", "a\tx", "b\ty\tz"], 2),
        ("a.jsonl", ['{"text": "a"}', '{"text": "b"}', '{"text" "c"}', '{"text": "d"}'], 3),
        ("a.jsonl", ['{"text": "a"}', "", "3"], 2),
        ("a.jsonl", ['{"text": "a"}', '["text", "b"]'], 2),
    ],
)
def test_a_broken_row_is_counted_from_1_without_the_line_of_names(
    name: str, lines: list[str], row: int, tmp_path: Path
) -> None:
    said = refusal(write(tmp_path / name, "\n".join(lines) + "\n"))
    assert re.search(rf"data.train=.*{name}: .*\brow {row}\b", said), said


def test_the_endings_that_are_known_are_those_that_are_read(tmp_path: Path) -> None:
    said = refusal(write(tmp_path / "a.xyz", "x"))
    for ending in (".csv", ".tsv", ".jsonl", ".parquet", ".txt", ".gz", ".bz2", ".xz", ".zst"):
        assert ending in said


DEEP = b"[" * 200_000 + b"]" * 200_000


@pytest.mark.parametrize(
    ("name", "deep", "text"),
    [
        ("a.jsonl", DEEP, b'\\"[' * 400_000),
        ("a.jsonl", DEEP[:300_000], b""),
        ("a.json.gz", b'{"a":' * 100_000, b'\\"[' * 400_000),
    ],
)
def test_json_that_is_nested_too_deeply(
    tmp_path: Path, name: str, deep: bytes, text: bytes
) -> None:
    content = b'{"text": "' + text + b'"}\n{"text": ' + deep + b"}\n"
    path = write(tmp_path / name, gzip.compress(content, 1) if name.endswith("gz") else content)
    assert "row 2 is not JSON: too many brackets within brackets" in refusal(path)


def test_brackets_in_texts_are_no_depth(tmp_path: Path) -> None:
    texts = ["[" * 999, '\\"{[' * 400_000, "\\" * 1_100_001, "]}" * 999, "[" * 999]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert rows(path)["text"] == texts


def test_a_packed_file_without_its_ending_is_read_in_its_encoding(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.csv", gzip.compress("text,label\n\u201che\u201d,b\n".encode("cp1252"))
    )
    assert rows(path) == {"text": ["\u201che\u201d"], "label": ["b"]}
