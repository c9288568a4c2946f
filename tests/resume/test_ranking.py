"""Which checkpoint is best: by one metric at a time, and among those that can be opened."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from optrun.artifacts import async_writer as saver
from optrun.artifacts.checkpoint import Snapshot, save_checkpoint
from optrun.artifacts.run_dir import RunDir
from optrun.base.errors import StorageError
from optrun.runner import train as experiment
from optrun.training import evaluate as evaluation
from tests.resume.test_exact import causal_lm
from tests.running import optrun, records, summary

Evaluations = Callable[[Sequence[float], Sequence[float]], None]
"""What the next evaluations find: losses, accuracies."""


@pytest.fixture
def find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Evaluations:
    monkeypatch.chdir(tmp_path)
    return found_in(monkeypatch)


def found_in(monkeypatch: pytest.MonkeyPatch) -> Evaluations:
    """Evaluations of the run in the current folder find what they are told to."""
    monkeypatch.setattr(experiment, "draw_curves", lambda path: None)
    left: list[dict[str, float]] = []

    def evaluate_sets(*_: Any, **__: Any) -> dict[str, float]:
        if not Path("run/metrics.jsonl").exists():  # before the first step
            return {"eval/loss": 0.0, "eval/perplexity": 1.0, "eval/accuracy": 1.0}
        if not left:
            raise StorageError("the evaluation fails, and nothing is saved for it")
        return {f"eval/{name}": value for name, value in left.pop(0).items()}

    monkeypatch.setattr(evaluation, "evaluate_sets", evaluate_sets)

    def told(losses: Sequence[float], accuracies: Sequence[float]) -> None:
        left[:] = [
            {"loss": loss, "perplexity": 1.0, "accuracy": accuracy}
            for loss, accuracy in zip(losses, accuracies, strict=True)
        ]

    return told


@pytest.fixture(scope="module")
def of_three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps whose first loss is the best; tests go on from copies."""
    folder = tmp_path_factory.mktemp("three")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        found_in(patch)([0.5, 2.0, 3.0], [0.1, 0.2, 0.3])
        assert optrun(*words(folder, 3)) == 0
    return folder / "run"


def words(folder: Path, steps: int, *more: str) -> list[str]:
    """Evaluated and saved at every step; the newest and the best are kept."""
    each = [
        "training.eval_steps=1",
        "training.logging_steps=1",
        "checkpoint.save_steps=1",
        "checkpoint.keep_last=1",
    ]
    return [*causal_lm(folder), *each, f"training.max_steps={steps}", "hydra.run.dir=run", *more]


def there() -> tuple[list[int], str]:
    """Steps on the disk, all whole, and what `best` says; nothing dangles."""
    run = RunDir("run")
    assert optrun("verify", "run") == 0
    best = run.best.read_text().strip() if run.best.exists() else ""
    return sorted(int(path.name.split("-")[1]) for path in run.checkpoints.glob("step-*")), best


