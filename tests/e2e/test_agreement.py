"""What a person reads of a run agrees.

The end table, the model card, `summary.json` and `metrics.jsonl`.
"""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from optrun.base.formatting import number
from optrun.report.table import format_metric
from optrun.runner import summary as summary_file
from optrun.runner.card import relative_names
from tests.e2e.prediction_runs import WORDS, rows_of, write_rows
from tests.running import TINY_GPT, optrun, sentence, summary, write_labelled

TASKS = {
    **WORDS,
    "sft": [*TINY_GPT[:-2], "task=sft", "data.max_length=64", "task.chat_template=chatml"],
}
EVERY = [
    "training.eval_steps=2",
    "training.logging_steps=2",
    "training.per_device_train_batch_size=8",
    "lr=1e-2",
]
PROLONGED = ("sequence_classification", "causal_lm", "regression")
COUNTED = ("step", "epoch", "time", "unscheduled")


def words_of(task: str, steps: int = 3) -> list[str]:
    """A small run of a task, in the current folder.

    Its last step is no step of an evaluation or a line.
    """
    words = [*TASKS[task], *EVERY, "hydra.run.dir=run", f"training.max_steps={steps}"]
    if task == "image_classification":
        return words
    rows = rows_of(task)
    if task == "sft":
        turns = [(0, "user"), (1, "assistant")]
        rows = [
            {"messages": [{"role": role, "content": sentence(n + k)} for k, role in turns]}
            for n in range(24)
        ]
    labelled = task == "sequence_classification"
    return [
        *words,
        "data=files",
        (
            "data.train="
            f"{write_labelled(Path()) if labelled else write_rows(Path('rows.jsonl'), rows)}"
        ),
    ]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock that the summary of a run in progress goes by.

    Of an idle machine all is within a second; of a busy one a minute passes at each look.
    """
    clock = SimpleNamespace(now=0.0, pace=0.0)

    def monotonic() -> float:
        clock.now += clock.pace
        return float(clock.now)

    stand_in = SimpleNamespace(monotonic=monotonic, strftime=time.strftime, gmtime=time.gmtime)
    monkeypatch.setattr(summary_file, "time", stand_in)
    return clock


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pictures: None) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines() -> list[dict[str, Any]]:
    """`metrics.jsonl` as it stands."""
    return [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]


def cells(text: str, bar: str, columns: int) -> dict[str, list[str]]:
    """Rows of the tables with so many columns, by their first cell."""
    rows = [
        [cell.strip().replace("\\", "") for cell in line.split(bar)[1:-1]]
        for line in text.splitlines()
    ]
    return {row[0].removeprefix("eval/"): row[1:] for row in rows if len(row) == columns}


def agree(said: str) -> dict[str, Any]:
    """All four say the same, and what `metrics.jsonl` says is the truth.

    Args:
        said: On the terminal, at the end.

    Returns:
        The summary.
    """
    told, log, card = summary(Path("run")), lines(), Path("run/model/README.md").read_text()
    last: dict[str, float] = {}
    for line in log:
        last |= {name: found for name, found in line.items() if name not in COUNTED}
    assert told["metrics"]["last"] == last
    assert (told["global_step"], told["wall_seconds"], told["epoch"]) == tuple(
        log[-1][key] for key in ("step", "time", "epoch")
    )
    assert f"{told['global_step']:,} steps in" in said
    reached = re.findall(r"step ([\d,]+) of ([\d,]+)", card.split("## Results")[0])
    early = told["global_step"] < told["max_steps"]
    assert reached == ([(str(told["global_step"]), str(told["max_steps"]))] if early else [])
    names = [name for name in last if name.startswith("eval/")]
    assert told["metrics"]["before_training"] == {name: log[0][name] for name in names}
    assert log[0]["step"] == 0
    table, rows = cells(said, "│", 4), cells(card, "|", 2)
    assert list(rows)[2:] == [name.removeprefix("eval/") for name in names]
    metadata = yaml.safe_load(card.split("---")[1])
    indexed = {
        metric["type"]: metric["value"]
        for result in metadata.get("model-index", [{"results": []}])[0]["results"]
        for metric in result["metrics"]
    }
    for name in names:
        held, short = told["metrics"]["best"][name], name.removeprefix("eval/")
        points = {line["step"]: line[name] for line in log if line["step"] and name in line}
        assert points[held["step"]] == held["value"]
        if finite := [
            point for point in points.values() if isinstance(point, float) and math.isfinite(point)
        ]:
            assert held["value"] in (min(finite), max(finite))
        assert table[short] == [number(held["value"]), str(held["step"]), number(last[name])]
        assert rows[short] == [format_metric(last[name])]
        assert indexed.get(short, round(last[name], 6)) == round(last[name], 6)
    assert table["train/loss"][-1] == number(last["train/loss"])
    assert indexed
    assert indexed.keys() <= rows.keys()
    best = Path("run/checkpoints/best").read_text().strip()
    assert best == f"step-{told['metrics']['best'][told['main_metric']['name']]['step']:08d}"
    assert relative_names(told["command"]) in card.split("## Training")[1]
    if (judged := told["generalisation"]) is not None:
        sentence = judged["verdict"] if judged["verdict"] != "no better" else "better than"
        for text in (said, card):
            assert sentence in text
            for fact in (judged["eval_loss"], judged["before_training"], judged["train_loss"]):
                assert number(fact) in text.replace("\\", "")
        assert (judged["step"], judged["eval_loss"]) == (told["global_step"], last[judged["loss"]])
        assert (judged["before_training"], judged["train_loss"]) == (
            log[0][judged["loss"]],
            last["train/loss"],
        )
    return told


@pytest.mark.parametrize("task", TASKS)
def test_every_task(
    task: str, clock: SimpleNamespace, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run on an idle machine.

    Of some, whose best is the highest and the lowest, prolonged on a busy one.
    """
    assert optrun(*words_of(task)) == 0
    assert agree(capsys.readouterr().out)["global_step"] == 3
    if task not in PROLONGED:
        return
    clock.pace = 60.0
    assert optrun("resume=run", "training.max_steps=6") == 0
    told = agree(capsys.readouterr().out)
    assert told["global_step"] == 6
    assert "training.max_steps=6" in told["resumes"][-1]["command"], "what prolonged it"


