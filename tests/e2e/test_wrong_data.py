"""The reader's test.

Wrong data files and model folders, each with one message in one place to read.

Read a table from above: what a person hands over, how it is asked for, and the facts that the
answer must hold. None is a traceback, none trains in silence.
"""

from __future__ import annotations

import copy
import gzip
import importlib.util
import io
import json
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optrun.base.errors import ConfigError
from optrun.runner.prepare import prepare
from tests.running import (
    TINY_BERT,
    TINY_GPT,
    composed,
    optrun,
    read_files,
    sentence,
    write_labelled,
)

# How it is asked for
# ----------------------------------------------------------------------------------------------

CLASSIFY = [*TINY_BERT, "task=sequence_classification"]
WORDS = [*TINY_BERT, "task=token_classification"]
TEXTS = TINY_GPT
TARGETS = ["task=seq2seq_lm", "model=from_config", "model.model_type=t5", "model.config.d_model=16"]
IMAGES = ["task=image_classification", "model=vit_tiny"]

# What is handed over
# ----------------------------------------------------------------------------------------------

ROWS = [{"text": sentence(number), "label": number % 2} for number in range(12)]
TABLE = "text,label\n" + "".join(
    f"{row['text']},{'odd' if row['label'] else 'even'}\n" for row in ROWS
)
CHAT = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}]
SHARED = [{"from": "human", "value": "a question"}, {"from": "gpt", "value": "an answer"}]
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"
PAGE = "<!DOCTYPE html>\n<html><body>Not found</body></html>\n"


def table(label: Callable[[int], Any]) -> str:
    return "text,label\n" + "".join(f"{sentence(number)},{label(number)}\n" for number in range(12))


def lines(*rows: Any, times: int = 1) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows) * times


def numbered(form: str) -> str:
    """A line for each row, with its label and its text."""
    return "".join(
        form.format(label="NUM" if row["label"] else "DESC", text=row["text"]) + "\n"
        for row in ROWS
    )


