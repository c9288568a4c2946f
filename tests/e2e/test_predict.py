"""`optrun predict`: what is written is what a loop over transformers, one row at a time, gives."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, pipeline

import optrun as library
from optrun.runner import predict
from optrun.task.entities import entities
from tests.e2e.prediction_runs import QUICK, WORDS, read_rows, train, write_rows
from tests.running import optrun, sentence, summary, write_labelled

Trained = Callable[[str], Path]
CLOSE = {"rel": 1e-4, "abs": 1e-6}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Run directory of a task."""
    base, made = tmp_path_factory.mktemp("runs"), dict[str, Path]()

    def run(task: str) -> Path:
        if task not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("optrun.runner.train.draw_curves", lambda path: None)
                made[task] = train(task, base / task)
        return made[task]

    return run


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def loaded(run: Path) -> tuple[Any, Any]:
    return library.load_run(run).load_model(), AutoTokenizer.from_pretrained(str(run / "tokenizer"))


def predicted(
    run: Path, *words: str, out: str = "out.jsonl", batch: int = 4
) -> list[dict[str, Any]]:
    words = (f"out={out}", f"training.per_device_eval_batch_size={batch}", *words)
    assert optrun("predict", str(run), "data.eval=rows.jsonl", *words) == 0
    assert not list(Path().glob(f".{out}*"))
    return read_rows(Path(out))


def texts(count: int = 19) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"id": f"r{n}", "text": sentence(n)} for n in range(count)]
    write_rows(Path("rows.jsonl"), rows)
    return rows


