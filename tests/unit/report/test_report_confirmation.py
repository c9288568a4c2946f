"""Which runs a confirmation is planned of, and how a report judges it by these alone."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from optrun.base.errors import ConfigError
from optrun.cli.values import read_request, read_seeds
from optrun.report import build, confirmation_plan
from optrun.report.build import report
from optrun.report.confirmation_plan import (
    MOST_SEEDS,
    ConfirmationPlan,
    ConfirmationRequest,
    load_or_make_plan,
    make_plan,
    read_plan,
)
from optrun.report.findings import Findings, analyse_runs
from optrun.report.runs import load_runs

MakeRun = Callable[..., Path]


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer than all of this; tests of their own look at them."""
    monkeypatch.setattr(build, "all_pictures", lambda comparison, judged: [])


@pytest.fixture
def sweep(tmp_path: Path, make_run: MakeRun) -> Path:
    """Two optimizers, two lr each, three seeds: 4e-3 is the better one of lamb, 1e-3 of adamw."""
    folder = tmp_path / "sweep"
    for optimizer in ("adamw", "lamb"):
        for lr in (1e-3, 4e-3):
            for seed in range(3):
                make_run(folder / f"{optimizer}-{lr}-{seed}", optimizer=optimizer, lr=lr, seed=seed)
    return folder


def _found(folder: Path, **options: str) -> Findings:
    return analyse_runs(load_runs([folder]), **options)  # type: ignore[arg-type]