def zipped(*names: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name in names:
            archive.writestr(name, TABLE)
    return out.getvalue()


def parquet(columns: dict[str, list[Any]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet

    out = io.BytesIO()
    pyarrow.parquet.write_table(pa.table(columns), out)
    return out.getvalue()


def arrow() -> bytes:
    import pyarrow as pa

    rows, out = pa.table({"text": ["a", "b"]}), io.BytesIO()
    with pa.ipc.new_file(out, rows.schema) as writer:
        writer.write_table(rows)
    return out.getvalue()


GOOD_PARQUET = parquet({"text": ["a b", "c d"] * 6, "label": [0, 1] * 6})

FILES: list[tuple[str, list[str], str, str | bytes, list[str]]] = [
    # what it is, the words, the file, its content, facts of the message
    # Rows somewhere inside.
    (
        "rows under a key",
        CLASSIFY,
        "a.json",
        json.dumps({"data": ROWS}),
        [
            "one JSON object (data)",
            "jq -c '.data[]'",
        ],
    ),
    (
        "a list for each column",
        CLASSIFY,
        "a.json",
        json.dumps({key: [row[key] for row in ROWS] for key in ("text", "label")}),
        ["one JSON object (text, label)", "one object a line"],
    ),
    (
        "an object for each row",
        CLASSIFY,
        "a.json",
        json.dumps({f"id{at}": row for at, row in enumerate(ROWS)}),
        ["one JSON object (id0, id1, id2", "one object a line"],
    ),
    (
        "rows that are lists",
        CLASSIFY,
        "a.json",
        json.dumps([[row["text"], str(row["label"])] for row in ROWS]),
        ["a.json", "row 1 is not an object", '{"text": ..., "label": ...}'],
    ),
    (
        "a list a line",
        CLASSIFY,
        "a.jsonl",
        lines(*([row["text"], row["label"]] for row in ROWS)),
        ["a.jsonl", "row 1 is not an object", '{"text": ..., "label": ...}'],
    ),
    (
        "a chat a line",
        TEXTS,
        "a.jsonl",
        lines(CHAT, times=8),
        ["a.jsonl", "row 1 is not an object", '"content"'],
    ),
    # Cells that are no texts.
    (
        "texts in objects",
        CLASSIFY,
        "a.jsonl",
        lines({"text": {"en": "a b"}, "label": 1}, times=8),
        ["data.text_column", "text (such as {'en': 'a b'} (dict))", "from text as a text"],
    ),
    (
        "texts in objects, few rows to join",
        TEXTS,
        "a.jsonl",
        lines({"text": {"en": "a b"}}, times=8),
        ["data.text_column", "text (such as {'en': 'a b'} (dict))", "from text as a text"],
    ),
    (
        "texts in objects, with names beside",
        TEXTS,
        "a.jsonl",
        lines({"text": {"en": "a b"}, "id": "x"}, times=8),
        ["data.text_column", "no texts in column text", "id may be something else"],
    ),
    (
        "texts in lists, named",
        [*TEXTS, "data.text_column=text"],
        "a.jsonl",
        lines({"text": ["a", "b"]}, times=8),
        [
            "column text, where a text is expected",
            "text (such as ['a', 'b'] (list))",
            '{"text": ..., "label": ...}',
        ],
    ),
    (
        "chats",
        TEXTS,
        "a.jsonl",
        lines({"messages": CHAT}, times=8),
        [
            "data.text_column",
            "messages (such as [{'role': 'user', 'content': 'a question'}",
            "chats",
            "apply_chat_template",
        ],
    ),
    (
        "chats, to be classified",
        CLASSIFY,
        "a.jsonl",
        lines({"messages": CHAT}, times=8),
        ["data.label_column", "messages holds chats"],
    ),
    (
        "chats of another kind",
        TEXTS,
        "a.jsonl",
        lines({"conversations": SHARED}, times=8),
        ["conversations (such as [{'from': 'human'", "chats"],
    ),
    (
        "a list as a label",
        CLASSIFY,
        "a.jsonl",
        lines({"text": "a b", "label": [0, 1]}, times=8),
        ["data.label_column=label", "holds [0, 1], not one label"],
    ),
    # Lines with something in them.
    (
        "__label__ text",
        CLASSIFY,
        "a.txt",
        numbered("__label__{label} {text}"),
        ["data.label_column", "give a table"],
    ),
    (
        "texts alone",
        CLASSIFY,
        "a.txt",
        numbered("{text}"),
        ["data.label_column", "only texts", "csv, tsv, jsonl"],
    ),
    (
        "a word and a tag a line",
        WORDS,
        "a.txt",
        "EU B-ORG\nrejects O\n\nPeter B-PER\n" * 4,
        ["data.format=conll"],
    ),
    (
        "lists of words in csv",
        WORDS,
        "a.csv",
        "tokens,tags\n" + "a b,O O\n" * 8,
        ["data.text_column", "Lists are read from json"],
    ),
    # Another delimiter, another shape.
    (
        "no header",
        CLASSIFY,
        "a.csv",
        TABLE.split("\n", 1)[1],
        ["data.label_column", "'even'", "seems to be a row, not a header"],
    ),
    ("a header alone", CLASSIFY, "a.csv", "text,label\n", ["a.csv", "no rows"]),
    (
        "no line of names, the same number twice",
        CLASSIFY,
        "a.csv",
        "0,5,0\n1,5,2\n",
        ["two columns", "'0'", "data.column_names="],
    ),
    (
        "a comment before the names",
        CLASSIFY,
        "a.csv",
        "# from a site\ntext,label\na,0\n",
        ["'# from a site'", "Remove comments"],
    ),
    (
        "a column twice",
        CLASSIFY,
        "a.csv",
        "text,label,text\na,0,b\n",
        ["a.csv", "two columns are called 'text'"],
    ),
    (
        "a key twice",
        CLASSIFY,
        "a.jsonl",
        '{"text":"a","text":"b"}\n',
        ["a.jsonl", "the key 'text' is repeated"],
    ),
    (
        "a row too wide",
        CLASSIFY,
        "a.csv",
        TABLE + "a,b,c\n",
        ["row 13: ", "2 columns, got 3", "needs quotes"],
    ),
    (
        "a quote that stays open",
        CLASSIFY,
        "a.csv",
        'text,label\n"a,1\nb,2\n',
        ["row 1: ", "opened and not closed"],
    ),
    (
        "a row without its label",
        CLASSIFY,
        "a.jsonl",
        lines(*ROWS, {"text": "a b"}),
        ["row 13", "column label"],
    ),
    (
        "one column of two",
        CLASSIFY,
        "a.csv",
        "text\na b\nc d\n",
        ["data.label_column", "Columns: text."],
    ),
    (
        "no column of texts",
        CLASSIFY,
        "a.csv",
        "label\na\nb\n",
        ["data.text_column", "Columns: label."],
    ),
    (
        "no column of targets",
        TARGETS,
        "a.jsonl",
        lines(*ROWS),
        ["data.target_column", "Columns: text, label."],
    ),
    (
        "empty texts",
        CLASSIFY,
        "a.csv",
        "text,label\n" + ",0\n,1\n" * 6,
        ["data", "the text column is empty"],
    ),
    # Labels.
    (
        "fractions as labels",
        CLASSIFY,
        "a.csv",
        table(lambda at: at + 0.5),
        ["fractions", "problem_type=regression"],
    ),
    ("one label for all", CLASSIFY, "a.csv", table(lambda _: "yes"), ["one label only (yes)"]),
    (
        "labels that are missing",
        CLASSIFY,
        "a.jsonl",
        '{"text": "a", "label": NaN}\n' * 6,
        ["row 1", "column label"],
    ),
    # Bytes of another kind.
    (
        "no encoding in JSON",
        CLASSIFY,
        "a.jsonl",
        lines(*ROWS).encode() + b'{"text":"th\x81","label":0}\n',
        ["a.jsonl", "line 13", "not UTF-8", "data.encoding=cp1251"],
    ),
    (
        "a zero byte far down",
        CLASSIFY,
        "a.csv",
        TABLE.encode() + b"a\x00b,even\n",
        ["a.csv", "line 14", "zero bytes"],
    ),
    (
        "zero bytes in a text",
        TEXTS,
        "a.txt",
        b"abc\x00def there\n" * 30,
        ["a.txt", "line 1", "zero bytes"],
    ),
    ("nothing", CLASSIFY, "a.csv", "", ["a.csv", "the file is empty"]),
    (
        "nothing, compressed",
        CLASSIFY,
        "a.jsonl.gz",
        gzip.compress(b""),
        ["a.jsonl.gz", "the file is empty"],
    ),
    ("nothing but line ends", TEXTS, "a.txt", "\n\n\n", ["a.txt", "nothing but white space"]),
    (
        "a pointer in place of parquet",
        CLASSIFY,
        "a.parquet",
        POINTER,
        ["a.parquet", "Git LFS", "git lfs pull"],
    ),
    ("a pointer in place of a text", TEXTS, "a.txt", POINTER, ["a.txt", "Git LFS", "git lfs pull"]),
    ("a web page in place of csv", CLASSIFY, "a.csv", PAGE, ["a.csv", "a web page"]),
    (
        "a spreadsheet called csv",
        CLASSIFY,
        "a.csv",
        zipped("xl/workbook.xml"),
        ["a.csv", "spreadsheet as CSV (UTF-8)"],
    ),
    (
        "an old spreadsheet",
        CLASSIFY,
        "a.xls",
        b"\xd0\xcf\x11\xe0",
        ["a.xls", "spreadsheet", "CSV (UTF-8)"],
    ),
    (
        "a zip of several files called csv",
        CLASSIFY,
        "a.csv",
        zipped("a.csv", "b.csv"),
        ["a.csv", "zip archive", "unpack"],
    ),
    (
        "an Arrow file called parquet",
        CLASSIFY,
        "a.parquet",
        arrow(),
        ["a.parquet", "its bytes are arrow", "a.arrow"],
    ),
    ("a pickle", CLASSIFY, "a.pkl", b"\x80\x04K\x01.", ["a.pkl", "never opened"]),
    (
        "parquet called csv",
        CLASSIFY,
        "a.csv",
        GOOD_PARQUET,
        ["a.csv", "parquet", "Call it a.parquet"],
    ),
    (
        "parquet, cut short",
        CLASSIFY,
        "a.parquet",
        GOOD_PARQUET[:-20],
        ["cannot be read as parquet"],
    ),
    (
        "parquet, compressed as a whole",
        CLASSIFY,
        "a.parquet",
        gzip.compress(GOOD_PARQUET),
        ["a.parquet", "cannot be read as parquet"],
    ),
    ("JSON called csv", CLASSIFY, "a.csv", lines(*ROWS), ["a.csv", "lines are JSON", "a.jsonl"]),
    ("csv called JSON", CLASSIFY, "a.json", TABLE, ["a.json", "'text,label'", "JSON begins with"]),
    ("no ending", CLASSIFY, "a", TABLE, ["data.train=a", "unknown format", ".csv"]),
    (
        "no images",
        IMAGES,
        "a.csv",
        TABLE,
        ["data.image_column", "no column of images", "Columns: text, label."],
    ),
]


def refused(
    words: list[str], key: str, value: str, facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """One message of one line with the facts in it, and not a word of a library beside it."""
    config = copy.deepcopy(composed(*words, f"{key}=PLACE"))
    group, name = key.split(".")
    setattr(getattr(config, group), name, value)
    capsys.readouterr()
    with pytest.raises(ConfigError) as caught:
        prepare(config)
    message = str(caught.value)
    for fact in facts:
        assert fact in message
    assert "\n" not in message
    assert len(message) < 600
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("words", "name", "content", "facts"), [row[1:] for row in FILES], ids=[row[0] for row in FILES]
)
def test_a_wrong_file(
    words: list[str],
    name: str,
    content: str | bytes,
    facts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    refused([*words, "data=files"], "data.train", name, facts, capsys)


def tables(folder: Path) -> None:
    folder.mkdir()
    (folder / "part.csv").write_text(TABLE)


@pytest.mark.parametrize(
    ("make", "name", "facts"),
    [
        (tables, "mine", ["data.train=mine", "a folder", "mine/*.csv"]),
        (tables, "mine/*.tsv", ["no file matches this glob"]),
        (tables, "mine/prat.csv", ["no such file", "Did you mean mine/part.csv?"]),
    ],
)
def test_a_path_that_is_no_file(
    make: Callable[[Path], None],
    name: str,
    facts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    make(Path("mine"))
    refused([*CLASSIFY, "data=files"], "data.train", name, facts, capsys)


def test_on_the_command_line_it_is_one_message_in_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text(lines({"messages": CHAT}, times=8))
    assert optrun(*TEXTS, "data=files", "data.train=a.jsonl", "hydra.run.dir=run") == 2
    said = capsys.readouterr()
    (message,) = said.err.splitlines()
    assert message.startswith(
        "optrun: error: data.text_column is needed: data.train has no column of texts"
    )
    assert len(said.out.splitlines()) == 1, "what is being run, and nothing of a library"
    assert not Path("run").exists()


def test_gzip_without_its_ending_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(gzip.compress(TABLE.encode()))
    assert read_files("data.train", str(path), documents=False)["text"][:] == [
        row["text"] for row in ROWS
    ]


# Model folders
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is over, with its checkpoint and its model."""
    folder = tmp_path_factory.mktemp("whole")
    data = write_labelled(folder, rows=12)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        words = ["data=files", f"data.train={data}", "training.max_steps=1", "hydra.run.dir=run"]
        assert optrun(*CLASSIFY, *words) == 0
    return folder / "run"


def config_with(**values: Any) -> Callable[[Path], None]:
    """A configuration with other values; None: without the key."""

    def change(folder: Path) -> None:
        before = json.loads((folder / "config.json").read_text())
        after = {key: value for key, value in {**before, **values}.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(after))

    return change


def written(name: str, content: str | bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return change


def without(*names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for path in list(folder.iterdir()):
            if not names or path.name in names:
                path.unlink()

    return change


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def one_shard_of_two(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": names})
    )


def called_otherwise(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    save_file(
        {f"net.{name}": value for name, value in weights.items()}, folder / "model.safetensors"
    )


def adapter(folder: Path) -> None:
    without()(folder)
    written("adapter_config.json", "{}")(folder)


def as_it_is(folder: Path) -> None:
    """Nothing is wrong with the folder; what is asked of it is."""


CODE = {"AutoConfig": "mine.Config", "AutoModelForSequenceClassification": "mine.Model"}
NOT_WHOLE = "model.safetensors is not a complete safetensors file"
FOLDERS: list[tuple[str, Callable[[Path], None], list[str], list[str]]] = [
    # what it is, what is done to a whole folder, more words, facts of the message
    ("an empty folder", without(), [], ["no config.json"]),
    ("no configuration", without("config.json"), [], ["no config.json"]),
    (
        "a configuration that breaks off",
        written("config.json", '{"model_type":'),
        [],
        ["config.json", "valid JSON"],
    ),
    (
        "a configuration that is a list",
        written("config.json", "[1]"),
        [],
        ["config.json", "`model_type`"],
    ),
    ("no model_type", config_with(model_type=None), [], ["config.json", "`model_type`"]),
    (
        "an unknown model_type",
        config_with(model_type="bertt"),
        [],
        ["model_type=bertt", "Did you mean bert"],
    ),
    (
        "a value of another type",
        config_with(hidden_size="big"),
        [],
        ["config.json", "hidden_size", "'big'"],
    ),
    (
        "heads that do not divide",
        config_with(num_attention_heads=7),
        [],
        ["(32)", "attention heads (7)"],
    ),
    (
        "code of its own",
        config_with(model_type="mine", auto_map=CODE),
        [],
        ["code of its own", "trust_remote_code"],
    ),
    ("no weights", without("model.safetensors"), [], ["no weights", "safetensors"]),
    ("pickled weights alone", pickled, [], ["pytorch_model.bin", "only safetensors"]),
    (
        "empty weights",
        written("model.safetensors", b""),
        [],
        [NOT_WHOLE],
    ),
    ("weights cut short", cut, [], [NOT_WHOLE]),
    (
        "other bytes as weights",
        written("model.safetensors", b"junk" * 99),
        [],
        [NOT_WHOLE],
    ),
    (
        "a pointer in place of weights",
        written("model.safetensors", POINTER),
        [],
        ["Git LFS", "git lfs pull"],
    ),
    (
        "one shard of two",
        one_shard_of_two,
        [],
        ["model-00002-of-00002.safetensors, which is missing"],
    ),
    (
        "weights of another shape",
        config_with(hidden_size=48),
        [],
        ["38 of the model's 41", "another shape"],
    ),
    (
        "weights of another model",
        called_otherwise,
        [],
        ["41 of the model's 41", "have other names there"],
    ),
    ("an adapter", adapter, [], ["adapter (peft)", "merge_and_unload"]),
    (
        "an encoder to write targets",
        as_it_is,
        ["task=seq2seq_lm"],
        ["AutoModelForSeq2SeqLM", "bert"],
    ),
    (
        "a reader to look at images",
        as_it_is,
        ["task=image_classification"],
        ["AutoModelForImageClassification", "bert"],
    ),
]


@pytest.mark.parametrize(
    ("harm", "words", "facts"), [row[1:] for row in FOLDERS], ids=[row[0] for row in FOLDERS]
)
def test_a_wrong_model_folder(
    harm: Callable[[Path], None],
    words: list[str],
    facts: list[str],
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(whole / "model", "mine")
    harm(Path("mine"))
    write_labelled(tmp_path, rows=12)
    asked = [
        *(words or ["task=sequence_classification"]),
        "model=pretrained",
        "data=files",
        "data.train=train.csv",
    ]
    refused(asked, "model.path", "mine", ["model.path=mine", *facts], capsys)


@pytest.mark.parametrize(
    ("path", "facts"),
    [
        ("run", ["its folder model has", "model.path=run/model"]),
        (
            "run/checkpoints/step-00000001",
            ["a checkpoint of optrun", "optrun export run/checkpoints/step-00000001"],
        ),
        ("run/model/model.safetensors", ["this is a file", "config.json"]),
        ("run/modle", ["no such local folder"]),
        ("nobody/nothing", ["no such local folder", "HF_HUB_OFFLINE", "it is not there"]),
    ],
)
def test_a_path_that_is_no_model_folder(
    path: str,
    facts: list[str],
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(whole.parent)
    words = [
        "task=sequence_classification",
        "model=pretrained",
        f"model.path={path}",
        "data=files",
        "data.train=no.csv",
    ]
    assert optrun(*words, "hydra.run.dir=other") == 2
    message = capsys.readouterr().err.splitlines()[0]
    for fact in [f"model.path={path}", *facts]:
        assert fact in message


# Libraries
# --------------------------------------------------------------------------------------------------


def test_a_missing_library_is_told_before_any_data_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The data are not there either, and that is not what is said."""
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as lacking_pillow:
        lacking_pillow.setitem(sys.modules, "PIL", None)
        refused(
            [*IMAGES, "data=files"],
            "data.train",
            "no.csv",
            ["pillow", "pip install 'optrun[vision]'"],
            capsys,
        )
    found = importlib.util.find_spec
    lacking = lambda name, *more: None if name == "trackio" else found(name, *more)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", lacking)
    asked = ["tracking=trackio", "data=files", "data.train=no.csv"]
    for words in (asked, [*asked, "-m", "lr=1e-3,2e-3"]):
        assert optrun(*words) == 2
        assert "pip install 'optrun[trackio]'" in capsys.readouterr().err
    assert not list(tmp_path.glob("outputs/*/*"))
