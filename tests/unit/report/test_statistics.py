"""The comparison of contenders.

Cases computed by hand, scipy as an oracle, and what must not change a verdict.
"""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from scipy import stats

from benchmarks import verdict as simulated
from optrun.report.statistics import (
    ALPHA,
    MIN_SEEDS,
    POWER,
    TtestResult,
    Verdict,
    compare,
    detectable,
    holm,
    pooled_sd,
    seeds_for,
)

Scores = dict[str, dict[int, float]]


def _scores(values: np.ndarray) -> Scores:
    return {f"c{index}": dict(enumerate(map(float, row))) for index, row in enumerate(values)}


def _drawn(seed: int, contenders: int = 5, seeds: int = 5, apart: float = 1.0) -> np.ndarray:
    """Contenders that differ by `apart` each, on seeds that are easy or hard for all."""
    random = np.random.default_rng(seed)
    own = random.standard_normal((contenders, seeds)) + apart * np.arange(contenders)[:, None]
    return 0.5 * own + random.standard_normal(seeds)


def _verdicts(judged: TtestResult) -> dict[str, Verdict]:
    return {name: each.verdict for name, each in judged.comparisons.items()}


def test_a_case_computed_by_hand() -> None:
    """Differences 1, 2, 3.

    Mean 2, sd 1, t = 2 sqrt(3) on 2 degrees, p = (1 - t / sqrt(t^2 + 2)) / 2 = 0.0371.
    """
    judged = compare(
        {"a": {0: 1.0, 1: 5.0, 2: 3.0}, "b": {0: 2.0, 1: 7.0, 2: 6.0}}, mode="min", matters=0.5
    )
    worse = judged.comparisons["b"]
    t = 2 * math.sqrt(3)
    assert worse.difference == pytest.approx(2.0)
    assert worse.p == pytest.approx((1 - t / math.sqrt(t * t + 2)) / 2)
    assert (worse.verdict, worse.ruled_out_by, worse.reference, worse.seeds) == (
        Verdict.ruled_out,
        "a",
        "a",
        3,
    )
    assert (judged.reference, judged.has_baseline, judged.possible, judged.matters) == (
        "a",
        False,
        ["a"],
        0.5,
    )
    assert judged.sd == pytest.approx(math.sqrt((8 + 14) / 4))


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize(("contenders", "seeds"), [(2, 3), (4, 5), (7, 3)])
def test_p_and_intervals_are_those_of_scipy(mode: str, contenders: int, seeds: int) -> None:
    values = _drawn(contenders, contenders, seeds)
    judged = compare(_scores(values), mode=mode)
    worse = "greater" if mode == "min" else "less"
    best = int(values.mean(axis=1).argmin() if mode == "min" else values.mean(axis=1).argmax())
    assert judged.reference == f"c{best}"
    assert judged.confidence == pytest.approx(1 - 2 * ALPHA / (contenders - 1))
    for i, each in enumerate(judged.comparisons.values()):
        one_sided = [
            stats.ttest_rel(values[i], values[j], alternative=worse).pvalue
            for j in range(contenders)
            if j != i
        ]
        assert each.p == pytest.approx(min(1.0, (contenders - 1) * min(one_sided)))
        if i != best:
            interval = stats.ttest_rel(values[i], values[best]).confidence_interval(
                judged.confidence
            )
            assert (each.low, each.high) == pytest.approx((interval.low, interval.high))


def test_a_baseline_is_compared_two_sided_by_holm() -> None:
    values = _drawn(4, apart=0.8)
    judged = compare(_scores(values), mode="min", baseline="c2", matters=0.0)
    p = [float(stats.ttest_rel(values[i], values[2]).pvalue) for i in (0, 1, 3, 4)]
    order = sorted(range(4), key=p.__getitem__)
    expected: dict[int, float] = {}
    for place, index in enumerate(order):
        expected[index] = max([min(1.0, (4 - place) * p[index]), *expected.values()])
    others = [judged.comparisons[name] for name in ("c0", "c1", "c3", "c4")]
    assert [each.p for each in others] == pytest.approx([expected[index] for index in range(4)])
    assert {each.ruled_out_by for each in others} == {""}
    named = judged.comparisons["c2"]
    assert (judged.has_baseline, judged.reference, named.verdict) == (True, "c2", Verdict.baseline)
    assert (named.difference, judged.confidence) == (0.0, 1 - ALPHA)
    interval = stats.ttest_rel(values[0], values[2]).confidence_interval()
    assert (others[0].low, others[0].high) == pytest.approx((interval.low, interval.high))


