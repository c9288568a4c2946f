"""An exception in a plugin's file, wherever it is called.

One message with file, line and type, and no traceback.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from optrun.base.errors import ConfigError
from optrun.config import registry
from optrun.config.registry import plugins
from tests.running import TINY_BERT, optrun, optrun_process, summary, write_labelled

MINE = """
from dataclasses import dataclass
from typing import Any
import optrun
from optrun.config.schema.data import FilesConfig
from optrun.config.schema.metric import MetricConfig
from optrun.config.schema.scheduler import SchedulerConfig
from optrun.config.schema.task import SequenceClassificationConfig, ProblemType
from optrun.config.schema.tracking import TrackingConfig
from optrun.data.files import load_files
from optrun.task.sequence_classification import SequenceClassification

WHERE = "nowhere"

def here(name):
    if name == WHERE:
        raise KeyError("no such\\nthing")  # the line

@dataclass(kw_only=True)
class TaskConfig(SequenceClassificationConfig):
    problem_type: ProblemType = ProblemType.single_label_classification
    def __post_init__(self):
        here("schema")

@optrun.register_task("mine", schema=TaskConfig)
class Mine(SequenceClassification):
    def read(self, source, split, tokenizer, limit, seed):
        here("read")
        return super().read(source, split, tokenizer, limit, seed)
    def collate(self, examples):
        here("collate")
        return super().collate(examples)
    def loss(self, outputs, batch):
        here("loss")
        return outputs.loss

@dataclass(kw_only=True)
class DataConfig(FilesConfig):
    train: Any = "train.csv"
    eval: Any = None

@optrun.register_data("mine", schema=DataConfig)
def read_mine(config, *, documents):
    here("data")
    return load_files(config, documents=documents)

@dataclass(kw_only=True)
class ScoreConfig(MetricConfig):
    MODE = "max"

@optrun.register_metric("mine", schema=ScoreConfig)
def metric(predictions, labels):
    here("metric")
    return 1.0

@optrun.register_scheduler("mine", schema=SchedulerConfig)
def schedule(step, *, config, decay_steps):
    here("scheduler")
    return 1.0

@optrun.register_tracker("mine", schema=TrackingConfig)
class Tracker:
    def __init__(self, run):
        here("tracker")
    def log(self, record): pass
    def close(self, status): pass
"""
LINE = 1 + next(
    index for index, line in enumerate(MINE.splitlines()) if line.endswith("# the line")
)
RUN = [
    *TINY_BERT,
    "--plugin",
    "mine.py",
    "task=mine",
    "data=mine",
    "task.metrics=[mine]",
    "scheduler=mine",
    "tracking=mine",
    "training.per_device_train_batch_size=4",
    "training.max_steps=2",
    "hydra.run.dir=run",
]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    write_labelled(tmp_path)
    yield
    for name in list(plugins.LOADED):
        plugins.forget(name)


def write(where: str, raises: str = "") -> None:
    text = MINE.replace('WHERE = "nowhere"', f'WHERE = "{where}"')
    Path("mine.py").write_text(
        text.replace('raise KeyError("no such\\nthing")', raises) if raises else text
    )


@pytest.mark.parametrize(
    ("where", "code", "facts"),
    [
        *(
            (where, 1, ["task=mine", "data=mine", "HYDRA_FULL_ERROR=1"])
            for where in ("schema", "read", "loss", "data")
        ),
        ("metric", 1, ["task.metrics", "6 predictions"]),
        ("scheduler", 2, ["scheduler=mine: schedule at step 0"]),
        ("tracker", 2, ["tracking=mine", "tracking=none"]),
    ],
)
def test_it_is_told_by_file_and_line(
    where: str, code: int, facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write(where)
    assert optrun(*RUN) == code
    error = capsys.readouterr().err
    for fact in ("mine.py", f"line {LINE}, in here: ", "KeyError", "no such", *facts):
        assert fact in error
    assert error.count("optrun: ") == 1
    assert "Traceback" not in error


def test_in_a_worker_of_the_data_loader(capsys: pytest.CaptureFixture[str]) -> None:
    write("collate")
    assert optrun(*RUN, "training.dataloader_num_workers=1") == 1
    error = capsys.readouterr().err
    assert f"mine.py, line {LINE}, in here: KeyError" in error
    assert "Traceback" not in error


def test_the_traceback_is_there_where_it_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    write("metric")
    assert optrun(*RUN) == 1
    assert f"line {LINE}, in here\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "raises",
    ["raise SystemExit(0)", "open('gone.txt')", "assert False", "raise MemoryError", "here(name)"],
)
def test_whatever_is_raised(raises: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An exit that would pass for a good end, and a file that is no disk's failure, among them."""
    write("metric", raises)
    assert optrun(*RUN) == 1
    error = capsys.readouterr().err
    assert f"mine.py, line {LINE}, in here" in error
    assert summary(Path("run"))["status"] == "failed"


def test_in_other_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    write("nowhere")
    assert optrun(*RUN) == 0
    write("metric")
    options = ["--plugin", "mine.py", "--allow-changed-plugins"]
    assert optrun("evaluate", "run", *options) == 1
    assert f"mine.py, line {LINE}, in here: task.metrics" in capsys.readouterr().err


@pytest.mark.slow
def test_of_a_real_process(tmp_path: Path) -> None:
    write("data")
    done = optrun_process(*RUN, cwd=tmp_path)
    assert done.returncode == 1
    assert f"mine.py, line {LINE}, in here: KeyError" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_refusal_names_the_file_once(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(MINE.replace('register_metric("mine"', 'register_metric("accuracy"'))
    assert optrun(*RUN, "--cfg", "job") == 2
    error = capsys.readouterr().err
    assert error.count("mine.py") == 1
    for fact in ("--plugin mine.py, line ", "metric=accuracy", "optrun itself"):
        assert fact in error


def test_files_of_one_name_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, from two folders.

    Each has its rows, and taking one back leaves the other's.
    """
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        text = MINE.replace('("mine"', f'("{folder}"')
        (tmp_path / folder / "mine.py").write_text(text)
        monkeypatch.chdir(tmp_path / folder)
        assert "metric=" + folder in plugins.load("mine.py")["names"]
    one, two = plugins.LOADED.values()
    assert set(one["names"]).isdisjoint(two["names"])
    plugins.forget(next(iter(plugins.LOADED)))
    assert "one" not in registry.choices("metric")
    assert "two" in registry.choices("metric")
    monkeypatch.chdir(tmp_path / "one")
    Path("mine.py").write_text((tmp_path / "two" / "mine.py").read_text())
    with pytest.raises(ConfigError, match=r"taken by .*two/mine\.py"):
        plugins.load("mine.py")
