"""Figures of each class by `optrun evaluate`, and the tasks with several labels and with
choices from end to end.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.prediction_runs import QUICK, rows_of, write_rows
from tests.running import TINY_BERT, optrun, sentence, summary, write_labelled


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def evaluated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert optrun("evaluate", "run", *words, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_classes(capsys: pytest.CaptureFixture[str]) -> None:
    write_labelled(Path())
    words = [
        *TINY_BERT,
        "task=sequence_classification",
        "data=files",
        "data.train=train.csv",
        *QUICK,
    ]
    assert optrun(*words, "data.eval={dev: train.csv, hard: train.csv}", "hydra.run.dir=run") == 0
    assert "macro mean" in capsys.readouterr().out  # at the end of the run, too
    found = evaluated(capsys)
    table = found["tables"]["dev"]
    assert summary(Path("run"))["classes"] == {"step": 4, "sets": found["tables"]}
    counts = table["confusion"]["counts"]
    assert table["confusion"]["labels"] == ["even", "odd"]
    assert [sum(row) for row in counts] == [30, 30]
    assert (counts[0][0] + counts[1][1]) / 60 == pytest.approx(found["eval/dev/accuracy"])
    assert table["classes"][1]["f1"] == pytest.approx(found["eval/dev/f1"])
    capsys.readouterr()
    assert optrun("evaluate", "run", "out=figures") == 2
    assert "--json" in capsys.readouterr().err
    assert optrun("evaluate", "run") == 0
    said = capsys.readouterr().out
    for fact in ("precision", "support", "even", "macro mean", "true \\ predicted"):
        assert fact in said


def test_entities(capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(Path("train.jsonl"), rows_of("token_classification"))
    words = [
        *TINY_BERT,
        "task=token_classification",
        "data=files",
        "data.train=train.jsonl",
        *QUICK,
    ]
    assert optrun(*words, "data.eval=train.jsonl", "hydra.run.dir=run") == 0
    found = evaluated(capsys)
    table = found["tables"][""]
    assert [row["entity"] for row in table["classes"]] == ["X", "Y"]
    assert table["means"][0]["f1"] == pytest.approx(found["eval/f1"])
    assert "confusion" not in table


def test_any_number_of_labels(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"text": sentence(n), "label": ["even"] * (n % 2 == 0) + ["third"] * (n % 3 == 0)}
        for n in range(30)
    ]
    write_rows(Path("train.jsonl"), rows)
    several = ["task=sequence_classification", "task.problem_type=multi_label_classification"]
    words = [
        *TINY_BERT,
        *several,
        "data=files",
        "data.train=train.jsonl",
        "data.eval=train.jsonl",
        *QUICK,
    ]
    assert optrun("explain", *words) == 0
    assert optrun(*words, "training.label_smoothing_factor=0.1") == 2
    assert "any number of labels" in capsys.readouterr().err
    assert optrun(*words, "hydra.run.dir=run") == 0
    assert summary(Path("run"))["main_metric"] == {"name": "eval/f1_micro", "mode": "max"}
    found = evaluated(capsys)
    assert found["eval/f1_micro"] == pytest.approx(found["tables"][""]["means"][0]["f1"])
    assert optrun("resume=run", "training.max_steps=5") == 0
    assert optrun("predict", "run", "data.eval=train.jsonl", "out=out.jsonl") == 0
    made = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert all(
        one["prediction"] == [name for name, p in one["probabilities"].items() if p > 0.5]
        for one in made
    )
    right = sum(sorted(one["prediction"]) == sorted(one["label"]) for one in made) / 30
    assert right == pytest.approx(evaluated(capsys)["eval/exact_match"])