def test_a_baseline_is_told_better_worse_and_no_difference() -> None:
    noise = np.array([0.0, 0.1, -0.1, 0.05])
    scores = {"base": 0 * noise, "low": -1 + noise, "high": 1 + noise, "alike": 0.01 + 3 * noise}
    of_seeds = {name: dict(enumerate(values.tolist())) for name, values in scores.items()}
    low, high, alike = Verdict.better, Verdict.worse, Verdict.no_difference
    expected = {"base": Verdict.baseline, "low": low, "high": high, "alike": alike}
    assert _verdicts(compare(of_seeds, mode="min", baseline="base")) == expected
    assert _verdicts(compare(of_seeds, mode="max", baseline="base")) == expected | {
        "low": high,
        "high": low,
    }


def test_tests_that_are_not_made_count_for_holm() -> None:
    scores = _scores(_drawn(1, contenders=2, apart=2))
    alone = compare(scores, mode="min", baseline="c0").comparisons["c1"]
    beside = compare(scores | {"short": {0: 1.0}}, mode="min", baseline="c0").comparisons["c1"]
    assert alone.p * 2 == pytest.approx(beside.p)


def test_a_contender_is_ruled_out_by_any_other() -> None:
    """The best scatters too much to tell c1 from it; the second best rules c1 out."""
    scores = _scores(
        np.array([[-9.0, 9.0, -6.0, 0.0], [1.0, 1.1, 0.9, 1.05], [0.0, 0.01, -0.01, 0.0]])
    )
    judged = compare(scores, mode="min")
    worse = judged.comparisons["c1"]
    assert judged.reference == "c0"
    assert (worse.verdict, worse.ruled_out_by) == (Verdict.ruled_out, "c2")
    assert worse.low < 0 < worse.high
    assert judged.possible == ["c0", "c2"]


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("baseline", [None, "c1"])
def test_what_must_not_change_a_verdict(mode: str, baseline: str | None) -> None:
    random = np.random.default_rng(7)
    for seed in range(20):
        values = _drawn(seed, apart=0.8)
        before = compare(_scores(values), mode=mode, baseline=baseline)
        shuffled = compare(
            {f"c{index}": _scores(values)[f"c{index}"] for index in random.permutation(5)},
            mode=mode,
            baseline=baseline,
        )
        seeds = random.permutation(5)
        others = {
            "seeds": compare(_scores(values[:, seeds]), mode=mode, baseline=baseline),
            "unit": compare(_scores(1e-3 * values), mode=mode, baseline=baseline),
            "huge": compare(_scores(1e200 * values), mode=mode, baseline=baseline),
            "mode": compare(
                _scores(-values), mode="max" if mode == "min" else "min", baseline=baseline
            ),
        }
        hard = compare(
            _scores(values + 10 * random.standard_normal(5)),
            mode=mode,
            baseline=baseline,
            matters=before.sd,
        )
        assert _verdicts(shuffled) == _verdicts(before)
        assert _verdicts(hard) == _verdicts(before)
        for law, after in others.items():
            assert _verdicts(after) == _verdicts(before), law
            assert (after.reference, after.possible) == (before.reference, before.possible), law
            for name, each in after.comparisons.items():
                assert each.p == pytest.approx(before.comparisons[name].p, nan_ok=True), law


@pytest.mark.parametrize("baseline", [None, "c0"])
def test_an_interval_excludes_zero_where_the_pair_is_told_apart(baseline: str | None) -> None:
    told = 0
    for seed in range(60):
        judged = compare(
            _scores(_drawn(seed, contenders=2, seeds=4)), mode="min", baseline=baseline, matters=0.0
        )
        each = next(each for each in judged.comparisons.values() if each.name != judged.reference)
        found = each.verdict in (Verdict.ruled_out, Verdict.better, Verdict.worse)
        assert found == (each.low > 0 or each.high < 0)
        told += found
    assert 0 < told < 60


def test_the_best_mean_is_never_ruled_out_and_compare_is_rule_out() -> None:
    for seed in range(50):
        values = _drawn(seed, contenders=2 + seed % 6, apart=0.5)
        judged = compare(_scores(values), mode="max", matters=0.0)
        assert judged.reference == judged.ranking[0] == judged.possible[0]
        gone = simulated.rule_out(values[None], "max")[0]
        assert [
            each.verdict == Verdict.ruled_out for each in judged.comparisons.values()
        ] == gone.tolist()
        assert bool(gone[values.mean(axis=1).argmax()]) is False


