"""Files in the shapes that people have.

Each is read as it is meant, told, or refused in a sentence.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optrun.base.errors import ConfigError
from optrun.config.schema.data import FilesConfig
from optrun.data.build import load_source
from optrun.data.columns import label_column, text_column
from optrun.data.content import check_text
from optrun.data.data_keys import data_keys
from optrun.data.files import load_files
from optrun.data.formats import FORMATS, Format, format_of
from optrun.data.reading import Reading, ReadOptions
from optrun.data.shards import File, Lines, Opening
from optrun.data.stream import open_stream
from tests.running import read_files

COMMA = "text,label\nfine day,good\nbad day,poor\n"
ROWS = {"text": ["fine day", "bad day"], "label": ["good", "poor"]}
CAFE = "text,label\ncafé “one”,good\nthe naïve résumé,poor\n"
CAFE_ROWS = {"text": ["café “one”", "the naïve résumé"], "label": ["good", "poor"]}
LATIN = "text,label\nle café,good\nça va très bien,poor\n"
LATIN_ROWS = {"text": ["le café", "ça va très bien"], "label": ["good", "poor"]}
RUSSIAN = "text,label\nхороший день,good\nплохой день,poor\n"
LINES = '{"text": "fine day", "label": "good"}\n{"text": "bad day", "label": "poor"}\n'
CONLL = "-DOCSTART- O\n\nAnna B-PER\nsings O\n\n\nin O\nRome B-LOC\n"
TAGGED = {"tokens": [["Anna", "sings"], ["in", "Rome"]], "tags": [["B-PER", "O"], ["O", "B-LOC"]]}


def by(mark: str, text: str = COMMA) -> str:
    return text.replace(",", mark)


def zipped(**files: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name.replace("__", "/").replace("_", "."), content)
    return out.getvalue()


def zstd(text: str) -> bytes:
    import pyarrow

    return bytes(pyarrow.Codec("zstd").compress(text.encode(), asbytes=True))


def arrow(*, stream: bool) -> bytes:
    import pyarrow

    out, table = io.BytesIO(), pyarrow.table(ROWS)
    with (pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file)(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()


# what it is, name, bytes, what is said of it, the rows or words of the refusal, words of the note
Case = tuple[str, str, str | bytes, dict[str, Any], dict[str, list[Any]] | list[str], list[str]]
CASES: list[Case] = [
    ("commas", "a.csv", COMMA, {}, ROWS, []),
    ("semicolons", "a.csv", by(";"), {}, ROWS, ["separated by ';'", "data.delimiter"]),
    ("bars", "a.csv", by("|"), {}, ROWS, ["'|'"]),
    ("tabs called csv", "a.csv", by("\t"), {}, ROWS, ["'\\t'"]),
    ("tabs", "a.tsv", by("\t"), {}, ROWS, []),
    ("tabs called tab", "a.tab", by("\t"), {}, ROWS, []),
    ("commas called tsv", "a.tsv", COMMA, {}, ROWS, ["','"]),
    (
        "semicolons and commas in texts",
        "a.csv",
        "text;label\na, b;x\nc;y\n",
        {},
        {"text": ["a, b", "c"], "label": ["x", "y"]},
        ["';'"],
    ),
    (
        "commas in a quoted text",
        "a.csv",
        'text;label\n"a; b, c";x\n',
        {},
        {"text": ["a; b, c"], "label": ["x"]},
        ["';'"],
    ),
    (
        "semicolons in every comma row",
        "a.csv",
        "text;one,label\na;b,x\nc;d,y\n",
        {},
        {"text;one": ["a;b", "c;d"], "label": ["x", "y"]},
        ["every row has ';', too", "separates columns there"],
    ),
    (
        "two ways",
        "a.csv",
        "a;b|c\nd;e|f\n",
        {},
        ["several ways", """'data.delimiter=";"'""", """'data.delimiter="|"'"""],
        [],
    ),
    (
        "a way of two, said",
        "a.csv",
        "a;b|c\nd;e|f\n",
        {"delimiter": ";"},
        {"a": ["d"], "b|c": ["e|f"]},
        [],
    ),
    ("tab, said", "a.csv", "a\tb\nc,\td\n", {"delimiter": "tab"}, {"a": ["c,"], "b": ["d"]}, []),
    ("colons, said", "a.csv", by(":"), {"delimiter": ":"}, ROWS, []),
    ("what Excel says first", "a.csv", "sep=;\n" + by(";"), {}, ROWS, ["first line says"]),
    (
        "quotes as Spark and MySQL write them",
        "a.csv",
        r"""text,label
