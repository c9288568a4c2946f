"""`tracking=[A,B]`.

Both get every step, each with its own keys, over a resume and from a recipe.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optrun.base.errors import ConfigError
from optrun.config import saved
from optrun.config.registry import plugins
from tests.running import TINY_GPT, optrun, write_text

PLUGIN = """
from dataclasses import dataclass

import optrun
from optrun.plugin import TrackingConfig


@dataclass(kw_only=True)
class LinesConfig(TrackingConfig):
    name: str = "lines"
    file: str = "steps.txt"


@optrun.register_tracker("lines", schema=LinesConfig)
class Lines:
    def __init__(self, run, file):
        self.path = run.extra_dir / file

    def log(self, record):
        with self.path.open("a") as file:
            print(record["step"], file=file)

    def close(self, status):
        with self.path.open("a") as file:
            print(status, file=file)
"""
LINE = [
    *TINY_GPT,
    "data=files",
    "data.train=corpus.txt",
    "training.logging_steps=1",
    "checkpoint.save_steps=2",
    "--plugin",
    "lines.py",
]
FOUR = "training.max_steps=4"
BOTH = ["tracking=[tensorboard,lines]", "tracking.trackers.lines.file=mine.txt"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path, 60)
    Path("lines.py").write_text(PLUGIN)
    yield
    for name in list(plugins.LOADED):
        plugins.forget(name)


def steps_sent(run: Path) -> list[str]:
    return next(run.rglob("mine.txt")).read_text().split()


def test_each_gets_every_step_before_and_after_a_resume() -> None:
    pytest.importorskip("tensorboard")
    assert optrun(*LINE, *BOTH, "hydra.run.dir=run", "training.max_steps=2") == 0
    assert steps_sent(Path("run")) == ["0", "1", "2", "finished"]
    assert optrun("resume=run", FOUR, "--plugin", "lines.py") == 0
    assert steps_sent(Path("run"))[4:] == ["3", "4", "finished"]
    assert len(list(Path("run/tensorboard").iterdir())) == 2
    assert saved.read_config(Path("run/config.yaml"))["tracking"]["trackers"]["lines"] == {
        "name": "lines",
        "file": "mine.txt",
    }


def test_another_list_at_a_resume_replaces_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert optrun(*LINE, "hydra.run.dir=run", "training.max_steps=2") == 0
    assert optrun("resume=run", FOUR, *BOTH, "--plugin", "lines.py") == 0
    assert steps_sent(Path("run")) == ["3", "4", "finished"]
    assert optrun("resume=run", "tracking=[tensorboard,linse]", "--plugin", "lines.py") == 2
    assert "Did you mean lines?" in capsys.readouterr().err


def test_a_recipe_lists_them_as_hydra_does() -> None:
    Path("mine.yaml").write_text(
        "defaults: [config, {override tracking: [tensorboard, lines]}, _self_]\n"
        "tracking: {trackers: {lines: {file: mine.txt}}}\n"
    )
    assert optrun("-cn", "mine", "--config-dir", ".", *LINE, FOUR, "hydra.run.dir=run") == 0
    assert steps_sent(Path("run"))[-2:] == ["4", "finished"]


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ("tracking=[tensorboard,tensorboard]", ["tensorboard is given twice"]),
        ("tracking=[tensorboard,linse]", ["tracking=linse", "Did you mean lines?"]),
        ("tracking=[none,lines]", ["none goes with no other"]),
        ("tracking=[lines,several]", ["several goes with no other"]),
        ("tracking=several", ["names no tracker", "tracking=[tensorboard,wandb]"]),
        ("tracking=[]", ["a run has one tracking"]),
        (
            "tracking=[tensorboard,lines] tracking.file=a",
            ["Did you mean tracking.trackers.lines.file?"],
        ),
        (
            "tracking=[tensorboard,lines] tracking.trackers.lines.fil=a",
            ["Did you mean tracking.trackers.lines.file?"],
        ),
        (
            "tracking=[tensorboard,lines] tracking.trackers.lines.file=[1]",
            ["tracking.trackers.lines.file", "text"],
        ),
        (
            "tracking=[tensorboard,lines] tracking.trackers.mlflow.project=a",
            ["tracking.trackers.mlflow", "tracking=[tensorboard,lines,mlflow]"],
        ),
    ],
)
def test_what_is_wrong_is_refused_by_name(
    words: str, facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert optrun(*LINE, *words.split()) == 2
    said = capsys.readouterr().err
    assert [fact for fact in facts if fact not in said] == [], said


def test_a_recipe_names_none_twice(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text(
        "defaults: [config, {override tracking: [lines, lines]}, _self_]\n"
    )
    assert optrun("-cn", "mine", "--config-dir", ".", *LINE) == 2
    assert "lines is given twice" in capsys.readouterr().err


def test_a_sweep_takes_a_list_as_one_value(forked_jobs: None) -> None:
    assert (
        optrun(
            "-m",
            *LINE,
            "training.max_steps=1",
            "tracking=[tensorboard,lines]",
            "lr=1e-3,2e-3",
            "hydra.sweep.dir=s",
        )
        == 0
    )
    written: list[Any] = [
        json.loads(path.read_text())["status"] for path in Path("s").glob("*/summary.json")
    ]
    assert written == ["finished", "finished"]
    assert len(list(Path("s").rglob("steps.txt"))) == 2


def test_a_tracker_of_ones_own_may_have_a_key_of_that_name() -> None:
    own = (
        PLUGIN.replace("file: str", "trackers: str")
        .replace("run, file", "run, trackers")
        .replace("/ file", "/ trackers")
    )
    Path("lines.py").write_text(own)
    assert optrun(*LINE, "tracking=lines", "training.max_steps=2", "hydra.run.dir=run") == 0
    assert optrun("resume=run", "--plugin", "lines.py", FOUR) == 0
    assert "4" in Path("run/extra/steps.txt").read_text().split()


def test_stored_trackers_that_are_none_are_refused() -> None:
    assert optrun(*LINE, *BOTH, "training.max_steps=1", "hydra.run.dir=run") == 0
    for broken in (5, {"lines": 5}, {"lines": {"file": "a"}}):
        values = saved.read_config(Path("run/config.yaml"))
        values["tracking"]["trackers"] = broken
        with pytest.raises(ConfigError, match="trackers"):
            saved.with_schemas(values, "run/config.yaml")