def _noisy(
    folder: Path, make_run: MakeRun, *, gap: float, seeds: int = 4, sd: float = 0.01
) -> Path:
    """Two contenders, `gap` apart, whose residuals have the standard deviation `sd` / sqrt(3)."""
    for seed in range(seeds):
        own, other = sd * (seed % 2), sd * (seed // 2 % 2)
        make_run(folder / f"a{seed}", optimizer="adamw", seed=seed, max_steps=25, final=2.0 + own)
        make_run(
            folder / f"b{seed}",
            optimizer="lamb",
            lr=4e-3,
            seed=seed,
            max_steps=25,
            final=2.0 + gap + other,
        )
    return folder


def test_the_chosen_configurations_run_on_seeds_nobody_was_chosen_by(sweep: Path) -> None:
    made, said = make_plan(_found(sweep), ConfirmationRequest())
    assert made.contenders == {
        "lamb": ["optimizer=lamb", "lr=0.004", "training.max_steps=200"],
        "adamw": ["optimizer=adamw", "lr=0.001", "training.max_steps=200"],
    }
    assert made.reference is None, "nobody named one: each is asked whether it could be the best"
    assert make_plan(_found(sweep, baseline="adamw"), ConfirmationRequest())[0].reference == "adamw"
    assert min(made.seeds) == 3
    assert f"{len(made.seeds)} fresh seeds" in said
    points = made.points()
    assert len(points) == 2 * len(made.seeds)
    assert points[0] == [
        "optimizer=lamb",
        "lr=0.004",
        "training.max_steps=200",
        f"seed={made.seeds[0]}",
    ]
    assert points[-1] == [
        "optimizer=adamw",
        "lr=0.001",
        "training.max_steps=200",
        f"seed={made.seeds[-1]}",
    ]


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        ([2, 3, 4], r"seeds: 2 took part in the choice.*seeds=3-5"),
        ([7, 8], "at least 3, got 2.*seeds=3-5"),
    ],
)
def test_seeds_that_prove_nothing_are_refused(sweep: Path, seeds: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(_found(sweep), ConfirmationRequest(seeds=seeds))


def test_a_sweep_with_one_contender_so_far_is_finished_first(
    tmp_path: Path, make_run: MakeRun
) -> None:
    make_run(tmp_path / "a", optimizer="adamw")
    rows = [
        {"name": name, "status": status, "overrides": [f"optimizer={optimizer}"]}
        for name, status, optimizer in [("a", "finished", "adamw"), ("b", "new", "lamb")]
    ]
    (tmp_path / "sweep.json").write_text(json.dumps({"format": 1, "jobs": rows}))
    with pytest.raises(ConfigError, match="yet: the sweep has 1 of 2 runs left"):
        load_or_make_plan(tmp_path, tmp_path / "confirm")


def test_one_contender_is_no_comparison(sweep: Path, tmp_path: Path, make_run: MakeRun) -> None:
    make_run(tmp_path / "alone" / "a")
    with pytest.raises(ConfigError, match="two or more"):
        load_or_make_plan(tmp_path / "alone", tmp_path / "alone" / "confirm")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no run found"):
        load_or_make_plan(tmp_path / "empty", tmp_path / "empty" / "confirm")
    (sweep / "confirm").mkdir()
    (sweep / "confirm" / "mine.txt").touch()
    with pytest.raises(ConfigError, match="holds no confirmation"):
        load_or_make_plan(sweep, sweep / "confirm")


def test_seeds_follow_from_what_matters_and_never_from_the_gap_that_was_seen(
    tmp_path: Path, make_run: MakeRun
) -> None:
    wide, narrow = (_noisy(tmp_path / str(gap), make_run, gap=gap) for gap in (0.05, 1e-5))
    sizes = [
        len(make_plan(_found(each), ConfirmationRequest(difference=0.02))[0].seeds)
        for each in (wide, narrow)
    ]
    assert sizes[0] == sizes[1]
    made, said = make_plan(_found(wide), ConfirmationRequest(difference=0.02))
    assert (made.difference, made.power, made.spread) == (0.02, 0.8, pytest.approx(0.01 / 3**0.5))
    assert f"{sizes[0]} fresh seeds find a difference of 0.02 eval/loss in 4 of 5 cases" in said
    surer, told = make_plan(_found(wide), ConfirmationRequest(difference=0.02, power=0.95))
    assert len(surer.seeds) > sizes[0]
    assert "19 of 20" in told
    none, told = make_plan(_found(wide), ConfirmationRequest(difference=1e-4))
    assert (len(none.seeds), none.difference) == (MOST_SEEDS, 1e-4)
    assert (
        f"{MOST_SEEDS} fresh seeds, the most that are planned: to find a difference of 0.0001"
        in told
    )
    assert "difference=NUMBER plans for a larger difference" in told


def test_unless_told_what_matters_is_that_of_the_sweep(tmp_path: Path, make_run: MakeRun) -> None:
    found = _found(_noisy(tmp_path / "unset", make_run, gap=0.05))
    assert found.ttest is not None
    assert make_plan(found, ConfirmationRequest())[0].difference == pytest.approx(found.ttest.sd), (
        "what another seed changes"
    )
    for seed in range(4):
        for optimizer in ("adamw", "lamb"):
            make_run(
                tmp_path / "set" / f"{optimizer}{seed}",
                optimizer=optimizer,
                seed=seed,
                config={"matters": 0.5},
            )
    assert load_or_make_plan(tmp_path / "set", tmp_path / "set" / "confirm")[0].difference == 0.5


def test_a_sweep_of_one_seed_says_nothing_of_the_spread(tmp_path: Path, make_run: MakeRun) -> None:
    made, said = make_plan(
        _found(_noisy(tmp_path, make_run, gap=0.05, seeds=1)), ConfirmationRequest()
    )
    assert (made.seeds, made.difference, made.spread) == ([1, 2, 3, 4, 5], None, None)
    assert "5 fresh seeds" in said
    assert "nothing of the spread" in said


def test_a_run_that_diverged_adds_nothing_to_the_spread(tmp_path: Path, make_run: MakeRun) -> None:
    folder = _noisy(tmp_path, make_run, gap=0.05)
    spread = make_plan(_found(folder), ConfirmationRequest())[0].spread
    for seed in range(4):
        make_run(
            folder / f"c{seed}",
            optimizer="sgd",
            seed=seed,
            max_steps=25,
            diverge_at=20 if seed else None,
            final=2.5,
        )
    made, _ = make_plan(_found(folder), ConfirmationRequest())
    assert len(made.contenders) == 3
    assert made.spread == pytest.approx(spread)


def test_what_was_planned_stays_planned(sweep: Path, make_run: MakeRun) -> None:
    folder = sweep / "confirm"
    made, told = load_or_make_plan(sweep, folder, ConfirmationRequest(seeds=[5, 6, 7]))
    assert " configurations on 3 fresh seeds each: " in told
    assert "judged when all have ended; seeds=FIRST-LAST" in told
    made.write(folder)
    assert read_plan(folder) == made
    again, said = load_or_make_plan(sweep, folder)
    assert (again, said) == (made, "continues as planned: seeds 5-7")
    other_sweep = sweep.with_name("other")
    shutil.copytree(sweep, other_sweep, ignore=shutil.ignore_patterns("confirm"))
    with pytest.raises(ConfigError, match=r"confirms .*sweep\. Choose another out=DIR"):
        load_or_make_plan(other_sweep, folder)
    make_run(folder / "adamw5", seed=5, max_steps=25)
    with pytest.raises(ConfigError, match=r"planned with seeds 5-7.*out=DIR"):
        load_or_make_plan(sweep, folder, ConfirmationRequest(seeds=[5, 6, 7, 8]))
    for seed in range(3):
        make_run(sweep / f"more{seed}", optimizer="adamw", lr=1.5e-3, seed=seed, floor=1.0)
    with pytest.raises(ConfigError, match=r"another choice: adamw changed since.*out=DIR"):
        load_or_make_plan(sweep, folder)
    for broken in (
        "{",
        "[]",
        '{"format": 1}',
        json.dumps({"format": 1, **asdict(made), "contenders": {"a": "lr=1"}}),
    ):
        (folder / confirmation_plan.RECORD).write_text(broken)
        with pytest.raises(ConfigError, match="Move the folder away"):
            load_or_make_plan(sweep, folder)


@pytest.mark.parametrize(
    "asked", [{"power": 0.9}, {"difference": 0.5}, {"power": 0.9, "difference": 0.5}]
)
def test_the_same_line_goes_on_with_what_it_was_planned_for(
    sweep: Path, make_run: MakeRun, asked: dict[str, float]
) -> None:
    folder = sweep / "confirm"
    made, _ = load_or_make_plan(sweep, folder, ConfirmationRequest(**asked))  # type: ignore[arg-type]
    made.write(folder)
    assert (
        load_or_make_plan(sweep, folder, ConfirmationRequest(**asked))[0]
        == load_or_make_plan(sweep, folder)[0]
        == made
    )  # type: ignore[arg-type]
    make_run(folder / "adamw5", seed=5, max_steps=25)
    for key, value in asked.items():
        with pytest.raises(ConfigError, match="was planned with seeds"):
            load_or_make_plan(sweep, folder, ConfirmationRequest(**{key: value / 2}))  # type: ignore[arg-type]
    (sweep / "file").touch()
    with pytest.raises(ConfigError, match="holds no confirmation"):
        load_or_make_plan(sweep, sweep / "file")


def test_a_record_of_an_earlier_version_is_gone_on_with_against_its_reference(sweep: Path) -> None:
    """It names the best of the sweep as reference, and knows neither difference nor spread."""
    made, _ = load_or_make_plan(
        sweep, sweep / "confirm", ConfirmationRequest(seeds=[5, 6, 7], baseline="adamw")
    )
    old = {"format": 1, **asdict(made), "power": 0.8}
    for key in ("difference", "spread", "sweep"):
        del old[key]
    (sweep / "confirm").mkdir()
    (sweep / "confirm" / confirmation_plan.RECORD).write_text(json.dumps(old))
    again, said = load_or_make_plan(sweep, sweep / "confirm")
    assert (again.reference, again.seeds) == ("adamw", [5, 6, 7])
    assert "continues" in said
    with pytest.raises(
        ConfigError, match=r"another choice: baseline=lamb, planned with adamw\. .*out=DIR"
    ):
        load_or_make_plan(sweep, sweep / "confirm", ConfirmationRequest(baseline="lamb"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("power", "high"),
        ("difference", -1),
        ("difference", 1e999),
        ("spread", [1]),
        ("seeds", []),
        ("seeds", ["5"]),
        ("reference", 3),
        ("by", "lr"),
        ("contenders", ["a"]),
        ("metric", None),
        ("config_name", 5),
    ],
)
def test_a_record_that_is_none_is_named(sweep: Path, key: str, value: object) -> None:
    made, _ = load_or_make_plan(sweep, sweep / "confirm", ConfirmationRequest(seeds=[5, 6, 7]))
    made.write(sweep / "confirm")
    path = sweep / "confirm" / confirmation_plan.RECORD
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(ConfigError, match=r"confirmation\.json.*Move the folder away"):
        read_plan(sweep / "confirm")


@pytest.mark.parametrize(
    "token", ["model.trust_remote_code=true", "++model.trust_remote_code=1", "--config-dir=x"]
)
def test_no_file_of_a_run_lets_code_run(sweep: Path, token: str) -> None:
    for path in sweep.glob("*/summary.json"):
        summary = json.loads(path.read_text())
        path.write_text(json.dumps({**summary, "overrides": [*summary["overrides"], token]}))
    with pytest.raises(ConfigError, match=r"does not take from a file"):
        load_or_make_plan(sweep, sweep / "confirm")


def _run_plan(
    folder: Path, made: ConfirmationPlan, make_run: MakeRun, *, lamb: float, skip: int = 0
) -> None:
    """Run what was planned but for the last runs; lamb is `lamb` better on every seed."""
    made.write(folder)
    for seed in made.seeds:
        for optimizer, lr in (("adamw", 1e-3), ("lamb", 4e-3)):
            final = (
                2.6 + 0.01 * (7 * seed % 5) - (lamb + 0.002 * (seed % 3)) * (optimizer == "lamb")
            )
            if seed < made.seeds[-1] or skip == 0:
                make_run(
                    folder / f"{optimizer}{seed}",
                    optimizer=optimizer,
                    lr=lr,
                    seed=seed,
                    final=final,
                )


def _confirm(
    sweep: Path, folder: Path, seeds: list[int], make_run: MakeRun, **options: float
) -> None:
    _run_plan(
        folder,
        load_or_make_plan(sweep, folder, ConfirmationRequest(seeds=seeds))[0],
        make_run,
        **options,
    )  # type: ignore[arg-type]


def test_the_report_judges_by_the_fresh_seeds_alone_and_by_all_of_them(
    sweep: Path, make_run: MakeRun
) -> None:
    before = report([sweep])
    folder = sweep / "confirm"
    _confirm(sweep, folder, [5, 6, 7], make_run, lamb=0.1, skip=1)
    stream = io.StringIO()
    waiting = report([sweep], console=Console(file=stream, width=140))
    said = " ".join(stream.getvalue().split())
    assert "Fresh seeds 5-7 are judged when all have ended: 2 runs left." in said
    assert waiting.verdict.kind == before.verdict.kind == "selected"
    assert "Confirmed" not in said
    alone = report([folder])
    assert alone.verdict.kind == "none"
    assert "2 runs left" in alone.verdict.text
    assert alone.verdict.ruled_out == (), "nobody is, before the last run"
    _confirm(sweep, folder, [5, 6, 7], make_run, lamb=0.1)
    made = report([sweep])
    assert [row.configuration.scores for row in made.comparison.findings.contenders] == [
        row.configuration.scores for row in before.comparison.findings.contenders
    ]
    assert made.confirmed is not None
    judged = made.confirmed.comparison.ttest
    assert judged is not None
    assert not judged.has_baseline
    assert judged.possible == ["lamb"]
    assert made.verdict.kind == "confirmed"
    assert made.verdict.text.startswith("Confirmed on fresh seeds 5-7: lamb")
    for page in ("report.md", "report.html"):
        text = (sweep / page).read_text()
        assert "Confirmed on fresh seeds 5-7" in text
        assert "The choice" in text
    assert len(report([folder]).comparison.findings.runs) == 6
    above = report([sweep.parent])
    assert (len(above.comparison.findings.runs), above.confirmed) == (
        12,
        None,
    )  # a folder of sweeps: no verdict of one of them


def test_runs_that_failed_are_told_beside_the_verdict(sweep: Path, make_run: MakeRun) -> None:
    """A full disk or a kill says nothing of the contender; that the comparison lacks it is said."""
    folder = sweep / "confirm"
    _confirm(sweep, folder, [5, 6, 7, 8], make_run, lamb=0.1)
    make_run(
        folder / "lamb8",
        optimizer="lamb",
        lr=4e-3,
        seed=8,
        global_step=50,
        status="failed",
        message="disk full",
    )
    text = report([sweep]).verdict.text
    assert text.startswith("Confirmed on fresh seeds 5-8: lamb")
    assert "1 planned run without a result." in text


def test_a_confirmation_without_any_result_waits_for_no_run(sweep: Path, make_run: MakeRun) -> None:
    folder = sweep / "confirm"
    made = load_or_make_plan(sweep, folder, ConfirmationRequest(seeds=[5, 6, 7]))[0]
    made.write(folder)
    for seed in made.seeds:
        for optimizer, lr in (("adamw", 1e-3), ("lamb", 4e-3)):
            make_run(
                folder / f"{optimizer}{seed}", optimizer=optimizer, lr=lr, seed=seed, diverge_at=20
            )
    for text in (report([sweep]).verdict.text, report([folder]).verdict.text):
        assert "None of the runs on fresh seeds 5-7 has a result." in text
        assert "are left" not in text


def test_another_baseline_than_the_planned_one_is_not_dropped_silently(
    sweep: Path, make_run: MakeRun
) -> None:
    _confirm(sweep, sweep / "confirm", [5, 6, 7], make_run, lamb=0.1)
    text = report([sweep], baseline="adamw").verdict.text
    assert text.startswith("Confirmed on fresh seeds 5-7: lamb")
    assert "baseline=adamw is for the choice alone" in text


def test_several_confirmations_are_judged_together_and_all_named(
    sweep: Path, make_run: MakeRun
) -> None:
    for number, seeds in (("confirm", [5, 6, 7]), ("confirm-2", [8, 9, 10])):
        _confirm(sweep, sweep / number, seeds, make_run, lamb=0.1)
    made = report([sweep])
    assert made.verdict.text.startswith("Confirmed on fresh seeds 5-7 and 8-10: lamb")
    assert made.confirmed is not None
    judged = made.confirmed.comparison.ttest
    assert judged is not None
    assert judged.comparisons["adamw"].seeds == 6
    assert judged.alpha == pytest.approx(0.05 / 2)
    assert "0.025" in made.verdict.text, "the second look says so"
    by_itself = report([sweep / "confirm-2"])
    assert by_itself.confirmed is not None
    assert by_itself.confirmed.looks == 2
    assert "so judged at 0.025" in by_itself.verdict.text
    assert by_itself.comparison.ttest is not None
    assert by_itself.comparison.ttest.alpha == pytest.approx(0.05 / 2), "as it says"
    assert min(load_or_make_plan(sweep, sweep / "confirm-3")[0].seeds) == 11
    _, said = load_or_make_plan(sweep, sweep / "confirm-3", ConfirmationRequest(seeds=[7, 8, 11]))
    assert "seeds 7-8 ran in a confirmation before" in said
    assert "from 11 on" in said
    _confirm(sweep, sweep / "confirm-3", [11, 12, 13], make_run, lamb=0.1, skip=1)
    text = report([sweep]).verdict.text
    assert text.startswith("Confirmed on fresh seeds 5-7 and 8-10: lamb"), (
        "not looked at before its end"
    )
    assert "Fresh seeds 11-13 are judged when all have ended: 2 runs left." in text


def test_confirmations_of_another_choice_are_not_mixed(sweep: Path, make_run: MakeRun) -> None:
    _confirm(sweep, sweep / "confirm", [5, 6, 7], make_run, lamb=0.1)
    for seed in range(3):
        make_run(sweep / f"more{seed}", optimizer="adamw", lr=1.5e-3, seed=seed, floor=1.0)
    second = load_or_make_plan(sweep, sweep / "confirm-2", ConfirmationRequest(seeds=[8, 9, 10]))[0]
    second.write(sweep / "confirm-2")
    for seed in second.seeds:
        for optimizer, lr in (("adamw", 1.5e-3), ("lamb", 4e-3)):
            make_run(
                sweep / "confirm-2" / f"{optimizer}{seed}", optimizer=optimizer, lr=lr, seed=seed
            )
    text = report([sweep]).verdict.text
    assert text.startswith("Confirmed on fresh seeds 8-10: ")
    assert "Seeds 5-7 confirmed another choice." in text
    assert "0.025" in text, "a look at it, nevertheless"


def test_a_baseline_that_was_named_is_what_all_are_judged_against(
    sweep: Path, make_run: MakeRun
) -> None:
    folder = sweep / "confirm"
    _run_plan(
        folder,
        load_or_make_plan(sweep, folder, ConfirmationRequest(seeds=[5, 6, 7], baseline="adamw"))[0],
        make_run,
        lamb=0.1,
    )
    for directory in (sweep, folder):
        made = report([directory])
        assert made.confirmed is not None
        judged = made.confirmed.comparison.ttest
        assert judged is not None
        assert (judged.has_baseline, judged.reference) == (True, "adamw")
        assert made.verdict.text.startswith("Confirmed on fresh seeds 5-7: "), directory
    _confirm(sweep, sweep / "confirm-2", [8, 9, 10], make_run, lamb=0.1)
    both = report([sweep]).confirmed
    assert both is not None
    assert both.comparison.ttest is not None
    assert not both.comparison.ttest.has_baseline, "one of them asked which could be the best"


def test_another_question_is_not_called_confirmed(sweep: Path, make_run: MakeRun) -> None:
    folder = sweep / "confirm"
    _confirm(sweep, folder, [5, 6, 7], make_run, lamb=0.1)
    for options in ({"baseline": "lamb"}, {"metric": "eval/perplexity"}, {"by": ["lr"]}):
        text = report([folder], **options).verdict.text  # type: ignore[arg-type]
        assert "Not as planned, which was eval/loss against the best." in text, options
        assert "Confirmed" not in text, options
    assert report([folder], metric="eval/loss", by=["optimizer.name"]).verdict.kind == "confirmed"


@pytest.mark.parametrize(
    "text", ["", "a", "5-", "-5", "9-5", "5,,6", "5,5", "1-99999", "1.5", "5-7-9", "9" * 5000]
)
def test_seeds_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"seeds=.*expected numbers and ranges"):
        read_seeds(text)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        *(("power", each) for each in ("", "0", "1", "80", "nan", "high")),
        *(("difference", each) for each in ("", "0", "-0.1", "nan", "inf", "small")),
    ],
)
def test_numbers_that_are_none(key: str, text: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"{key}={text}: expected a (chance between 0 and 1|number above 0)"
    ):
        read_request(**{key: text})
    with pytest.raises(ConfigError, match=rf"{key}=0.5: .*seeds= names them"):
        read_request(**{key: "0.5", "seeds": "5-9"})


