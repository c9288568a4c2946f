"""Which runs a confirmation is planned of, and how a report judges it by these alone."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from optrun.errors import ConfigError
from optrun.report import build, confirmation
from optrun.report.build import report
from optrun.report.collect import load_runs
from optrun.report.confirmation import parse_power, parse_seeds, plan, prepare, read
from optrun.report.findings import find

MakeRun = Callable[..., Path]


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer than all of this; tests of their own look at them."""
    monkeypatch.setattr(build, "pictures", lambda findings: [])


@pytest.fixture
def sweep(tmp_path: Path, make_run: MakeRun) -> Path:
    """Two optimizers, two lr each, three seeds: 4e-3 is the better one of lamb, 1e-3 of adamw."""
    folder = tmp_path / "sweep"
    for optimizer in ("adamw", "lamb"):
        for lr in (1e-3, 4e-3):
            for seed in range(3):
                make_run(folder / f"{optimizer}-{lr}-{seed}", optimizer=optimizer, lr=lr, seed=seed)
    return folder


def test_the_chosen_configurations_run_on_seeds_nobody_was_chosen_by(sweep: Path) -> None:
    made, said = plan(find(load_runs([sweep])))
    assert made.contenders == {
        "lamb": ["optimizer=lamb", "lr=0.004", "training.max_steps=200"],
        "adamw": ["optimizer=adamw", "lr=0.001", "training.max_steps=200"],
    }
    assert made.reference == "lamb"
    assert min(made.seeds) == 3
    assert f"{len(made.seeds)} fresh seeds" in said[0]
    points = made.points()
    assert len(points) == 2 * len(made.seeds)
    assert points[0] == ["optimizer=lamb", "lr=0.004", "training.max_steps=200", f"seed={made.seeds[0]}"]
    assert points[-1] == ["optimizer=adamw", "lr=0.001", "training.max_steps=200", f"seed={made.seeds[-1]}"]


