"""A permutation that is computed where it is read.

Each index once, by the key alone, at no cost.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from optrun.data import permutation
from optrun.data.examples import chosen
from optrun.data.loader import EpochPlan
from optrun.data.permutation import KeyedPermutation


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 16, 17, 100, 4097])
def test_each_index_stands_at_one_place(size: int) -> None:
    for seed in range(3):
        order = KeyedPermutation(size, seed, "order", 0)
        assert sorted(order[:].tolist()) == list(range(size))
        assert (order[: size // 2] == order[:][: size // 2]).all(), (
            "a slice is the slice of the whole"
        )


def test_another_key_is_another_order() -> None:
    size = 10_000
    orders = [
        KeyedPermutation(size, *key)[:]
        for key in ((0, "order", 0), (0, "order", 1), (1, "order", 0), (0, "mask", 0))
    ]
    for number, order in enumerate(orders):
        for other in [np.arange(size), *orders[:number]]:
            assert (order == other).sum() < 8, "as many as chance gives: one"


def test_indices_are_spread_as_chance_spreads_them() -> None:
    """Chi-squared of the tenth that an index of each tenth goes to.

    81 degrees of freedom, 128 at one in a thousand.
    """
    size, tables = 100_000, []
    for seed in range(8):
        order = KeyedPermutation(size, seed, "order", 0)[:]
        tables.append(np.histogram2d(np.arange(size), order, bins=10)[0])
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.015
        assert (np.diff(order) == 1).sum() < 10
    expected = size / 100
    values = [float(((table - expected) ** 2 / expected).sum()) for table in tables]
    assert max(values) < 140
    assert 66 < np.mean(values) < 97


def test_a_place_that_is_not_there() -> None:
    order = KeyedPermutation(10, 0, "order")
    assert len(order[5:99]) == 5
    with pytest.raises(IndexError, match="from 0 to 9"):
        order[np.array([3, 10])]


def test_an_epoch_of_a_thousand_million_examples_begins_at_once() -> None:
    plan = EpochPlan(examples=10**9, batch_size=8, accumulation=2, seed=0)
    begun = time.process_time()
    middle = plan.steps_per_epoch // 2
    first, second = (next(plan.steps(step)) for step in (middle, middle + 1))
    assert time.process_time() - begun < 1
    assert [len(batch) for batch in first] == [8, 8]
    steps = plan.steps(middle)
    assert [next(steps), next(steps)] == [first, second], "as if never interrupted"
    limited = chosen(10**9, 100, seed=0)
    assert limited is not None
    assert len(set(limited.tolist())) == 100


def test_small_orders_stay_what_they_were() -> None:
    assert permutation.LARGE == 1 << 22, "checkpoints rely on it"
    assert isinstance(EpochPlan(1000, 4, 1, 0).order(0), np.ndarray)
