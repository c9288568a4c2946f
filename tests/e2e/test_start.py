"""`optrun start`.

What is understood of a file, and that each command it shows works as it stands.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optrun.cli import proposal
from tests.running import optrun, sentence

REVIEWS = "id;Review;verdict\n" + "".join(
    f"{n};{sentence(n)} café;{'good' if n % 3 else 'bad'}\n" for n in range(60)
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def started(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, list[list[str]]]:
    """What is said, and the commands that are shown."""
    assert optrun("start", *words) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out, [
        shlex.split(line)[1:] for line in said.out.splitlines() if line.startswith("   optrun ")
    ]


def test_a_european_csv(here: Path, capsys: pytest.CaptureFixture[str], forked_jobs: None) -> None:
    (here / "my reviews.csv").write_bytes(REVIEWS.encode("cp1252"))
    own = ("training.max_steps=2", "checkpoint=none", "hydra.run.dir=run")
    said, (train, compare) = started(capsys, "my reviews.csv", *own)
    facts = [
        "separated by ';'",
        "cp1252",
        "café",
        "Review (text)",
        "verdict (label)",
        "not read by task=sequence_classification: id",
        "54 rows for training",
        "good: ",
        "18 runs of 2 steps, 18 times as long",
        "Nothing was written",
    ]
    assert [fact for fact in facts if fact not in said] == []
    assert all(len(line) <= 120 for line in said.splitlines() if "   optrun " not in line)
    assert sorted(path.name for path in here.iterdir()) == ["my reviews.csv"]
    assert optrun(*train) == 0
    assert {"search.adamw.lr=6e-4,2e-3,6e-3", "search.lamb.lr=6e-3,2e-2,6e-2", "seed=0,1,2"} <= set(
        compare
    )
    few = [re.sub(r"(lr|seed)=([^,]+),.*", r"\1=\2", word) for word in compare]
    assert optrun(*few, "hydra.sweep.dir=sweep") == 0
    assert (here / "sweep" / "report.html").is_file()


def test_a_chat_runs_at_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns = [
        {"role": "user", "content": sentence(1)},
        {"role": "assistant", "content": sentence(2)},
    ]
    (here / "chat.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 12)
    words = ("run=true", "training.max_steps=2", "checkpoint=none", "hydra.run.dir=run")
    said, (train, compare) = started(capsys, "chat.jsonl", *words)
    assert "task=sft" in train
    assert "'role': 'user'" in said
    assert not [word for word in compare if word.startswith("hydra.run")]
    assert (here / "run" / "summary.json").is_file()


@pytest.mark.parametrize(
    ("make", "words", "facts"),
    [
        ({}, ["no.csv"], ["data.train=no.csv", "no such file"]),
        ({"a.csv": ""}, ["a.csv"], ["a.csv", "the file is empty"]),
        ({"a.pdf": "x"}, ["a.pdf"], ["a.pdf", "unknown format"]),
        ({"a.csv": "a,b\n1,2\n3,4\n"}, ["a.csv"], ["make no task", "Columns: a, b", "task=NAME"]),
        (
            {"a.csv": "Date,IBM\n1990-01-01,1.5\n1990-02-01,\n"},
            ["a.csv"],
            ["make no task", "Columns: Date, IBM"],
        ),
        ({"a.csv": REVIEWS}, ["a.csv", "run=yes"], ["run=yes", "true or false"]),
        ({"a.csv": REVIEWS}, ["a.csv", "b.csv"], ["expected optrun start FILE"]),
        ({"a.csv": REVIEWS}, ["a.csv", "resume=run"], ["resume=run", "proposes a new run"]),
        ({"a.csv": REVIEWS}, ["a.csv", "tsk=sft"], ["tsk", "task"]),
        ({"x/a.csv": "a", "x/b.txt": "b"}, ["x"], ["data.train=x", "Give files or a glob"]),
        ({}, ["some/name"], ["data.path=some/name"]),
        ({"a.bin": "abcd"}, ["a.bin"], ["model.tokenizer"]),
        ({}, [""], ["expected a file, a folder or a name"]),
        ({}, ["https://site/a.csv"], ["FILE=https://site/a.csv", "a URL"]),
        ({"a.csv": REVIEWS}, ["a.csv", "data=hub"], ["data=hub", "which reads a.csv"]),
        ({"a.csv": REVIEWS}, ["a.csv", "data.train=b.csv"], ["data.train=b.csv", "leave it out"]),
        (
            {"a.csv": "text,label\na, b,u\n"},
            ["a.csv"],
            ["row 1", "needs quotes", "or the first line does not name"],
        ),
        ({"a.csv": "x,y\n3,4\n5,6\n7,8\n"}, ["a.csv"], ["it trains on texts"]),
        ({"a.csv": "1.5,2\n3,4\n5,6\n"}, ["a.csv"], ["it trains on texts", "Columns: 1.5, 2"]),
        ({"x/README": "a"}, ["x"], ["data.train=x", "a folder"]),
        (
            {"a.tsv": REVIEWS.partition("\n")[2].replace(";", "\t")},
            ["a.tsv"],
            [
                "not sure",
                "seems to be a row, not a header",
                "data.column_names=[NAME1, NAME2, NAME3]",
            ],
        ),
        (
            {"a.csv": "good film,0.5\n" + "".join(f"film {n},0.{n}\n" for n in range(30))},
            ["a.csv"],
            ["not sure", "seems to be a row, not a header: 'good film', '0.5'"],
        ),
        (
            {"a.txt": "".join(f"word{n}\t-1.5\t[-1, 2, 3]\n" for n in range(30))},
            ["a.txt"],
            ["not sure", "seems to be a row, not a header: 'word0', '-1.5', '[-1, 2, 3]'"],
        ),
        (
            {
                "train.csv": "text,label\n" + "a b,u\nc d,v\n,u\n" * 9,
                "test.csv": "line,kind\na b,u\n",
            },
            ["train.csv"],
            ["data.label_column=label", "data.eval has no column label"],
        ),
    ],
)
def test_what_it_refuses(
    make: dict[str, str],
    words: list[str],
    facts: list[str],
    here: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, content in make.items():
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text(content)
    assert optrun("start", *words) == 2
    said = capsys.readouterr().err
    assert [fact for fact in facts if fact not in said] == [], said
    assert said.count("optrun: error: ") == 1


FOLDERS = {
    "splits of classes": (
        {f"x/{part}/{kind}/0.txt": f"u v {part}" for part in ("train", "test") for kind in "ab"},
        "x",
        ["data.train=x/train", "data.eval=x/test", "task=sequence_classification"],
    ),
    "files called train in several folders": (
        {
            f"x/{kind}/{part}.csv": f"text\nu v {part}\nw\n"
            for part in ("train", "test")
            for kind in "ab"
        },
        "x",
        ["data.train='x/**/train*.csv'", "data.eval='x/**/test*.csv'"],
    ),
    "tables by their names": (
        {f"x/{part}.tsv": "text\tlabel\n" + "a b\tu\nc d\tv\n" * 9 for part in ("train", "dev")},
        "x",
        ["data.train=x/train.tsv", "data.eval=x/dev.tsv"],
    ),
    "rows beside those to train on": (
        {"train.jsonl": '{"text": "a b"}\n' * 9, "valid.jsonl": '{"text": "a"}\n'},
        "train.jsonl",
        ["data.eval=valid.jsonl", "task=causal_lm"],
    ),
    "parts of one table": (
        {f"x/{n}.csv": "text,label\n" + "a b,u\nc d,v\n" * 3 for n in range(3)},
        "x",
        ["data.train='x/*.csv'"],
    ),
    "a text that is the word text": (
        {"a.csv": REVIEWS.replace(";", ",").replace("Review", "text") + "9,text,good\n"},
        "a.csv",
        ["data.label_column=verdict"],
    ),
    "a column that is called as a number": (
        {"a.csv": REVIEWS.replace("verdict", "2")},
        "a.csv",
        ["data.label_column='2'", "data.text_column=Review"],
    ),
    "CoNLL in a text": (
        {"a.txt": "Anna B-PER\nsings O\n\n" * 9},
        "a.txt",
        ["data.format=conll", "task=token_classification"],
    ),
    "a glob": (
        {f"{n}.csv": "text,label\n" + "a b,u\nc d,v\n" * 5 for n in "ab"},
        "*.csv",
        ["data=files", "data.train='*.csv'", "data.label_column=label"],
    ),
    "CoNLL in a table": (
        {"a.tsv": "".join(f"Anna{n}\tB-PER\nsings\tO\n\n" for n in range(9))},
        "a.tsv",
        ["data.format=conll", "task=token_classification"],
    ),
    "a table in a text": (
        {"a.txt": REVIEWS},
        "a.txt",
        ["data.format=csv", "data.label_column=verdict"],
    ),
    "objects in a text": (
        {"a.txt": '{"text": "a b", "label": "u"}\n{"text": "c d", "label": "v"}\n' * 9},
        "a.txt",
        ["data.format=json", "data.label_column=label"],
    ),
    "a file called as an option": ({"-a.csv": REVIEWS}, "-a.csv", ["data.label_column=verdict"]),
    "a file with a sign in its name": ({"a=b.csv": REVIEWS}, "a=b.csv", ["data.train='a=b.csv'"]),
    "restructured text": (
        {"a.rst": "a line of words\n" * 20},
        "a.rst",
        ["data.train=a.rst", "task=causal_lm"],
    ),
    "a label for each column": (
        {"a.csv": "text,bad,rude\n" + "a b,0,1\nc d,1,0\n" * 9},
        "a.csv",
        ["data.label_columns=[bad,rude]", "task.problem_type=multi_label_classification"],
    ),
    "a task of one's own choice": (
        {"a.txt": "a line of words\n" * 20},
        "a.txt task=masked_lm",
        ["task=masked_lm"],
    ),
}


@pytest.mark.parametrize("shape", FOLDERS)
def test_where_data_lie(shape: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, words, expected = FOLDERS[shape]
    for name, content in files.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(content)
    _, (train, *_) = started(capsys, *words.split())
    assert [token for token in expected if token not in train] == [], train


def test_examples_are_not_cut(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "a.jsonl").write_text(
        "".join(json.dumps({"text": sentence(n) * 20, "label": n % 2}) + "\n" for n in range(40))
    )
    said, (train, *_) = started(capsys, "a.jsonl")
    assert "cuts" not in said
    assert int(re.search(r"data.max_length=(\d+)", shlex.join(train))[1]) > 128  # type: ignore[index]


UNSURE: dict[str, tuple[dict[str, object], list[str]]] = {
    "questions about a context, as SQuAD has them": (
        {"context": "a b c", "question": "d e", "answers": {"text": ["a"], "answer_start": [0]}},
        ["not sure", "answers holds texts in lists or objects"],
    ),
    "a text inside of an object": (
        {"meta": {"lang": "en"}, "text": "a b", "label": "u"},
        ["not sure", "meta holds texts", "task=sequence_classification", "data.text_column=text"],
    ),
    "lists as JSON text": (
        {"tokens": '["a", "b"]', "tags": "[0, 1]"},
        ["not sure", "tokens holds lists or objects written as JSON text"],
    ),
}


@pytest.mark.parametrize("shape", UNSURE)
def test_nothing_is_proposed_for_what_is_not_sure(
    shape: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row, facts = UNSURE[shape]
    rows = [row | ({"label": "uv"[n % 2]} if "label" in row else {}) for n in range(20)]
    (here / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert optrun("start", "a.jsonl") == 2
    output = capsys.readouterr()
    assert "   optrun " not in output.out
    assert [fact for fact in facts if fact not in output.err] == []


def test_texts_to_evaluate_on_in_a_column_called_otherwise(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in SST-2, whose `train.tsv` has `sentence` and whose `dev.tsv` has `content`."""
    (here / "train.tsv").write_text("label\tsentence\n" + "u\ta b\nv\tc d\n" * 9)
    (here / "dev.tsv").write_text("label\tcontent\n" + "u\te b\nv\tc f\n" * 9)
    said, (train, *_) = started(capsys, "train.tsv")
    assert "data.eval=dev.tsv" in train
    assert "evaluates on dev.tsv, found beside it (data.eval=null: hold out rows)" in said
    assert "its only text column 'content' is read" in " ".join(said.split())


