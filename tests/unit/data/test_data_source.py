"""Splits, columns, local dataset folders."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

from optrun.base.errors import ConfigError
from optrun.config.choice import choice
from optrun.config.schema.data import SCHEMAS, DataConfig
from optrun.data.build import load_source
from optrun.data.columns import (
    ALL_KEYS,
    label_column,
    named_column,
    refuse_unused,
    text_column,
    texts,
    words_column,
)
from optrun.data.files import resolve
from optrun.data.source import Source, Split, cut
from optrun.task.labels import (
    LABEL_OF_EACH_WORD,
    read_finite_numbers,
    read_label_lists,
    read_labels,
)
from tests.preloaded import program
from tests.running import read_files


def config(name: str, **options: Any) -> DataConfig:
    return choice("data", SCHEMAS, name, options)


def source(
    train: dict[str, list[Any]], held: dict[str, list[Any]] | None = None, **columns: str
) -> Source:
    files = config("files", train="x", **columns)
    return Source(
        Split(Dataset.from_dict(train), "data.train"),
        {"": Split(Dataset.from_dict(held if held is not None else train), "data.eval")},
        files,  # type: ignore[arg-type]
    )


def test_the_only_text_column_is_found() -> None:
    made = source({"review": ["a"], "stars": [3]})
    assert text_column(made, made.train) == "review"


def test_an_index_in_a_csv_file_is_no_text() -> None:
    made = source({"id": ["1", "2"], "review": ["good", "3"], "label": ["x", "y"]})
    assert text_column(made, made.train, taken=("label",)) == "review"


def test_a_usual_name_decides_between_several() -> None:
    made = source({"title": ["a"], "text": ["b"]})
    assert text_column(made, made.train) == "text"
    made = source({"title": ["a"], "body": ["b"]})
    with pytest.raises(
        ConfigError, match=r"data.text_column is needed: .*title, body.*Columns: title, body"
    ):
        text_column(made, made.train)


def test_a_missing_column_lists_the_columns_there_are() -> None:
    made = source({"sentence": ["a"], "label": [1]}, text_column="sentense")
    with pytest.raises(
        ConfigError,
        match=r"data.text_column=sentense: .*Columns: sentence, label. Did you mean sentence",
    ):
        text_column(made, made.train)
    made = source({"sentence": ["a"]}, label_column="klass")
    with pytest.raises(ConfigError, match=r"data.label_column=klass: .*Columns: sentence"):
        label_column(made, made.train)


def test_evaluation_may_call_its_only_text_otherwise() -> None:
    made = source(
        {"sentence": ["a"], "label": ["0"]},
        {"content": ["b"], "label": ["1"]},
        text_column="sentence",
    )
    assert text_column(made, made.eval_sets[""], taken=("label",)) == "content"
    assert "its only text column 'content' is read" in made.notes[0]
    made = source({"s": ["a"]}, {"content": ["b"], "other": ["c"]}, text_column="s")
    with pytest.raises(ConfigError, match=r"data.text_column=s: .*column names of data.train"):
        text_column(made, made.eval_sets[""])


def test_a_label_column_by_its_usual_name() -> None:
    made = source({"t": ["a"], "labels": [1]})
    assert label_column(made, made.train) == "labels"
    made = source({"t": ["a"], "labels": [1], "label": [1]})
    with pytest.raises(ConfigError, match=r"data.label_column is needed"):
        label_column(made, made.train)


def test_a_column_that_the_task_does_not_read_is_refused() -> None:
    made = source({"t": ["a"]}, target_column="t")
    with pytest.raises(
        ConfigError, match=r"data.target_column=t: task=causal_lm does not use this key"
    ):
        refuse_unused(made.columns, ("text_column",), "causal_lm")
    assert named_column(made.columns, "target_column", made.train) == "t"


def test_texts_are_texts() -> None:
    made = source({"t": [7, 8, None]})
    assert list(texts(made.train, "t")) == ["7", "8", ""]
    made = source({"t": [["a"], ["b"]]})
    with pytest.raises(ConfigError, match=r"data.train: row 1 has \['a'\] \(list\) in column t"):
        list(texts(made.train, "t"))


def test_a_held_back_split_is_disjoint_and_a_function_of_the_seed() -> None:
    split = Split(Dataset.from_dict({"text": [str(n) for n in range(50)]}), "data.train")
    train, held, note = cut(split, 0.1, seed=3, documents=False)
    assert len(held.rows) == 5
    assert sorted([*train.rows["text"], *held.rows["text"]]) == sorted(split.rows["text"])
    assert "5 of 50" in note
    again = cut(split, 0.1, seed=3, documents=False)
    assert list(again[1].rows["text"]) == list(held.rows["text"])
    other = cut(split, 0.1, seed=4, documents=False)
    assert list(other[1].rows["text"]) != list(held.rows["text"])


def test_one_row_cannot_be_cut_but_one_document_can() -> None:
    split = Split(Dataset.from_dict({"text": ["line\n" * 100]}), "data.train")
    with pytest.raises(ConfigError, match=r"fewer than two rows cannot be cut.*data.eval"):
        cut(split, 0.1, seed=0, documents=False)
    train, held, _ = cut(split, 0.1, seed=0, documents=True)
    assert train.rows["text"][0] + held.rows["text"][0] == "line\n" * 100
    assert held.rows["text"][0] == "line\n" * 10
    two = Split(split.rows.select([0, 0]), "data.train")
    assert [len(part.rows) for part in cut(two, 0.9, seed=0, documents=False)[:2]] == [1, 1]


@pytest.mark.parametrize(
    ("text", "fraction", "left"),
    [
        ("A title\n" + "word " * 2000, 0.1, 9003),  # at a space, not behind the title
        ("A title\n" + "word " * 2000, 0.6, 4003),
        ("A title\n" + "x" * 9992, 0.1, 9000),  # nor is there a space
        (
            "one two three\n" * 100,
            0.1,
            90 * 14,
        ),  # a line break that is near counts for more than a space
        ("x" * 850 + "\n" + "one " * 50, 0.1, 851),
        ("x" * 700 + "\n" + "x" * 300, 0.1, 900),
    ],
)
def test_the_end_of_a_document_is_cut_near_its_place(text: str, fraction: float, left: int) -> None:
    split = Split(Dataset.from_dict({"text": [text]}), "data.train")
    train, held, _ = cut(split, fraction, seed=0, documents=True)
    assert train.rows["text"][0] + held.rows["text"][0] == text
    assert len(train.rows["text"][0]) == left


def test_the_same_file_on_both_sides_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a\nb\n")
    made = load_source(config("files", train=str(path), eval=str(path)), seed=0, documents=False)
    assert "evaluation sees training rows" in made.notes[0]


@pytest.fixture
def labelled() -> DatasetDict:
    features = Features({"text": Value("string"), "label": ClassLabel(names=["no", "yes"])})
    rows = {"text": ["a", "b", "c"], "label": [0, 1, 0]}
    part = Dataset.from_dict(rows, features=features)
    return DatasetDict({"train": part, "validation": part, "extra": part})


def hub(path: Path, **options: Any) -> Source:
    return load_source(config("hub", path=str(path), **options), seed=0, documents=False)


def test_a_local_dataset_folder(tmp_path: Path, labelled: DatasetDict) -> None:
    for split in labelled:
        labelled[split].to_parquet(str(tmp_path / "data" / f"{split}-00000-of-00001.parquet"))
    made = hub(tmp_path)
    assert (made.train.key, made.eval_sets[""].key, made.cut_from_train) == (
        "split train",
        "split validation",
        False,
    )
    assert made.train.rows.features["label"].names == ["no", "yes"]


WORDS = ["007", "NA", "1e5", "true", "2024-03-01", "null"]


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_a_text_of_a_dataset_folder_stays_what_the_file_says(tmp_path: Path, ending: str) -> None:
    """The readers of `datasets` make numbers, dates and truth values of such texts."""
    rows = [{"text": "a b", "label": word} for word in WORDS]
    content = "".join(json.dumps(row) + "\n" for row in rows)
    if ending == "csv":
        content = "text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in rows)
    for split in ("train", "test"):
        (tmp_path / f"{split}.{ending}").write_text(content)
    made = hub(tmp_path)
    assert list(made.train.rows["label"]) == WORDS
    assert list(made.eval_sets[""].rows["label"]) == WORDS
    assert (made.train.key, made.eval_sets[""].key) == ("split train", "split test")


def test_types_that_a_card_declares_are_kept(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.csv").write_text("text,label\na b,1\nc d,0\n")
    features = "  - name: text\n    dtype: string\n  - name: label\n    dtype: int64\n"
    (tmp_path / "README.md").write_text(f"---\ndataset_info:\n  features:\n{features}---\n")
    assert hub(tmp_path).train.rows["label"][:] == [1, 0]


def test_what_save_to_disk_wrote(tmp_path: Path, labelled: DatasetDict) -> None:
    labelled.save_to_disk(str(tmp_path / "several"))
    assert hub(tmp_path / "several", eval_split="extra").eval_sets[""].key == "split extra"
    labelled["train"].save_to_disk(str(tmp_path / "one"))
    made = hub(tmp_path / "one")
    assert made.cut_from_train
    with pytest.raises(ConfigError, match=r"data.subset=sst2: .*save_to_disk has no subsets"):
        hub(tmp_path / "one", subset="sst2")


def test_a_changed_folder_is_read_anew(tmp_path: Path) -> None:
    for word in ("first", "second one"):
        (tmp_path / "train.jsonl").write_text(f'{{"text": "{word}"}}\n' * 3)
        assert hub(tmp_path).train.rows["text"][0] == word


def test_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "here"}\n' * 3)
    monkeypatch.chdir(tmp_path)
    assert hub(Path()).train.rows["text"][0] == "here"


def test_splits_by_name(tmp_path: Path, labelled: DatasetDict) -> None:
    labelled.save_to_disk(str(tmp_path / "a"))
    with pytest.raises(
        ConfigError, match=r"data.train_split=trian: .* has no split trian. .*Did you mean train"
    ):
        hub(tmp_path / "a", train_split="trian")
    with pytest.raises(ConfigError, match=r"data.eval_split=tests: .* has no split tests"):
        hub(tmp_path / "a", eval_split="tests")


def test_an_unknown_dataset_is_one_line(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(ConfigError, match=r"data.path=") as caught:
            hub(path)
        assert "\n" not in str(caught.value)
    (tmp_path / "a.csv").write_text("text\na\n")
    with pytest.raises(ConfigError, match=r"this is a file.*data=files data.train="):
        hub(tmp_path / "a.csv")


def test_the_standard_library_is_split_by_files() -> None:
    made = load_source(config("stdlib"), seed=0, documents=True)
    train, held = set(made.train.rows["text"][:]), set(made.eval_sets[""].rows["text"][:])
    assert len(train) > 300
    assert len(held) > 10
    assert {text for text in train & held if len(text) > 500} == set()
    assert made.prompt


def test_plain_text_has_no_labels() -> None:
    made = load_source(config("stdlib"), seed=0, documents=False)
    with pytest.raises(
        ConfigError,
        match=r"data=stdlib has only texts, and this task needs labels. Take data=files",
    ):
        label_column(made, made.train)


def test_two_processes_at_once_read_the_same(tmp_path: Path) -> None:
    for name, content in (("a.csv", "text\nx\n"), ("a.jsonl", '{"text": "x"}\n')):
        (tmp_path / name).write_text(content)
    (tmp_path / "reads.py").write_text(
        "import sys\nfrom pathlib import Path\n"
        "from optrun.data.files import ReadOptions, read_split\n"
        "for path in sys.argv[1:]:\n"
        "    print(read_split('data.train', [Path(path)], ReadOptions(), []).rows['text'][:])\n"
    )
    env = {"OPTRUN_CACHE": str(tmp_path / "cache")}
    with ExitStack() as stack:
        both = [
            stack.enter_context(program("reads", ["a.csv", "a.jsonl"], tmp_path, env))
            for _ in range(2)
        ]
        assert [process.communicate()[0].strip() for process in both] == ["['x']\n['x']"] * 2
    assert list((tmp_path / "cache").rglob(".making-*")) == []


def test_a_held_back_row_is_told_by_its_number_in_the_file() -> None:
    rows = {
        "text": [f"text {n}" for n in range(40)],
        "label": ["a" if n % 2 else "b" for n in range(40)],
    }
    train, held, _ = cut(
        Split(Dataset.from_dict(rows), "data.train"), 0.25, seed=3, documents=False
    )
    assert [held.rows["text"][row] for row in range(10)] == [
        f"text {held.number(row) - 1}" for row in range(10)
    ]
    some = train.take(np.array([7, 2]))
    assert [f"text {some.number(row) - 1}" for row in range(2)] == list(some.rows["text"])


def test_one_column_has_one_meaning() -> None:
    rows = {"a": ["x", "y"], "label": ["p", "q"]}
    made = source(rows, label_column="label", text_column="label")
    with pytest.raises(
        ConfigError, match=r"data.label_column=label: data.text_column names the same column"
    ):
        refuse_unused(made.columns, ALL_KEYS, "sequence_classification")
    made = source(rows, text_column="label")
    with pytest.raises(
        ConfigError, match=r"data.text_column=label: data.train has its labels or targets there"
    ):
        text_column(made, made.train, taken=(label_column(made, made.train),))


def test_an_ending_is_no_likeness(tmp_path: Path) -> None:
    for name in ("train.csv", "unicode.csv", "notes.jsonl"):
        (tmp_path / name).write_text("text\n")
    for typed, meant in (("trian.csv", "train.csv"), ("notes.json", "notes.jsonl")):
        with pytest.raises(ConfigError, match=rf"Did you mean .*{meant}\?"):
            resolve("data.train", str(tmp_path / typed))
    with pytest.raises(ConfigError) as refusal:
        resolve("data.train", str(tmp_path / "nope.csv"))
    assert "Did you mean" not in str(refusal.value)


def from_lines(folder: Path, lines: list[str]) -> Split:
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return Split(
        read_files("data.train", str(folder / "rows.jsonl"), documents=False), "data.train"
    )


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (['"a b"', "5"], r"row 1 has 'a b' \(str\), row 2 has 5 \(int\)"),
        (["null", "1.5", "2", '"x"'], r"row 2 has 1.5 \(float\), row 4 has 'x' \(str\)"),
        (["true", "1"], r"row 1 has True \(bool\), row 2 has 1 \(int\)"),
        (["1", '"1"'], r"row 1 has 1 \(int\), row 2 has '1' \(str\)"),
        (['"x"', '{"a": 1}'], r"row 1 has 'x' \(str\), row 2 has {'a': 1} \(dict\)"),
    ],
)
def test_a_column_that_mixes_kinds_is_refused(tmp_path: Path, values: list[str], said: str) -> None:
    """Named, it was read: numbers as their digits, 1 and "1" as one label."""
    split = from_lines(tmp_path, [f'{{"text": {value}, "label": {value}}}' for value in values])
    with pytest.raises(
        ConfigError, match=rf"data.train: column text mixes kinds of values: {said}"
    ):
        list(texts(split, "text"))
    for read in (read_labels, read_finite_numbers):
        with pytest.raises(ConfigError, match=rf"column label mixes kinds of values: {said}"):
            read(split, "label")
    with pytest.raises(ConfigError, match=r"column text mixes kinds of values"):
        text_column(Source(split, {"": split}, config("files", train="x")), split)  # type: ignore[arg-type]


def test_lists_that_mix_kinds_are_refused(tmp_path: Path) -> None:
    split = from_lines(
        tmp_path,
        ['{"tokens": ["a", "b"], "tags": ["O", "O"]}', '{"tokens": ["a", 3], "tags": [0]}'],
    )
    with pytest.raises(
        ConfigError, match=r"column tags mixes kinds of values: row 1 has 'O' \(str\), row 2 has 0"
    ):
        read_label_lists(split, "tags", LABEL_OF_EACH_WORD)
    with pytest.raises(
        ConfigError,
        match=r"column tokens mixes kinds of values: row 1 has 'a' \(str\), row 2 has 3",
    ):
        words_column(Source(split, {"": split}, config("files", train="x")), split, "tags")  # type: ignore[arg-type]


def test_numbers_of_two_forms_and_missing_ones_are_no_mixture(tmp_path: Path) -> None:
    split = from_lines(tmp_path, [f'{{"text": {value}}}' for value in ("1", "2.5", "null")])
    assert list(texts(split, "text")) == ["1.0", "2.5", ""]


@pytest.mark.parametrize(("labels", "row"), [("1 0 NA 1", 3), ("nan 0 1 1", 1), ("0.0 1 ? n/a", 3)])
def test_na_among_numbers_is_no_class(labels: str, row: int) -> None:
    split = Split(Dataset.from_dict({"label": labels.split()}), "data.train")
    with pytest.raises(
        ConfigError, match=rf"row {row} has '.*' in column label, and all others have numbers"
    ):
        read_labels(split, "label")


@pytest.mark.parametrize("labels", ["yes no NA", "E11 250 V10", "NA none", "0-9 10+ 1"])
def test_names_of_classes_may_be_what_they_are(labels: str) -> None:
    names, places, _ = read_labels(
        Split(Dataset.from_dict({"label": labels.split()}), "data.train"), "label"
    )
    assert [names[place] for place in places] == labels.split()


def test_what_a_reader_must_not_return(monkeypatch: pytest.MonkeyPatch) -> None:
    """One message each, whoever wrote the reader."""
    rows, nothing = Dataset.from_dict({"text": ["a"]}), Dataset.from_dict({"text": []})
    for returned, fact in (
        ({"train": rows}, "returned dict"),
        (Source(Split(nothing, "here"), {}, None), "no training rows"),
        (Source(Split(rows, "here"), {"a b": Split(rows, "there")}, None), "letters, digits"),
        (Source(Split(rows, "here"), {"dev": Split(nothing, "there")}, None), "there has no rows"),
    ):
        monkeypatch.setattr(
            "optrun.data.stdlib.load_stdlib", lambda config, *, documents, made=returned: made
        )
        with pytest.raises(ConfigError, match=fact):
            load_source(config("stdlib"), seed=0, documents=False)