def test_another_metric_ranks_anew(
    find: Evaluations, of_three: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses are not compared with accuracies: 3.0 would be the best accuracy for good."""
    shutil.copytree(of_three, "run")
    assert there() == ([1, 3], "step-00000001")
    capsys.readouterr()
    find([0.9, 0.8, 0.7], [0.4, 0.3, 0.2])
    assert optrun("resume=run", "checkpoint.metric=eval/accuracy", "training.max_steps=6") == 0
    assert "ranked by eval/accuracy (max) from here on" in capsys.readouterr().out
    assert there() == ([4, 6], "step-00000004")
    assert summary(Path("run"))["metrics"]["best"]["eval/accuracy"] == {
        "value": 0.4,
        "step": 4,
        "loss": 0.9,
        "tied": 1,
    }
    assert summary(Path("run"))["metrics"]["best"]["eval/loss"] == {
        "value": 0.5,
        "step": 1,
        "loss": 0.5,
        "tied": 1,
    }


def test_another_direction_ranks_anew(find: Evaluations, of_three: Path) -> None:
    shutil.copytree(of_three, "run")
    find([0.9, 1.0, 0.7], [0.4, 0.3, 0.2])
    assert optrun("resume=run", "checkpoint.mode=max", "training.max_steps=6") == 0
    assert there() == ([5, 6], "step-00000005")
    best = summary(Path("run"))["metrics"]["best"]
    assert best["eval/loss"] == {"value": 1.0, "step": 5, "loss": 1.0, "tied": 1}
    assert best["eval/accuracy"] == {"value": 0.4, "step": 4, "loss": 0.9, "tied": 1}


def test_the_same_metric_by_its_name_is_no_other(
    find: Evaluations, of_three: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(of_three, "run")
    find([0.9, 0.8], [0.4, 0.3])
    assert (
        optrun(
            "resume=run", "checkpoint.metric=loss", "checkpoint.mode=min", "training.max_steps=5"
        )
        == 0
    )
    assert "from here on" not in capsys.readouterr().out.replace(
        "changes the weights from here on", ""
    )
    assert there() == ([1, 5], "step-00000001")


def test_nothing_is_best_before_the_first_evaluation_by_another_metric(
    find: Evaluations, of_three: Path
) -> None:
    """The old best goes with the newest; what named it goes too."""
    shutil.copytree(of_three, "run")
    more = [
        "checkpoint.metric=accuracy",
        "training.eval_steps=9",
        "training.max_seconds=1e-9",
        "training.max_steps=9",
    ]
    assert optrun("resume=run", *more) == 75
    assert there() == ([4], "")


def test_a_tie_goes_to_the_lower_loss_and_then_to_the_later_step(
    find: Evaluations, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checkpoint, end table and export agree.

    The evaluation before the first step, best by far, counts nowhere.
    """
    find([0.5, 0.02, 0.01, 0.01, 0.03], [0.1, 0.9, 0.9, 0.9, 0.9])
    assert optrun(*words(tmp_path, 5, "checkpoint.metric=accuracy")) == 0
    assert there() == ([4, 5], "step-00000004")
    assert summary(Path("run"))["metrics"]["best"]["eval/accuracy"] == {
        "value": 0.9,
        "step": 4,
        "loss": 0.01,
        "tied": 4,
    }
    said = capsys.readouterr().out
    assert optrun("export", "run/checkpoints/best", "out") == 0
    for text in (said, capsys.readouterr().out):
        (line,) = [line for line in text.splitlines() if line.startswith("best: ")]
        for fact in ("step 4", "eval/accuracy", "0.9", "tie of 4", "eval/loss", "0.01"):
            assert fact in line, line
    assert optrun("export", "run/checkpoints/last", "other") == 0
    assert "best: " not in capsys.readouterr().out


def test_a_plateau_of_another_metric_begins_anew(
    find: Evaluations, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rising accuracies are no failure to get above the best loss."""
    find([5.0, 5.0, 5.0], [0.1, 0.1, 0.1])
    plateau = ["scheduler=plateau", "scheduler.patience=0", "scheduler.factor=0.5", "lr=1e-3"]
    assert optrun(*words(tmp_path, 3, *plateau)) == 0
    assert [record["train/lr"] for record in records(Path("run"))] == [1e-3, 1e-3, 5e-4]
    capsys.readouterr()
    find([5.0] * 3, [0.1, 0.2, 0.3])
    changes = ["scheduler.metric=eval/accuracy", "scheduler.mode=max", "training.max_steps=6"]
    assert optrun("resume=run", *changes) == 0
    assert "what it saw of eval/loss is forgotten" in capsys.readouterr().out
    rates = [record["train/lr"] for record in records(Path("run"))]
    assert rates[3:] == [2.5e-4] * 3, "reduced twice before, and never after"


def test_what_was_never_saved_takes_no_place(
    find: Evaluations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best step fails to be saved.

    The best that is there stays, and better ones than it are kept.
    """

    def save(run: RunDir, taken: Snapshot, *given: Any) -> Path:
        if taken.global_step == 3:
            raise StorageError("full")
        return save_checkpoint(run, taken, *given)

    monkeypatch.setattr(saver, "save_checkpoint", save)
    find([3.0, 2.0, 0.5, 2.5, 2.6, 2.7], [0.1] * 6)
    assert optrun(*words(tmp_path, 6)) == 0
    assert there() == ([2, 6], "step-00000002")
    find([1.0, 1.1, 1.2], [0.1] * 3)
    assert optrun("resume=run", "checkpoint.save_steps=null", "training.max_steps=9") == 0
    assert there() == ([7, 9], "step-00000007")


def test_what_was_deleted_takes_no_place(find: Evaluations, tmp_path: Path) -> None:
    find([3.0, 0.5, 2.0, 2.2], [0.1] * 4)
    assert optrun(*words(tmp_path, 4)) == 0
    assert there() == ([2, 4], "step-00000002")
    shutil.rmtree(RunDir("run").checkpoint(2))
    find([2.1, 2.3, 2.4], [0.1] * 3)
    assert optrun("resume=run", "checkpoint.keep_best=2", "training.max_steps=7") == 0
    assert there() == ([4, 5, 7], "step-00000005")
    find([2.5, 2.6], [0.1] * 2)
    assert optrun("resume=run", "checkpoint.keep_best=0", "training.max_steps=9") == 0
    assert there() == ([9], "")


def test_the_best_that_is_put_aside_is_no_longer_named(find: Evaluations, tmp_path: Path) -> None:
    """Going on from an older checkpoint and ending before the next save."""
    find([3.0, 2.0, 0.5], [0.1] * 3)
    given = [word for word in words(tmp_path, 3) if word != "checkpoint.keep_last=1"]
    assert optrun(*given, "checkpoint.keep_last=9") == 0
    find([], [])  # the first evaluation fails
    assert optrun(f"resume={RunDir('run').checkpoint(1)}") == 74
    assert there() == ([1], "")