def test_a_sure_difference_may_not_matter() -> None:
    """0.0001 on every seed but for noise of 0.00001, where seeds lie 0.026 apart."""
    hard = 0.026 * np.array([-1.0, 0.5, 1.2, -0.7, 0.0])
    values = np.array([hard, hard + 1e-4 + 1e-5 * np.array([1, -1, 0.5, -0.5, 0])])
    judged = compare(_scores(values), mode="min")
    assert judged.comparisons["c1"].verdict == Verdict.either_will_do
    assert judged.matters == judged.sd == pytest.approx(np.std(values[0], ddof=1), rel=0.01)
    assert (
        compare(_scores(values), mode="min", matters=5e-5).comparisons["c1"].verdict
        == Verdict.ruled_out
    )
    assert (
        compare(_scores(values), mode="min", baseline="c0").comparisons["c1"].verdict
        == Verdict.differs_little
    )
    assert compare(_scores(values), mode="min", sd=1e-6).matters == 1e-6


def test_later_looks_are_judged_more_strictly() -> None:
    scores = _scores(np.array([[0.0] * 4, [1.0, 1.2, 0.9, 0.1]]))
    first, third = compare(scores, mode="min"), compare(scores, mode="min", looks=3)
    assert (first.alpha, third.alpha) == (ALPHA, ALPHA / 3)
    assert 0.02 < first.comparisons["c1"].p == third.comparisons["c1"].p < 0.03
    assert _verdicts(first)["c1"] == Verdict.ruled_out
    assert _verdicts(third)["c1"] == Verdict.could_be_best
    assert third.comparisons["c1"].low < 0 < first.comparisons["c1"].low
    assert third.confidence == pytest.approx(1 - 2 * ALPHA / 3)


@pytest.mark.parametrize("shared", range(MIN_SEEDS))
def test_too_few_shared_seeds_are_no_evidence(shared: int) -> None:
    scores = {
        "a": {seed: 1.0 + seed / 100 for seed in range(5)},
        "b": {5 + s - shared: 9.0 + s for s in range(5)},
    }
    judged = compare(scores, mode="min")
    found = judged.comparisons["b"]
    assert (found.verdict, found.seeds) == (Verdict.too_few, shared)
    assert all(math.isnan(number) for number in (found.p, found.low, found.high, found.seen))
    assert math.isnan(found.difference) == (shared == 0)
    assert judged.possible == ["a", "b"]


def test_each_pair_is_compared_over_the_seeds_that_both_have() -> None:
    values = _drawn(2, contenders=3, seeds=6, apart=3)
    scores = _scores(values)
    del scores["c1"][0], scores["c1"][1]
    judged = compare(scores, mode="min")
    expected = stats.ttest_rel(values[1, 2:], values[0, 2:], alternative="greater").pvalue
    assert judged.comparisons["c1"].seeds == 4
    assert judged.comparisons["c1"].p == pytest.approx(2 * expected)
    assert judged.comparisons["c1"].difference == pytest.approx(
        np.mean(values[1, 2:] - values[0, 2:])
    )


def test_easy_seeds_make_no_reference() -> None:
    """b has the best mean, since it did not run the hard seeds, and is worse on all that it shares.

    D ran once.
    """
    a = {0: 1.0, 1: 1.1, 2: 0.9, 3: 9.0, 4: 9.1}
    judged = compare(
        {"a": a, "b": {0: 2.0, 1: 2.2, 2: 1.8}, "d": {0: 0.5}}, mode="min", matters=0.1
    )
    assert judged.ranking == ["d", "b", "a"]
    assert judged.reference == "a"
    assert _verdicts(judged) == {
        "a": Verdict.could_be_best,
        "b": Verdict.ruled_out,
        "d": Verdict.too_few,
    }


def test_seeds_that_change_nothing_are_no_evidence_either() -> None:
    scores = {
        f"c{i}": {seed: mean + seed for seed in range(4)}
        for i, mean in enumerate([0.1, 0.2, 0.1, 0.7])
    }
    judged = compare(scores, mode="min")
    could, flat = Verdict.could_be_best, Verdict.no_spread
    assert list(_verdicts(judged).values()) == [could, flat, could, flat]
    assert judged.comparisons["c1"].difference == pytest.approx(0.1)
    assert math.isnan(judged.comparisons["c1"].p)
    planned = _verdicts(compare(scores, mode="min", baseline="c0"))
    assert list(planned.values()) == [Verdict.baseline, flat, Verdict.no_difference, flat]