def test_a_plan_says_how_long_it_takes_and_may_change_while_nothing_has_finished(
    tmp_path: Path, make_run: Callable[..., Path]
) -> None:
    for optimizer in ("adamw", "lamb"):
        for seed in range(3):
            make_run(
                tmp_path / "sweep" / f"{optimizer}{seed}",
                optimizer=optimizer,
                seed=seed,
                max_steps=20,
                log_every=10,
                summary={"wall_seconds": 60.0, "overrides": [f"optimizer={optimizer}"]},
            )
    sweep, folder = tmp_path / "sweep", tmp_path / "sweep" / "confirm"
    made, said = load_or_make_plan(sweep, folder, ConfirmationRequest(seeds=[5, 6, 7, 8]))
    assert "8 runs, about 8 min" in said
    made.write(folder)
    cut = folder / "adamw5"
    make_run(cut, seed=5, max_steps=20, global_step=10, log_every=10, status="interrupted")
    again, _ = load_or_make_plan(sweep, folder, ConfirmationRequest(seeds=[5, 6, 7]))
    assert again.seeds == [5, 6, 7]
    make_run(cut, seed=5, max_steps=20, log_every=10)
    with pytest.raises(ConfigError, match="raise the error rate"):
        load_or_make_plan(sweep, folder, ConfirmationRequest(seeds=[5, 6, 7]))