"he said \"hi, you\" 1",a
"\"",b
"a \\ \"b\"",a
""",
        {},
        {"text": ['he said "hi, you" 1', '"', r'a \ "b"'], "label": ["a", "b", "a"]},
        [r"written \""],
    ),
    (
        "a field that ends with a backslash",
        "a.csv",
        'text,label\n"C:\\dir\\",a\n"x ""y""",b\n',
        {},
        {"text": ["C:\\dir\\", 'x "y"'], "label": ["a", "b"]},
        [],
    ),
    ("text behind a quote", "a.csv", 'text,label\n"a" b,x\n', {}, ["row 1", "closing"], []),
    (
        "a line of names in the middle, behind a byte order mark and in another case",
        "a.csv",
        COMMA + "\ufeffText, LABEL\n" + COMMA.partition("\n")[2],
        {},
        {key: cells * 2 for key, cells in ROWS.items()},
        ["repeat the header are left out: 1"],
    ),
    (
        "a line of names in the middle",
        "a.csv",
        COMMA + COMMA,
        {},
        {key: cells * 2 for key, cells in ROWS.items()},
        ["repeat the header are left out: 1"],
    ),
    ("a single column", "a.csv", "text\na; b\nc\n", {}, {"text": ["a; b", "c"]}, []),
    (
        "semicolons, one row too wide",
        "a.csv",
        by(";") + "a;b;c\n",
        {},
        ["row 3", "2 columns, got 3", "';' needs quotes"],
        [],
    ),
    (
        "no line of names",
        "a.csv",
        "fine day,good\nbad day,poor\n",
        {"column_names": ["text", "label"]},
        ROWS,
        [],
    ),
    (
        "no line of names, semicolons",
        "a.csv",
        "fine day;good\nbad day;poor\n",
        {"column_names": ["text", "label"]},
        ROWS,
        ["';'"],
    ),
    (
        "no line of names, tabs",
        "a.tsv",
        "fine day\tgood\nbad day\tpoor\n",
        {"column_names": ["text", "label"]},
        ROWS,
        [],
    ),
    (
        "a name too many",
        "a.csv",
        COMMA,
        {"column_names": ["a", "b", "c"]},
        ["data.column_names", "2 columns"],
        [],
    ),
    ("a mark of UTF-8", "a.csv", b"\xef\xbb\xbf" + by(";").encode(), {}, ROWS, ["';'"]),
    ("UTF-16", "a.csv", CAFE.encode("utf-16"), {}, CAFE_ROWS, ["utf-16", "data.encoding"]),
    (
        "UTF-16, big end first, tabs",
        "a.tsv",
        b"\xfe\xff" + by("\t", CAFE).encode("utf-16-be"),
        {},
        CAFE_ROWS,
        ["utf-16"],
    ),
    (
        "UTF-16 without a mark",
        "a.csv",
        CAFE.encode("utf-16-le"),
        {},
        ["zero bytes", "data.encoding=utf-16-le"],
        [],
    ),
    (
        "UTF-16 without a mark, said",
        "a.csv",
        CAFE.encode("utf-16-le"),
        {"encoding": "utf-16-le"},
        CAFE_ROWS,
        [],
    ),
    ("UTF-32", "a.csv", CAFE.encode("utf-32"), {}, CAFE_ROWS, ["utf-32"]),
    ("cp1252", "a.csv", CAFE.encode("cp1252"), {}, CAFE_ROWS, ["cp1252", "line 2", "café “one”"]),
    (
        "cp1252, semicolons",
        "a.csv",
        by(";", CAFE).encode("cp1252"),
        {},
        CAFE_ROWS,
        ["cp1252", "';'"],
    ),
    (
        "Turkish",
        "a.csv",
        "text,label\nçok güzel şarkı,iyi\n".encode("cp1254"),
        {},
        ["not UTF-8", "as cp1252 it would be 'çok güzel þarký", "cp1254 (Turkish)"],
        [],
    ),
    (
        "Turkish that is named",
        "a.csv",
        "text,label\nçok güzel şarkı,iyi\n".encode("cp1254"),
        {"encoding": "cp1254"},
        {"text": ["çok güzel şarkı"], "label": ["iyi"]},
        [],
    ),
    (
        "Polish",
        "a.csv",
        "text,label\nżółw i pięć łódź,dobry\n".encode("cp1250"),
        {},
        ["not UTF-8", "cp1250 (Central Europe)"],
        [],
    ),
    ("Latin-1", "a.csv", LATIN.encode("latin-1"), {}, LATIN_ROWS, ["cp1252", "café"]),
    (
        "Latin-1, packed",
        "a.csv.gz",
        gzip.compress(LATIN.encode("latin-1")),
        {},
        LATIN_ROWS,
        ["cp1252"],
    ),
    (
        "cp1251",
        "a.csv",
        RUSSIAN.encode("cp1251"),
        {},
        ["not UTF-8", "data.encoding=", "cp1251 (Cyrillic)"],
        [],
    ),
    (
        "cp1251, said",
        "a.csv",
        RUSSIAN.encode("cp1251"),
        {"encoding": "cp1251"},
        {"text": ["хороший день", "плохой день"], "label": ["good", "poor"]},
        [],
    ),
    (
        "cp1250",
        "a.csv",
        "text,label\ngęsią złotą,good\n".encode("cp1250"),
        {},
        ["not UTF-8", "cp1250"],
        [],
    ),
    (
        "Mac Roman",
        "a.csv",
        "text,label\nun café très long,good\nles élèves,a\n".encode("mac-roman"),
        {},
        ["not UTF-8"],
        [],
    ),
    (
        "GB 18030",
        "a.csv",
        "text,label\n今天天气很好,good\n".encode("gb18030"),
        {},
        ["not UTF-8", "gb18030"],
        [],
    ),
    (
        "Shift JIS",
        "a.csv",
        "text,label\nとても良い,good\n".encode("shift_jis"),
        {},
        ["not UTF-8", "shift_jis"],
        [],
    ),
    (
        "GB 18030, said",
        "a.jsonl",
        '{"text": "天气"}\n'.encode("gb18030"),
        {"encoding": "gb18030"},
        {"text": ["天气"]},
        [],
    ),
    (
        "a byte of no encoding",
        "a.csv",
        b"text,label\n\x81,1\n",
        {},
        ["line 2", "not UTF-8", "damaged"],
        [],
    ),
    (
        "damaged UTF-8",
        "a.csv",
        "text,label\nçà,1\né,2\n".encode() + b"\xe9a,1\n",
        {},
        ["line 4", "damaged"],
        [],
    ),
    (
        "another encoding than is said",
        "a.csv",
        LATIN.encode("latin-1"),
        {"encoding": "utf-8"},
        ["data.encoding=utf-8", "line 2"],
        [],
    ),
    (
        "lines of cp1252",
        "a.txt",
        "a “b”\nc\n".encode("cp1252"),
        {},
        {"text": ["a “b”", "c"]},
        ["cp1252"],
    ),
    (
        "lines of UTF-16",
        "a.txt",
        "fine day\nbad day\n".encode("utf-16"),
        {},
        {"text": ["fine day", "bad day"]},
        ["utf-16"],
    ),
    ("JSON lines of UTF-16", "a.jsonl", LINES.encode("utf-16"), {}, ROWS, ["utf-16"]),
    (
        "JSON lines of Latin-1",
        "a.jsonl",
        '{"text": "le café"}\n'.encode("latin-1"),
        {},
        {"text": ["le café"]},
        ["cp1252"],
    ),
    (
        "a broken row of UTF-16",
        "a.jsonl",
        (LINES + "{\n").encode("utf-16"),
        {},
        ["a.jsonl", "row 3"],
        [],
    ),
    (
        "brackets of UTF-16",
        "a.json",
        ("[" * 9000 + "]" * 9000).encode("utf-16"),
        {},
        ["brackets within brackets"],
        [],
    ),
    ("zip", "a.zip", zipped(a_csv=COMMA), {}, ["unknown format", "an archive", "Unpack"], []),
    ("zip called csv", "a.csv", zipped(a_csv=COMMA), {}, ["zip archive", "unpack"], []),
    ("gz", "a.csv.gz", gzip.compress(by(";").encode()), {}, ROWS, ["';'"]),
    ("zst", "a.csv.zst", zstd(by(";")), {}, ROWS, ["';'"]),
    ("zst of JSON lines", "a.jsonl.zst", zstd(LINES), {}, ROWS, []),
    ("xz", "a.tsv.xz", lzma.compress(by("\t").encode()), {}, ROWS, []),
    ("an Arrow file", "a.arrow", arrow(stream=False), {}, ROWS, []),
    ("an Arrow stream", "a.arrow", arrow(stream=True), {}, ROWS, []),
    ("feather", "a.feather", arrow(stream=False), {}, ROWS, []),
    ("Arrow called csv", "a.csv", arrow(stream=False), {}, ["its bytes are arrow", "a.arrow"], []),
    (
        "an Arrow file cut short",
        "a.arrow",
        arrow(stream=False)[:300],
        {},
        ["cannot be read as arrow"],
        [],
    ),
    ("CoNLL", "a.conll", CONLL, {}, TAGGED, []),
    ("CoNLL in a text file", "a.txt", CONLL, {"format": "conll"}, TAGGED, []),
    (
        "CoNLL with more columns",
        "a.iob",
        "Anna\tNNP\tB-PER\n",
        {},
        {"tokens": [["Anna"]], "tags": [["B-PER"]]},
        ["column 2 is not read: the word is first, its tag is last"],
    ),
    (
        "CoNLL with comments",
        "a.conll",
        "# id = 1\n# O\n",
        {},
        {"tokens": [["#"]], "tags": [["O"]]},
        ["1 lines of comments left out"],
    ),
    (
        "CoNLL with a column missing",
        "a.conll",
        "a O\nb\n",
        {},
        ["line 2", "1 columns", "Expected 2"],
        [],
    ),
    ("CoNLL of nothing", "a.conll", "\n\n", {}, ["no rows"], []),
    ("no ending", "a", COMMA, {"format": "csv"}, ROWS, []),
    ("an ending in capitals", "A.CSV", COMMA, {}, ROWS, []),
    ("gz that is none", "a.csv.gz", COMMA, {}, ROWS, []),
    ("line ends of two kinds", "a.csv", COMMA.replace("\n", "\r\n", 2), {}, ROWS, []),
    ("line ends of an old Mac", "a.csv", COMMA.replace("\n", "\r"), {}, ROWS, []),
    ("a blank line before the names", "a.csv", "\n" + COMMA, {}, ROWS, []),
    ("blank lines between the rows", "a.csv", COMMA.replace("\n", "\n\n"), {}, ROWS, []),
    ("a mark and UTF-16, tabs", "a.tsv", by("\t").encode("utf-16"), {}, ROWS, ["utf-16"]),
    (
        "a huge field",
        "a.csv",
        'text,label\n"' + "a b " * 300_000 + '",good\n',
        {},
        {"text": ["a b " * 300_000], "label": ["good"]},
        [],
    ),
    (
        "labels as they are written",
        "a.csv",
        "text,label\na,NA\nb,1.0\nc,007\nd,Good\ne,good \n",
        {},
        {"text": list("abcde"), "label": ["NA", "1.0", "007", "Good", "good "]},
        [],
    ),
    (
        "quotes in a field of tabs",
        "a.tsv",
        'text\tlabel\n"a" b\tx\n',
        {},
        {"text": ['"a" b'], "label": ["x"]},
        [],
    ),
    (
        "a quote that stays open among others",
        "a.csv",
        'text,label\n"a ""b"",1\n',
        {},
        ["opened and not closed"],
        [],
    ),
    ("restructured text", "a.rst", "Title\n=====\n", {}, {"text": ["Title", "====="]}, []),
    (
        "a list of objects called jsonl",
        "a.jsonl",
        json.dumps([{"text": "a"}, {"text": "b"}], indent=1),
        {},
        {"text": ["a", "b"]},
        [],
    ),
    ("JSON lines called json", "a.json", LINES, {}, ROWS, []),
    (
        "objects of several lines",
        "a.json",
        '{\n "text": "a"\n}\n{\n "text": "b"\n}\n',
        {},
        {"text": ["a", "b"]},
        [],
    ),
    (
        "a comma behind each object",
        "a.jsonl",
        LINES.replace("}\n", "},\n"),
        {},
        ["row 1", "Remove the comma at its end"],
        [],
    ),
    (
        "objects as Python writes them",
        "a.jsonl",
        "{'text': 'a'}\n{'text': 'b'}\n",
        {},
        ["row 1", "in double quotes"],
        [],
    ),
    ("a row too short", "a.csv", COMMA + "a\n", {}, ["row 3", "Expected 2 columns, got 1"], []),
    ("a document", "a.docx", "PK", {}, ["unknown format", "no table"], []),
    ("a page", "a.html", "<p>", {}, ["unknown format", "jsonl"], []),
    ("a notebook", "a.ipynb", "{}", {}, ["unknown format", "data.format=NAME"], []),
    ("an array", "a.npy", "x", {}, ["unknown format", "no table"], []),
    ("an archive of several", "a.tar.gz", "x", {}, ["an archive", "Unpack"], []),
    ("a spreadsheet of another program", "a.ods", "x", {}, ["a spreadsheet", "CSV (UTF-8)"], []),
    ("an image", "a.png", "x", {}, ["an image", "one folder of images for each class"], []),
    ("no ending, nothing said", "a", COMMA, {}, ["unknown format", "data.format"], []),
    ("no such format", "a", COMMA, {"format": "cvs"}, ["data.format=cvs", "csv"], []),
    ("a spreadsheet", "a.xlsx", "x", {}, ["a spreadsheet", "Save it as CSV (UTF-8)"], []),
    (
        "a sheet called csv",
        "a.csv",
        zipped(xl__workbook_xml="x"),
        {},
        ["spreadsheet as CSV (UTF-8)"],
        [],
    ),
]


