"""The score that fewer configurations would have given, against all draws there are, and what was spent."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from optrun.report.budget import BAND, expected_best
from optrun.report.collect import load_runs
from optrun.report.cost import cost, cost_table, equal_budget
from optrun.report.findings import Findings, find

MakeRun = Callable[..., Path]


@pytest.mark.parametrize("scores", [[2.0], [3.0, 1.0], [1.0, 1.0, 4.0, 2.5, 4.0], [0.3, -1.0, 7.0, 7.0, 2.0, 5.5, 9.0]])
def test_it_is_the_mean_and_the_quantiles_over_all_subsets(scores: list[float]) -> None:
    expected, low, high = expected_best(sorted(scores))
    for k in range(1, len(scores) + 1):
        drawn = np.array([min(subset) for subset in itertools.combinations(scores, k)])
        assert expected[k - 1] == pytest.approx(drawn.mean(), rel=1e-12)
        for found, quantile in ((low, BAND[0]), (high, BAND[1])):
            assert found[k - 1] == np.quantile(drawn, quantile, method="inverted_cdf")


def test_it_is_unbiased_where_the_plug_in_is_not() -> None:
    """The best of 5 uniform numbers is 1/6 on average, whatever the number of configurations it is estimated from."""
    random = np.random.default_rng(0)
    samples = np.sort(random.random((4000, 8)), axis=1)
    ours = np.mean([expected_best(sample)[0][4] for sample in samples[:1000]])
    i = np.arange(1, 9)
    plug_in = np.mean(samples @ ((1 - (i - 1) / 8) ** 5 - (1 - i / 8) ** 5))
    assert ours == pytest.approx(1 / 6, abs=0.012)
    assert plug_in > 1 / 6 + 0.02


def test_a_thousand_configurations_stay_exact() -> None:
    scores = np.arange(1.0, 1001.0)
    expected, _, _ = expected_best(scores.tolist())
    k = np.arange(1, 1001)
    assert expected == pytest.approx(1001 / (k + 1), rel=1e-9), "the mean of the smallest of k of 1 ... n"
    assert (np.diff(expected) <= 0).all()


def _unequal(folder: Path, make_run: MakeRun) -> Findings:
    """Four configurations of lamb, one of which diverges; two of adamw, one of which is cut and run twice."""
    for number, final in enumerate((2.0, 2.2, 2.6)):
        make_run(folder / f"l{number}", optimizer="lamb", lr=1e-3 * 2**number, max_steps=20, final=final)
    make_run(folder / "l3", optimizer="lamb", lr=1.0, max_steps=20, diverge_at=10)
    make_run(folder / "a0", lr=1e-3, max_steps=20, final=2.1)
    make_run(folder / "a1", lr=2e-3, max_steps=20, final=2.3)
    make_run(folder / "a2", lr=4e-3, max_steps=20, global_step=10, status="interrupted")
    return find(load_runs([folder]))


def test_a_configuration_that_diverged_was_tried_and_has_learnt_nothing(tmp_path: Path, make_run: MakeRun) -> None:
    findings = _unequal(tmp_path, make_run)
    lamb, adamw = (row.budget for row in findings.rows)
    assert (lamb.tried, lamb.stand_ins) == (4, 1)
    assert lamb.expected[0] == pytest.approx((2.0 + 2.2 + 2.6 + findings.level.start) / 4)
    assert lamb.expected[-1] == findings.rows[0].arm.mean == 2.0
    assert (adamw.tried, adamw.stand_ins, adamw.stopped) == (3, 0, 1), "what was cut counts as far as it came"
    cut = next(run for run in findings.runs if run.status == "interrupted").last("eval/loss")
    assert cut is not None
    assert adamw.expected == pytest.approx([(2.1 + 2.3 + cut) / 3, (2 * 2.1 + 2.3) / 3, 2.1])
    assert math.isnan(adamw.at(4))
    assert equal_budget(findings.rows) == 3
    assert lamb.at(3) == pytest.approx((3 * 2.0 + 2.2) / 4)


def test_where_more_is_better_the_curve_rises(tmp_path: Path, make_run: MakeRun) -> None:
    for number, final in enumerate((2.0, 2.4, 3.0)):
        make_run(tmp_path / str(number), lr=1e-3 * 2**number, max_steps=20, final=final, accuracy=True)
        make_run(tmp_path / f"x{number}", lr=1e-3 * 2**number, max_steps=20, final=3.0, accuracy=True, optimizer="sgd")
    budget = find(load_runs([tmp_path]), metric="eval/accuracy").rows[0].budget
    assert budget.expected == pytest.approx([(0.75 + 0.65 + 0.5) / 3, (2 * 0.75 + 0.65) / 3, 0.75])
    assert (budget.low <= budget.expected).all()
    assert (budget.expected <= budget.high).all()


def test_the_cost_is_that_of_everything_tried(tmp_path: Path, make_run: MakeRun) -> None:
    findings = _unequal(tmp_path, make_run)
    spent = {row.name: cost(row.contender) for row in findings.rows}
    assert (spent["lamb"].configurations, spent["lamb"].runs, spent["lamb"].steps) == (4, 4, 80)
    assert (spent["adamw"].configurations, spent["adamw"].steps) == (3, 50)
    assert spent["adamw"].seconds == pytest.approx(2 * (20 / 100 + 1) + 10 / 100 + 1)
    assert spent["adamw"].tokens == pytest.approx(100.0 * 2048 * (spent["adamw"].seconds or 0))
    table = cost_table(findings)
    assert table.columns[:3] == ["contender", "eval/loss", "expected best of 3"]
    assert [row[2] for row in table.rows] == ["2.0500", "2.1000"]
    assert {len(row) for row in table.rows} == {len(table.columns)} == {len(table.numeric)}


def test_a_cost_that_is_known_in_part_is_a_bound(tmp_path: Path, make_run: MakeRun) -> None:
    make_run(tmp_path / "a", max_steps=20)
    make_run(tmp_path / "b", max_steps=20, seed=1, summary={"perf": {}})
    make_run(tmp_path / "c", max_steps=20, optimizer="sgd", summary={"perf": {}, "wall_seconds": None})
    rows = {row[0]: row for row in cost_table(find(load_runs([tmp_path]))).rows}
    assert rows["adamw"][-2].startswith("≥ ")
    assert rows["sgd"][-2:] == ["–", "–"]
