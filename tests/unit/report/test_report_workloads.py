"""Several workloads, one verdict: numbers by hand and by brute force, and what the page says of them."""

from __future__ import annotations

import io
import itertools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from optrun.artifacts.objective import Objective
from optrun.errors import ConfigError
from optrun.report.build import report
from optrun.report.collect import load_runs
from optrun.report.statistics import BETTER, NO_DIFFERENCE, REFERENCE, TOO_FEW, WORSE, paired_tests
from optrun.report.workloads import Overview, over_workloads, split
from optrun.report.workloads_page import cautions, lead, notes, scores_table, switches, table
from optrun.report.workloads_sections import cost_section
from optrun.report.workloads_statistics import (
    bootstrap_interval,
    compare_over_workloads,
    interquartile_mean,
    mean_score,
    normalised,
    optimality_gap,
    performance_profile,
    profile_score,
    ratios,
    resample,
    score_profile,
    sign_test,
    stratified_t_tests,
)

TASKS = {"causal_lm": 2.0, "masked_lm": 3.0, "token_classification": 1.0}


def write_workloads(
    folder: Path, make_run: Callable[..., Path], *, without: tuple[str, str] | None = None, seeds: int = 3
) -> Path:
    """Three optimizers, the second 0.1 behind on each task, the third 1.0; seeds 0.02 apart."""
    for (task, floor), (index, optimizer) in itertools.product(TASKS.items(), enumerate(("adamw", "lamb", "sgd"))):
        for seed in range(seeds if (task, optimizer) != without else 0):
            final = floor + (0.0, 0.1, 1.0)[index] + 0.02 * seed + 0.001 * ((seed + index) % 3)
            name = f"{task}-{optimizer}-{seed}"
            config = {"task": {"name": task}}
            make_run(folder / name, optimizer=optimizer, lr=1e-3, seed=seed, final=final, max_steps=50, config=config)
    return folder


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory, make_run: Callable[..., Path]) -> Path:
    return write_workloads(tmp_path_factory.mktemp("three"), make_run)


def found(folder: Path, **options: Any) -> Overview:
    overview = over_workloads(load_runs([folder]), **options)
    assert overview is not None
    return overview


def test_profile_by_hand() -> None:
    """Dolan and More's ratios of two contenders on four workloads; one is never reached, one by nobody."""
    ratio = ratios({"a": [10, 20, math.inf, math.inf], "b": [20, 10, 30, math.inf]})
    assert ratio["a"].tolist() == [1, 2, math.inf, math.inf]
    assert ratio["b"].tolist() == [2, 1, 1, math.inf]
    assert performance_profile(ratio["a"], np.array([1, 1.9, 2, 100])).tolist() == [0.25, 0.25, 0.5, 0.5]
    taus = np.linspace(1, 4, 30001)
    for values in ratio.values():
        area = np.trapezoid(performance_profile(values, taus), taus) / 3
        assert profile_score(values) == pytest.approx(area, abs=1e-4), "the area below the profile, by brute force"


def test_aggregates_by_brute_force() -> None:
    scores = np.random.default_rng(0).normal(0.8, 0.2, size=(5, 4))
    flat = np.sort(scores.ravel())
    assert interquartile_mean(scores) == pytest.approx(stats.trim_mean(flat, 0.25))
    assert optimality_gap(scores) == pytest.approx(np.mean([1 - min(value, 1) for value in flat]))
    shares = [np.mean([np.mean(row > tau) for row in scores]) for tau in (0.5, 0.8, 1.0)]
    assert score_profile(scores, np.array([0.5, 0.8, 1.0])) == pytest.approx(shares)
    holes = scores.copy()
    holes[2, 3] = np.nan
    assert mean_score(holes) == pytest.approx(np.mean([row[~np.isnan(row)].mean() for row in holes]))
    assert interquartile_mean(holes) == pytest.approx(stats.trim_mean(holes[~np.isnan(holes)], 0.25))
    assert (normalised(5.0, 4.0, 2.0), normalised(0.9, 0.5, 0.7)) == (-0.5, pytest.approx(2.0))