def read(path: Path, said: dict[str, Any]) -> tuple[dict[str, list[Any]], str]:
    notes: list[str] = []
    rows = read_files("data.train", str(path), ReadOptions(**said), notes, documents=False)
    return dict(rows[:]), "\n".join(notes)


@pytest.mark.parametrize(
    ("name", "content", "said", "expected", "told"),
    [row[1:] for row in CASES],
    ids=[r[0] for r in CASES],
)
def test_a_file(
    name: str,
    content: str | bytes,
    said: dict[str, Any],
    expected: dict[str, list[Any]] | list[str],
    told: list[str],
    tmp_path: Path,
) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    if isinstance(expected, dict):
        rows, notes = read(path, said)
        assert rows == expected
        assert all(fact in notes for fact in told), notes
        assert bool(told) == bool(notes), "what is as its ending says is not told"
        return
    with pytest.raises(ConfigError) as refused:
        read(path, said)
    message = str(refused.value)
    assert [fact for fact in expected if fact not in message] == [], message
    assert "\n" not in message


# Folders
# --------------------------------------------------------------------------------------------------


def texts(folder: Path, *classes: str, ending: str = ".txt") -> Path:
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number in range(2):
            (folder / name / f"{number}{ending}").write_bytes(
                f"{name} café {number}\nmore".encode("cp1252")
            )
    return folder


