"""Batches divided among ranks: every rank as many, every batch once."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from optrun.data.examples import Example
from optrun.data.loader import Batch, BatchLoader, EpochPlan, share_of


@given(st.integers(1, 40), st.integers(1, 9))
def test_each_number_is_on_one_rank_and_all_ranks_have_as_many(count: int, ranks: int) -> None:
    shares = [share_of(count, rank, ranks) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    assert sorted(number for share in shares for number in share if number < count) == list(
        range(count)
    )
    assert all(max(share) < count + ranks for share in shares)


class Numbers:
    """Examples that are their own numbers."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Example:
        return {"input_ids": np.array([index])}

    def fingerprint(self) -> str:
        return "numbers"


def loader() -> BatchLoader:
    def collate(examples: list[Example]) -> Batch:
        return {"input_ids": torch.tensor([int(example["input_ids"][0]) for example in examples])}

    return BatchLoader(Numbers(), lambda example, _: example, collate, seed=3, workers=0)


def seen(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 5), st.integers(0, 30))
def test_the_ranks_together_train_on_the_batches_of_one(
    size: int, micro: int, ranks: int, start: int
) -> None:
    plan = EpochPlan(len(Numbers()), size, micro, seed=3)

    def steps(rank: int, of: int) -> list[list[list[int]]]:
        stream = loader().training(plan, start, rank, of)
        return [
            [batch["input_ids"].tolist() for batch in step] for step in itertools.islice(stream, 4)
        ]

    whole, parts = steps(0, 1), [steps(rank, ranks) for rank in range(ranks)]
    for number, step in enumerate(whole):
        count = plan.micro_batches(start + number)
        assert len(step) == count
        assert [parts[at % ranks][number][at // ranks] for at in range(count)] == step


@given(st.integers(1, 30), st.integers(1, 6))
def test_the_ranks_together_evaluate_each_example_once(size: int, ranks: int) -> None:
    count = -(-len(Numbers()) // size)
    found = []
    for rank in range(ranks):
        batches = [batch["input_ids"].tolist() for batch in loader().evaluation(size, rank, ranks)]
        numbers = share_of(count, rank, ranks)
        assert len(batches) == len(numbers)
        found += [batch for batch, number in zip(batches, numbers, strict=True) if number < count]
    assert sorted(seen(found)) == list(range(len(Numbers())))
