"""Right against scikit-learn and scipy."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as truth

from optrun.task import metrics

classes = st.integers(2, 5).flatmap(
    lambda count: st.tuples(
        st.just(count),
        st.lists(
            st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), min_size=1, max_size=40
        ),
    )
)


@settings(deadline=None, max_examples=60)
@given(classes)
def test_classification(case: tuple[int, list[tuple[int, int]]]) -> None:
    count, pairs = case
    made, right = np.array(pairs).T
    counts = metrics.confusion(made, right, count)
    assert (counts == truth.confusion_matrix(right, made, labels=range(count))).all()
    assert metrics.accuracy(made, right) == pytest.approx(truth.accuracy_score(right, made))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        each = truth.f1_score(right, made, labels=range(count), average=None, zero_division=0)
        assert metrics.f1_scores(counts) == pytest.approx(each)
        assert metrics.mean_f1(counts) == pytest.approx(
            truth.f1_score(right, made, average="macro", zero_division=0)
        )
        expected = (
            each[1] if count == 2 else truth.f1_score(right, made, average="macro", zero_division=0)
        )
        assert metrics.f1(made, right, count) == pytest.approx(expected)
        assert metrics.matthews(made, right) == pytest.approx(
            truth.matthews_corrcoef(right, made), abs=1e-12
        )


numbers = st.lists(
    st.tuples(st.integers(-3, 3), st.floats(-100, 100, allow_nan=False, width=32)),
    min_size=2,
    max_size=30,
)


@settings(deadline=None, max_examples=60)
@given(numbers)
def test_correlation_with_ties(pairs: list[tuple[int, float]]) -> None:
    made = np.array([first for first, _ in pairs], dtype=np.float32)  # few values: many ties
    right = np.array([round(second, 1) for _, second in pairs], dtype=np.float32)
    assert metrics.ranks(right) == pytest.approx(stats.rankdata(right))
    if len(set(made.tolist())) < 2 or len(set(right.tolist())) < 2:
        assert math.isnan(metrics.pearson(made, right))
        assert math.isnan(metrics.spearman(made, right))
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # near-constant input
        expected = stats.pearsonr(made.astype(np.float64), right.astype(np.float64)).statistic
        assert metrics.pearson(made, right) == pytest.approx(expected, abs=1e-9)
        assert metrics.spearman(made, right) == pytest.approx(
            stats.spearmanr(made, right).statistic, abs=1e-9
        )


@pytest.mark.parametrize(
    "made",
    [
        [0.1, 0.1, 0.1, 0.1],  # whose mean is not 0.1 in floating point
        [1.0, 2.0, math.nan, 4.0],
        [1.0, 2.0, math.inf, 3.0],
        [1e200, 2e200, 3e200, 5e200],
        [1e-200, 2e-200, 3.5e-200, 1e-200],
        [1e8, 1e8 + 8, 1e8 + 16, 1e8 + 8],
        [0.0, 0.0, 0.0, 1.0],
    ],
    ids=str,
)
def test_correlation_with_numbers_that_are_hard(made: list[float]) -> None:
    right = np.array([1.0, 2.0, 3.0, 4.0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of constants, and of infinity
        expected = [stats.pearsonr(made, right).statistic, stats.spearmanr(made, right).statistic]
    for order in (slice(None), slice(None, None, -1)):
        values, other = np.array(made)[order], right[order]
        found = [metrics.pearson(values, other), metrics.spearman(values, other)]
        assert found == pytest.approx(expected, abs=1e-12, nan_ok=True)
        assert found == pytest.approx(
            [metrics.pearson(other, values), metrics.spearman(other, values)], nan_ok=True
        )


def test_numbers_of_one_class_and_of_nothing() -> None:
    one = np.zeros(4, dtype=np.int64)
    assert metrics.f1(one, one, 2) == truth.f1_score(one, one, zero_division=0) == 0.0
    assert metrics.f1(one, one, 3) == truth.f1_score(one, one, average="macro") == 1.0
    assert metrics.matthews(one, one) == 0.0  # as scikit-learn's, which warns
    assert math.isnan(metrics.pearson(one[:0], one[:0]))
    assert math.isnan(metrics.spearman(one[:0], one[:0]))


def test_matthews_of_a_constant_prediction_is_zero() -> None:
    assert metrics.matthews(np.array([1, 1, 1]), np.array([0, 1, 1])) == 0.0


def test_perplexity() -> None:
    assert metrics.perplexity(0.0) == 1.0
    assert metrics.perplexity(math.log(50)) == pytest.approx(50)
    assert metrics.perplexity(1000.0) == math.inf
