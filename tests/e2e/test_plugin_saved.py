"""What code of others raises after some steps: told by name and place, the steps saved.

Mended, the run goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from optrun.artifacts.retention import latest_complete
from optrun.artifacts.run_dir import RunDir
from optrun.config.registry import plugins
from tests.running import TINY_BERT, optrun, write_labelled

MINE = """
from dataclasses import dataclass
from typing import ClassVar
import optrun
import torch
from optrun.config.schema.metric import MetricConfig
from optrun.config.schema.task import SequenceClassificationConfig, ProblemType
from optrun.config.schema.tracking import TrackingConfig
from optrun.task.sequence_classification import SequenceClassification

WHERE = "nowhere"
CALLS = {}

def here(name):
    CALLS[name] = CALLS.get(name, 0) + 1
    if name == WHERE and CALLS[name] == AFTER:
        raise KeyError("no such thing")  # the line

@dataclass(kw_only=True)
class TaskConfig(SequenceClassificationConfig):
    AUTO_CLASS: ClassVar[str] = "AutoModel"
    MAIN_METRIC: ClassVar[str] = "loss"
    MODE: ClassVar[str] = "min"
    METRICS: ClassVar[tuple[str, ...]] = ()
    problem_type: ProblemType = ProblemType.single_label_classification

@optrun.register_task("mine", schema=TaskConfig)
class Mine(SequenceClassification):
    def collate(self, examples):
        here("collate")
        return super().collate(examples)
    def loss(self, outputs, batch):
        here("loss")
        return LOSS
    def predictions(self, outputs, batch):
        here("predictions")
        return outputs.last_hidden_state[:, 0, :2].argmax(-1).numpy(), batch["labels"].numpy()

def loss_of(outputs, batch):
    return torch.nn.functional.cross_entropy(outputs.last_hidden_state[:, 0, :2], batch["labels"])

@dataclass(kw_only=True)
class ScoreConfig(MetricConfig):
    MODE = "max"

@optrun.register_metric("mine", schema=ScoreConfig)
def metric(predictions, labels):
    here("metric")
    return VALUE

@optrun.register_tracker("mine", schema=TrackingConfig)
class Tracker:
    def __init__(self, run): pass
    def log(self, record): here("tracker")
    def close(self, status): pass
"""
RUN = [
    *(word.replace("num_hidden_layers=2", "num_hidden_layers=1") for word in TINY_BERT),
    "--plugin",
    "mine.py",
    "task=mine",
    "data=files",
    "data.train=train.csv",
    "task.metrics=[mine]",
    "tracking=mine",
    "training.per_device_train_batch_size=4",
    "training.max_steps=4",
    "training.eval_steps=2",
    "training.logging_steps=2",
    "hydra.run.dir=run",
]


def write(
    where: str = "nowhere",
    after: int = 1,
    loss: str = "loss_of(outputs, batch)",
    value: str = "0.5",
) -> int:
    """Write the plugin; returns the line that raises."""
    text = MINE.replace('WHERE = "nowhere"', f'WHERE = "{where}"').replace("AFTER", str(after))
    Path("mine.py").write_text(text.replace("LOSS", loss).replace("VALUE", value))
    return 1 + next(
        index for index, line in enumerate(text.splitlines()) if line.endswith("# the line")
    )


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    write_labelled(tmp_path)
    yield
    for name in list(plugins.LOADED):
        plugins.forget(name)


def losses(run: str) -> list[str]:
    """The lines of a run, without what depends on the clock."""
    kept = []
    for line in Path(run, "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        kept.append(
            ",".join(
                part for part in line.split(",") if "perf/" not in part and '"time"' not in part
            )
        )
    return kept


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run in which nothing raises."""
    folder = tmp_path_factory.mktemp("straight")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        monkeypatch.setattr("optrun.runner.train.draw_curves", lambda path: None)
        write_labelled(folder)
        write()
        assert optrun(*RUN) == 0
    for name in list(plugins.LOADED):
        plugins.forget(name)
    return str(folder / "run")


