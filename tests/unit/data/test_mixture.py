"""Mixtures.

Drawn, and ended, as `datasets.interleave_datasets` does it, each place looked up at once.
"""

from __future__ import annotations

import numpy as np
import pytest
from datasets import Dataset, interleave_datasets

from optrun.data import mixture
from optrun.data.examples import Examples
from optrun.data.loader import SOURCE, EpochPlan
from optrun.data.mixture import Draws, MixedExamples

STRATEGIES = ("first_exhausted", "all_exhausted", "all_exhausted_without_replacement")


def drawn(draws: Draws) -> list[tuple[int, int]]:
    sources, numbers = draws[0 : len(draws)]
    return list(zip(sources.tolist(), numbers.tolist(), strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("sizes", [(3, 4, 5), (2, 2), (7, 1, 1), (1,)])
def test_turns_are_those_of_interleave_datasets(sizes: tuple[int, ...], strategy: str) -> None:
    rows = [
        Dataset.from_dict({"at": [(source, number) for number in range(size)]})
        for source, size in enumerate(sizes)
    ]
    theirs = [tuple(at) for at in interleave_datasets(rows, stopping_strategy=strategy)["at"]]  # type: ignore[arg-type]
    ours = [
        (source, number % sizes[source])
        for source, number in drawn(Draws(sizes, None, strategy, seed=0))
    ]
    assert ours == theirs


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("block", [8, 64])
def test_an_epoch_ends_where_the_strategy_says(
    strategy: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixture, "_DRAWS_AT_ONCE", block)
    sizes, probabilities = (40, 25, 60), (0.5, 0.3, 0.2)
    for seed in range(6):
        draws = Draws(sizes, probabilities, strategy, seed=seed)
        found = drawn(draws)
        assert len(found) == len(draws)
        counts = [sum(source == each for source, _ in found) for each in range(3)]
        for each in range(3):
            assert [number for source, number in found if source == each] == list(
                range(counts[each])
            )
        before = [count - (source == found[-1][0]) for source, count in enumerate(counts)]
        if strategy == "first_exhausted":
            assert any(count == size for count, size in zip(counts, sizes, strict=True))
            assert all(count < size for count, size in zip(before, sizes, strict=True))
        elif strategy == "all_exhausted":
            assert all(count >= size for count, size in zip(counts, sizes, strict=True))
            assert any(count < size for count, size in zip(before, sizes, strict=True))
        else:
            assert counts == list(sizes)
        for begin, end in ((0, 3), (7, 9), (len(found) - 2, len(found)), (6, 30)):
            sources, numbers = draws[begin:end]
            assert list(zip(sources.tolist(), numbers.tolist(), strict=True)) == found[begin:end]


def test_shares_follow_the_probabilities() -> None:
    sources, _ = Draws((10**6, 10**6), (0.9, 0.1), "first_exhausted", seed=1)[0:100_000]
    assert abs(sources.mean() - 0.1) < 0.005
    runs = np.flatnonzero(np.diff(sources) != 0)
    assert 0.15 < len(runs) / 100_000 < 0.21, "2 * 0.9 * 0.1 of all places change the source"
    assert len(Draws((5, 5), (1.0, 0.0), "first_exhausted", seed=1)) == 5


def numbered(first: int, count: int) -> Examples:
    return Examples(np.arange(count + 1), {"input_ids": np.arange(first, first + count)})


@pytest.mark.parametrize("probabilities", [None, (0.7, 0.3)])
def test_each_pass_over_a_source_has_each_of_its_examples_once(
    probabilities: tuple[float, ...] | None,
) -> None:
    mixed = MixedExamples(
        {"a": numbered(0, 50), "b": numbered(100, 7)}, probabilities, "all_exhausted", seed=2
    )
    plan = EpochPlan(len(mixed), 4, 1, seed=2, arrangement=mixed.arrangement)
    seen: dict[int, list[int]] = {0: [], 1: []}
    steps = plan.steps(0)
    for _ in range(plan.steps_per_epoch):
        for _, index in next(steps)[0]:
            example = mixed[index]
            seen[example[SOURCE]].append(int(example["input_ids"][0]))
    assert sorted(seen[0][:50]) == list(range(50)) != seen[0][:50]
    turns = [seen[1][at : at + 7] for at in range(0, len(seen[1]) - 6, 7)]
    assert all(sorted(turn) == list(range(100, 107)) for turn in turns)
    assert turns[0] != turns[1]
    later = [step for _, step in zip(range(3), plan.steps(plan.steps_per_epoch + 2), strict=False)]
    straight = plan.steps(0)
    whole = [next(straight) for _ in range(plan.steps_per_epoch + 5)]
    assert later == whole[-3:]
    other = MixedExamples(
        {"a": numbered(0, 50), "b": numbered(101, 7)}, probabilities, "all_exhausted", seed=2
    )
    assert mixed.fingerprint() != other.fingerprint()
    assert list(mixed.source_digests()) == ["a", "b"]
