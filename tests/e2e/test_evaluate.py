"""`optrun evaluate` reads the words and the classes that the weights were trained with, or
refuses.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.running import TINY_BERT, TINY_GPT, optrun, sentence, summary, write_text

FEW = ["training.max_steps=3", "training.logging_steps=1", "training.per_device_train_batch_size=4"]
Evaluate = Callable[..., tuple[int, dict[str, Any], str]]
"""Exit code, the JSON that was printed, and what was said beside it."""


@pytest.fixture
def evaluate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Evaluate:
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, dict[str, Any], str]:
        capsys.readouterr()
        code = optrun("evaluate", *words, "--json")
        said = capsys.readouterr()
        return code, json.loads(said.out) if said.out else {}, said.err

    return run


def labelled(name: str, labels: list[str], rows: int = 24) -> Path:
    path = Path(name)
    path.write_text(
        "\n".join(
            ["text,label", *(f"{sentence(n)},{labels[n % len(labels)]}" for n in range(rows))]
        )
        + "\n"
    )
    return path


def write_words(name: str, shift: int, labels: list[str]) -> Path:
    """Rows of words with a label each; another shift, another vocabulary."""
    rows = []
    for number in range(16):
        words = [*sentence(number + shift).split(), "zyx" * (1 + shift)]
        rows.append(
            {"tokens": words, "labels": [labels[n % len(labels)] for n in range(len(words))]}
        )
    path = Path(name)
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def as_trained(found: dict[str, Any], run: str = "run") -> None:
    """The metrics are those of the run itself."""
    told = summary(Path(run))["metrics"]["last"]
    names = [name for name in told if name.startswith("eval/")]
    assert names
    assert {name: found[name] for name in names} == pytest.approx(
        {name: told[name] for name in names}, rel=1e-6
    )


OTHER_TEXT = "zebra yonder xylophone wander violet under thunder " * 60


def test_another_train_text_trains_no_other_tokenizer(evaluate: Evaluate, tmp_path: Path) -> None:
    """A vocabulary of the same size, and other words behind its numbers.

    The run's own is read instead.
    """
    write_text(tmp_path)
    Path("dev.txt").write_text("\n".join(sentence(n) for n in range(70)))
    assert (
        optrun(
            *TINY_GPT,
            "data=files",
            "data.train=corpus.txt",
            "data.eval=dev.txt",
            *FEW,
            "hydra.run.dir=run",
        )
        == 0
    )
    Path("mine.txt").write_text(OTHER_TEXT)
    code, found, _ = evaluate("run", "data.train=mine.txt")
    assert code == 0
    as_trained(found)
    # Without the run's own tokenizer another one is no stand-in.
    shutil.rmtree("run/tokenizer")
    code, found, said = evaluate("run", "data.train=mine.txt")
    assert code == 2
    assert "the tokenizer is another one" in said
    assert not found
    assert evaluate("run")[0] == 0


def test_words_are_encoded_as_in_training(evaluate: Evaluate) -> None:
    write_words("train.jsonl", 0, ["O", "B-X", "I-X"])
    write_words("dev.jsonl", 3, ["O", "B-X", "I-X"])
    words = [
        *TINY_BERT,
        "task=token_classification",
        "data=files",
        "data.train=train.jsonl",
        "data.eval=dev.jsonl",
    ]
    assert optrun(*words, *FEW, "hydra.run.dir=run") == 0
    as_trained(evaluate("run")[1])
    write_words(
        "mine.jsonl", 5, ["I-X", "O"]
    )  # a label less, and another tokenizer, were they learnt from it
    code, found, _ = evaluate("run", "data.train=mine.jsonl")
    assert code == 0
    as_trained(found)


def test_classes_keep_their_numbers(evaluate: Evaluate) -> None:
    labelled("train.csv", ["dog", "cat"])
    labelled("dev.csv", ["dog", "cat", "cat"])
    words = [
        *TINY_BERT,
        "task=sequence_classification",
        "data=files",
        "data.train=train.csv",
        "data.eval=dev.csv",
    ]
    assert optrun(*words, *FEW, "hydra.run.dir=run") == 0
    labelled("one.csv", ["dog"])
    code, found, _ = evaluate("run", "data.train=one.csv")
    assert code == 0
    as_trained(found)
    labelled("birds.csv", ["bird", "cat"])
    for word in ("data.train=birds.csv", "data.eval=birds.csv"):
        code, found, said = evaluate("run", word)
        assert code == 2
        assert "has the label 'bird', which the checkpoint does not have. Labels: cat, dog." in said
        assert not found


def test_rows_that_training_may_have_seen_are_told(evaluate: Evaluate) -> None:
    labelled("train.csv", ["dog", "cat"], rows=60)
    words = [*TINY_BERT, "task=sequence_classification", "data=files", "data.train=train.csv", *FEW]
    assert optrun(*words, "hydra.run.dir=run") == 0
    assert evaluate("run")[2] == ""
    code, _, said = evaluate("run", "seed=1")
    assert code == 0
    assert "not those that were held out" in said
    assert "data.eval" in said
    labelled("train.csv", ["dog", "cat"], rows=80)
    assert "not those that were held out" in evaluate("run")[2]
    assert evaluate("run", "data.eval=train.csv")[2] == ""