@pytest.mark.parametrize(
    ("where", "after", "step", "facts"),
    [
        ("loss", 5, 2, ["task=mine", "in here"]),
        ("predictions", 2, 2, ["task=mine", "in here"]),  # the first is before the first step
        ("metric", 2, 2, ["task.metrics: mine failed", "in here"]),
    ],
)
def test_the_steps_are_saved_first(
    where: str,
    after: int,
    step: int,
    facts: list[str],
    capsys: pytest.CaptureFixture[str],
    straight: str,
) -> None:
    line = write(where, after)
    code = optrun(*RUN)
    said = "".join(capsys.readouterr())
    assert code == 1, said
    for fact in [
        "KeyError",
        "no such thing",
        f"mine.py, line {line}",
        f"step {step} is saved",
        *facts,
    ]:
        assert fact in said
    assert "Traceback" not in said
    newest, _ = latest_complete(RunDir("run"))
    assert newest is not None
    assert newest.name == f"step-{step:08}"
    write()
    options = ["--plugin", "mine.py", "--allow-changed-plugins"]
    assert optrun("resume=run", *options) == 0
    assert losses("run") == losses(straight)


def test_a_model_without_a_loss_is_judged_by_the_loss_of_the_task(straight: str) -> None:
    assert '"eval/loss"' in Path(straight, "metrics.jsonl").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("loss", "facts"),
    [
        ("super().loss(outputs, batch)", ["task=mine", "returned no loss", "AUTO_CLASS=AutoModel"]),
        ("outputs.last_hidden_state[:, 0, 0]", ["loss of the task", "shape (6,)"]),
    ],
)
def test_a_loss_that_nothing_can_be_learnt_from(
    loss: str, facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write(loss=loss)
    assert optrun(*RUN) in (1, 2)
    said = capsys.readouterr().err
    for fact in facts:
        assert fact in said


def test_a_metric_that_gives_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    write(value="predictions.reshape(-1, 1)")
    assert optrun(*RUN) == 1
    said = "".join(capsys.readouterr())
    for fact in ("task.metrics: mine gave an array", "expected one number"):
        assert fact in said
    assert "Traceback" not in said
    assert "train/loss" not in said, "found by the evaluation before the first step"


def test_nan_is_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    """Of checkpoints that are ranked by it none is the best, and none is advised to be exported
    as such.
    """
    write(value="float('nan')")
    assert optrun(*RUN, "checkpoint.metric=eval/mine", "checkpoint.mode=max") == 0
    said = capsys.readouterr().out
    assert "was NaN in every evaluation" in said
    assert "checkpoints/last" in said
    assert "checkpoints/best" not in said


def test_every_file_of_a_package_counts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Edited, a run that goes on is refused, or goes on with it where that is allowed."""
    monkeypatch.syspath_prepend(str(Path.cwd()))
    write(value="helper.VALUE")
    text = (
        Path("mine.py")
        .read_text()
        .replace("import torch\n", "import torch\nfrom . import helper\n", 1)
    )
    Path("pack").mkdir()
    Path("pack/__init__.py").write_text(text)
    Path("pack/helper.py").write_text("VALUE = 0.5\n")
    line = ["pack" if word == "mine.py" else word for word in RUN]
    assert optrun(*line) == 0
    options = ["--plugin", "pack", "resume=run", "training.max_steps=6"]
    Path("pack/helper.py").write_text("VALUE = 0.25\n")
    capsys.readouterr()
    assert optrun(*options) == 2
    said = capsys.readouterr().err
    for fact in ("pack changed since", "--allow-changed-plugins"):
        assert fact in said
    assert optrun(*options, "--allow-changed-plugins") == 0
    metrics = Path("run/metrics.jsonl").read_text(encoding="utf-8")
    assert '"eval/mine":0.25' in metrics.replace(" ", "")