@pytest.mark.parametrize(
    ("seeds", "verdict"), [(1, Verdict.too_few), (2, Verdict.too_few), (3, Verdict.could_be_best)]
)
def test_a_contender_alone_or_without_scores(seeds: int, verdict: Verdict) -> None:
    judged = compare({"a": {seed: float(seed) for seed in range(seeds)}, "b": {}}, mode="min")
    assert _verdicts(judged) == {"a": verdict, "b": Verdict.too_few}
    assert (judged.possible, judged.ranking, judged.reference) == (["a"], ["a"], "a")
    beside = compare({"a": {0: 1.0}, "b": {}}, mode="min", baseline="b")
    assert _verdicts(beside) == {"a": Verdict.too_few, "b": Verdict.baseline}


def test_runs_that_diverged_to_huge_scores_hide_nobody() -> None:
    """A perplexity of 1e300 counts, and squares of it do not overflow."""
    scores = _scores(np.array([[3.0, 3.1, 2.9], [1e300, 1.1e300, 0.9e300], [4.0, 4.2, 3.9]]))
    judged = compare(scores, mode="min", sd=0.1)
    assert list(_verdicts(judged).values())[2] == Verdict.ruled_out
    assert judged.comparisons["c1"].verdict == Verdict.ruled_out
    assert math.isfinite(compare(scores, mode="min").sd)


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_score_that_is_no_number_is_refused(score: float) -> None:
    with pytest.raises(ValueError, match=r"expected finite scores"):
        compare({"a": {3: 1.0}, "b": {3: score}}, mode="min")