def test_stratified_bootstrap_against_every_resample() -> None:
    """Two workloads of three seeds: all 27 x 27 draws, stretched by sqrt(3 / 2)."""
    scores = np.array([[0.0, 0.3, 0.9], [0.5, 0.6, 0.4]])
    stretched = scores.mean(axis=1, keepdims=True) + (scores - scores.mean(axis=1, keepdims=True)) * math.sqrt(1.5)
    draws = [[row[list(picks)].mean() for picks in itertools.product(range(3), repeat=3)] for row in stretched]
    every = np.add.outer(*map(np.array, draws)).ravel() / 2
    drawn = mean_score(resample(scores, resamples=20000))
    assert drawn.mean() == pytest.approx(every.mean(), abs=5e-3)
    assert drawn.std() == pytest.approx(every.std(), rel=0.02)
    assert every.std() == pytest.approx(math.sqrt((scores.var(axis=1, ddof=1) / 3).sum()) / 2), (
        "unbiased, for the stretch"
    )
    assert bootstrap_interval(mean_score, scores) == pytest.approx(np.quantile(every, [0.025, 0.975]), abs=0.03)
    assert np.isnan(bootstrap_interval(mean_score, scores[:, :2])).all(), "two seeds spread nothing to draw from"


def test_stratified_t_test_by_hand() -> None:
    """Two contenders: nothing is moderated, the p value is twice that of the t test."""
    random = np.random.default_rng(1)
    one = random.normal(loc=[[2.0], [0.0]], size=(2, 6))
    told = stats.ttest_rel(*one)
    (made,) = stratified_t_tests([one], [(0, 1)])
    assert made.p == pytest.approx(2 * told.pvalue)
    assert (made.low, made.high) == pytest.approx(tuple(told.confidence_interval(0.975)))
    parts = [np.array([random.normal(scale=scale, size=n), np.zeros(n)]) for scale, n in ((1.0, 5), (0.3, 4))]
    (made,) = stratified_t_tests(parts, [(0, 1)])
    share = np.array([part[0].var(ddof=1) / part.shape[1] for part in parts])
    degrees = (share.sum() ** 2 / (share**2 / [4, 3]).sum() + 3) / 2
    mean = np.mean([part[0].mean() for part in parts])
    assert made.difference == pytest.approx(mean)
    assert made.p == pytest.approx(min(1, 4 * stats.t.sf(abs(mean) / (math.sqrt(share.sum()) / 2), degrees)))
    assert (made.reversed().low, made.reversed().difference) == (-made.high, -made.difference)


def test_stratified_t_test_of_many_borrows_their_variance() -> None:
    """One workload of seven contenders: mean and spread of the single comparison."""
    table = np.random.default_rng(2).normal(size=(7, 4))
    pairs = [(0, 1), (5, 2)]
    single = paired_tests(table[None], *zip(*pairs, strict=True))
    for index, made in enumerate(stratified_t_tests([table], pairs)):
        assert made.p == pytest.approx(single.p[0, index])
        assert (made.low, made.high) == pytest.approx((single.low[0, index], single.high[0, index]))


def test_no_test_without_seeds_or_spread() -> None:
    (few,) = stratified_t_tests([np.ones((2, 2)), np.ones((2, 5))], [(0, 1)])
    assert (math.isnan(few.p), few.seeds) == (True, 2)
    (still,) = stratified_t_tests([np.array([[1.0, 2, 3], [0, 1, 2]])], [(0, 1)])
    assert (still.difference, still.seeds) == (1, 3)
    assert math.isnan(still.p), "every seed differs by the same"


def test_error_rate_over_workloads() -> None:
    """No contender differs, one workload spreads ten times as much: a false verdict in at most one report of twenty."""
    random = np.random.default_rng(2)
    spreads = np.array([10.0, 1.0, 1.0, 1.0, 1.0])[:, None]
    wrong = 0
    for _ in range(150):
        scores = {name: random.normal(size=(5, 3)) * spreads for name in "abcd"}
        best = max(scores, key=lambda name: float(mean_score(scores[name])))
        tests = compare_over_workloads(scores, best, named_beforehand=False)
        wrong += any(p < 0.05 for _, p in tests.values())
    assert wrong <= 150 * 0.05 + 2 * math.sqrt(150 * 0.05 * 0.95)


def test_sign_test_needs_six_workloads() -> None:
    assert math.isnan(sign_test(5, 0))
    assert sign_test(6, 0) == pytest.approx(2 / 2**6)
    assert sign_test(4, 4) == 1


