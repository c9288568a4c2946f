"""`optrun confirm`: what a sweep chose, on fresh seeds, as a sweep of its own that goes on."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from optrun.base.errors import ConfigError
from optrun.cli import confirm_sweep
from optrun.cli.main import run
from optrun.cli.sweep import SweepOutcome
from optrun.config.request import CommandLine
from optrun.launch.single_run import Caller
from optrun.report import build
from optrun.report.confirmation_plan import ConfirmationRequest
from optrun.report.findings import analyse_runs
from optrun.report.runs import load_runs
from optrun.report.sweep_folder import tuned_keys
from tests.running import optrun, summary
from tests.sweep import forked
from tests.sweep.forked import STEPS, ForkServer, jobs, sweep, whole
from tests.unit.report.conftest import write_run


def test_a_sweep_is_confirmed_and_goes_on(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[tuple[Path, bool]] = []

    def report(folders: list[Path], **options: bool) -> SimpleNamespace:
        shown.append((folders[0], options.get("brief", False)))
        return SimpleNamespace(verdict=None)

    monkeypatch.setattr(build, "report", report)
    monkeypatch.setenv("COLUMNS", "200")
    line = ["optimizer=lamb,adamw", "lr=1e-3", "seed=0", "clip.max_norm=0.5"]
    assert sweep(*line, "hydra.sweeper.confirm={seeds: 5-7}") == 0
    pilot, folder = Path("sweep"), Path("sweep", "confirm")
    assert shown == [
        (pilot, True),
        (pilot, False),
    ], "what was chosen in a line, then one report of all"
    runs = load_runs([folder])
    assert {(each.optimizer, each.seed, each.global_step) for each in runs} == {
        (optimizer, seed, STEPS) for optimizer in ("lamb", "adamw") for seed in (5, 6, 7)
    }
    assert len({(each.optimizer, each.lr) for each in runs}) == 2
    assert {each.config["clip.max_norm"] for each in runs} == {0.5}
    assert {each.config["training.max_steps"] for each in runs} == {STEPS}
    lost = runs[0].path
    kept = {each.path: summary(each.path)["updated_at"] for each in runs[1:]}
    shutil.rmtree(lost)
    ForkServer.launches.clear()
    assert run(["confirm", str(pilot), "hydra.sweeper.max_batch_size=1"]) == 0
    assert ForkServer.launches == [1]
    assert summary(lost)["status"] == "finished"
    assert {path: summary(path)["updated_at"] for path in kept} == kept
    ForkServer.launches.clear()
    assert sweep(*line, "hydra.sweeper.confirm={seeds: 5-7}", "hydra.sweeper.timeout=1e-9") == 75
    assert sweep(*line, "hydra.sweeper.confirm={seeds: 5-7}", "hydra.sweeper.timeout=1000") == 0
    assert ForkServer.launches == []
    monkeypatch.setattr(confirm_sweep, "run_points", _refuse)
    assert (
        run(["confirm", str(pilot)]) == 2
    )  # such as a plugin that is not named this time; its record stays
    assert run(["confirm", str(pilot), "seeds=5-8"]) == 2
    assert "planned with seeds 5-7" in capsys.readouterr().err
    assert json.loads((folder / "confirmation.json").read_text())["seeds"] == [5, 6, 7]


def _refuse(*arguments: object, **options: object) -> int:
    raise ConfigError("refused")


def test_a_refusal_leaves_nothing(
    place: Path,
    undisturbed: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pilot = shutil.copytree(undisturbed, place / "pilot")
    for given, message in [
        ("seeds=0-4", "hydra.sweeper.confirm.seeds: 0 took part in the choice"),
        ("seeds=5-6", "hydra.sweeper.confirm.seeds: expected at least 3, got 2"),
        ("power=80", "hydra.sweeper.confirm.power=80.0"),
        ("difference=0", "hydra.sweeper.confirm.difference=0.0: expected a number above 0"),
        (
            "seeds=5-9 hydra.sweeper.confirm.difference=1",
            "hydra.sweeper.confirm.difference=1.0: plans how many seeds",
        ),
    ]:
        assert (
            sweep(
                "optimizer=lamb,adamw",
                "lr=2e-3",
                "seed=0",
                *f"hydra.sweeper.confirm.{given}".split(),
                folder="new",
            )
            == 2
        )
        assert message in capsys.readouterr().err
        assert not Path("new").exists()
    over_two = ("data.eval_fraction=0.1,0.2", "optimizer=lamb,adamw", "lr=2e-3", "seed=0")
    assert sweep(*over_two, "hydra.sweeper.confirm.seeds=5-7", folder="new") == 2
    assert "hydra.sweeper.confirm: this sweep has 2 workloads" in capsys.readouterr().err
    for argv, message in [
        (["confirm"], "expected optrun confirm DIR"),
        (["confirm", "nowhere"], "no such directory"),
        (["confirm", str(pilot), "seeds=0-4"], "took part in the choice"),
        (["confirm", str(pilot), "seed=5-7"], "seeds"),
        (["confirm", str(pilot), "diference=1"], "difference"),
        (["confirm", str(pilot), "difference=none"], "difference=none: expected a number above 0"),
        (
            ["confirm", str(pilot), "seeds=5-7", "difference=1"],
            "difference=1: plans how many seeds are run",
        ),
        (["confirm", str(pilot), "seeds=5-7", "seeds=8-9"], "given twice"),
        (["confirm", str(pilot), "baseline=sgd"], "baseline=sgd"),
        (["confirm", str(pilot), "hydra.sweep.dir=elsewhere"], "out=DIR"),
        (["confirm", str(pilot), "seeds=5-7", "hydra/launcher=jobli"], "joblib"),
        (["confirm", str(pilot), "seeds=5-7", "hydra.sweeper.params.lr=1"], "has no effect here"),
        (["confirm", str(pilot), "seeds=5-7", "hydra.sweeper.devics=auto"], "devices"),
    ]:
        assert run(argv) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setattr(confirm_sweep, "run_points", _refuse)
    assert run(["confirm", str(pilot), "seeds=5-7"]) == 2
    assert not (pilot / "confirm").exists()


def test_what_goes_on_runs_where_it_ran(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line that a stopped confirmation names has all that was typed, and the whole limit of
    time.
    """
    for seed in range(3):
        for optimizer in ("adamw", "lamb"):
            write_run(
                Path("a sweep", f"{optimizer}{seed}"), optimizer=optimizer, seed=seed, max_steps=25
            )
    seen: list[tuple[str, list[str]]] = []

    def stopped(
        hydra: object, line: CommandLine, *arguments: object, again: str, **options: object
    ) -> SweepOutcome:
        seen.append((again, [token for token in line.overrides if "timeout" in token]))
        return SweepOutcome(Path("a sweep", "confirm"), 75, ())

    monkeypatch.setattr(confirm_sweep, "run_points", stopped)
    placed = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra.sweeper.max_batch_size=2"]
    line = ["confirm", "a sweep", "baseline=adamw", *placed, "hydra.sweeper.timeout=9"]
    assert run([*line, "seeds=5-7"]) == 75
    assert seen == [(shlex.join(["optrun", *line]), ["hydra.sweeper.timeout=9"])]
    assert run(shlex.split(seen[0][0])[1:]) == 75
    assert seen[1] == seen[0]
    of_sweep = ["optimizer=lamb", "hydra.sweeper.confirm.seeds=5-7", "hydra.sweeper.devices=auto"]
    asked, limit = ConfirmationRequest(baseline="adamw"), "hydra.sweeper.timeout=9"
    then = confirm_sweep.confirm(
        Path("a sweep"), asked, Caller(Console()), [*of_sweep, limit], seconds=0.5
    )
    assert then.exit_code == 75
    told = ["optrun", "confirm", "a sweep", "baseline=adamw", of_sweep[2], limit]
    assert seen[2] == (shlex.join(told), ["hydra.sweeper.timeout=0.5"])


