"""The last line of a run names one next step: that which fits its result."""

from __future__ import annotations

from pathlib import Path

import pytest

from optrun.artifacts.generalisation import Verdict
from optrun.artifacts.run_dir import RunDir
from optrun.config import store
from optrun.config.compose import compose_request
from optrun.config.request import CommandLine
from optrun.runner.console import _next_commands
from optrun.runner.outcome import Outcome
from tests.running import TINY_BERT, optrun, write_labelled


def next_step(folder: Path, verdict: Verdict, *words: str) -> str:
    run = RunDir(folder)
    run.checkpoints.mkdir(parents=True)
    summary = {
        "global_step": 4,
        "max_steps": 4,
        "main_metric": {"name": "eval/accuracy", "mode": "max"},
        "generalisation": {"step": 4, "verdict": str(verdict)},
    }
    config = compose_request(store.open_hydra(), CommandLine(overrides=list(words))).config
    rows = _next_commands(Outcome(run, summary), config)
    (step,) = [text for label, text in rows if label == "next:"]
    assert rows[-1] == ("next:", step)
    return step


@pytest.mark.parametrize(
    ("verdict", "words", "facts"),
    [
        (Verdict.generalises, [], ["optrun predict run data.eval=FILE out=FILE.jsonl"]),
        (Verdict.generalises, ["task=masked_lm", "model=bert_tiny"], ["optrun evaluate run"]),
        (Verdict.no_better, [], ["train longer", "another lr", "model=pretrained model.path=NAME"]),
        (Verdict.memorised, [], ["more rows", "model=pretrained model.path=NAME"]),
        (Verdict.seen, [], ["data.eval=FILE"]),
    ],
)
def test_the_next_step_fits_the_result(
    verdict: Verdict,
    words: list[str],
    facts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    step = next_step(Path("run"), verdict, *words)
    assert not [fact for fact in facts if fact not in step], step


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["data=files", "data.train=a.txt"], "optrun evaluate run data.eval=FILE"),
        ([], "optrun export run/checkpoints/last DEST"),
    ],
)
def test_the_next_step_runs_without_evaluation_rows(
    words: list[str], command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run that was trained on all rows, whose task predicts none."""
    monkeypatch.chdir(tmp_path)
    run = RunDir(Path("run"))
    run.checkpoints.mkdir(parents=True)
    line = CommandLine(overrides=["task=masked_lm", "model=bert_tiny", *words])
    config = compose_request(store.open_hydra(), line).config
    outcome = Outcome(run, {"global_step": 4, "max_steps": 4})
    assert _next_commands(outcome, config)[-1] == ("next:", command)


def test_without_checkpoints_only_the_folder_is_named(tmp_path: Path) -> None:
    config = compose_request(store.open_hydra(), CommandLine()).config
    summary = {"global_step": 4, "max_steps": 4}
    assert [label for label, _ in _next_commands(Outcome(RunDir(tmp_path), summary), config)] == [
        "written"
    ]


def test_the_folder_is_named_when_the_run_trains_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A refused run leaves no folder, so none is named."""
    monkeypatch.chdir(tmp_path)
    write_labelled(tmp_path)
    words = [*TINY_BERT, "task=sequence_classification", "data=files", "data.train=train.csv"]
    words += ["training.max_steps=1", "hydra.run.dir=run"]
    assert optrun(*words, "data.label_column=nope") == 2
    assert "->" not in capsys.readouterr().out
    assert not Path("run").exists()
    assert optrun(*words) == 0
    assert "\n-> run\n" in capsys.readouterr().out


def test_the_best_checkpoint_is_named_if_a_later_one_is_the_newest(tmp_path: Path) -> None:
    """And every command loads the plugins of the run again."""
    config = compose_request(store.open_hydra(), CommandLine()).config
    run = RunDir(tmp_path / "run")
    for step in (2, 4):
        (run.checkpoints / f"step-{step:08}").mkdir(parents=True)
    run.best.write_text("step-00000002")
    summary = {
        "global_step": 4,
        "max_steps": 4,
        "main_metric": {"name": "eval/loss", "mode": "min"},
        "plugins": [{"plugin": "mine.py", "path": "/x/mine.py", "sha256": "0"}],
    }
    rows = dict(_next_commands(Outcome(run, summary), config))
    checkpoint = run.checkpoints / "best"
    assert rows["best"] == f"{checkpoint}; {run.path} alone means its newest checkpoint"
    assert rows["export"] == f"optrun export {checkpoint} DEST"
    assert rows["next:"].startswith("optrun --plugin mine.py ")
    assert rows["resume"].startswith(f"optrun --plugin mine.py resume={run.path} ")
    # The best one is the newest: there is nothing to say.
    assert "best" not in dict(_next_commands(Outcome(run, {**summary, "global_step": 2}), config))
