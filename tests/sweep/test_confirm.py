"""`optrun confirm`: what a sweep chose, on fresh seeds, as a sweep of its own that goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from optrun.cli import run
from optrun.commands import confirm_sweep
from optrun.errors import ConfigError
from optrun.report import build
from optrun.report.collect import load_runs
from tests.running import summary
from tests.sweep import forked
from tests.sweep.forked import STEPS, ForkServer, sweep


def test_a_sweep_is_confirmed_and_goes_on(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[Path] = []
    monkeypatch.setattr(build, "report", lambda folders, **options: shown.extend(folders))
    monkeypatch.setenv("COLUMNS", "200")
    assert sweep("optimizer=lamb,adamw", "lr=1e-3", "seed=0", "clip.max_norm=0.5") == 0
    pilot = next(path.parent for path in place.rglob("sweep.json"))
    assert run(["confirm", str(pilot), "seeds=5-7"]) == 0
    folder = pilot / "confirm"
    assert shown[-2:] == [folder, pilot]
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
    assert run(["confirm", str(pilot)]) == 0
    assert ForkServer.launches == [1]
    assert summary(lost)["status"] == "finished"
    assert {path: summary(path)["updated_at"] for path in kept} == kept
    monkeypatch.setattr(confirm_sweep, "run_points", _refuse)
    assert run(["confirm", str(pilot)]) == 2  # such as a plugin that is not named this time; its record stays
    assert run(["confirm", str(pilot), "seeds=5-8"]) == 2
    assert "planned with seeds 5-7" in capsys.readouterr().err
    assert json.loads((folder / "confirmation.json").read_text())["seeds"] == [5, 6, 7]


def _refuse(*arguments: object, **options: object) -> int:
    raise ConfigError("refused")


def test_a_refusal_leaves_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert forked.sweep("optimizer=lamb,adamw", "lr=1e-3", "seed=0") == 0
    pilot = next(path.parent for path in place.rglob("sweep.json"))
    for argv, message in [
        (["confirm"], "one directory"),
        (["confirm", "nowhere"], "no such directory"),
        (["confirm", str(pilot), "seeds=0-4"], "took part in the choice"),
        (["confirm", str(pilot), "seed=5-7"], "seeds"),
        (["confirm", str(pilot), "seeds=5-7", "seeds=8-9"], "given twice"),
        (["confirm", str(pilot), "baseline=sgd"], "baseline=sgd"),
    ]:
        assert run(argv) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setattr(confirm_sweep, "run_points", _refuse)
    assert run(["confirm", str(pilot), "seeds=5-7"]) == 2
    assert not (pilot / "confirm").exists()