@pytest.mark.parametrize(
    ("seeds", "message"), [([2, 3, 4], r"seeds: 2 took part in the choice.*seeds=3-5"), ([7, 8], "at least 3, got 2")]
)
def test_seeds_that_prove_nothing_are_refused(sweep: Path, seeds: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(find(load_runs([sweep])), seeds=seeds)


def test_one_contender_is_no_comparison(sweep: Path, tmp_path: Path, make_run: MakeRun) -> None:
    make_run(tmp_path / "alone" / "a")
    with pytest.raises(ConfigError, match="compares contenders"):
        prepare(tmp_path / "alone", tmp_path / "alone" / "confirm")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no run found"):
        prepare(tmp_path / "empty", tmp_path / "empty" / "confirm")
    (sweep / "confirm").mkdir()
    (sweep / "confirm" / "mine.txt").touch()
    with pytest.raises(ConfigError, match="is no confirmation"):
        prepare(sweep, sweep / "confirm")


def test_small_differences_take_more_seeds_and_hopeless_ones_are_told(tmp_path: Path, make_run: MakeRun) -> None:
    for gap, name in ((0.05, "wide"), (0.02, "narrow"), (1e-5, "none")):
        for seed in range(4):
            make_run(tmp_path / name / f"a{seed}", optimizer="adamw", seed=seed, final=2.0 + 0.01 * (seed % 2))
            make_run(tmp_path / name / f"b{seed}", optimizer="lamb", lr=4e-3, seed=seed,
                     final=2.0 + gap + 0.01 * (seed // 2))  # fmt: skip
    wide, narrow, none = (plan(find(load_runs([tmp_path / name]))) for name in ("wide", "narrow", "none"))
    assert confirmation.FEWEST == len(wide[0].seeds) <= len(narrow[0].seeds) <= confirmation.MOST
    more, _ = plan(find(load_runs([tmp_path / "narrow"])), power=0.99)
    assert len(more.seeds) > len(narrow[0].seeds)
    assert "takes more than 20" in none[1][1]


def test_what_was_planned_stays_planned(sweep: Path, make_run: MakeRun) -> None:
    folder = sweep / "confirm"
    made, _ = prepare(sweep, folder, seeds=[5, 6, 7])
    made.write(folder)
    assert read(folder) == made
    again, said = prepare(sweep, folder)
    assert (again, said) == (made, ["goes on with what was planned: seeds 5-7"])
    with pytest.raises(ConfigError, match=r"planned with seeds 5-7.*out=DIR"):
        prepare(sweep, folder, seeds=[5, 6, 7, 8])
    for seed in range(3):
        make_run(sweep / f"more{seed}", optimizer="adamw", lr=1.5e-3, seed=seed, floor=1.0)
    with pytest.raises(ConfigError, match=r"the choice has changed since \(adamw\)"):
        prepare(sweep, folder)
    for broken in ("{", "[]", '{"format": 1}', json.dumps({"format": 1, **asdict(made), "contenders": {"a": "lr=1"}})):
        (folder / confirmation.RECORD).write_text(broken)
        with pytest.raises(ConfigError, match="Move the folder away"):
            prepare(sweep, folder)


def test_the_same_line_goes_on_with_a_power_that_was_planned_for(sweep: Path) -> None:
    folder = sweep / "confirm"
    made, _ = prepare(sweep, folder, power=0.9)
    made.write(folder)
    assert prepare(sweep, folder, power=0.9)[0] == prepare(sweep, folder)[0] == made
    with pytest.raises(ConfigError, match="was planned with seeds"):
        prepare(sweep, folder, power=0.95)
    with pytest.raises(ConfigError, match=r"power=0.9: .*seeds= names them"):
        prepare(sweep, folder, power=0.9, seeds=[5, 6, 7])
    (sweep / "file").touch()
    with pytest.raises(ConfigError, match="is no confirmation"):
        prepare(sweep, sweep / "file")


@pytest.mark.parametrize("token", ["model.trust_remote_code=true", "++model.trust_remote_code=1", "--config-dir=x"])
def test_no_file_of_a_run_lets_code_run(sweep: Path, token: str) -> None:
    for path in sweep.glob("*/summary.json"):
        summary = json.loads(path.read_text())
        path.write_text(json.dumps({**summary, "overrides": [*summary["overrides"], token]}))
    with pytest.raises(ConfigError, match=r"stands in a file"):
        prepare(sweep, sweep / "confirm")


def test_the_report_judges_by_the_fresh_seeds_alone(sweep: Path, tmp_path: Path, make_run: MakeRun) -> None:
    """The choice favours lamb; on fresh seeds there is nothing of it."""
    before = report([sweep], console=None)
    folder = sweep / "confirm"
    prepare(sweep, folder, seeds=[5, 6, 7])[0].write(folder)
    assert report([sweep]).confirmed == []
    for seed in (5, 6, 7):
        for optimizer, lr in (("adamw", 1e-3), ("lamb", 4e-3)):
            if (seed, optimizer) != (7, "lamb"):
                make_run(folder / f"{optimizer}{seed}", optimizer=optimizer, lr=lr, seed=seed, floor=2.6, noise=0.05)
    stream = io.StringIO()
    made = report([sweep], console=Console(file=stream, width=140))
    assert [row.arm.scores for row in made.findings.rows] == [row.arm.scores for row in before.findings.rows]
    (one,) = made.confirmed
    assert one.missing == 1
    assert one.findings.reference == "lamb"
    assert one.findings.chosen_baseline
    said = " ".join(stream.getvalue().split())
    assert "Confirmed on fresh seeds 5-7, 1 of its runs without a result yet: " in said
    for page in ("report.md", "report.html"):
        text = (sweep / page).read_text()
        assert "Confirmed on fresh seeds 5-7" in text
        assert "The choice" in text
    assert "Selected: " in " ".join((before.files[1]).read_text().split()) or "Confirmed" in before.files[1].read_text()
    assert len(report([folder]).findings.runs) == 5  # by itself it is a sweep like any other
    above = report([tmp_path])
    assert (len(above.findings.runs), above.confirmed) == (12, [])  # a folder of sweeps has no verdict of one of them


def test_the_kind_of_the_answer_is_told(tmp_path: Path, make_run: MakeRun, sweep: Path) -> None:
    report([sweep])
    assert "**Selected: " in (sweep / "report.md").read_text()
    for optimizer in ("adamw", "lamb"):
        make_run(tmp_path / "pilot" / optimizer, optimizer=optimizer, lr=1e-3)
        for seed in range(3):
            make_run(tmp_path / "fixed" / f"{optimizer}{seed}", optimizer=optimizer, lr=1e-3, seed=seed)
    report([tmp_path / "pilot"])
    assert "**Pilot: " in (tmp_path / "pilot" / "report.md").read_text()
    report([tmp_path / "fixed"])
    assert "**Compared: " in (tmp_path / "fixed" / "report.md").read_text()


@pytest.mark.parametrize("text", ["", "a", "5-", "-5", "9-5", "5,,6", "5,5", "1-99999", "1.5", "5-7-9"])
def test_seeds_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="seeds="):
        parse_seeds(text)


@pytest.mark.parametrize("text", ["", "0", "1", "80", "nan", "high"])
def test_a_chance_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="power="):
        parse_power(text)
