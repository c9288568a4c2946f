"""TensorBoard for real where it is installed; the others by what is asked of them."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from optrun.base.errors import ConfigError
from optrun.config.choice import choice
from optrun.config.schema.tracking import SCHEMAS, TrackingConfig
from optrun.training.trackers import build_tracker, require_tracker

RECORD = {"step": 3, "epoch": 0.5, "time": 12.5, "train/loss": 1.25, "note": "text"}
SENT = {"epoch": 0.5, "train/loss": 1.25}
Calls = list[tuple[str, Any, Any]]


def config(name: str, **options: Any) -> TrackingConfig:
    return choice("tracking", SCHEMAS, name, options)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that writes down what is called."""

    def install(name: str, broken: str | None = None) -> Calls:
        calls: Calls = []

        class Fake(ModuleType):
            def __getattr__(self, attribute: str) -> Any:
                if attribute.startswith("__"):
                    raise AttributeError(attribute)

                def call(*args: Any, **kwargs: Any) -> Any:
                    calls.append((attribute, args, kwargs))
                    if attribute == broken:
                        raise ConnectionError("the server is gone")
                    return SimpleNamespace(info=SimpleNamespace(run_id="run-1"))

                return call

        monkeypatch.setitem(sys.modules, name, Fake(name))
        return calls

    return install


def test_none_takes_everything_and_does_nothing(tmp_path: Path) -> None:
    tracker = build_tracker(config("none"), tmp_path, None, {})
    tracker.log(RECORD)
    tracker.close("finished")
    assert list(tmp_path.iterdir()) == []


def test_wandb_by_its_calls(tmp_path: Path, fake: Any) -> None:
    calls = fake("wandb")
    made = build_tracker(config("wandb", mode="offline"), tmp_path, "mine", {"lr": 0.1})
    made.log(RECORD)
    made.close("interrupted")
    (_, _, first), (_, args, kwargs), (_, _, last) = calls
    assert [name for name, _, _ in calls] == ["init", "log", "finish"]
    identity = json.loads((tmp_path / "tracking.json").read_text())["wandb"]
    assert first == {
        "project": "optrun",
        "config": {"lr": 0.1},
        "resume": "allow",
        "id": identity,
        "name": "mine",
        "dir": str(tmp_path),
        "mode": "offline",
    }
    assert (args, kwargs) == ((SENT,), {"step": 3})
    assert last == {"exit_code": 1}
    build_tracker(config("wandb"), tmp_path, "mine", {}, start=3).close("finished")
    assert calls[3][2]["id"] == identity
    assert calls[-1][2] == {"exit_code": 0}


def test_trackio_by_its_calls(tmp_path: Path, fake: Any) -> None:
    calls = fake("trackio")
    made = build_tracker(config("trackio", project="p"), tmp_path, None, {"lr": 0.1})
    made.log(RECORD)
    made.close("finished")
    name = calls[0][2]["name"]
    assert name.startswith(tmp_path.name)
    assert calls == [
        ("init", (), {"project": "p", "config": {"lr": 0.1}, "resume": "allow", "name": name}),
        ("log", (SENT,), {"step": 3}),
        ("finish", (), {}),
    ]
    build_tracker(config("trackio"), tmp_path, None, {}, start=3)
    assert calls[-1][2]["name"] == name
    with pytest.raises(ConfigError, match=r"tracking.mode=offline: trackio has no modes"):
        build_tracker(config("trackio", mode="offline"), tmp_path, None, {})


def test_mlflow_by_its_calls(tmp_path: Path, fake: Any) -> None:
    calls = fake("mlflow")
    values = {f"group[{number}].key": number for number in range(120)}
    made = build_tracker(config("mlflow"), tmp_path, None, values)
    made.log(RECORD)
    made.close("failed")
    assert [name for name, _, _ in calls] == [
        "set_tracking_uri",
        "set_experiment",
        "start_run",
        "log_params",
        "log_params",
        "log_metrics",
        "end_run",
    ]
    assert calls[0][1] == (f"sqlite:///{tmp_path / 'mlflow.db'}",)
    assert calls[2][2] == {"run_name": tmp_path.name}
    sent = {**calls[3][1][0], **calls[4][1][0]}
    assert len(calls[3][1][0]) == 100
    assert sent["group_7_.key"] == "7"
    assert len(sent) == 120
    assert calls[5][1:] == ((SENT,), {"step": 3})
    assert calls[6][1] == ("FAILED",)
    calls.clear()
    made = build_tracker(config("mlflow", tracking_uri="http://x"), tmp_path, None, values, start=3)
    made.close("interrupted")
    assert [(name, args, kwargs) for name, args, kwargs in calls[2:]] == [
        ("start_run", (), {"run_id": "run-1"}),
        ("end_run", ("KILLED",), {}),
    ]


def test_a_tracker_that_fails_does_not_end_the_run(tmp_path: Path, fake: Any) -> None:
    calls = fake("wandb", broken="log")
    said: list[str] = []
    made = build_tracker(config("wandb"), tmp_path, None, {}, note=said.append)
    for _ in range(3):
        made.log(RECORD)
    made.close("finished")
    assert [name for name, _, _ in calls] == ["init", "log"]
    assert len(said) == 1
    assert "tracking=wandb failed (ConnectionError: the server is gone)" in said[0]


def test_a_tracker_that_cannot_start_is_told(tmp_path: Path, fake: Any) -> None:
    fake("mlflow", broken="start_run")
    with pytest.raises(
        ConfigError, match=r"tracking=mlflow: cannot start: ConnectionError: .*tracking=none"
    ):
        build_tracker(config("mlflow"), tmp_path, None, {})
    assert not (tmp_path / "tracking.json").exists()


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow", "tensorboard"])
def test_a_missing_package_is_told_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ConfigError, match=rf"the package {name} is not installed. pip install 'optrun\[{name}\]'"
    ):
        build_tracker(config(name), tmp_path, None, {})
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=rf"tracking={name}: the package {name} is not installed"):
        require_tracker(config(name))
    require_tracker(config("none"))


if (
    importlib.util.find_spec("tensorboard") is not None
):  # an extra: without it there is nothing to test

    def test_tensorboard_for_real(tmp_path: Path) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        made = build_tracker(config("tensorboard"), tmp_path, None, {})
        for step in (1, 2, 3):
            made.log({"step": step, "train/loss": 1.0 / step, "eval/pearson": math.nan})
        made.close("interrupted")
        resumed = build_tracker(
            config("tensorboard"), tmp_path, None, {}, start=2
        )  # step 3 was not saved
        resumed.log({"step": 3, "train/loss": 7.0})
        resumed.close("finished")
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
            (1, 1.0),
            (2, 0.5),
            (3, 7.0),
        ]
