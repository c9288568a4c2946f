"""Simulated scores with a known truth: real differences are found as often as theory says, others as rarely."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from scipy import stats

from optrun.report.moderated import CAUTION, CAUTIOUS_FROM
from optrun.report.statistics import (
    ALPHA,
    BETTER,
    MIN_SEEDS,
    NO_DIFFERENCE,
    NO_SPREAD,
    REFERENCE,
    TOO_FEW,
    WORSE,
    bootstrap_intervals,
    compare,
    holm,
    paired_tests,
)


def _scores(values: np.ndarray) -> dict[str, dict[int, float]]:
    return {f"c{index}": dict(enumerate(map(float, row))) for index, row in enumerate(values)}


def _p_of(differences: np.ndarray) -> np.ndarray:
    """The p values of many pairs that nothing else was run beside."""
    return paired_tests(np.stack([differences, np.zeros_like(differences)], axis=1), [0], [1]).p[:, 0]


def _limit(rate: float, repetitions: int) -> float:
    """What a true rate will not exceed by chance, but once in a thousand times."""
    return float(stats.binom.ppf(0.999, repetitions, rate)) / repetitions


@pytest.mark.parametrize("n", [3, 5, 10])
def test_the_false_positive_rate_of_one_comparison_is_alpha(n: int) -> None:
    repetitions = 20_000
    p = _p_of(np.random.default_rng(n).standard_normal((repetitions, n)))
    rate = float(np.mean(p < ALPHA))
    assert _limit(ALPHA, repetitions) > rate > ALPHA - (_limit(ALPHA, repetitions) - ALPHA)


@pytest.mark.parametrize(("n", "effect"), [(3, 3.0), (5, 1.5), (5, 2.0), (10, 1.0)])
def test_a_real_difference_is_found_with_the_power_of_theory(n: int, effect: float) -> None:
    repetitions = 20_000
    p = _p_of(np.random.default_rng(7).standard_normal((repetitions, n)) + effect)
    critical = stats.t.ppf(1 - ALPHA / 2, n - 1)
    shift = effect * math.sqrt(n)
    power = stats.nct.sf(critical, n - 1, shift) + stats.nct.cdf(-critical, n - 1, shift)
    assert np.mean(p < ALPHA) == pytest.approx(power, abs=4 * math.sqrt(power * (1 - power) / repetitions) + 1e-3)


@pytest.mark.parametrize("reference", [None, "c0"], ids=["against-the-best", "against-a-baseline"])
def test_no_difference_no_verdict_at_the_stated_rate_over_the_whole_report(reference: str | None) -> None:
    """Seven equal optimizers, five seeds: at most 5 in 100 reports may name any of them better or worse."""
    random, repetitions = np.random.default_rng(11), 700
    false = 0
    for _ in range(repetitions):
        seeds = random.standard_normal(5)  # a seed is easy or hard for everyone
        found = compare(_scores(2.5 + seeds + 0.3 * random.standard_normal((7, 5))), mode="min", reference=reference)
        false += any(each.verdict in (BETTER, WORSE) for each in found.values())
    assert false / repetitions <= _limit(ALPHA, repetitions)


def test_choosing_the_lr_on_the_same_scores_keeps_the_rate_when_all_tune_alike() -> None:
    """Each contender shows the best of six arms; the test on the chosen arms stays below alpha."""
    random, repetitions, false = np.random.default_rng(5), 500, 0
    for _ in range(repetitions):
        grid = random.standard_normal((4, 6, 5))
        chosen = grid[np.arange(4), grid.mean(axis=2).argmin(axis=1)]
        found = compare(_scores(chosen), mode="min")
        false += any(each.verdict in (BETTER, WORSE) for each in found.values())
    assert false / repetitions <= _limit(ALPHA, repetitions)


def test_a_real_difference_is_found_among_many_contenders() -> None:
    """One of five is three standard deviations of a paired difference better: found nearly always, and no other."""
    random, repetitions = np.random.default_rng(3), 300
    hits = wrong = 0
    for _ in range(repetitions):
        values = random.standard_normal((5, 8))
        values[2] -= 3.0 * math.sqrt(2)
        found = compare(_scores(values), mode="min", reference="c0")
        hits += found["c2"].verdict == BETTER
        wrong += any(found[name].verdict in (BETTER, WORSE) for name in ("c1", "c3", "c4"))
    assert hits / repetitions > 0.97
    assert wrong / repetitions <= _limit(ALPHA, repetitions)


def test_pairing_by_seed_sees_what_the_spread_of_seeds_hides() -> None:
    hard = np.array([0.0, 5.0, -4.0, 2.0, 9.0])
    noise = np.array([0.01, -0.01, 0.02, 0.0, -0.02])
    found = compare(_scores(np.array([hard, hard - 0.5 + noise])), mode="min", reference="c0")
    assert found["c1"].verdict == BETTER
    assert found["c1"].difference == pytest.approx(-0.5)
    assert found["c1"].effect > 0


def test_mode_turns_the_verdict_and_the_effect_but_not_the_difference() -> None:
    scores = {"a": {0: 1.0, 1: 1.1, 2: 0.9, 3: 1.0}, "b": {0: 2.0, 1: 2.2, 2: 1.8, 3: 2.1}}
    low = compare(scores, mode="min", reference="a")["b"]
    high = compare(scores, mode="max", reference="a")["b"]
    assert (low.verdict, high.verdict) == (WORSE, BETTER)
    assert low.difference == high.difference > 0
    assert low.effect == -high.effect < 0
    assert low.low < low.difference < low.high


def test_the_best_is_the_reference_unless_one_is_chosen() -> None:
    scores = _scores(np.random.default_rng(0).standard_normal((3, 4)) + np.array([[0.0], [-5.0], [5.0]]))
    found = compare(scores, mode="min")
    assert found["c1"].verdict == REFERENCE
    assert {each.reference for each in found.values()} == {"c1"}
    assert compare(scores, mode="max")["c2"].verdict == REFERENCE


def test_the_reference_chosen_by_looking_costs_a_harder_correction() -> None:
    scores = _scores(np.random.default_rng(4).standard_normal((4, 6)) + np.array([[0.0], [1.0], [1.2], [1.4]]))
    best = next(name for name, each in compare(scores, mode="min").items() if each.verdict == REFERENCE)
    looked, planned = compare(scores, mode="min"), compare(scores, mode="min", reference=best)
    for name in scores:
        if name != best:
            assert looked[name].p == planned[name].p
            assert looked[name].p_corrected >= planned[name].p_corrected


def test_p_agrees_with_scipy() -> None:
    a, b = np.random.default_rng(1).standard_normal((2, 6))
    expected = stats.ttest_rel(b, a)
    found = compare(_scores(np.array([a, b])), mode="min", reference="c0")["c1"]
    assert found.p == pytest.approx(expected.pvalue)
    interval = expected.confidence_interval()
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    difference = b - a
    assert abs(found.effect) == pytest.approx(abs(difference.mean() / difference.std(ddof=1)) * (1 - 3 / (4 * 5 - 1)))


@pytest.mark.parametrize("shared", range(MIN_SEEDS))
def test_too_few_shared_seeds_are_no_evidence(shared: int) -> None:
    scores = {"a": {seed: 1.0 + seed / 100 for seed in range(5)}, "b": {5 + s - shared: 9.0 + s for s in range(5)}}
    found = compare(scores, mode="min")["b"]
    assert found.verdict == TOO_FEW
    assert found.pairs == shared
    assert math.isnan(found.p)


def test_seeds_that_change_nothing_are_no_evidence_either() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = compare(_scores(np.array([[1.0] * 4, [2.0] * 4, [1.0] * 4])), mode="min", reference="c0")
    assert found["c1"].verdict == NO_SPREAD
    assert found["c2"].verdict == NO_DIFFERENCE


def test_a_contender_without_scores_stays_in_the_table() -> None:
    found = compare({"a": {0: 1.0}, "b": {}}, mode="min")
    assert list(found) == ["a", "b"]
    assert found["b"].verdict == TOO_FEW
    assert compare({"a": {0: 1.0}, "b": {}}, mode="min", reference="b")["a"].verdict == TOO_FEW


@pytest.mark.parametrize("n", [3, 5, 10])
def test_the_detectable_difference_is_found_in_four_of_five_cases(n: int) -> None:
    random = np.random.default_rng(2)
    found = compare(_scores(random.standard_normal((2, n)) - [[10.0], [0.0]]), mode="min")["c1"]
    p = _p_of(found.detectable + found.spread * random.standard_normal((20_000, n)))
    assert np.mean(p < ALPHA) == pytest.approx(0.8, abs=0.0125)  # 4.4 standard deviations


@pytest.mark.parametrize(("contenders", "comparisons"), [(4, 6), (7, 21)])
def test_the_detectable_difference_counts_every_correction(contenders: int, comparisons: int) -> None:
    found = compare(_scores(np.random.default_rng(2).standard_normal((contenders, 5))), mode="min")
    for each in found.values():
        if each.verdict != REFERENCE:
            learnt = (each.degrees - 4) / 4  # in weights of a pair's own differences
            caution = 1 + (CAUTION - 1) * min(1.0, learnt / CAUTIOUS_FROM)
            assert each.bar == pytest.approx(ALPHA / comparisons / caution)
            critical = stats.t.ppf(1 - each.bar / 2, each.degrees)
            shift = each.detectable / (each.spread / math.sqrt(5))
            assert stats.nct.sf(critical, each.degrees, shift) == pytest.approx(0.8)
            assert (
                each.p_corrected
                >= each.p
                >= stats.t.sf(abs(each.difference) * math.sqrt(5) / each.spread, each.degrees)
            )


def test_holm_is_the_textbook_example_and_leaves_untested_alone() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    corrected = holm([math.nan, 0.02, 0.9])
    assert math.isnan(corrected[0])
    assert corrected[1:] == pytest.approx([0.04, 0.9])
    assert len(holm([])) == 0


@pytest.mark.parametrize(("n", "coverage"), [(3, 0.75), (5, 0.84), (10, 0.90)])
def test_bootstrap_intervals_cover_as_the_documentation_says(n: int, coverage: float) -> None:
    low, high = bootstrap_intervals(np.random.default_rng(n).standard_normal((2000, n)), resamples=500)
    assert np.mean((low < 0) & (high > 0)) == pytest.approx(coverage, abs=0.03)


def test_bootstrap_of_little_or_equal_data() -> None:
    low, high = bootstrap_intervals(np.ones((2, 2)))
    assert np.isnan(low).all()
    assert np.isnan(high).all()
    low, high = bootstrap_intervals(np.ones((1, 4)))
    assert (low[0], high[0]) == (1.0, 1.0)
    again = np.random.default_rng(0).standard_normal((3, 5))
    assert np.array_equal(bootstrap_intervals(again), bootstrap_intervals(again))


@pytest.mark.parametrize(
    ("scores", "options", "message"),
    [
        ({"a": {0: 1.0}}, {"mode": "low"}, "mode='low'"),
        ({"a": {0: 1.0}}, {"mode": "min", "reference": "z"}, "reference='z'"),
        ({"a": {}}, {"mode": "min"}, "no contender"),
    ],
)
def test_bad_arguments_are_refused(scores: dict[str, dict[int, float]], options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare(scores, **options)  # type: ignore[arg-type]