def test_a_run_that_ends_early(
    clock: SimpleNamespace, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of("sequence_classification", steps=40)
    assert (
        optrun(*words, "training.early_stopping_patience=1", "training.early_stopping_threshold=9")
        == 0
    )
    told = agree(capsys.readouterr().out)
    assert (told["global_step"], told["max_steps"]) == (4, 40)
    assert optrun("resume=run", "training.early_stopping_patience=2", "training.max_steps=50") == 0
    told = agree(capsys.readouterr().out)
    assert (told["global_step"], told["max_steps"]) == (6, 50)


def test_a_run_that_was_stopped(
    clock: SimpleNamespace, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of("causal_lm")
    for code in (75, 75, 0):
        assert optrun(*words, "training.max_seconds=1e-9", "resume=auto") == code
        said = capsys.readouterr().out
    agree(said)


def test_an_exported_checkpoint_tells_of_itself(here: Path) -> None:
    """The step, the length and the numbers that it was saved with, after the run was prolonged."""
    assert optrun(*words_of("causal_lm"), "checkpoint.keep_last=9") == 0
    assert optrun("resume=run", "training.max_steps=6") == 0
    assert optrun("export", "run/checkpoints/step-00000003", "out") == 0
    card = Path("out/README.md").read_text()
    assert "step 3 of" not in card, "it was the end of that run"
    state = json.loads(Path("run/checkpoints/step-00000003/state.json").read_text())
    assert cells(card, "|", 2)["loss"] == [format_metric(state["train"]["last"]["eval/loss"])]
    assert optrun("export", "run/checkpoints/step-00000006", "other") == 0
    assert (
        Path("other/README.md")
        .read_text()
        .replace("\\", "")
        .count(number(summary(Path("run"))["metrics"]["last"]["eval/loss"]))
    )