def test_folders_of_classes(tmp_path: Path) -> None:
    folder = texts(tmp_path / "mine", "good", "bad")
    (folder / ".DS_Store").write_text("x")
    rows, notes = read(folder, {})
    assert rows["label"] == ["bad", "bad", "good", "good"]
    assert rows["text"][3] == "good café 1\nmore"
    assert "2 folders, which are the labels" in notes
    assert "cp1252" in notes
    before = load_files(
        FilesConfig(name="files", train=str(folder), eval=None), documents=False
    ).train.content
    (folder / "good" / "1.txt").write_text("another")
    assert (
        load_files(
            FilesConfig(name="files", train=str(folder), eval=None), documents=False
        ).train.content
        != before
    )


def test_folders_of_images(tmp_path: Path) -> None:
    from PIL import Image

    for name in ("cat", "dog"):
        (tmp_path / "mine" / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "mine" / name / "0.png")
    rows = read_files("data.train", str(tmp_path / "mine"), documents=False)
    assert type(rows.features["image"]).__name__ == "Image"
    assert rows["label"][:] == ["cat", "dog"]


def tables(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(LINES if path.suffix == ".jsonl" else COMMA)
    return folder


def test_a_glob_over_splits_is_told(tmp_path: Path) -> None:
    tables(tmp_path, "data/train-0.jsonl", "data/test-0.jsonl")
    for pattern, told in (("*.jsonl", 1), ("train*.jsonl", 0)):
        config = FilesConfig(name="files", train=f"{tmp_path}/data/{pattern}", eval=None)
        notes = load_files(config, documents=False).notes
        assert sum("named after other splits" in note for note in notes) == told


def saved(folder: Path) -> Path:
    from datasets import Dataset, DatasetDict

    DatasetDict({"train": Dataset.from_dict(ROWS), "test": Dataset.from_dict(ROWS)}).save_to_disk(
        str(folder)
    )
    return folder


FOLDERS: list[tuple[str, Callable[[Path], Path], list[str]]] = [
    (
        "splits of classes",
        lambda path: texts(path / "train", "a", "b").parent,
        ["splits", "data.train=mine/train"],
    ),
    (
        "texts of train and test are no classes",
        lambda path: texts(path, "train", "test"),
        ["splits (train, test)", "data.train='mine/train/*.txt' data.eval='mine/test/*.txt'"],
    ),
    (
        "text files called train, valid and test",
        lambda path: tables(path, "train.txt", "valid.txt", "test.txt", "README.md"),
        ["data.train=mine/train.txt data.eval=mine/valid.txt"],
    ),
    ("one class alone", lambda path: texts(path, "a"), ["**/*.txt"]),
    (
        "what save_to_disk wrote",
        saved,
        ["that save_to_disk wrote", "data=hub data.path=mine"],
    ),
    (
        "nothing that is read",
        lambda path: texts(path, "a", "b", ending=".exe"),
        ["no file in it ends with"],
    ),
    ("tables", lambda path: texts(path, "a", "b", ending=".csv"), ["**/*.csv"]),
    (
        "a folder for each split",
        lambda path: tables(path, "train/a.csv", "test/b.csv", "README.md"),
        ["splits (train, test)", "data.train=mine/train/a.csv data.eval=mine/test/b.csv"],
    ),
    (
        "training and validation",
        lambda path: tables(path, "training/a.csv", "training/b.csv", "validation/b.csv"),
        ["data.train='mine/training/*.csv'", "data.eval=mine/validation/b.csv"],
    ),
    (
        "what the hub has",
        lambda path: tables(
            path, "README.md", "data/train-0.jsonl", "data/train-1.jsonl", "data/test-0.jsonl"
        ),
        ["data.train='mine/data/train*.jsonl'", "data.eval=mine/data/test-0.jsonl"],
    ),
    (
        "files called train and dev",
        lambda path: tables(path, "train.csv", "dev.csv", "README.md"),
        ["data.train=mine/train.csv data.eval=mine/dev.csv"],
    ),
    ("a table and its README.md", lambda path: tables(path, "README.md", "a.csv"), ["mine/*.csv"]),
]


@pytest.mark.parametrize(
    ("make", "facts"), [row[1:] for row in FOLDERS], ids=[row[0] for row in FOLDERS]
)
def test_a_folder_that_is_not_read(
    make: Callable[[Path], Path], facts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make(Path("mine"))
    with pytest.raises(ConfigError) as refused:
        read(Path("mine"), {})
    assert [fact for fact in facts if fact not in str(refused.value)] == [], refused.value


def test_the_keys_of_what_save_to_disk_wrote(tmp_path: Path) -> None:
    for folder in (saved(tmp_path / "mine"), tmp_path / "mine" / "train"):
        assert data_keys(str(folder)) == {"data": "hub", "data.path": str(folder)}


# What is said
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said", "facts"),
    [
        ("a.jsonl", {"delimiter": ";"}, ["data.delimiter=;", "no effect on json", "csv, tsv"]),
        ("a.txt", {"delimiter": "tab"}, ["no effect on text", "add data.format=csv"]),
        ("a.jsonl", {"column_names": ["a"]}, ["data.column_names", "csv, tsv"]),
        ("a.parquet", {"encoding": "cp1252"}, ["data.encoding=cp1252", "no effect on parquet"]),
        ("a.jsonl", {"delimiter": "ab"}, ["data.delimiter", "one character"]),
        ("a.csv", {"format": "cvs"}, ["data.format=cvs", "csv"]),
        (
            "a.jsonl",
            {"format": "json", "streaming": True, "eval_fraction": 0},
            ["data.format=json", "a stream"],
        ),
        ("a.csv", {"encoding": "klingon"}, ["data.encoding", "klingon"]),
        ("a.csv", {"encoding": "base64"}, ["data.encoding", "base64"]),
        ("a.csv", {"column_names": ["a", "a"]}, ["data.column_names", "each once"]),
    ],
)
def test_what_has_no_effect_is_refused(
    name: str, said: dict[str, Any], facts: list[str], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(LINES)
    with pytest.raises(ConfigError) as refused:
        load_files(
            FilesConfig(name="files", train=str(tmp_path / name), eval=None, **said),
            documents=False,
        )
    assert [fact for fact in facts if fact not in str(refused.value)] == [], refused.value


def test_a_stream_is_read_as_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"text": "café, the naïve one"}\n'.encode("cp1252"))
    config = FilesConfig(
        name="files", train=str(tmp_path / "a.jsonl"), eval=None, eval_fraction=0, streaming=True
    )
    with pytest.raises(ConfigError, match="iconv -f cp1252"):
        load_source(config, seed=0, documents=False)


def test_rows_are_known_by_what_is_said(tmp_path: Path) -> None:
    """One file, read in two ways, is two sets of rows, in the cache and for what is remembered
    of them.
    """
    (tmp_path / "a.csv").write_text("a;b|c\nd;e|f\n")
    found = []
    for mark in (";", "|"):
        config = FilesConfig(name="files", train=str(tmp_path / "a.csv"), eval=None, delimiter=mark)
        split = load_files(config, documents=False).train
        found.append((split.content, split.rows.column_names))
    assert found[0][0] != found[1][0]
    assert found[0][1] == ["a", "b|c"]
    assert found[1][1] == ["a;b", "c"]


def test_each_ending_has_one_format() -> None:
    endings = [ending for row in FORMATS.values() for ending in row.endings]
    assert len(endings) == len(set(endings))


@pytest.mark.parametrize("header", ["Text,Label", "TEXT, LABEL", " text ,label"])
def test_names_in_other_case_or_with_blanks_around(header: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(COMMA.replace("text,label", header))
    source = load_source(
        FilesConfig(name="files", train=str(tmp_path / "a.csv"), eval=None), seed=0, documents=False
    )
    label = label_column(source, source.train)
    assert [label, text_column(source, source.train, [label])] == header.split(",")[::-1]


def test_a_missing_line_of_names_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("fine day,good\n" + "fine day,good\nbad day,poor\n" * 4)
    with pytest.raises(
        ConfigError,
        match=r"row 1 repeats .*'fine day', 'good'.*\"data.column_names=\[NAME1, NAME2\]\"",
    ):
        read(tmp_path / "a.csv", {})
    (tmp_path / "a.csv").write_text("fine day,good\n" + "dull day,good\nbad day,poor\n" * 4)
    source = load_source(
        FilesConfig(name="files", train=str(tmp_path / "a.csv"), eval=None), seed=0, documents=False
    )
    with pytest.raises(
        ConfigError,
        match=r"seems to be a row, not a header: 'fine day', 'good'.*"
        r"\"data.column_names=\[NAME1, NAME2\]\"",
    ):
        label_column(source, source.train)


def test_a_format_is_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up one, `key: value` lines.

    Its files are found, read, checked, streamed and named by the row alone.
    """
    from datasets import Dataset

    def read_cards(asked: Reading) -> Dataset:
        lines = [
            line for path in asked.utf8_files(tmp_path) for line in path.read_text().splitlines()
        ]
        return Dataset.from_list([dict([line.split(": ", 1)]) for line in lines])

    class Cards(Lines):
        def _parse(self, raw: bytes, number: int) -> dict[str, Any]:
            return dict([raw.decode().rstrip().split(": ", 1)])

        @staticmethod
        def open(key: str, file: File, opening: Opening) -> Cards:
            found = Lines.open(key, file, opening)
            return Cards(key, file, found.rows, found.content, found.begins)

    row = Format("cards", (".card",), check_text, read_cards, ("encoding",), b"CARD", Cards.open)
    monkeypatch.setitem(FORMATS, row.name, row)
    path = tmp_path / "a.card"
    path.write_bytes("text: caf\u00e9\ntext: b\n".encode("latin-1"))
    assert read(path, {"encoding": "latin-1"})[0] == {"text": ["caf\u00e9", "b"]}
    assert data_keys(str(path)) == {"data": "files", "data.train": str(path)}
    assert format_of("data.train", tmp_path / "b", "cards") is row
    path.write_text("text: a\ntext: b\n")
    assert list(open_stream("data.train", [path], 9, [])) == [{"text": "a"}, {"text": "b"}]
    with pytest.raises(ConfigError, match=r"Known endings: .*\.card"):
        format_of("data.train", tmp_path / "a.unknown", None)
    with pytest.raises(
        ConfigError, match=r"encoding=utf-8: has no effect on parquet; it is read for .*, cards\."
    ):
        load_files(
            FilesConfig(name="files", train=str(_parquet(tmp_path)), eval=None, encoding="utf-8"),
            documents=False,
        )
    (tmp_path / "c.csv").write_bytes(b"CARD: 1\n")
    with pytest.raises(
        ConfigError, match=r"cannot be read as csv: its bytes are cards\. Call it c\.card"
    ):
        read(tmp_path / "c.csv", {})
    with pytest.raises(ConfigError, match=r"streaming=true reads .*\.card"):
        open_stream("data.train", [tmp_path / "c.csv"], 9, [])


def _parquet(folder: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["a"]}), folder / "a.parquet")
    return folder / "a.parquet"