def test_a_link_to_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "data").mkdir()
    for name in ("a.csv", "data/mine"):
        (here / name).symlink_to("/no/such/file.csv")
        assert optrun("start", name) == 2
        said = capsys.readouterr().err
        assert f"data.train={name}: a link to /no/such/file.csv, which does not exist" in said


def test_an_image_that_cannot_be_decoded(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    for number in range(12):
        path = here / "mine" / ("cat" if number % 2 else "dog") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(path)
    (here / "mine" / "cat" / "99.png").write_text("no")
    said, (train, *_) = started(capsys, "mine")
    assert "image (image), label (label)" in said
    assert optrun(*train, "checkpoint=none") == 2
    assert "cat/99.png): Pillow cannot read this image" in capsys.readouterr().err


def test_overrides_that_a_comparison_decides_itself() -> None:
    own = ["optimizer=lamb", "optimizer.eps=1", "lr=1", "task=sft", "hydra.run.dir=x"]
    made = proposal.Proposal(own, {"adamw": "1,2"}, 9)
    assert made.commands()[1][1] == ["-m", "search.adamw.lr=1,2", "seed=0,1,2", "task=sft"]


def test_the_mistakes_that_come_next(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "a.csv").write_text(REVIEWS)
    (here / "outputs" / "reviews").mkdir(parents=True)
    for words, expected in (
        ("explain a.csv", "data.train=a.csv"),
        ("predict outputs/reviews a.csv", "data.eval=a.csv"),
        ("evaluate outputs/review", "Did you mean outputs/reviews?"),
        ("resume=outputs/review", "Did you mean resume=outputs/reviews?"),
    ):
        assert optrun(*words.split()) == 2
        assert expected in capsys.readouterr().err


def test_texts_of_another_split_are_not_trained_on(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder with a text for each split, as wikitext and the PTB are handed around."""
    folder = here / "corpus"
    folder.mkdir()
    for split in ("train", "valid", "test"):
        (folder / f"{split}.txt").write_text(f"a plain line of the {split} text\n" * 60)
    said, (train, *_) = started(capsys, "corpus")
    assert "data.train=corpus/train.txt" in train
    assert "data.eval=corpus/valid.txt" in train
    assert "corpus/test.txt is left alone" in said


def test_a_text_is_held_back_as_training_does(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "a.txt").write_text("\nTo be or not to be\n" * 400)
    said, _ = started(capsys, "a.txt", "task.sample_tokens=0")
    assert "the last 10% of each text of data.train held out" in said
    assert "held out at random" not in said
    assert "1 row for training" in said
    assert all(
        line.removeprefix("example").strip() for line in said.splitlines() if "example " in line[:8]
    )


def test_the_learning_rates_of_the_comparison_contain_the_exact_default() -> None:
    class Draft:
        overrides = ("data=tiny", "lr=1.0")

        def compose(self, overrides: list[str]) -> SimpleNamespace:
            assert "lr=1.0" not in overrides
            return SimpleNamespace(lr=2.5e-4)

    draft: Any = Draft()
    assert proposal._grids(draft) == dict.fromkeys(("adamw", "lamb"), "7.5e-5,2.5e-4,7.5e-4")
