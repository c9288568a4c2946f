"""`summary.json` as it is written.

By a start, by the lines of metrics, by another start, by each kind of end.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from optrun.artifacts.metrics import read_summary
from optrun.artifacts.run_dir import RunDir
from optrun.config.request import Request
from optrun.runner import summary as summaries
from optrun.runner.summary import Summary, SummaryCallback
from optrun.training.callback import StopRequest
from optrun.training.state import TrainState
from tests.running import composed


def request(*argv: str, **values: Any) -> Request:
    return Request(
        argv=argv, overrides=argv, config=composed(), values={"run_name": None, "seed": 0, **values}
    )


def begun(summary: Summary, **state: Any) -> TrainState:
    """Let training stand somewhere, of which a summary knows no more than this."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1, momentum=0.9)
    optimizer.param_groups[0]["params"][0].sum().backward()
    optimizer.step()
    at = TrainState(**state)
    train_step = SimpleNamespace(device=torch.device("cpu"), optimizer=optimizer)
    setup = SimpleNamespace(
        state=at, plan=SimpleNamespace(steps_per_epoch=4), train_step=train_step
    )
    summary.setup = cast("Any", setup)
    return at


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


@pytest.fixture
def summary(run: RunDir) -> Summary:
    run.path.mkdir()
    return Summary(run, request("lr=1e-3", "run_name=a b"), "id")


def test_a_start_says_what_was_asked_for(summary: Summary, run: RunDir) -> None:
    assert not summary.begun
    summary.write()
    found = read_summary(run.summary)
    assert (found["status"], found["run_id"], found["run_name"], found["global_step"]) == (
        "running",
        "id",
        "run",
        0,
    )
    assert found["command"] == "optrun lr=1e-3 'run_name=a b'"
    assert summary.command("resume=x y") == "optrun 'resume=x y'"


def test_what_training_has_come_to_is_taken_when_it_is_written(
    summary: Summary, run: RunDir
) -> None:
    at = begun(summary, global_step=6, tokens=300, samples=12, seconds=1.5)
    at.last["eval/loss"], at.before_training["eval/loss"], at.skipped_steps = 0.5, 0.75, 1
    summary.write()
    found = read_summary(run.summary)
    assert (found["global_step"], found["epoch"], found["wall_seconds"]) == (6, 1.5, 1.5)
    assert found["metrics"] == {
        "last": {"eval/loss": 0.5},
        "best": {},
        "before_training": {"eval/loss": 0.75},
    }
    perf = found["perf"]
    assert (perf["tokens_per_second"], perf["samples_per_second"], perf["skipped_steps"]) == (
        200.0,
        8.0,
        1,
    )
    assert perf["optimizer_state_bytes"] == 3 * 4, "one momentum, in float32"
    at.global_step = 7
    assert summary.present()["global_step"] == 7
    assert read_summary(run.summary)["global_step"] == 6


def test_another_start_goes_on_with_what_the_file_says(summary: Summary, run: RunDir) -> None:
    begun(summary, global_step=3)
    summary.values["started_at"] = "2026-01-02T03:04:05Z"
    summary.end("interrupted", "stopped", 75)
    again = Summary(run, request("resume=run", "lr=2e-3"), "other")
    again.inherit_earlier_starts()
    again.resumed(3, {"lr": (1e-3, 2e-3)}, ["a note"])
    found = read_summary(run.summary)
    assert found["started_at"] == "2026-01-02T03:04:05Z"
    assert found["command"] == "optrun lr=1e-3 'run_name=a b'"
    assert (found["status"], found["message"], found["exit_code"]) == ("running", "", None)
    (entry,) = found["resumes"]
    assert entry.pop("at")
    assert entry == {
        "from_step": 3,
        "command": "optrun resume=run lr=2e-3",
        "changes": {"lr": [1e-3, 2e-3]},
        "notes": ["a note"],
    }
    assert not again.finished_before


@pytest.mark.parametrize("text", [None, "", "{"])
def test_a_file_that_was_torn_is_none(summary: Summary, run: RunDir, text: str | None) -> None:
    if text is not None:
        run.summary.write_text(text)
    before = dict(summary.values)
    summary.inherit_earlier_starts()
    assert summary.values == before
    assert not summary.finished_before


def test_a_good_end_is_made_first_and_written_later(summary: Summary, run: RunDir) -> None:
    """The model card is made of it, and the run is finished when that is there, too."""
    begun(summary, global_step=5)
    summary.values["max_steps"] = 9
    summary.write()
    values = summary.finished(StopRequest("callbacks.probe", "enough", 5))
    assert values["status"] == "finished"
    assert values["message"] == "callbacks.probe ended training after step 5 of 9: enough"
    assert values["stopped"] == {"by": "callbacks.probe", "reason": "enough", "step": 5}
    assert read_summary(run.summary)["status"] == "running"
    summary.finish(values)
    assert read_summary(run.summary)["status"] == "finished"
    again = Summary(run, request("resume=run"), "id")
    again.inherit_earlier_starts()
    assert again.finished_before
    plain = summary.finished(None)
    assert (plain["message"], plain["exit_code"], plain["generalisation"]) == ("", 0, None)


def test_it_is_written_once_a_second_and_again_where_the_disk_was_full(
    summary: Summary, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, written, refused = [0.0], [], []
    full = OSError(28, "No space left on device")

    def write(path: Path, values: object) -> None:
        written.append(clock[0])
        if clock[0] == 5.0:
            raise full

    monkeypatch.setattr(summaries.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(summaries, "write_summary", write)
    callback = SummaryCallback(summary, lambda path, what, error: refused.append((path, error)))
    for clock[0] in (0.0, 0.5, 0.99, 1.0, 5.0, 5.1, 5.2, 6.0):
        callback.on_log(cast("Any", None), {})
    assert written == [0.0, 1.0, 5.0, 5.1]
    assert refused == [(summary.run.summary, full)]


def test_the_classes_of_one_evaluation_stand_together(
    summary: Summary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All sets of one step; another step's go with it."""
    monkeypatch.setattr(summaries, "as_values", lambda table, most: (table, most))
    tables = {
        name: cast("Any", SimpleNamespace(table=lambda name=name: name))
        for name in ("first", "second")
    }
    summary.keep_classes("a", tables["first"])
    assert "classes" not in summary.values, "before training there is no step"
    at = begun(summary, global_step=2)
    summary.keep_classes("a", cast("Any", SimpleNamespace(table=lambda: None)))
    assert "classes" not in summary.values
    for name, table in (("a", "first"), ("b", "second")):
        summary.keep_classes(name, tables[table])
    assert summary.values["classes"] == {
        "step": 2,
        "sets": {"a": ("first", 50), "b": ("second", 50)},
    }
    at.global_step = 4
    summary.keep_classes("b", tables["first"])
    assert summary.values["classes"] == {"step": 4, "sets": {"b": ("first", 50)}}


def test_code_is_that_of_optrun_and_the_plugins_wherever_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No program of the repository in the working folder runs."""
    import subprocess

    from optrun.runner import summary as module

    def refused(*arguments: object, **_: object) -> None:
        raise AssertionError(f"started {arguments}")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", refused)
    monkeypatch.setattr(subprocess, "Popen", refused)
    plugin = {"plugin": "folder/mine.py", "sha256": "1"}
    code = module._code([plugin])
    assert code.keys() == {"optrun", "mine.py"}
    assert module._code([{**plugin, "sha256": "2"}])["mine.py"] != code["mine.py"]
