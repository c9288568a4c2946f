"""The evaluation before the first step: the first line, once, and no trace of it in training."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optrun.base.errors import OptrunError
from optrun.data.loader import BatchLoader
from optrun.training.evaluate import Evaluator
from optrun.training.loop import Loop
from optrun.training.step import TrainStep
from tests.resume.test_exact import TASKS, causal_lm
from tests.running import optrun, records, state, summary, tensors

EVERY = [
    "training.max_steps=4",
    "training.logging_steps=2",
    "training.eval_steps=2",
    "checkpoint.keep_last=9",
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pictures: None) -> None:
    monkeypatch.chdir(tmp_path)


def fails(*_: object) -> None:
    raise OptrunError("the first step fails")


def first_steps(run: str = "run") -> list[int]:
    return [record["step"] for record in records(Path(run), before=True)][:2]


def without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs as they were before there was this evaluation."""
    original = Evaluator.__call__

    def call(self: Evaluator, *, trained: bool = True) -> dict[str, float]:
        return original(self, trained=trained) if trained else {}

    monkeypatch.setattr(Evaluator, "__call__", call)


PLATEAU = ["scheduler=plateau", "scheduler.patience=0", "training.early_stopping_patience=3"]
AVERAGED = ["optimizer=schedule_free"]


@pytest.mark.parametrize(
    ("task", "more"),
    [("causal_lm", PLATEAU), ("classification", AVERAGED), ("masked_lm", PLATEAU)],
    ids=["causal_lm", "classification", "masked_lm"],
)
def test_training_is_what_it_is_without(
    task: str, more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout, masks, weights of evaluation, patience and plateau: bit for bit."""
    words = [*TASKS[task](tmp_path), *EVERY, *more]
    assert optrun(*words, "hydra.run.dir=run") == 0
    with monkeypatch.context() as patch:
        without_it(patch)
        assert optrun(*words, "hydra.run.dir=without") == 0
    assert first_steps() == [0, 2]
    assert first_steps("without") == [2, 4]
    assert records(Path("run")) == records(Path("without"))
    for step in (2, 4):
        assert tensors(Path("run"), step) == tensors(Path("without"), step)
        one, other = state(Path("run"), step), state(Path("without"), step)
        assert one["train"].pop("before_training")
        assert not other["train"].pop("before_training")
        assert one == other


def test_it_is_no_time_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the wall time nor the throughput has a part of it."""
    clock = [0.0]
    original = Evaluator.__call__

    def call(self: Evaluator, *, trained: bool = True) -> dict[str, float]:
        clock[0] += 0.0 if trained else 1000.0
        return original(self, trained=trained)

    monkeypatch.setattr(Evaluator, "__call__", call)
    monkeypatch.setitem(Loop.__init__.__kwdefaults__, "clock", lambda: clock[0])
    assert optrun(*causal_lm(tmp_path), *EVERY, "hydra.run.dir=run") == 0
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [line["time"] for line in lines] == [0.0, 0.0, 0.0]
    assert summary(Path("run"))["wall_seconds"] == 0.0
    assert not any(name.startswith("perf/") for name in lines[0])


def test_step_0_is_never_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where training makes it worse: it has no checkpoint."""
    words = [
        *causal_lm(tmp_path),
        *EVERY,
        "lr=100",
        "clip=none",
        "optimizer=sgd",
        "training.early_stopping_patience=9",
    ]
    assert optrun(*words, "hydra.run.dir=run") == 0
    lines = records(Path("run"), before=True)
    assert lines[0]["eval/loss"] < min(line["eval/loss"] for line in lines[1:])
    told = summary(Path("run"))
    assert told["metrics"]["best"]["eval/loss"]["step"] in (2, 4)
    assert "0" not in state(Path("run"), 4)["train"]["ranking"]
    assert told["generalisation"]["verdict"] == "no better"
    assert told["metrics"]["before_training"]["eval/loss"] == lines[0]["eval/loss"]


def test_a_signal_in_it_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is there to save; the same line again is a whole run."""
    words = [
        *causal_lm(tmp_path),
        *EVERY,
        "training.per_device_eval_batch_size=2",
        "hydra.run.dir=run",
    ]
    original = BatchLoader.evaluation

    def batches(self: BatchLoader, *args: Any) -> Iterator[Any]:
        for count, batch in enumerate(original(self, *args)):
            if count == 1:
                os.kill(os.getpid(), signal.SIGINT)
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(BatchLoader, "evaluation", batches)
        assert optrun(*words) == 75
    told = summary(Path("run"))
    assert (told["status"], told["global_step"]) == ("interrupted", 0)
    assert "before the first step" in told["message"]
    assert not Path("run/metrics.jsonl").exists()
    assert optrun(*words, "resume=auto") == 0
    assert [record["step"] for record in records(Path("run"), before=True)] == [0, 2, 4]


def test_a_run_that_begins_again_has_the_line_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended by an error in its first step, with the line written and nothing saved."""
    words = [*causal_lm(tmp_path), *EVERY, "hydra.run.dir=run"]
    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "exchange", fails)
        assert optrun(*words) == 1
    assert first_steps() == [0]
    assert optrun(*words, "resume=auto") == 0
    assert [record["step"] for record in records(Path("run"), before=True)] == [0, 2, 4]


def test_going_on_from_step_0_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of step 0 (`on_nonfinite=rollback`) knows what was found before it."""
    words = [*causal_lm(tmp_path), *EVERY, "training.on_nonfinite=rollback", "hydra.run.dir=run"]
    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "exchange", fails)
        assert optrun(*words) == 1
    before = records(Path("run"), before=True)
    assert optrun("resume=run/checkpoints/step-00000000") == 0
    lines = records(Path("run"), before=True)
    assert [line["step"] for line in lines] == [0, 2, 4]
    assert lines[:1] == before
    assert summary(Path("run"))["metrics"]["before_training"]["eval/loss"] == before[0]["eval/loss"]


def test_a_branch_has_the_line_only_at_step_0(tmp_path: Path) -> None:
    """What precedes the first step of a branch is a line of its trunk."""
    words = [*causal_lm(tmp_path), *EVERY, "training.on_nonfinite=rollback"]
    assert optrun(*words, "hydra.run.dir=trunk") == 0
    assert optrun("branch_from=trunk/checkpoints/step-00000002", "hydra.run.dir=branch") == 0
    assert first_steps("branch") == [4]
    assert summary(Path("branch"))["metrics"]["before_training"] == {}


def test_without_evaluation_rows_there_is_none(tmp_path: Path) -> None:
    words = [*causal_lm(tmp_path), *EVERY[:2], "data.eval_fraction=0", "hydra.run.dir=run"]
    assert optrun(*words) == 0
    assert first_steps() == [2, 4]
    assert summary(Path("run"))["generalisation"] is None
