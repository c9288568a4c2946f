"""A run that came to its good end stays what it is, whatever a resume of it is asked for or
ends by.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from optrun.artifacts.run_dir import RunDir
from optrun.runner import train as experiment
from tests.faults.runs import STEPS, Go, Straight
from tests.running import summary


def held(run: Path) -> dict[str, bytes]:
    """What a run says of itself."""
    return {
        name: (run / name).read_bytes() for name in ("config.yaml", "summary.json", "metrics.jsonl")
    }


@pytest.fixture
def run(straight: Straight, tmp_path: Path) -> Path:
    """A copy of the undisturbed run, finished."""
    shutil.copytree(straight.path, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("word", "pair"),
    [
        ("lr=1e-4", "lr=0.0001 (was 0.002)"),
        ("training.max_steps=3", "training.max_steps=3 (was 6)"),
        ("task.prompt=quick", "task.prompt=quick (was null)"),
    ],
)
def test_a_change_that_nothing_is_computed_with_is_refused(
    go: Go, run: Path, word: str, pair: str
) -> None:
    """Else its results would be told with an lr that was never used."""
    before = held(run)
    code, said = go("resume=run", word)
    assert code == 2
    assert f"{pair}: all 6 steps are done, so it would have no effect" in said
    assert "training.max_steps=N" in said
    assert held(run) == before


def test_no_change_leaves_everything_as_it_is(go: Go, run: Path) -> None:
    before = held(run)
    code, said = go("resume=run")
    assert code == 0
    assert f"all {STEPS} steps are done; nothing to train" in said
    assert "eval/loss" in said
    assert held(run) == before


def test_a_harmless_change_is_recorded(go: Go, run: Path) -> None:
    before = summary(run)
    assert go("resume=run", "run_name=mine")[0] == 0
    after = summary(run)
    assert (after["run_name"], after["status"]) == ("mine", "finished")
    assert after["resumes"][-1]["changes"] == {"run_name": [None, "mine"]}
    for key in (
        "metrics",
        "model",
        "data",
        "versions",
        "hardware",
        "code",
        "main_metric",
        "perf",
        "wall_seconds",
    ):
        assert after[key] == before[key]
    assert (
        go("resume=run", "lr=1e-4", "training.max_steps=7")[0] == 0
    )  # with something to compute it is applied
    assert summary(run)["global_step"] == 7


def test_the_end_may_still_be_owed(go: Go, straight: Straight, tmp_path: Path) -> None:
    """Killed between the last save and the summary.

    The last thing is made up for, with no other lr either.
    """
    run = straight.cut(tmp_path / "run", STEPS)
    code, said = go("resume=run", "lr=1e-4")
    assert code == 2
    assert "it would have no effect" in said
    assert go("resume=run")[0] == 0
    straight.same(run)


def interrupt(*_: Any, **__: Any) -> None:
    """Ctrl-C while the data is prepared."""
    os.kill(os.getpid(), signal.SIGINT)
    signal.sigtimedwait([], 1)


@pytest.mark.parametrize("how", ["interrupted", "damaged", "broken"])
def test_a_resume_that_goes_nowhere_takes_nothing_away(
    go: Go, run: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    before = held(run)
    place, expected = "run", {"interrupted": 75, "damaged": 4, "broken": 1}[how]
    if how == "interrupted":
        monkeypatch.setattr(experiment, "prepare", interrupt)
    elif how == "damaged":
        place = f"run/checkpoints/step-{STEPS:08d}"
        (run / "checkpoints" / f"step-{STEPS:08d}" / "state.json").write_text("{}")
    else:
        monkeypatch.setattr(experiment, "assemble", lambda *_: 1 / 0)
    if how == "broken":
        with pytest.raises(ZeroDivisionError):
            go(f"resume={place}")
    else:
        assert go(f"resume={place}")[0] == expected
    assert held(run) == before


def test_what_is_known_of_an_interrupted_run_stays(
    go: Go, straight: Straight, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = straight.cut(tmp_path / "run", 3)
    values = {**summary(run.path), "status": "interrupted"}
    RunDir(run.path).summary.write_text(json.dumps(values))
    with monkeypatch.context() as patch:
        patch.setattr(experiment, "prepare", interrupt)
        assert go("resume=run")[0] == 75
    after = summary(run.path)
    assert after["status"] == "interrupted"
    for key in ("model", "data", "versions", "hardware", "code", "main_metric", "metrics"):
        assert after[key] == values[key]
    assert go("resume=run")[0] == 0
    straight.same(run)
