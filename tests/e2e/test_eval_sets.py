"""Several evaluation sets, class weights and label smoothing, from the command line on."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.running import TINY_BERT, optrun, records, summary, write_labelled

SETS = "data.eval={dev: dev.csv, hard: hard.csv}"
COMMON = [
    "task=sequence_classification",
    "data=files",
    "data.train=train.csv",
    "data.max_length=16",
    *TINY_BERT,
]
SHORT = ["training.max_steps=4", "training.eval_steps=2", "checkpoint.save_steps=2"]
WORDS = [*COMMON, *SHORT]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, rows in (("train.csv", 48), ("dev.csv", 20), ("hard.csv", 12)):
        write_labelled(tmp_path, rows, name)
    hard = Path("hard.csv").read_text().splitlines()
    Path("hard.csv").write_text("\n".join([hard[0], *(f"unseen {row}" for row in hard[1:])]) + "\n")
    return tmp_path


def test_each_set_has_its_metrics_as_it_has_alone(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert optrun(*WORDS, SETS, "hydra.run.dir=run", "task.class_weights=balanced") == 0
    told = capsys.readouterr()
    assert "20 of 20 texts of data.eval.dev are in data.train" in told.out + told.err
    assert "texts of data.eval.hard stand" not in told.out + told.err
    names = {
        f"eval/{name}/{metric}"
        for name in ("dev", "hard")
        for metric in ("loss", "accuracy", "f1", "mcc")
    }
    assert {key for key in records(here / "run")[-1] if key.startswith("eval/")} == names
    found = summary(here / "run")
    assert found["main_metric"] == {"name": "eval/dev/accuracy", "mode": "max"}
    assert set(found["metrics"]["best"]) == names
    assert found["data"]["eval_examples"] == 32
    assert optrun("evaluate", "run", "--json") == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["examples"] == 32
    last = records(here / "run")[-1]
    assert {name: numbers[name] for name in names} == pytest.approx(
        {name: last[name] for name in names}
    )
    assert optrun("explain", *WORDS, SETS) == 0
    assert "eval/hard" in capsys.readouterr().out
    assert (
        optrun(*WORDS, "data.eval=hard.csv", "hydra.run.dir=alone", "task.class_weights=balanced")
        == 0
    )
    alone = records(here / "alone")[-1]
    assert last["train/loss"] == alone["train/loss"]
    for metric in ("loss", "accuracy", "f1", "mcc"):
        assert last[f"eval/hard/{metric}"] == alone[f"eval/{metric}"]


def test_a_set_may_choose_the_best_and_a_resume_keeps_them(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = here / "mine"
    config.mkdir()
    (config / "sets.yaml").write_text(
        "defaults: [config, {override /data: files}, _self_]\ndata: {eval: {dev: dev.csv, hard:"
        " [hard.csv]}}\ncheckpoint: {metric: eval/hard/loss}\n"
    )
    assert optrun("--config-dir", "mine", "-cn", "sets", *WORDS, "hydra.run.dir=run") == 0, (
        capsys.readouterr().err
    )
    assert summary(here / "run")["main_metric"] == {"name": "eval/hard/loss", "mode": "min"}
    elsewhere = here / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert optrun(f"resume={here / 'run'}", "training.max_steps=6") == 0, capsys.readouterr().err
    assert summary(here / "run")["resumes"][0]["changes"].keys() == {"training.max_steps"}, (
        "paths are the same"
    )
    monkeypatch.chdir(here)
    rows = Path("hard.csv").read_text().splitlines()
    Path("hard.csv").write_text("\n".join(rows[:-2]) + "\n")
    capsys.readouterr()
    assert optrun("resume=run", "training.max_steps=8") == 2
    assert "the data is not what the run was started with" in capsys.readouterr().err
    assert (
        optrun(
            "resume=run", "training.max_steps=8", f"data.eval.hard={os.fspath(here / 'dev.csv')}"
        )
        == 0
    )
    assert "data.eval.hard" in summary(here / "run")["resumes"][-1]["changes"]


def test_in_a_sweep(here: Path, capsys: pytest.CaptureFixture[str], forked_jobs: None) -> None:
    swept = ["-m", "seed=0,1", "hydra.sweep.dir=sweep", "checkpoint.metric=eval/hard/accuracy"]
    assert optrun(*swept, *WORDS, SETS) == 0, capsys.readouterr().err
    runs = sorted(path.parent for path in (here / "sweep").glob("*/summary.json"))
    assert [summary(run)["main_metric"]["name"] for run in runs] == ["eval/hard/accuracy"] * 2
    text = (here / "sweep" / "report.md").read_text()
    assert "hard/accuracy" in text


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        (["data.eval={a b: dev.csv}"], ["data.eval", "letters, digits"]),
        (["data.eval={a/b: dev.csv}"], ["data.eval"]),
        (["data.eval={Train: dev.csv}"], ["data.eval={Train: ...}", "another name", "train/loss"]),
        (
            ["data.eval={dev: dev.csv, hard: hard.csv, Dev: hard.csv}"],
            ["data.eval={Dev: ...}", "dev", "case"],
        ),
        (["data.eval={}"], ["data.eval", "expected a path"]),
        (["data.eval={dev: null}"], ["data.eval.dev", "expected a path"]),
        (["data.eval={dev: gone.csv}"], ["data.eval.dev=gone.csv", "no such file"]),
        (
            [SETS, "checkpoint.metric=eval/accuracy"],
            ["checkpoint.metric=eval/accuracy", "eval/dev/accuracy"],
        ),
        (
            [SETS, "checkpoint.metric=eval/hrad/f1"],
            ["checkpoint.metric=eval/hrad/f1", "Did you mean eval/hard/f1"],
        ),
        (["task.class_weights=balance"], ["task.class_weights", "balanced"]),
        (["task.class_weights=[1,2]"], ["task.class_weights=[1, 2]", "{rare: 3.0}"]),
        (["task.class_weights={odd: -1}"], ["task.class_weights.odd=-1", "above 0"]),
        (["task.class_weights={evn: 2}"], ["task.class_weights.evn", "Did you mean even"]),
        (["task.metrics=[mse]"], ["task.metrics", "mse", "not for task=sequence_classification"]),
        (["task.metrics=[acuracy]"], ["task.metrics", "acuracy", "Did you mean accuracy"]),
        (["training.label_smoothing_factor=1"], ["training.label_smoothing_factor=1", "[0, 1)"]),
        (
            ["task.problem_type=regression", "training.label_smoothing_factor=0.1"],
            ["training.label_smoothing_factor=0.1", "expected 0 with task=sequence_classification"],
        ),
        (
            ["task.problem_type=regression", "task.class_weights=balanced"],
            ["task.class_weights=balanced", "regression"],
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)
def test_what_is_refused(
    given: list[str], facts: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert optrun(*WORDS, *given) == 2
    told = capsys.readouterr().err
    assert all(fact in told for fact in facts), told
    assert "Traceback" not in told
