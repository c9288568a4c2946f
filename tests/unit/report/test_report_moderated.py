"""The simulation of benchmarks/verdicts.py, small: rates that hold where spreads differ, power where they do not."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from benchmarks import verdicts
from optrun.report.moderated import CAUTION, spread_of_pairs
from optrun.report.power import POWER, foreseen, seeds_for
from optrun.report.statistics import ALPHA, NO_SPREAD, WORSE, compare

REPETITIONS = 1500
LIMIT = float(stats.binom.ppf(0.9999, REPETITIONS, ALPHA)) / REPETITIONS


@pytest.mark.parametrize("situation", [*verdicts.SPREADS, *verdicts.NOISES, *verdicts.SHARED])
@pytest.mark.parametrize(("contenders", "seeds"), [(7, 3), (4, 5)])
def test_the_rate_holds_whatever_the_spreads(situation: str, contenders: int, seeds: int) -> None:
    assert verdicts.errors(situation, contenders, seeds, REPETITIONS, ["optrun"])["optrun"] <= LIMIT


@pytest.mark.parametrize(("contenders", "seeds", "least"), [(7, 3, 0.33), (12, 3, 0.28), (7, 5, 0.86), (20, 5, 0.78)])
def test_it_finds_what_the_paired_test_does_not(contenders: int, seeds: int, least: float) -> None:
    found = verdicts.power(contenders, seeds, REPETITIONS, ["optrun", "paired t"])
    assert found["optrun"] > max(least, 1.6 * found["paired t"])


@pytest.mark.parametrize("situation", ["half x 10", verdicts.FAMILIES])
def test_it_is_the_paired_test_where_there_is_nothing_to_learn(situation: str) -> None:
    found = verdicts.power(7, 5, REPETITIONS, ["optrun", "paired t"], situation=situation)
    assert found["optrun"] > found["paired t"] - 0.02


def test_an_optimizer_under_three_names_counts_once_and_costs_the_others_little() -> None:
    """Five contenders are left, from which less is learnt than from seven."""
    found = verdicts.power(7, 5, REPETITIONS, ["optrun"], situation=verdicts.TRIPLE)["optrun"]
    assert found > 0.9 * verdicts.power(7, 5, REPETITIONS, ["optrun"])["optrun"]
    few = verdicts.power(7, 3, REPETITIONS, ["optrun", "paired t"], situation=verdicts.TRIPLE)
    assert few["optrun"] > 2 * few["paired t"]


@pytest.mark.parametrize("of_its_own", [0.0, 0.01, 0.1, 0.4])
@pytest.mark.parametrize("contenders", [6, 10])
def test_contenders_that_scatter_as_one_do_not_count_as_many(contenders: int, of_its_own: float) -> None:
    """Two groups, such as two optimizers with a key that has no effect, on three seeds: the first is the baseline."""
    random = np.random.default_rng(contenders)
    values = random.standard_normal((REPETITIONS, 2, 3))[:, np.arange(contenders) % 2]
    values = values + of_its_own * random.standard_normal((REPETITIONS, contenders, 3))
    p = verdicts.moderated(values, np.zeros(contenders - 1, dtype=np.int64), np.arange(1, contenders))
    assert verdicts.rejected(p).any(axis=1).mean() <= LIMIT


def test_a_noisy_contender_does_not_cost_the_others_their_power() -> None:
    alike, noisy = (
        verdicts.power(7, 5, REPETITIONS, ["optrun"], situation=situation)["optrun"]
        for situation in ("equal", "1 x 10")
    )
    assert noisy > alike - 0.05


@pytest.mark.parametrize("contenders", [2, 3])
def test_few_contenders_are_left_to_the_paired_test(contenders: int) -> None:
    values = np.random.default_rng(0).standard_normal((1, contenders, 4))
    spread = spread_of_pairs(values, np.array([0]), np.array([1]))
    expected = (values[0, 0] - values[0, 1]).std(ddof=1)
    found = (spread.moderated[0, 0], spread.degrees[0, 0], spread.caution[0, 0])
    assert found == (pytest.approx(expected), 3.0, 1.0)


def test_alike_contenders_share_their_variance_and_an_unlike_one_does_not() -> None:
    values = np.random.default_rng(3).standard_normal((1, 6, 4))
    values[0, 5] *= 100
    spread = spread_of_pairs(values, np.array([0, 0]), np.array([1, 5]))
    own = (values[0, 0] - values[0, 5]).std(ddof=1)
    assert spread.degrees[0, 0] > 3
    assert spread.degrees[0, 1] == 3
    assert spread.moderated[0, 1] == pytest.approx(own)
    assert spread.moderated[0, 0] < 5  # nothing of the hundredfold one
    assert spread.caution.tolist() == [[CAUTION, 1.0]]


def test_values_that_no_seed_moves_have_no_spread() -> None:
    values = np.random.default_rng(1).standard_normal((1, 1, 3)) * 1e6 + np.arange(5.0)[None, :, None]
    spread = spread_of_pairs(values, np.array([0, 1]), np.array([1, 4]))
    assert not spread.moderated.any()
    found = compare({f"c{i}": dict.fromkeys(range(3), mean) for i, mean in enumerate([0.1, 0.2, 0.3, 0.7])}, mode="min")
    assert {each.verdict for name, each in found.items() if name != "c0"} == {NO_SPREAD}


def test_a_pair_learns_from_those_that_have_its_seeds() -> None:
    """One contender lacks a seed: the others are compared as if it were not there, it on the seeds that it has."""
    random = np.random.default_rng(5)
    scores = {f"c{i}": dict(enumerate(map(float, random.standard_normal(5)))) for i in range(5)}
    short = scores | {"c4": {seed: value for seed, value in scores["c4"].items() if seed != 2}}
    found = compare(short, mode="min", reference="c0")
    without = compare({name: scores[name] for name in ("c0", "c1", "c2", "c3")}, mode="min", reference="c0")
    assert found["c1"].spread == without["c1"].spread
    assert found["c4"].pairs == 4
    assert found["c4"].degrees > 3


@pytest.mark.parametrize(
    ("contenders", "seeds", "baseline"),
    [(2, 3, False), (4, 3, False), (7, 3, False), (12, 3, False), (7, 5, False), (7, 5, True), (12, 10, False)],
)
def test_what_is_foreseen_is_found_in_four_of_five(contenders: int, seeds: int, baseline: bool) -> None:
    gap = foreseen(contenders, seeds, ALPHA, baseline=baseline)
    found = verdicts.power(contenders, seeds, REPETITIONS, ["optrun"], baseline=baseline, gap=gap)["optrun"]
    assert POWER - 0.06 < found < POWER + 0.1  # Holm's steps are easier where other differences are found, too


def test_many_contenders_are_foreseen_too() -> None:
    seen = [foreseen(contenders, 3, ALPHA) for contenders in (20, 200, 1000)]
    assert seen == sorted(seen)


def test_more_seeds_settle_an_open_question_and_none_a_hopeless_one() -> None:
    needed = seeds_for(1.0, 1.5, 5, 0.01, 8.0)
    assert needed is not None
    assert 5 < needed < 40
    assert seeds_for(0.8, 1.5, 5, 0.01, 8.0) in range(needed + 1, 101)
    assert seeds_for(1e-3, 1.5, 5, 0.01, 8.0) is None
    assert seeds_for(0.0, 1.5, 5, 0.01, 8.0) is None
    random = np.random.default_rng(0)
    noise = random.standard_normal((4, 5))
    scores = {f"c{i}": dict(enumerate(map(float, row + 0.8 * (i == 0)))) for i, row in enumerate(noise)}
    found = compare(scores, mode="min", reference="c1")
    assert all(each.needed is None or each.needed > 5 for each in found.values())
    assert found["c0"].verdict == WORSE or found["c0"].needed is not None
