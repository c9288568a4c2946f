"""The files of docs/plugins.md, as they stand there.

Trained, resumed, explained, swept, reported, exported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from optrun.config import store
from optrun.config.overrides import parse_checked
from optrun.config.registry import plugins
from tests.docs.commands import commands
from tests.running import TINY_BERT, optrun, records, sentence, summary, write_labelled

PAGE = Path(__file__).parents[2] / "docs" / "plugins.md"
SHORT = [
    "data.max_length=16",
    "training.max_steps=2",
    "training.eval_steps=1",
    "checkpoint.save_steps=1",
]
FILES = dict(
    re.findall(
        r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL
    )
)


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text, encoding="utf-8")
    yield
    for name in list(plugins.LOADED):
        plugins.forget(name)


def write_endings(name: str, rows: int, first: int = 0) -> str:
    """Rows with a text, three endings and the number of the right one."""
    made = [
        {
            "text": sentence(row),
            "endings": [sentence(row + one)[:20] for one in (1, 2, 3)],
            "label": row % 3,
        }
        for row in range(first, first + rows)
    ]
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
    return name


def write_pipes(name: str, rows: int) -> str:
    lines = [f"{'even' if row % 2 == 0 else 'odd'} | {sentence(row)}" for row in range(rows)]
    Path(name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return name


def test_each_example_is_short() -> None:
    assert set(FILES) >= {
        "best_ending.py",
        "focal_classification.py",
        "balanced_error.py",
        "pipes.py",
    }
    assert {name: text.count("\n") for name, text in FILES.items() if text.count("\n") >= 80} == {}


def through(
    capsys: pytest.CaptureFixture[str], plugin: list[str], words: list[str], metric: str, mode: str
) -> str:
    """Train two steps, resume, explain, evaluate, report and export; returns the card."""
    words = [*words, *TINY_BERT, *SHORT]
    assert optrun(*plugin, *words, "hydra.run.dir=run") == 0, capsys.readouterr().err
    assert summary(Path("run"))["main_metric"] == {"name": metric, "mode": mode}
    assert metric in records(Path("run"))[-1]
    assert optrun(*plugin, "resume=run", "training.max_steps=3") == 0, capsys.readouterr().err
    assert summary(Path("run"))["global_step"] == 3
    capsys.readouterr()
    assert optrun(*plugin, "evaluate", "run", "--json") == 0
    assert metric in json.loads(capsys.readouterr().out)
    assert optrun(*plugin, "explain", *words) == 0
    assert "trainable parameters" in capsys.readouterr().out
    assert optrun(*plugin, "report", "run") == 0
    assert optrun(*plugin, "export", "run", "exported") == 0, capsys.readouterr().err
    return Path("exported/README.md").read_text(encoding="utf-8")


def test_a_task(capsys: pytest.CaptureFixture[str]) -> None:
    plugin = ["--plugin", "best_ending.py"]
    train, a, b = (
        write_endings("train.jsonl", 24),
        write_endings("a.jsonl", 6, 50),
        write_endings("b.jsonl", 6, 60),
    )
    words = [
        "task=best_ending",
        "data=files",
        f"data.train={train}",
        f"data.eval={{dev: {a}, hard: {b}}}",
    ]
    assert optrun(*plugin, *words, *TINY_BERT, *SHORT, "task.endings_column=answers") == 2
    assert "task.endings_column=answers" in capsys.readouterr().err
    smoothed = [*words, "training.label_smoothing_factor=0.1"]
    card = through(capsys, plugin, smoothed, "eval/dev/accuracy", "max")
    meta = yaml.safe_load(card.split("---")[1])
    assert meta["pipeline_tag"] == "multiple-choice"
    assert "for multiple choice, trained from scratch" in card
    assert "AutoModelForMultipleChoice.from_pretrained(folder)" in card
    Path("bad.jsonl").write_text('{"text": "a", "endings": ["b", "c"], "label": 2}\n')
    capsys.readouterr()
    assert (
        optrun(*plugin, *words[:2], "data.train=bad.jsonl", "data.eval=a.jsonl", *TINY_BERT, *SHORT)
        == 2
    )
    assert "data.train: row 1: 2 endings, label 2" in capsys.readouterr().err


def test_a_search_knows_the_direction() -> None:
    pytest.importorskip("optuna")
    from optrun.sweeper.contenders import Contender
    from optrun.sweeper.jobs import Composer
    from optrun.sweeper.search import Search
    from tests.sweep.stand_in import options as searching

    plugins.load("best_ending.py")
    plugins.load("balanced_error.py")
    options = searching(n_trials=1)
    hydra = store.open_hydra()
    for chosen, mode in (
        ([], "max"),
        (["task.metrics=[balanced_error]", "checkpoint.metric=balanced_error"], "min"),
        (["checkpoint.metric=eval/dev/loss"], "min"),
    ):
        given = ["task=best_ending", "data=files", "data.train=x.jsonl", "lr=1e-3,1e-2", *chosen]
        search = Search(
            hydra,
            Composer(hydra, "config"),
            options,
            [Contender("", parse_checked(hydra, "config", given, sweep=True))],
        )
        assert [study.mode() for study in search.studies] == [mode]


@pytest.mark.slow
def test_a_task_is_searched(capsys: pytest.CaptureFixture[str]) -> None:
    optuna = pytest.importorskip("optuna")
    search = ["-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweep.dir=sweep"]
    words = ["task=best_ending", "data=files", f"data.train={write_endings('train.jsonl', 24)}"]
    swept = [*search, *words, "lr=interval(1e-4,1e-2)", *TINY_BERT, *SHORT]
    assert optrun("--plugin", "best_ending.py", *swept) == 0, capsys.readouterr().err
    (study,) = optuna.get_all_study_summaries("sqlite:///sweep/study.db")
    assert study.direction == optuna.study.StudyDirection.MAXIMIZE
    assert all(
        summary(path.parent)["status"] == "finished"
        for path in Path("sweep").glob("*/summary.json")
    )


def test_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    write_endings("endings.jsonl", 24)
    write_pipes("reviews.txt", 40)
    own = [one for one in commands(PAGE) if {"best_ending.py", "pipes.py"} & set(one.arguments)]
    assert len(own) == 2
    for number, command in enumerate(own):
        program, *words = command.arguments
        assert program == "optrun"
        assert optrun(*words, *TINY_BERT[1:], *SHORT, f"hydra.run.dir=run-{number}") == 0, (
            capsys.readouterr().err
        )


def test_a_loss(capsys: pytest.CaptureFixture[str]) -> None:
    train = write_labelled(Path(), 24)
    words = ["data=files", f"data.train={train}", *TINY_BERT, *SHORT, "clip=none", "optimizer=sgd"]
    plugin = ["--plugin", "focal_classification.py"]
    assert optrun("task=sequence_classification", *words, "hydra.run.dir=plain") == 0
    for gamma, run in ((0, "none"), (2, "two")):
        task = ["task=focal_classification", f"task.gamma={gamma}"]
        assert optrun(*plugin, *task, *words, f"hydra.run.dir={run}") == 0, capsys.readouterr().err
    plain, none, two = (records(Path(run))[-1] for run in ("plain", "none", "two"))
    assert none["train/loss"] == pytest.approx(plain["train/loss"], rel=1e-5)
    assert two["train/loss"] < 0.6 * plain["train/loss"]
    assert two["eval/loss"] == pytest.approx(plain["eval/loss"], rel=0.1), "the model's own"
    for refused, fact in (
        ("task.gamma=-1", "0 or more"),
        ("training.label_smoothing_factor=0.1", "expected 0"),
    ):
        capsys.readouterr()
        assert optrun(*plugin, "task=focal_classification", *words, refused) == 2
        assert refused in (said := capsys.readouterr().err)
        assert fact in said


def test_a_source_and_a_metric(capsys: pytest.CaptureFixture[str]) -> None:
    plugin = ["--plugin", "pipes.py", "--plugin", "balanced_error.py"]
    words = [
        "data=pipes",
        f"data.path={write_pipes('reviews.txt', 40)}",
        "task=sequence_classification",
    ]
    judged = ["task.metrics=[balanced_error]", "checkpoint.metric=balanced_error"]
    plateau = ["scheduler=plateau", "scheduler.metric=eval/balanced_error"]
    through(capsys, plugin, [*words, *judged, *plateau], "eval/balanced_error", "min")
    last = records(Path("run"))[-1]
    assert last["eval/balanced_error"] == pytest.approx(0.5, abs=0.5)
    capsys.readouterr()
    for wrong, facts in {
        "task.metrics=[balanced_eror]": [
            "task.metrics",
            "balanced_eror",
            "Did you mean balanced_error",
        ],
        "data.path=nowhere.txt": ["data.path=nowhere.txt", "cannot be read"],
        "task.problem_type=regression": ["balanced_error", "not for", "numbers"],
    }.items():
        others = [word for word in [*words, *judged] if word.split("=")[0] != wrong.split("=")[0]]
        assert optrun(*plugin, *others, wrong, *TINY_BERT, *SHORT) == 2
        said = capsys.readouterr().err
        assert all(fact in said for fact in facts), said


def test_a_source_is_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the schema knows that `data.rows` is a file."""
    written = FILES["pipes.py"].replace('("path",)', '("rows",)').replace("path: str", "rows: str")
    Path("pipes.py").write_text(written.replace("config.path", "config.rows"), encoding="utf-8")
    words = [
        "data=pipes",
        f"data.rows={write_pipes('reviews.txt', 40)}",
        "task=sequence_classification",
    ]
    assert optrun("--plugin", "pipes.py", *words, *TINY_BERT, *SHORT, "hydra.run.dir=run") == 0, (
        capsys.readouterr().err
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    capsys.readouterr()
    assert optrun("--plugin", "../pipes.py", "resume=../run", "training.max_steps=3") == 0, (
        capsys.readouterr().err
    )
    assert "data.rows" not in capsys.readouterr().out, "the same file is no change"
    assert optrun("--plugin", "../pipes.py", "evaluate", "../run") == 0, capsys.readouterr().err