@pytest.mark.slow
def test_one_command_goes_the_whole_way(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe with a space per optimizer.

    Killed while it searches and while it confirms, the same line goes on.
    """
    monkeypatch.setattr(build, "report", lambda folders, **options: SimpleNamespace(verdict=None))
    recipe = {
        "defaults": ["config", {"override hydra/sweeper": "optuna"}, "_self_"],
        "hydra": {
            "mode": "MULTIRUN",
            "sweep": {"dir": "whole"},
            "sweeper": {
                "n_trials": 4,
                "pruner": "asha",
                "min_resource": 4,
                "params": {"seed": "0,1"},
                "search": {
                    "adamw": {
                        "lr": "tag(log, interval(1e-4, 1e-2))",
                        "scheduler": {"warmup_ratio": "0.1,0.2"},
                    },
                    "lamb": {
                        "lr": "tag(log, interval(1e-3, 1e-1))",
                        "optimizer.betas": "[0.9,0.99],[0.8,0.9]",
                    },
                },
                "confirm": {"seeds": "5-7"},
            },
        },
    }
    (place / "mine.yaml").write_text(json.dumps(recipe))
    line = ["--config-dir", str(place), "-cn", "mine", *forked.JOB]
    for count, folder in ((3, "whole"), (2, "whole/confirm")):
        pid = forked.fork(lambda: (os.setpgid(0, 0), optrun(*line))[1], place / "log")
        while len(jobs(folder)) < count:
            assert os.waitpid(pid, os.WNOHANG)[0] == 0, (place / "log").read_text()[-2000:]
            time.sleep(0.01)
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert optrun(*line) == 0
    searched = load_runs([Path("whole")], beside=[Path("whole/confirm")])
    assert [each.status for each in searched].count("finished") >= 4
    assert {each.status for each in searched} <= {"finished", "interrupted"}
    chosen = analyse_runs(searched, tuned=tuned_keys(run.path.parent for run in searched))
    tried = {
        row.name: sum(len(configuration.runs) for configuration in row.configurations)
        for row in chosen.contenders
    }
    assert tried == {"adamw": 4, "lamb": 4}
    fresh = load_runs([Path("whole/confirm")])
    assert sorted((each.optimizer, each.seed) for each in fresh) == [
        (n, s) for n in ("adamw", "lamb") for s in (5, 6, 7)
    ]
    assert all(whole(each.path) for each in fresh)
    ForkServer.launches.clear()
    assert optrun(*line) == 0
    assert run(["confirm", "whole", "seeds=5-7", "out=again"]) == 0
    assert ForkServer.launches == [6]
