"""Callbacks and early stopping through whole runs.

Resumed to the bit, refused by name, told when they fail.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from optrun.config import registry
from optrun.config.registry import plugins
from optrun.config.saved import read_config
from optrun.runner import train as experiment
from tests.running import TINY_BERT, optrun, records, state, summary, tensors, write_labelled

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "docs" / "plugins.md", ROOT / "CONTRIBUTING.md")
RUN = [
    *(word.replace("num_hidden_layers=2", "num_hidden_layers=1") for word in TINY_BERT),
    "task=sequence_classification",
    "data=files",
    "data.train=train.csv",
    "lr=1e-2",
    "scheduler=constant",
    "training.per_device_train_batch_size=4",
    "training.eval_steps=2",
    "training.logging_steps=3",
    "checkpoint.save_steps=2",
    "checkpoint.keep_last=9",
    "training.max_steps=8",
]
WATCH = """
import random
from dataclasses import dataclass
import torch, optrun

@dataclass(kw_only=True)
class WatchConfig:
    stop_in: str = ""
    stop_at: int = 0
    raise_in: str = ""
    label: str | None = None

@optrun.register_callback("watch", schema=WatchConfig)
class Watch:
    def __init__(self, **options):
        self.options, self.heard = options, []

    def hear(self, training, hook):
        torch.rand(3), random.random(), training.model.eval()
        if hook not in ("begin", "save", "end"):
            self.heard.append(f"{hook} {training.global_step}")
        step = 0 if hook == "begin" else 4
        if self.options["raise_in"] == hook and training.global_step == step:
            raise KeyError("no such thing")
        if self.options["stop_in"] == hook and training.global_step == self.options["stop_at"]:
            training.request_stop("seen enough")

    def on_train_begin(self, training): self.hear(training, "begin")
    def on_step(self, training, result): self.hear(training, "step")
    def on_evaluate(self, training, metrics): self.hear(training, "evaluate")
    def on_log(self, training, record): self.hear(training, "log")
    def on_save(self, training, checkpoint): assert (checkpoint / "manifest.json").is_file()
    def on_train_end(self, training, status): (training.extra_dir / "ended.txt").write_text(status)
    def state_dict(self): return {"heard": self.heard}
    def load_state_dict(self, state): self.heard = state["heard"]
"""
RAISES = 1 + next(
    index for index, line in enumerate(WATCH.splitlines()) if "raise KeyError" in line
)
Go = Callable[..., tuple[int, str]]


def begin(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """In a folder with data and the callback."""
    patch.chdir(folder)
    patch.setattr(experiment, "draw_curves", lambda path: None)
    write_labelled(folder)
    (folder / "watch.py").write_text(WATCH)


def forget_all() -> None:
    for name in list(plugins.LOADED):
        plugins.forget(name)


@pytest.fixture
def go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Go]:
    begin(tmp_path, monkeypatch)

    def run(*args: str) -> tuple[int, str]:
        """Of a key that is given twice the last value counts."""
        given = {arg.split("=", 1)[0] if "=" in arg else arg: arg for arg in args}
        code = optrun("--plugin", "watch.py", *given.values())
        said = capsys.readouterr()
        return code, said.out + said.err

    yield run
    forget_all()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Run somewhere, for several tests to read."""

    def run(*args: str) -> str:
        with pytest.MonkeyPatch.context() as patch:
            begin(folder := tmp_path_factory.mktemp("made"), patch)
            assert optrun(*args, "hydra.run.dir=run") == 0
        forget_all()
        return str(folder / "run")

    return run


@pytest.fixture(scope="module")
def straight(made: Callable[..., str]) -> str:
    """A run with the callback, in which it does nothing."""
    return made("--plugin", "watch.py", *RUN, "callbacks.watch={}")


def heard(run: str, step: int) -> list[str]:
    return list(state(Path(run), step)["callbacks"]["callbacks.watch"]["heard"])


def stored(run: str, step: int) -> dict[str, Any]:
    """What a checkpoint has besides tensors, wherever the plugin lay."""
    values = state(Path(run), step)
    return {**values, "plugins": [{**plugin, "path": None} for plugin in values["plugins"]]}