def test_one_verdict(three: Path) -> None:
    overview = found(three)
    assert [each.name for each in overview.workloads] == list(TASKS), "named by what differs: the task"
    assert overview.reference == "adamw"
    assert {each.name: each.verdict for each in overview.standings} == {"adamw": REFERENCE, "lamb": WORSE, "sgd": WORSE}
    lamb = overview.standings[1]
    by_hand = []
    for each in overview.workloads:
        runs = {row.name: row.arm.scores for row in each.findings.rows}
        best = np.mean(list(runs["adamw"].values()))
        assert each.best == pytest.approx(best)
        by_hand.append([(each.floor - score) / (each.floor - best) for score in runs["lamb"].values()])
    assert lamb.scores == pytest.approx(np.array(by_hand))
    assert lamb.mean == pytest.approx(np.mean(by_hand))
    assert (lamb.better, lamb.worse, lamb.ranks.tolist()) == (0, 3, [2, 2, 2])
    assert overview.standings[2].profile == 0, "it never reaches what half of the contenders reach"
    said = lead(overview)
    for fact in ("Over 3 workloads adamw", "Against adamw, on these workloads", "lamb and sgd are worse", "needs 6"):
        assert fact in said


def test_a_baseline_named_beforehand(three: Path) -> None:
    overview = found(three, baseline="lamb")
    assert {each.name: each.verdict for each in overview.standings} == {
        "adamw": BETTER,
        "lamb": REFERENCE,
        "sgd": WORSE,
    }
    assert {each.findings.reference for each in overview.workloads} == {"lamb"}, "within each workload, too"
    with pytest.raises(ConfigError, match=r"baseline=lam: .*lamb"):
        found(three, baseline="lam")


