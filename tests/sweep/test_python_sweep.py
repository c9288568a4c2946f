"""Sweeps from Python: the page of documentation and the example, with jobs that are forked."""

from __future__ import annotations

import html
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest

import optrun
from optrun.base.errors import ConfigError
from optrun.config import registry
from optrun.report import build
from optrun.report.build import report as made
from tests.running import optrun as cli
from tests.running import summary
from tests.sweep import forked

ROOT = Path(__file__).parents[2]


def test_a_sweep_returns_its_runs(place: Path, undisturbed: Path) -> None:
    shutil.copytree(undisturbed, "sweep")
    sweep = optrun.sweep(
        [*forked.JOB, "lr=1e-3,2e-3", "seed=0,2", "hydra.sweep.dir=sweep"], quiet=True
    )
    assert sweep.exit_code == 0
    assert sweep.sweep_dir == Path("sweep").resolve()
    assert {(run.config.lr, run.config.seed) for run in sweep.runs} == {
        (1e-3, 0),
        (2e-3, 0),
        (1e-3, 2),
        (2e-3, 2),
    }
    for run in sweep.runs:
        if run.config.seed == 0:
            assert run.summary == summary(undisturbed / run.path.name)


def test_a_sweep_says_what_its_report_says(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line.

    That of the result in Python, of `-m`, of a search, of `report` and `confirm`, and of both
    pages.
    """
    monkeypatch.setattr(build, "report", made)
    monkeypatch.setattr(build, "all_pictures", lambda comparison, judged: [])
    monkeypatch.setenv("COLUMNS", "2000")
    line = [*forked.JOB, "lr=1e-3,2e-3", "hydra.sweep.dir=sweep"]
    sweep = optrun.sweep(line, quiet=True)
    assert sweep.verdict is not None
    assert sweep.verdict.kind == "pilot"
    assert set(sweep.verdict.possible) == {"lr 1e-3", "lr 2e-3"}
    assert _first_line("sweep") == sweep.verdict.text
    search = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "lr=tag(log,interval(1e-3,1e-2))"]
    for words in (
        ["-m", *line],
        ["report", "sweep"],
        ["-m", *forked.JOB, *search, "hydra.sweep.dir=search"],
        ["confirm", "sweep", "seeds=5-7"],
        ["report", "sweep"],
    ):
        assert cli(*words) == 0
        assert _first_line("search" if search[0] in words else "sweep") in capsys.readouterr().out
    assert _first_line("sweep").startswith("Confirmed on fresh seeds 5-7: ")


def _first_line(folder: str) -> str:
    """What both pages of a folder begin with."""
    told = [
        text for text in Path(folder, "report.md").read_text(encoding="utf-8").splitlines() if text
    ][3]
    page = re.search(
        r'<div class="lead"><p>(.*?)</p>', Path(folder, "report.html").read_text(encoding="utf-8")
    )
    assert page is not None
    line = html.unescape(page[1])
    assert html.unescape(told.replace("\\", "")) == f"**{line}**"
    return line


def test_a_job_that_fails_is_told(place: Path) -> None:
    words = [
        *forked.JOB,
        "lr=1e30,1e-3",
        "optimizer=sgd",
        "scheduler=constant",
        "hydra.sweep.dir=sweep",
    ]
    sweep = optrun.sweep(words, quiet=True)
    assert sweep.exit_code == 1
    assert sorted(run.summary["status"] for run in sweep.runs) == ["failed", "finished"]


def test_what_is_no_sweep_is_refused(place: Path) -> None:
    with pytest.raises(ConfigError, match="continues one run"):
        optrun.sweep(["resume=latest"])
    with pytest.raises(ConfigError, match=r"hydra\.run\.dir=x: has no effect on a sweep"):
        optrun.sweep(["lr=1,2", "hydra.run.dir=x"])
    with pytest.raises(ConfigError, match=r"optrun\.sweep"):
        optrun.run([], config_name="compare_optimizers")


def test_the_page_runs_as_it_stands(place: Path) -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 5
    exec("\n".join(blocks), {})


def test_the_example_of_a_sweep(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "compare.py"))
    assert "lamb   seed 1: evaluation loss" in capsys.readouterr().out


CELL = """
from dataclasses import dataclass
import torch
import optrun
from optrun.plugin import OptimizerConfig

@dataclass(kw_only=True)
class CellConfig(OptimizerConfig):
    default_lr: float = 1e-3
    weight_decay: float = 0.0

@optrun.register_optimizer("of_a_cell", schema=CellConfig)
class OfACell(torch.optim.SGD):
    pass
"""


def test_an_optimizer_of_a_notebook_cell(place: Path) -> None:
    registry.remove("__main__")
    exec(CELL, vars(sys.modules["__main__"]))
    try:
        with pytest.raises(ConfigError) as refused:
            optrun.sweep(
                [*forked.JOB, "optimizer=of_a_cell", "lr=1e-3,2e-3", "hydra.sweep.dir=cells"],
                quiet=True,
            )
    finally:
        registry.remove("__main__")
    for fact in ("optimizer=of_a_cell", "__main__", "plugins=[FILE]", "Save it in a file"):
        assert fact in str(refused.value)
    assert not list(Path("cells").glob("*/config.yaml"))