def same(one: str, two: str, step: int) -> None:
    assert stored(one, step) == stored(two, step)
    assert tensors(Path(one), step) == tensors(Path(two), step)
    assert records(Path(one)) == records(Path(two))


def test_it_hears_everything_once_and_changes_nothing(go: Go, straight: str) -> None:
    assert go(*RUN, "hydra.run.dir=without")[0] == 0
    assert tensors(Path("without"), 8) == tensors(Path(straight), 8)
    assert records(Path("without")) == records(Path(straight))
    assert "callbacks" not in state(Path("without"), 8)
    assert heard(straight, 6) == [
        "log 0",  # before the first step there is a line, and no evaluation of what was trained
        *(
            "step 1",
            "step 2",
            "evaluate 2",
            "log 2",
            "step 3",
            "log 3",
            "step 4",
            "evaluate 4",
            "log 4",
            "step 5",
        ),
        *("step 6", "evaluate 6", "log 6"),
    ]
    assert Path(straight, "extra/ended.txt").read_text() == "finished"


def test_its_state_is_resumed_and_prolonged_to_the_bit(go: Go, straight: str) -> None:
    assert go(*RUN, "hydra.run.dir=cut", "callbacks.watch={}", "training.max_steps=5")[0] == 0
    assert (
        heard("cut", 5)[-1] == "step 5"
    )  # the evaluation and the line of the end are not of the longer run
    code, said = go("resume=cut", "training.max_steps=8")
    assert code == 0, said
    same(straight, "cut", 8)


@pytest.mark.parametrize(
    ("hook", "at", "end"), [("step", 3, 3), ("evaluate", 4, 4), ("log", 4, 5), ("begin", 0, 1)]
)
def test_it_ends_a_run(go: Go, hook: str, at: int, end: int, straight: str) -> None:
    stop = [f"callbacks.watch={{stop_in: {hook}, stop_at: {at}}}"]
    code, said = go(*RUN, *stop, "hydra.run.dir=run")
    assert code == 0, said
    told = summary(Path("run"))
    assert (told["status"], told["global_step"], told["max_steps"]) == ("finished", end, 8)
    assert told["stopped"] == {"by": "callbacks.watch", "reason": "seen enough", "step": end}
    assert f"after step {end} of 8" in told["message"]
    last = records(Path("run"))[-1]
    assert last["step"] == end
    assert {"train/loss", "eval/loss"} <= set(last)
    if hook == "evaluate":
        code, said = go("resume=run")
        assert code == 0
        assert "nothing to train" in said
        assert summary(Path("run"))["status"] == "finished"
        assert go("resume=run", "callbacks.watch.stop_at=99")[0] == 0
        same(straight, "run", 8)
        assert "stopped" not in summary(Path("run"))


@pytest.mark.parametrize("hook", ["begin", "step", "evaluate", "log"])
def test_an_exception_in_it_ends_the_run_by_name(go: Go, hook: str, straight: str) -> None:
    code, said = go(*RUN, f"callbacks.watch.raise_in={hook}", "hydra.run.dir=run")
    method = f"on_{'train_' if hook == 'begin' else ''}{hook}"
    assert code == 1
    saved = ["after step 4", "step 4 is saved"] if hook != "begin" else []
    for fact in (
        "callbacks.watch",
        f"{method} raised KeyError",
        "no such thing",
        "--plugin watch.py",
        " resume=",
        f"watch.py, line {RAISES}, in hear",
        *saved,
    ):
        assert fact in said
    assert "Traceback" not in said
    assert summary(Path("run"))["status"] == "failed"
    assert Path("run/extra/ended.txt").read_text() == "failed"
    assert optrun("verify", "run") == (4 if hook == "begin" else 0), "no checkpoint, or a whole one"
    assert go("resume=auto", "hydra.run.dir=run", "callbacks.watch.raise_in=''")[0] == 0
    same(straight, "run", 8)