def test_one_contender_has_nothing_to_be_compared_with(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    """Runs of several tasks that lie side by side by chance: no verdict over all of them."""
    for task in TASKS:
        make_run(tmp_path / task, max_steps=50, config={"task": {"name": task}})
    runs = load_runs([tmp_path])
    assert len(split(runs)) == 3
    assert over_workloads(runs) is None


def test_two_seeds_are_not_tested(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    overview = found(write_workloads(tmp_path, make_run, seeds=2))
    assert {each.verdict for each in overview.standings} == {REFERENCE, TOO_FEW}
    assert all(math.isnan(end) for each in overview.standings for end in each.interval)
    assert lead(overview).startswith("Pilot: ")


def test_a_contender_that_is_missing_somewhere(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    overview = found(write_workloads(tmp_path, make_run, without=("masked_lm", "lamb")))
    last = overview.standings[-1]
    assert (last.name, last.missing) == ("lamb", ("masked_lm",))
    assert last.ratio[1] == math.inf, "what has no result reaches no target"
    assert "no result on masked_lm" in str(table(overview).rows[-1])
    assert switches(overview) == [], "its colours would be another contender's on that workload"


def test_a_workload_on_which_nothing_was_learnt(three: Path, tmp_path: Path, make_run: Callable[..., Path]) -> None:
    for seed in range(3):
        for optimizer in ("adamw", "lamb", "sgd"):
            make_run(tmp_path / f"{optimizer}-{seed}", optimizer=optimizer, seed=seed, final=12.0, max_steps=50,
                     config={"task": {"name": "seq2seq_lm"}})  # fmt: skip
    overview = over_workloads(load_runs([three, tmp_path]))
    assert overview is not None
    assert list(overview.left_out) == ["seq2seq_lm"]
    assert len(scores_table(overview).rows) == 3
    assert "Not in the score: seq2seq_lm" in notes(overview)[-1]


def test_what_a_workload_is(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    """Named by data where tasks agree; a copy of the same rows is the same workload; one is none of several."""
    for source, digest in (("a", "1"), ("b", "2"), ("copy", "1")):
        make_run(tmp_path / source, config={"data": {"name": "files", "eval": f"{source}.csv"}},
                 summary={"data": {"fingerprint": f"same-{digest}"}})  # fmt: skip
    runs = load_runs([tmp_path])
    assert {name: len(part) for name, part in split(runs).items()} == {"a.csv": 2, "b.csv": 1}
    assert over_workloads(runs[:1]) is None
    assert over_workloads([run for run in runs if run.label != "b"]) is None


def test_the_report(three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optrun.report.workloads_figures._WITHIN", ("results",))  # each picture takes its time
    monkeypatch.setattr("optrun.report.build.save_png", lambda figure, path, *, dpi: path)
    made = report([three], out=tmp_path / "report")
    assert made.overview is not None
    assert all(row.rank is None for row in made.findings.rows), "all runs together stay unranked"
    names = {path.name for path in made.files}
    assert {"report-workloads.png", "report-workloads-steps.png", "report-workloads-scores.png", "report-workloads.csv",
            "report-workloads-scores.csv", "report-workload-1-results.png"} <= names  # fmt: skip
    for page in ("report.html", "report.md"):
        text = (tmp_path / "report" / page).read_text().replace("\\_", "_")
        for fact in (
            "3 contenders over 3 workloads",
            "Over several workloads",
            "Within causal_lm",
            "lamb and sgd are worse",
        ):
            assert fact in text
        assert "Nothing is ranked" not in text
    for fact in (
        "We compared 3 contenders (adamw, lamb, sgd) on 3 workloads, in 27 training runs of 50 optimizer steps each: "
        "causal_lm (model",
        "Within each workload each contender had one configuration",
        "with Holm's correction over all pairs of contenders, shown against the best, adamw, at 5 %",
        "Of other workloads nothing is claimed, which takes at least 6.",
        "All runs together took 1,350 optimizer steps",
        "Not over several workloads",
    ):
        assert fact in text
    cost, by_workload = cost_section(made.overview).tables
    assert [row[:6] for row in cost.rows] == [
        [each.name, f"{each.mean:.3f}", "3", "3", "9", "450"] for each in made.overview.standings
    ]
    assert [row[:4] for row in by_workload.rows] == [[task, "3", "9", "450"] for task in TASKS]
    kinds = {warning.kind for warning in cautions(made.overview, made.findings)}
    assert not kinds & {"task", "data"}
    with pytest.raises(ConfigError, match=r"target=2\.0: 3 workloads"):
        report([three], out=tmp_path / "other", target=2.0)


def test_each_workload_has_a_front(three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What several numbers weigh is drawn of each workload; a number that one has not is told there."""
    drawn: list[str] = []
    monkeypatch.setattr("optrun.report.build.save_png", lambda figure, path, *, dpi: drawn.append(path.name))
    monkeypatch.setattr("optrun.report.workloads_figures._WITHIN", ("pareto",))
    monkeypatch.setattr("optrun.report.workloads_figures._together", lambda overview: [])
    weighed = [Objective("eval/loss", "min"), Objective("perf/tokens_per_second", "max")]
    runs = tmp_path / "runs"
    shutil.copytree(three, runs)
    for path in runs.glob("masked_lm-*/summary.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"perf": {}}))
        metrics = path.with_name("metrics.jsonl")
        metrics.write_text(metrics.read_text().replace("perf/", "other/"))
    stream = io.StringIO()
    made = report([runs], out=tmp_path / "out", objectives=weighed, console=Console(file=stream, width=160))
    assert drawn == ["report-workload-1-pareto.png", "report-workload-3-pareto.png"]
    text = (tmp_path / "out" / "report.md").read_text().replace("\\_", "_")
    assert [f"## Pareto front of {task}" in text for task in TASKS] == [True] * 3
    missing = "No finished run has all of eval/loss, perf/tokens_per_second: there is nothing to weigh."
    assert (text.count(missing), stream.getvalue().count(missing)) == (1, 1)
    assert all(tuple(each.findings.objectives) == tuple(weighed) for each in (made.overview or found(runs)).workloads)


def test_no_difference_is_said(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    random = np.random.default_rng(3)
    for task, optimizer, seed in itertools.product(TASKS, ("adamw", "lamb"), range(3)):
        make_run(tmp_path / f"{task}{optimizer}{seed}", optimizer=optimizer, lr=1e-3, seed=seed, max_steps=50,
                 final=2 + 0.1 * random.normal(), config={"task": {"name": task}})  # fmt: skip
    overview = found(tmp_path)
    assert overview.standings[1].verdict == NO_DIFFERENCE
    assert f"{NO_DIFFERENCE} for " in lead(overview)