def same_rows(found: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    """One line for each row, in order, with its columns."""
    assert len(found) == len(rows)
    assert [{name: one[name] for name in row} for one, row in zip(found, rows, strict=True)] == rows


def test_labels_with_probabilities(trained: Trained) -> None:
    run = trained("sequence_classification")
    rows, (model, tokenizer) = texts(), loaded(run)
    found = predicted(run)
    same_rows(found, rows)
    for row, one in zip(rows, found, strict=True):
        with torch.no_grad():
            shares = (
                model(**tokenizer(row["text"], return_tensors="pt")).logits[0].softmax(-1).tolist()
            )
        assert list(one["probabilities"]) == ["even", "odd"]
        assert list(one["probabilities"].values()) == pytest.approx(shares, **CLOSE)
        assert one["prediction"] == ["even", "odd"][shares.index(max(shares))]
        assert one["probability"] == one["probabilities"][one["prediction"]]


def test_how_rows_are_batched_changes_nothing(trained: Trained) -> None:
    run = trained("sequence_classification")
    texts()
    alone, together = (
        predicted(run, out="a.jsonl", batch=1),
        predicted(run, out="b.jsonl", batch=64),
    )
    for one, other in zip(alone, together, strict=True):
        assert one["prediction"] == other["prediction"]
        assert one["probabilities"] == pytest.approx(other["probabilities"], **CLOSE)


def test_pairs_and_numbers(trained: Trained) -> None:
    rows = [{"a": sentence(n), "b": sentence(n + 3)} for n in range(9)]
    write_rows(Path("rows.jsonl"), rows)
    model, tokenizer = loaded(trained("pairs"))
    for row, one in zip(rows, predicted(trained("pairs")), strict=True):
        with torch.no_grad():
            shares = (
                model(**tokenizer(row["a"], row["b"], return_tensors="pt"))
                .logits[0]
                .softmax(-1)
                .tolist()
            )
        assert list(one["probabilities"].values()) == pytest.approx(shares, **CLOSE)
    rows, (model, tokenizer) = texts(9), loaded(trained("regression"))
    for row, one in zip(rows, predicted(trained("regression"), out="n.jsonl"), strict=True):
        with torch.no_grad():
            number = float(model(**tokenizer(row["text"], return_tensors="pt")).logits)
        assert one["prediction"] == pytest.approx(number, **CLOSE)
        assert set(one) == {"id", "text", "prediction"}


def test_words_and_entities(trained: Trained) -> None:
    run = trained("token_classification")
    rows = [{"tokens": sentence(n).split()} for n in range(9)] + [
        {"tokens": []},
        {"tokens": ["fox"] * 200},
    ]
    write_rows(Path("rows.jsonl"), rows)
    model, tokenizer = loaded(run)
    found = predicted(run)
    same_rows(found, rows)
    for row, one in zip(rows[:9], found, strict=False):
        encoded = tokenizer(row["tokens"], is_split_into_words=True, return_tensors="pt")
        with torch.no_grad():
            shares = model(**encoded).logits[0].softmax(-1)
        first = [encoded.word_ids().index(word) for word in range(len(row["tokens"]))]
        assert one["prediction"] == [
            model.config.id2label[int(shares[place].argmax())] for place in first
        ]
        assert one["probability"] == pytest.approx(
            [float(shares[place].max()) for place in first], **CLOSE
        )
        spans = [(entity["type"], entity["start"], entity["end"]) for entity in one["entities"]]
        assert spans == entities(one["prediction"])
        assert all(
            entity["words"] == row["tokens"][entity["start"] : entity["end"]]
            for entity in one["entities"]
        )
    assert found[9]["prediction"] == []
    assert len(found[10]["prediction"]) == 200
    assert found[10]["prediction"][-1] is None  # beyond data.max_length


def test_masks_are_filled_by_transformers(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    """`optrun predict` refuses, and names the pipeline, which fills them."""
    run = trained("masked_lm")
    write_rows(Path("rows.jsonl"), [{"text": "the [MASK] brown fox"}])
    capsys.readouterr()
    assert optrun("predict", str(run), "data.eval=rows.jsonl", "out=out.jsonl") == 2
    assert "Load the model/ of the run with transformers.pipeline" in capsys.readouterr().err
    filled = pipeline("fill-mask", model=str(run / "model"))("the [MASK] brown fox")
    assert len(filled) == 5


def test_texts_go_on_from_prompts(trained: Trained) -> None:
    run = trained("causal_lm")
    rows, (model, tokenizer) = texts(5), loaded(run)
    for options in (
        {"max_new_tokens": 6},
        {"max_new_tokens": 5, "num_beams": 2, "no_repeat_ngram_size": 2},
    ):
        words = [f"generation.{name}={value}" for name, value in options.items()]
        found = predicted(run, *words, out=f"{len(options)}.jsonl")
        same_rows(found, rows)
        for row, one in zip(rows, found, strict=True):
            ids = tokenizer(row["text"], return_tensors="pt")
            made = model.generate(**ids, **options, pad_token_id=tokenizer.pad_token_id)
            assert one["generation"] == tokenizer.decode(
                made[0, ids.input_ids.shape[1] :], skip_special_tokens=True
            )


def test_what_is_drawn_is_drawn_by_the_seed(trained: Trained) -> None:
    run, drawn = trained("causal_lm"), ["generation.do_sample=true"]
    texts(3)
    first = predicted(run, *drawn, out="a.jsonl")
    assert predicted(run, *drawn, out="b.jsonl") == first
    assert predicted(run, *drawn, "seed=7", out="c.jsonl") != first


def test_texts_from_texts(trained: Trained) -> None:
    run = trained("seq2seq_lm")
    rows, (model, tokenizer) = texts(5), loaded(run)
    found = predicted(run)
    for row, one in zip(rows, found, strict=True):
        made = model.generate(**tokenizer(row["text"], return_tensors="pt"), max_new_tokens=12)
        assert one["generation"] == tokenizer.decode(made[0], skip_special_tokens=True)


def test_images(trained: Trained) -> None:
    from PIL import Image
    from sklearn.datasets import load_digits
    from transformers import AutoImageProcessor

    run = trained("image_classification")
    rows = []
    for n, pixels in enumerate(load_digits().images[:5]):
        Image.fromarray((pixels * 15).astype("uint8")).save(f"{n}.png")
        rows.append({"image": f"{n}.png"})
    write_rows(Path("rows.jsonl"), rows)
    found = predicted(run, "data.image_column=image")
    same_rows(found, rows)
    model = library.load_run(run).load_model()
    processor = AutoImageProcessor.from_pretrained(str(run / "tokenizer"), backend="pil")
    for n, one in enumerate(found):
        mode = "RGB" if model.config.num_channels == 3 else "L"
        with torch.no_grad(), Image.open(f"{n}.png") as image:
            shares = (
                model(**processor(image.convert(mode), return_tensors="pt")).logits[0].softmax(-1)
            )
        assert one["prediction"] == model.config.id2label[int(shares.argmax())]


def test_paths_of_images_begin_at_the_table(trained: Trained) -> None:
    from PIL import Image

    run = trained("image_classification")
    folder = Path("elsewhere")
    folder.mkdir()
    Image.new("L", (8, 8)).save(folder / "0.png")
    write_rows(folder / "rows.jsonl", [{"image": "0.png"}])
    words = [f"data.eval={folder / 'rows.jsonl'}", "data.image_column=image", "out=out.jsonl"]
    assert optrun("predict", str(run), *words) == 0
    assert len(read_rows(Path("out.jsonl"))) == 1


@pytest.mark.parametrize("task", sorted(set(WORDS) - {"pairs"}))
def test_the_card_says_how(
    task: str, trained: Trained, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The snippet of `model/README.md` runs as it stands, beside the model."""
    from PIL import Image

    folder = trained(task) / "model"
    Image.new("RGB", (9, 9)).save("image.png")
    snippet = re.findall(
        r"```python\n(.*?)```", (folder / "README.md").read_text(), flags=re.DOTALL
    )[0]
    assert 'folder = "."' in snippet
    capsys.readouterr()
    exec(snippet.replace('folder = "."', f"folder = {str(folder)!r}"), {})
    assert capsys.readouterr().out.strip()


def test_an_adapter_beside_its_base(capsys: pytest.CaptureFixture[str]) -> None:
    """Its checkpoint holds the adapter alone.

    The predictions are those that its evaluation judged.
    """
    write_labelled(Path())
    words = [
        *WORDS["sequence_classification"],
        *QUICK,
        "adapter=lora",
        "data=files",
        "data.train=train.csv",
    ]
    assert optrun(*words, "data.eval=train.csv", "hydra.run.dir=run") == 0
    told = summary(Path("run"))["metrics"]["last"]["eval/accuracy"]
    assert optrun("predict", "run", "data.eval=train.csv", "out=out.jsonl") == 0
    made = read_rows(Path("out.jsonl"))
    assert sum(one["prediction"] == one["label"] for one in made) / len(made) == pytest.approx(told)


def test_csv_and_parquet_hold_the_same(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    from pyarrow import parquet

    run = trained("sequence_classification")
    rows = [
        {
            "id": n,
            "text": sentence(n),
            "share": None if n == 2 else n / 7,
            "more": [1, n],
        }
        for n in range(5)
    ]
    write_rows(Path("rows.jsonl"), rows)
    lines = predicted(run, "data.text_column=text")
    capsys.readouterr()
    words = ("predict", str(run), "data.eval=rows.jsonl", "data.text_column=text")
    size = "training.per_device_eval_batch_size=4"
    assert optrun(*words, size, "out=out.csv") == 0
    assert "-> out.csv: 5 rows" in capsys.readouterr().err
    with Path("out.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [json.loads(line["probabilities"]) for line in table] == [
        line["probabilities"] for line in lines
    ]
    assert [line["share"] for line in table][2] == ""
    assert [json.loads(line["more"]) for line in table] == [row["more"] for row in rows]
    assert optrun(*words, size, "out=out.parquet") == 0
    held = parquet.read_table("out.parquet").to_pylist()
    for row, line in zip(held, lines, strict=True):
        assert (row["share"] or 0) == pytest.approx(line["share"] or 0, rel=1e-12)
        assert {**row, "share": 0} == {**line, "share": 0}


def test_a_csv_runs_no_formula(trained: Trained) -> None:
    """Texts that begin as a formula does are told from those, and given back by taking one
    apostrophe away.
    """
    values = ["=1+1", "+a", "-b", "@c", "\td", "'=e", "'f", "-0.5", "+1e-3", "g=h", ""]
    write_rows(
        Path("rows.jsonl"), [{"text": "the fox", "=note": value, "share": -0.5} for value in values]
    )
    words = (
        "predict",
        str(trained("sequence_classification")),
        "data.eval=rows.jsonl",
        "data.text_column=text",
    )
    assert optrun(*words, "out=out.csv") == 0
    with Path("out.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    cells = [line["'=note"] for line in table]
    assert not [
        cell for cell in cells if re.match(r"[=+\-@\t\r]", cell) and cell not in ("-0.5", "+1e-3")
    ]
    assert [re.sub(r"^'(?='*[=+\-@\t\r])", "", cell) for cell in cells] == values
    assert {line["share"] for line in table} == {"-0.5"}


def test_a_file_is_there_when_it_is_whole(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing of a prediction that ends in its middle; a file that comes meanwhile is not
    written over.
    """
    run = trained("sequence_classification")
    texts(3)
    words = ("predict", str(run), "data.eval=rows.jsonl")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(predict, "_rename_to_new", interrupt)
        assert optrun(*words, "out=out.jsonl") == 130
    assert [path.name for path in Path().iterdir()] == ["rows.jsonl"]
    put_in_place = predict._rename_to_new

    def meanwhile(aside: Path, out: Path) -> None:
        out.write_text("mine")
        put_in_place(aside, out)

    with monkeypatch.context() as patch:
        patch.setattr(predict, "_rename_to_new", meanwhile)
        assert optrun(*words, "out=out.jsonl") == 2
    assert "already exists" in capsys.readouterr().err
    assert Path("out.jsonl").read_text() == "mine"
    assert len(list(Path().iterdir())) == 2


def test_from_python(trained: Trained) -> None:
    texts(3)
    run = library.load_run(trained("sequence_classification"))
    out = run.predict(["data.eval=rows.jsonl", "out=out.jsonl"])
    assert out == Path("out.jsonl").resolve()
    assert [set(line) for line in read_rows(out)] == [
        {"id", "text", "prediction", "probability", "probabilities"}
    ] * 3


WRONG: dict[str, tuple[str, list[str], list[str]]] = {
    "nothing to predict": (
        "sequence_classification",
        ["-data.eval="],
        ["data.eval", "optrun predict RUN_DIR"],
    ),
    "nowhere to write": ("sequence_classification", ["-out="], ["out", "optrun predict RUN_DIR"]),
    "no such column": (
        "sequence_classification",
        ["data.text_column=txt"],
        [
            "data.text_column=txt",
            "data.eval has no column txt",
            "id, text",
            "optrun predict takes data.text_column=NAME",
            "Did you mean text?",
        ],
    ),
    "a column that is not read": (
        "sequence_classification",
        ["data.target_column=text"],
        ["data.target_column=text", "has no effect on a prediction of", "data.text_column"],
    ),
    "an ending": (
        "sequence_classification",
        ["out=o.xlsx"],
        ["out=o.xlsx", ".xlsx", ".jsonl, .csv, .parquet"],
    ),
    "a folder that is not there": (
        "sequence_classification",
        ["out=no/o.csv"],
        ["out=no/o.csv", "no such folder: no"],
    ),
    "there already": (
        "sequence_classification",
        ["out=there.csv"],
        ["out=there.csv", "nothing is overwritten"],
    ),
    "an option of generation": (
        "causal_lm",
        ["generation.max_new_token=3"],
        ["generation.max_new_token", "Did you mean generation.max_new_tokens"],
    ),
    "a value of generation": (
        "causal_lm",
        ["generation.max_new_tokens=0"],
        ["generation.max_new_tokens=0", "greater"],
    ),
    "a text for a number": (
        "causal_lm",
        ["generation.num_beams=two"],
        ["generation.num_beams=two"],
    ),
    "several texts": (
        "causal_lm",
        ["generation.num_return_sequences=3", "generation.num_beams=3"],
        ["num_return_sequences=3", "has no effect on a prediction"],
    ),
    "options that do not go together": (
        "causal_lm",
        [
            "generation.num_beams=2",
            "generation.use_cache=false",
            "generation.cache_implementation=static",
        ],
        ["generation.num_beams=2"],
    ),
    "a length that cuts nothing": (
        "causal_lm",
        ["data.max_length=9"],
        ["data.max_length=9", "has no effect on a prediction of task=causal_lm"],
    ),
    "an option without effect": (
        "causal_lm",
        ["generation.temperature=0.5"],
        ["temperature", "do_sample"],
    ),
    "more than there is room": (
        "causal_lm",
        ["generation.max_new_tokens=999"],
        ["max_new_tokens=999", "31 or fewer"],
    ),
    "generation of a classifier": (
        "sequence_classification",
        ["generation.num_beams=2"],
        ["generation.num_beams=2", "has no effect on a prediction of task=sequence_classification"],
    ),
    "a length with the prompt": (
        "causal_lm",
        ["generation.max_length=30"],
        ["generation.max_length=30", "has no effect on a prediction"],
    ),
    "an option without its group": (
        "causal_lm",
        ["max_new_tokens=4"],
        ["Did you mean generation.max_new_tokens"],
    ),
    "a key of training": (
        "sequence_classification",
        ["lr=1"],
        ["lr=1", "has no effect on a prediction of task=sequence_classification"],
    ),
    "a key": ("sequence_classification", ["training.divice=cpu"], ["Did you mean training.device"]),
    "how the file is read": (
        "sequence_classification",
        ["data.delimter=tab"],
        ["Did you mean data.delimiter?"],
    ),
    "names of columns": (
        "sequence_classification",
        ["data.column_names=abc"],
        ["data.column_names=abc", "a list"],
    ),
    "a url": (
        "sequence_classification",
        ["out=s3://bucket/o.csv"],
        ["out=s3://bucket/o.csv", "a URL"],
    ),
    "twice": ("sequence_classification", ["seed=1", "seed=2"], ["seed is given twice"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_words(case: str, trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    task, words, facts = WRONG[case]
    texts(3)
    Path("there.csv").write_text("mine")
    run = trained(task)
    usual = {"data.eval=": "data.eval=rows.jsonl", "out=": "out=o.jsonl"}
    words = [
        *(word for key, word in usual.items() if not any(key in other for other in words)),
        *words,
    ]
    capsys.readouterr()
    assert optrun("predict", str(run), *(word for word in words if word[0] != "-")) == 2
    said = capsys.readouterr().err
    for fact in facts:
        assert fact in said
    assert Path("there.csv").read_text() == "mine"
    assert not list(Path().glob("o.*"))


ROWS: dict[str, tuple[str, str, list[str]]] = {
    "no rows": ("sequence_classification", "", ["rows.jsonl", "the file is empty"]),
    "no text": ("sequence_classification", '{"text": "a"}\n{"text": ["b"]}\n', ["column text"]),
    "a list": ("sequence_classification", '{"text": ["a"]}\n{"text": ["b"]}\n', ["text", "(list)"]),
    "no words": ("token_classification", '{"text": "a b"}\n', ["data.text_column", "word lists"]),
    "a missing word": (
        "token_classification",
        '{"tokens": ["a"]}\n{"tokens": [null]}\n',
        ["row 2", "missing word"],
    ),
    "a column of its own": (
        "sequence_classification",
        '{"text": "a", "prediction": 1}\n',
        ["prediction", "Rename it"],
    ),
    "two texts": (
        "sequence_classification",
        '{"a": "a", "b": "b"}\n',
        ["several columns of texts (a, b)"],
    ),
}


@pytest.mark.parametrize("case", ROWS)
def test_wrong_rows(case: str, trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    task, content, facts = ROWS[case]
    Path("rows.jsonl").write_text(content)
    run = trained(task)
    capsys.readouterr()
    assert optrun("predict", str(run), "data.eval=rows.jsonl", "out=o.jsonl") == 2
    said = capsys.readouterr().err
    for fact in facts:
        assert fact in said
    assert not list(Path().glob("o.*"))
