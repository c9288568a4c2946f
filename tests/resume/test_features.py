"""Losses of one's own, several evaluation sets, callbacks and early stopping.

Stopped at each step and gone on from.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from optrun.config.registry import plugins
from optrun.runner import train as experiment
from tests.e2e.test_callbacks import WATCH
from tests.faults.runs import words_with
from tests.faults.test_numbers import poisoned
from tests.running import TINY_BERT, optrun, records, state, summary, tensors, write_labelled

STEPS = 4
RUN = [
    *(word.replace("num_hidden_layers=2", "num_hidden_layers=1") for word in TINY_BERT),
    "task=sequence_classification",
    "data=files",
    "data.train=train.csv",
    "data.max_length=16",
    "training.per_device_train_batch_size=4",
    "training.gradient_accumulation_steps=2",
    f"training.max_steps={STEPS}",
    "training.logging_steps=1",
    "training.eval_steps=2",
    "checkpoint.save_steps=3",
    "checkpoint.keep_last=9",
]
STALL = ["lr=1e-12", "training.early_stopping_threshold=10"]  # which no evaluation gets better by
FEATURES = {
    "class weights": ["task.class_weights={even: 3.0}", "training.label_smoothing_factor=0.1"],
    "evaluation sets": [
        "data.eval={dev: dev.csv, hard: hard.csv}",
        "checkpoint.metric=eval/hard/loss",
    ],
    "plateau of one": [
        "data.eval={dev: dev.csv, hard: hard.csv}",
        "scheduler=plateau",
        "scheduler.metric=eval/hard/loss",
        "scheduler.patience=0",
        "checkpoint.metric=eval/dev/accuracy",
    ],
    "callback": ["callbacks.watch={}", "--plugin", "watch.py"],
    "early stopping": [*STALL, "training.early_stopping_patience=2", "training.eval_steps=1"],
    "all of them": [
        "data.eval={dev: dev.csv, hard: hard.csv}",
        "task.class_weights=balanced",
        "callbacks.watch={}",
        "--plugin",
        "watch.py",
        "training.early_stopping_patience=9",
        "training.label_smoothing_factor=0.2",
        "scheduler=plateau",
        "scheduler.metric=eval/dev/loss",
    ],
}
FEW = ("early stopping", "all of them")
"""Which hold the others' parts; those are tried alone in the slow suite."""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(experiment, "draw_curves", lambda path: None)
    for name, rows in (("train.csv", 20), ("dev.csv", 12), ("hard.csv", 8)):
        write_labelled(tmp_path, rows, name)
    Path("watch.py").write_text(WATCH)
    yield
    for name in list(plugins.LOADED):
        plugins.forget(name)


def run_in_parts(args: list[str]) -> int:
    """A budget of nothing stops after every step; returns how many starts it took."""
    for start in range(1, 24):
        code = optrun(*args, "training.max_seconds=1e-9", "hydra.run.dir=parts", "resume=auto")
        if code == 0:
            return start
        assert code == 75
    raise AssertionError("it does not come to its end")


def same(step: int) -> None:
    whole, parts = Path("whole"), Path("parts")
    assert records(whole) == records(parts)
    assert tensors(whole, step) == tensors(parts, step)
    assert state(whole, step) == state(parts, step)
    assert summary(whole).get("stopped") == summary(parts).get("stopped")
    assert summary(whole)["metrics"]["best"] == summary(parts)["metrics"]["best"]


@pytest.mark.parametrize(
    "feature",
    [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in FEATURES],
)
def test_stopped_at_every_step_it_is_the_same_run(feature: str) -> None:
    args = words_with(RUN, *FEATURES[feature])
    assert optrun(*args, "hydra.run.dir=whole") == 0
    step = summary(Path("whole"))["global_step"]
    assert step == (3 if feature == "early stopping" else STEPS)
    assert run_in_parts(args) == step
    same(step)


@pytest.mark.slow
def test_early_stopping_after_a_rollback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad at step 5.

    Back to 3, where one evaluation less was counted, and on from there, stopped or not.
    """
    args = [*RUN, *STALL, "training.early_stopping_patience=3", "training.on_nonfinite=rollback"]
    args = [arg for arg in args if not arg.startswith("training.max_steps")] + [
        "training.max_steps=12"
    ]
    with poisoned(monkeypatch, set()) as marks:
        assert optrun(*args, "hydra.run.dir=probe") == 0
    assert summary(Path("probe"))["stopped"]["step"] == 8
    with poisoned(monkeypatch, {marks[4]}):
        assert optrun(*args, "hydra.run.dir=whole") == 0
        assert run_in_parts(args) > 5
    assert records(Path("whole"))[-1]["train/rollbacks"] == 1
    assert state(Path("whole"), 8)["callbacks"]["training.early_stopping_patience"]["counter"] == 3
    same(8)


def test_other_evaluation_rows_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    """A best checkpoint of the old rows stays, and its value means another thing."""
    assert (
        optrun(*words_with(RUN, "data.eval=dev.csv", "training.max_steps=2"), "hydra.run.dir=run")
        == 0
    )
    capsys.readouterr()
    assert optrun("resume=run", "training.max_steps=3") == 0
    assert "evaluation examples" not in capsys.readouterr().out
    assert optrun("resume=run", "training.max_steps=4", "data.eval=hard.csv") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "the evaluation examples are not those before this resume: metrics from now on" in said