def test_what_is_refused_before_anything_is_loaded(go: Go) -> None:
    for args, facts in {
        "callbacks.wtch={}": ["callbacks.wtch", "Did you mean watch", "--plugin"],
        "callbacks.watch.stop=1": ["callbacks.watch.stop", "stop_at"],
        "callbacks.watch.stop_at=soon": ["callbacks.watch.stop_at=soon", "whole number"],
        "callbacks.watch=3": ["callbacks.watch=3", "mapping"],
    }.items():
        code, said = go(*RUN, args, "hydra.run.dir=run")
        assert code == 2, said
        assert [fact for fact in facts if fact not in said] == []
    Path("watch.py").write_text(WATCH.replace("def on_evaluate", "def on_evalute"))
    code, said = go(*RUN, "callbacks.watch={}", "hydra.run.dir=run")
    assert code == 2
    assert "on_evalute is no hook" in said
    assert "Did you mean on_evaluate" in said


def test_its_paths_and_nan_are_the_same_from_another_folder(
    go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = (
        'label: str | None = None\n    other: str = "train.csv"\n    ratio: float = 0.0\n    PATHS'
        ' = ("label",)'
    )
    (tmp_path / "watch.py").write_text(WATCH.replace("label: str | None = None", own))
    given = ["callbacks.watch={label: train.csv, ratio: nan}", "training.max_steps=2"]
    assert go(*RUN, *given, "hydra.run.dir=run")[0] == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert optrun("--plugin", "../watch.py", "resume=../run", "training.max_steps=3") == 0
    assert summary(tmp_path / "run")["resumes"][0]["changes"] == {"training.max_steps": [2, 3]}
    watch = read_config(tmp_path / "run" / "config.yaml")["callbacks"]["watch"]
    assert (watch["label"], watch.get("other", "train.csv")) == (
        str(tmp_path / "train.csv"),
        "train.csv",
    )


@pytest.mark.parametrize("value", ["{1: 2}", "torch.zeros(2)", "[{'a': (1, 2)}]"])
def test_a_state_that_json_would_change_is_refused(go: Go, value: str) -> None:
    Path("watch.py").write_text(WATCH.replace('return {"heard": self.heard}', f"return {value}"))
    code, said = go(*RUN, "callbacks.watch={}", "hydra.run.dir=run")
    assert code == 1
    assert "callbacks.watch: state_dict raised TypeError" in said


# Early stopping
# --------------------------------------------------------------------------------------------------


STALL = [
    *(word for word in RUN if not word.startswith(("lr=", "training.max_steps="))),
    "training.max_steps=12",
    "lr=1e-12",
    "checkpoint.metric=eval/accuracy",
]
"""A run that never improves."""
PATIENT = "training.early_stopping_patience=2"


@pytest.fixture(scope="module")
def stalled(made: Callable[..., str]) -> str:
    """Such a run, which ends early."""
    return made(*STALL, PATIENT)


def test_early_stopping_ends_well_and_goes_on_with_more_patience(go: Go, stalled: str) -> None:
    told = summary(Path(stalled))
    assert (told["status"], told["global_step"]) == ("finished", 6)
    assert told["stopped"]["by"] == "training.early_stopping_patience"
    assert "no improvement of eval/accuracy in 2 evaluations" in told["message"]
    shutil.copytree(stalled, "run")
    code, said = go("resume=run")
    assert code == 0
    assert "nothing to train" in said
    assert "training.early_stopping_patience=N" in said
    assert go("resume=run", "training.early_stopping_patience=4")[0] == 0
    assert go(*STALL, "training.early_stopping_patience=4", "hydra.run.dir=straight")[0] == 0
    assert summary(Path("run"))["global_step"] == 10
    same("straight", "run", 10)


def test_its_counter_is_resumed(go: Go, stalled: str) -> None:
    assert go(*STALL, PATIENT, "training.max_steps=5", "hydra.run.dir=run")[0] == 0
    assert state(Path("run"), 5)["callbacks"]["training.early_stopping_patience"]["counter"] == 1
    assert go("resume=run", "training.max_steps=12")[0] == 0
    same(stalled, "run", 6)


def test_early_stopping_is_refused_where_it_cannot_be(go: Go) -> None:
    for args, facts in {
        ("training.early_stopping_patience=1", "data.eval_fraction=0"): [
            "early_stopping_patience=1",
            "evaluation",
        ],
        ("training.early_stopping_patience=0",): ["early_stopping_patience=0", "1 or more"],
        ("training.early_stopping_threshold=0.1",): [
            "early_stopping_threshold=0.1",
            "early_stopping_patience",
        ],
        ("training.early_stopping_patience=1", "training.early_stopping_threshold=-1"): [
            "threshold=-1",
            "0 or more",
        ],
    }.items():
        code, said = go(*RUN, *args, "hydra.run.dir=run")
        assert code == 2, said
        assert [fact for fact in facts if fact not in said] == []


# The documentation
# --------------------------------------------------------------------------------------------------


def blocks(language: str) -> list[str]:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def written(folder: Path) -> dict[str, str]:
    """Write the files of the pages; return their texts by name."""
    files = {text.split("\n", 1)[0].removeprefix("# "): text for text in blocks("python")}
    for name, text in files.items():
        if "/" not in name:
            (folder / name).write_text(text)
    return files


def test_the_examples_are_short(tmp_path: Path) -> None:
    files = written(tmp_path)
    assert max(len(files[name].splitlines()) for name in ("loss_target.py", "csv_tracker.py")) < 60


def test_the_documented_callback_runs_and_is_resumed(go: Go, tmp_path: Path) -> None:
    written(tmp_path)
    loss = ["--plugin", "loss_target.py", *RUN]
    assert go(*loss, "callbacks.loss_target.target=0.01", "hydra.run.dir=straight")[0] == 0
    code, said = go(
        *loss,
        "callbacks.loss_target.target=0.01",
        "training.max_seconds=0.001",
        "hydra.run.dir=cut",
    )
    assert code == 75
    assert "--plugin loss_target.py resume=" in said
    assert go("--plugin", "loss_target.py", "resume=cut", "training.max_seconds=null")[0] == 0
    same("straight", "cut", 8)
    assert go(*loss, "callbacks.loss_target.target=99", "hydra.run.dir=early")[0] == 0
    assert summary(Path("early"))["stopped"]["step"] == 1
    code, said = go(
        *loss, "callbacks.loss_target.target=1", "callbacks.loss_target.decay=2", "hydra.run.dir=no"
    )
    assert code == 2
    assert "callbacks.loss_target: decay=2.0: expected a number in [0, 1)" in said


def test_the_documented_tracker_runs_and_is_resumed(go: Go, tmp_path: Path) -> None:
    written(tmp_path)
    track = ["--plugin", "csv_tracker.py"]
    args = [*track, *RUN, "tracking=csv", "tracking.file=values.csv", "training.max_steps=4"]
    assert go(*args, "hydra.run.dir=run")[0] == 0
    assert go(*track, "resume=run", "training.max_steps=6")[0] == 0
    rows = [line.split(",") for line in Path("run/extra/values.csv").read_text().splitlines()]
    losses = {int(step): float(value) for step, name, value in rows if name == "eval/loss"}
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()
    ]
    assert losses == {line["step"]: line["eval/loss"] for line in lines if "eval/loss" in line}


def test_the_documented_row_inside_the_package(
    go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same class, in a module without the decorator, by the row of the page."""
    files = written(tmp_path)
    module = files["loss_target.py"].replace(
        '@optrun.register_callback("loss_target", schema=LossTargetConfig)\n', ""
    )
    (tmp_path / "inside.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    from inside import LossTargetConfig  # type: ignore[import-not-found]

    row = files["optrun/config/schema/callbacks.py"].replace(
        "optrun.training.loss_target:", "inside:"
    )
    try:
        exec(row, {"registry": registry, "LossTargetConfig": LossTargetConfig})
        assert go(*RUN, "callbacks.loss_target.target=99", "hydra.run.dir=run")[0] == 0
        assert summary(Path("run"))["stopped"]["by"] == "callbacks.loss_target"
    finally:
        del registry._ROWS["callback"]["loss_target"]