@pytest.mark.parametrize(
    ("scores", "options", "message"),
    [
        ({"a": {0: 1.0}}, {"mode": "low"}, "mode='low'"),
        ({"a": {0: 1.0}}, {"mode": "min", "baseline": "z"}, "baseline='z'"),
        ({"a": {}}, {"mode": "min"}, "expected finite scores"),
    ],
)
def test_bad_arguments_are_refused(scores: Scores, options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare(scores, **options)  # type: ignore[arg-type]


def test_holm_is_the_textbook_example() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert len(holm([])) == 0


def test_spread_is_pooled_over_contenders() -> None:
    assert pooled_sd([[1.0, 3.0], [5.0], [10.0, 11.0, 12.0]]) == pytest.approx(
        math.sqrt((2 + 2) / 3)
    )
    assert math.isnan(pooled_sd([[1.0], []]))


@pytest.mark.parametrize("sides", [1, 2])
@pytest.mark.parametrize(
    ("seeds", "alpha"), [(3, ALPHA), (5, ALPHA / 6), (10, ALPHA / 11), (3, ALPHA / 999)]
)
def test_the_detectable_difference_has_the_power_of_theory(
    seeds: int, alpha: float, sides: int
) -> None:
    shift = detectable(2.0, seeds, alpha, sides=sides) / (2.0 / math.sqrt(seeds))
    critical = stats.t.ppf(1 - alpha / sides, seeds - 1)
    assert stats.nct.sf(critical, seeds - 1, shift) == pytest.approx(POWER, abs=1e-5)


@pytest.mark.parametrize(
    ("contenders", "seeds", "baseline"), [(2, 3, False), (4, 5, False), (4, 5, True)]
)
def test_a_detectable_difference_is_found_in_four_of_five(
    contenders: int, seeds: int, baseline: bool
) -> None:
    """c0 is best and one other is worse by the detectable difference; the rest are far off."""
    tables = 4000
    sides = 2 if baseline else 1
    foreseen = detectable(math.sqrt(2), seeds, ALPHA / (contenders - 1), sides=sides)
    apart = np.array([0.0, foreseen, *[30.0] * (contenders - 2)])
    values = np.random.default_rng(0).standard_normal((tables, contenders, seeds)) + apart[:, None]
    alpha = ALPHA / 2 if baseline else ALPHA  # of two sides; Holm's first step
    assert simulated.rule_out(values, "min", alpha)[:, 1].mean() == pytest.approx(
        POWER, abs=4 * math.sqrt(0.16 / tables)
    )
    seen = (
        compare(_scores(values[0]), mode="min", baseline="c0" if baseline else None)
        .comparisons["c1"]
        .seen
    )
    spread = float(np.std(values[0, 1] - values[0, 0], ddof=1))
    assert seen == pytest.approx(spread / math.sqrt(2) * foreseen)


@pytest.mark.parametrize("baseline", [False, True])
@pytest.mark.parametrize(("contenders", "seeds"), [(2, 3), (4, 3), (3, 5)])
def test_a_plan_has_the_power_that_is_promised_on_average_over_pilots(
    contenders: int, seeds: int, baseline: bool
) -> None:
    """The true difference is one true standard deviation; each pilot sees another."""
    degrees, sides = (contenders - 1) * (seeds - 1), 2 if baseline else 1
    reached = []
    for observed in np.sqrt(np.random.default_rng(0).chisquare(degrees, 400) / degrees):
        plan = {
            "sd": observed,
            "degrees": degrees,
            "contenders": contenders,
            "baseline": baseline,
            "most": 10_000,
        }
        n = seeds_for(1.0, **plan)
        assert n is not None
        critical = stats.t.ppf(1 - ALPHA / (contenders - 1) / sides, n - 1)
        reached.append(stats.nct.sf(critical, n - 1, math.sqrt(n / 2)))
    assert np.mean(reached) == pytest.approx(0.82, abs=0.04)


def test_plans_have_bounds() -> None:
    assert seeds_for(1e-6, sd=1.0, degrees=4, contenders=2, most=100) is None
    assert seeds_for(0.0, sd=1.0, degrees=4, contenders=2, most=20) is None
    assert seeds_for(9.0, sd=1e-3, degrees=4, contenders=2, most=100) == MIN_SEEDS
    assert seeds_for(1.0, sd=math.nan, degrees=0, contenders=2, most=100) is None
    few = [
        seeds_for(difference, sd=1.0, degrees=9, contenders=3, most=100) for difference in (1, 2, 4)
    ]
    assert few == sorted((n for n in few if n), reverse=True)


TABLES = 2000


@pytest.mark.parametrize("noise", simulated.NOISES)
@pytest.mark.parametrize(("contenders", "seeds"), [(2, 3), (7, 3), (4, 5)])
def test_the_best_is_rarely_lost(noise: str, contenders: int, seeds: int) -> None:
    most = float(stats.binom.ppf(0.9999, TABLES, ALPHA)) / TABLES
    assert simulated.lost(noise, contenders, seeds, TABLES) <= most


@pytest.mark.parametrize(
    ("contenders", "seeds", "four", "two"),
    [
        (2, 3, 0.91, 0.50),
        (3, 3, 0.71, 0.31),
        (7, 3, 0.35, 0.14),
        (7, 5, 0.93, 0.40),
        (12, 5, 0.84, 0.28),
    ],
)
def test_a_worse_contender_is_found(contenders: int, seeds: int, four: float, two: float) -> None:
    for ahead, expected in ((4.0, four), (2.0, two)):
        rate = simulated.found(contenders, seeds, TABLES, ahead=ahead)
        assert rate == pytest.approx(
            expected, abs=4 * math.sqrt(expected * (1 - expected) / TABLES) + 0.005
        )


def test_a_workload_that_teaches_nothing_costs_no_power() -> None:
    alone, beside = (simulated.found_over_workloads(gain, TABLES) for gain in (None, 0.0))
    assert beside == pytest.approx(alone, abs=0.03)
    assert alone > 0.85


def test_nobody_wins_by_losing_runs() -> None:
    assert simulated.won_by_losing(TABLES, counted=True) == 0.0


def test_the_page_holds_its_promise() -> None:
    """The best is lost in at most 5.5 % of every size, and a confirmation has between 0.75 and
    0.9 of power.
    """
    text = (
        simulated.DOCUMENT.read_text(encoding="utf-8")
        .split(simulated.BEGIN)[1]
        .split(simulated.END)[0]
    )
    rates = {
        (int(k), int(n)): float(rate)
        for k, n, rate in re.findall(r"\| (\d+) x (\d+) \| ([\d.]+)%", text)
    }
    assert list(rates) == simulated.SIZES
    assert max(rates.values()) <= 5.5
    confirmed = re.findall(r"`confirm power=0.8`.*\| ([\d.]+) to ([\d.]+) \|", text)
    assert len(confirmed) == 2
    assert all(0.75 <= float(low) <= float(high) <= 0.9 for low, high in confirmed)
