"""No evaluation wanted, `data.eval_fraction=0`.

A last fit on all rows, and what needs an evaluation says so.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optrun.runner.prepare import prepare
from tests.faults.runs import cut
from tests.running import (
    TINY_BERT,
    TINY_GPT,
    WORDS,
    composed,
    optrun,
    records,
    sentence,
    state,
    summary,
    tensors,
    write_labelled,
)

ALL = "data.eval_fraction=0"
FIT = [
    *TINY_BERT,
    "task=sequence_classification",
    "data=files",
    "data.train=train.csv",
    ALL,
    "training.per_device_train_batch_size=4",
    "training.max_steps=6",
    "training.eval_steps=2",
    "training.logging_steps=4",
    "checkpoint.save_steps=3",
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_labelled(tmp_path, rows=12)
    return tmp_path


def test_a_last_fit_on_all_rows(
    here: Path, pictures: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert optrun(*FIT, "hydra.run.dir=run") == 0
    said = capsys.readouterr().out
    assert "trained on all rows, evaluated on none" in said
    assert "optrun evaluate run data.eval=FILE" in said
    assert "export run/checkpoints/last DEST" in said
    run = here / "run"
    told = summary(run)
    assert told["status"] == "finished"
    assert told["main_metric"] is None
    assert told["data"]["train_examples"] == 12
    assert told["data"]["eval_examples"] == 0
    assert told["metrics"]["best"] == {}
    assert not any(name.startswith("eval/") for record in records(run) for name in record)
    assert not any("eval/" in record.get("unscheduled", []) for record in records(run))
    assert (run / "curves.png").is_file()
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*")) == [
        "step-00000003",
        "step-00000006",
    ]
    card = (run / "model" / "README.md").read_text()
    assert "Not evaluated." in card

    assert optrun("report", "run") == 0
    assert optrun("verify", "run") == 0
    assert optrun("export", "run/checkpoints/last", "exported") == 0
    assert optrun("explain", *FIT) == 0
    capsys.readouterr()
    assert optrun("evaluate", "run") == 2
    assert "data.eval_fraction=0: the run was trained on all rows" in capsys.readouterr().err
    assert optrun("evaluate", "run", "data.eval=train.csv", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["examples"] == 12
    assert "eval/accuracy" in found


def test_a_resume_is_exact(here: Path) -> None:
    """Between two log lines: the peak of the gradient norm is taken up, too."""
    assert optrun(*FIT, "scheduler=constant", "hydra.run.dir=whole") == 0
    cut("whole", "cut", 3)
    assert optrun("resume=cut") == 0
    assert tensors(here / "cut", 6) == tensors(here / "whole", 6)
    assert state(here / "cut", 6)["train"] == state(here / "whole", 6)["train"]
    assert records(here / "cut") == records(here / "whole")


def write_rows(folder: Path) -> None:
    words = [{"tokens": WORDS[at : at + 3], "tags": ["O", "B-X", "O"]} for at in range(8)]
    pairs = [{"text": sentence(at), "target": sentence(at + 1)} for at in range(8)]
    for name, rows in (("words", words), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    "words",
    [
        [*TINY_GPT],
        [*TINY_GPT, "task.packing=false"],
        [*TINY_BERT, "task=masked_lm"],
        [
            *TINY_BERT,
            "task=sequence_classification",
            "task.problem_type=regression",
            "data.label_column=number",
        ],
        [*TINY_BERT, "task=token_classification", "data.train=words.jsonl"],
        [
            "task=seq2seq_lm",
            "model=from_config",
            "model.model_type=t5",
            "model.vocab_size=300",
            "model.config.d_model=16",
            "model.config.num_layers=1",
            "data.train=pairs.jsonl",
        ],
    ],
    ids=[
        "causal_lm",
        "causal_lm, row by row",
        "masked_lm",
        "regression",
        "token_classification",
        "seq2seq_lm",
    ],
)
def test_every_task_can_do_without(words: list[str], here: Path) -> None:
    write_rows(here)
    lines = ["text,number", *(f"{sentence(at)},{at}" for at in range(12))]
    (here / "train.csv").write_text("\n".join(lines) + "\n")
    given = (
        []
        if any(word.startswith("data.train=") for word in words)
        else ["data.train=train.csv", "data.text_column=text"]
    )
    prepared = prepare(composed("data=files", *words, *given, ALL))
    assert (len(prepared.task.train) > 0, len(prepared.task.eval)) == (True, 0)
    assert prepared.task.eval.fingerprint()


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (
            ["checkpoint.metric=eval/accuracy"],
            ["checkpoint.metric=eval/accuracy", "needs an evaluation"],
        ),
        (
            ["scheduler=plateau", "scheduler.metric=eval/loss"],
            ["scheduler.metric=eval/loss", "needs an evaluation"],
        ),
        (
            ["-m", "hydra/sweeper=optuna", "lr=interval(1e-4,1e-2)"],
            ["data.eval_fraction=0", "search"],
        ),
    ],
)
def test_what_needs_one_is_refused(
    words: list[str], facts: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert optrun(*FIT, *words) == 2
    message = capsys.readouterr().err.splitlines()[0]
    for fact in [*facts, "data.eval"]:
        assert fact in message
    assert not list(here.glob("outputs/*/*"))


def test_rows_cut_off_afterwards_were_trained_on(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The embedded data are cut as well, and have no other rows to name."""
    fit = [
        *TINY_GPT,
        "data=stdlib",
        "data.max_train_examples=16",
        "data.max_eval_examples=8",
        "training.max_steps=1",
    ]
    assert optrun(*fit, ALL, "hydra.run.dir=run") == 0
    assert "optrun evaluate" not in capsys.readouterr().out
    assert optrun("evaluate", "run") == 2
    assert "none to evaluate on: stdlib." in capsys.readouterr().err
    assert optrun("evaluate", "run", "data.eval_fraction=0.1") == 0
    assert "not those that were held out" in "".join(capsys.readouterr())
