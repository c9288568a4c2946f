"""Token arrays, packing, and the order of batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optrun.data.cache import pop_discard_messages
from optrun.data.examples import (
    Example,
    Examples,
    Joined,
    Selected,
    chosen,
    encode,
    limited,
    packed,
)
from optrun.data.loader import BatchLoader, EpochPlan
from optrun.data.randomness import generator


def documents(lengths: list[int]) -> Examples:
    total = sum(lengths)
    return Examples(np.cumsum([0, *lengths]), {"input_ids": np.arange(total, dtype=np.int32)})


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=20), st.integers(2, 16), st.booleans())
def test_every_token_stands_in_exactly_one_block(
    lengths: list[int], length: int, keep_rest: bool
) -> None:
    blocks = packed(documents(lengths), length, keep_rest=keep_rest)
    rows = [blocks[index]["input_ids"] for index in range(len(blocks))]
    seen = np.concatenate(rows) if rows else np.zeros(0)
    assert (seen == np.arange(len(seen))).all()
    left = sum(lengths) - len(seen)
    assert all(len(row) == length for row in rows[:-1])
    if rows and not keep_rest and len(rows) > 1:
        assert len(rows[-1]) == length
    assert left == 0 or left < (2 if keep_rest or len(rows) == 0 else length)


def encoded(texts: list[str], key: str = "k", longest: int | None = None) -> Examples:
    def encoder(batch: list[str], cut: bool) -> dict[str, list[list[int]]]:
        ids = [[ord(letter) for letter in (text[:longest] if cut else text)] for text in batch]
        return {"input_ids": ids, "token_type_ids": [[0] * len(row) for row in ids]}

    return encode(lambda: iter(texts), encoder, key, longest=longest)


def test_encoding_is_kept_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTRUN_CACHE", str(tmp_path))
    texts = [chr(97 + number % 26) * (number % 7) for number in range(2500)]
    made = encoded(texts)
    assert len(made) == 2500
    assert ["".join(map(chr, made[index]["input_ids"])) for index in range(2500)] == texts
    assert made[3]["input_ids"].dtype == np.int64
    folders = set((tmp_path / "tokens").iterdir())
    assert encoded(texts).fingerprint() == made.fingerprint()
    assert set((tmp_path / "tokens").iterdir()) == folders
    assert encoded([*texts[:-1], "z"]).fingerprint() != made.fingerprint()
    encoded(texts, "other tokenizer")
    assert len(list((tmp_path / "tokens").iterdir())) == 3


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_nothing_to_encode(texts: list[str]) -> None:
    made = encoded(texts)
    assert len(made) == len(texts)
    assert len(made.ragged.get("input_ids", ())) == 0


def test_what_is_cut_is_counted() -> None:
    texts = ["", "abc", "abcde", "abcdef", "x" * 1500]
    made = encoded(texts, longest=5)
    assert made.lost is not None
    assert made.lost.tolist() == [0, 0, 0, 1, 1495]
    assert encoded(texts).lost is None
    some = Selected(made.with_scalars(labels=np.arange(5)), np.array([4, 1]))
    assert some.lost is not None
    assert some.lost.tolist() == [1495, 0]


def test_texts_are_known_again_by_their_hash_also_where_they_are_joined() -> None:
    first, second = encoded(["abc", "cde", "abc"]), encoded(["cde", "x"], "other settings")
    assert first.hashes is not None
    assert second.hashes is not None
    assert np.isin(first.hashes, second.hashes).tolist() == [False, True, False]
    assert Selected(first, np.array([1])).hashes == first.hashes[1]
    blocks = packed(first, 2, keep_rest=True)
    assert len(blocks) == 4
    assert limited(blocks, 2, seed=0).hashes.tolist() == first.hashes.tolist()


@pytest.mark.parametrize(
    "name", ["input_ids.int32", "token_type_ids.int32", "offsets.npy", "lost.npy", "hashes.npy"]
)
def test_a_flipped_bit_in_cached_ids_is_discarded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTRUN_CACHE", str(tmp_path))
    before = encoded(["abc", "de"]).fingerprint()
    pop_discard_messages()
    (path,) = (tmp_path / "tokens").glob(f"*/{name}")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert encoded(["abc", "de"]).fingerprint() == before
    assert name in pop_discard_messages()[0]


def test_a_limit_picks_by_seed_or_the_same_ones_for_all_runs() -> None:
    made = documents([2] * 10)
    assert chosen(10, None, seed=0) is None
    assert chosen(10, 10, seed=0) is None
    held = limited(made, 3, seed=None)
    assert (
        held.indices.tolist()
        == sorted(set(held.indices.tolist()))
        == limited(made, 3, seed=None).indices.tolist()
    )
    one, two = limited(made, 5, seed=1), limited(made, 5, seed=2)
    assert isinstance(one, Selected)
    assert len(set(one.indices)) == 5
    assert one.fingerprint() == limited(made, 5, seed=1).fingerprint() != two.fingerprint()


def test_joined_examples() -> None:
    targets = Examples(np.array([0, 1, 3]), {"labels": np.arange(3, dtype=np.int32)})
    both = Joined(documents([2, 2]), targets)
    assert len(both) == 2
    assert both[1]["labels"].tolist() == [1, 2]
    assert both.lengths.tolist() == [3, 4]
    assert (
        both.fingerprint()
        != Joined(documents([2, 2]), Examples(np.array([0, 2, 3]), targets.ragged)).fingerprint()
    )


def test_generators_depend_on_all_they_are_given() -> None:
    places = [(0, "order", 1), (0, "order", 2), (1, "order", 1), (0, "mask", 1), (0, "order", 1, 0)]
    drawn = {int(generator(seed, stream, *rest).integers(2**62)) for seed, stream, *rest in places}  # type: ignore[misc]
    assert len(drawn) == len(places)


@given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 4), st.integers(0, 9), st.booleans())
def test_a_plan_serves_each_example_once_an_epoch_and_starts_anywhere(
    examples: int, batch_size: int, accumulation: int, start: int, grouped: bool
) -> None:
    lengths = np.arange(examples) * 7 % 5 if grouped else None
    plan = EpochPlan(examples, batch_size, accumulation, seed=5, lengths=lengths)
    steps = list(itertools.islice(plan.steps(0), 2 * plan.steps_per_epoch + start))
    for epoch in range(2):
        mine = [key for step in steps for batch in step for key in batch if key[0] == epoch]
        if epoch == 0 or start >= 0:
            assert sorted(index for _, index in mine) == list(range(examples))
    assert list(itertools.islice(plan.steps(start), 3)) == list(
        itertools.islice(plan.steps(0), start, start + 3)
    )
    for number, step in enumerate(steps):
        sizes = [len(batch) for batch in step]
        assert len(sizes) == plan.micro_batches(number)
        assert all(size == batch_size for size in sizes[:-1])
        assert len({epoch for batch in step for epoch, _ in batch}) == 1
        assert len(step) <= accumulation


def test_examples_of_like_length_share_a_step() -> None:
    lengths = np.arange(200) % 10
    plan = EpochPlan(200, 5, 2, seed=1, lengths=lengths)
    spread = [
        np.ptp(lengths[[index for batch in step for _, index in batch]])
        for step in itertools.islice(plan.steps(0), 20)
    ]
    assert max(spread) <= 1
    assert not np.array_equal(plan.order(0), plan.order(1))


def noisy(example: Example, randomness: np.random.Generator) -> Example:
    return {"ids": example["input_ids"] + randomness.integers(1000, size=len(example["input_ids"]))}


def collate(examples: list[Example]) -> dict[str, torch.Tensor]:
    return {"ids": torch.from_numpy(np.stack([example["ids"] for example in examples]))}


def feed(workers: int) -> BatchLoader:
    return BatchLoader(documents([3] * 11), noisy, collate, seed=7, workers=workers)


def served(workers: int, start: int, count: int) -> list[list[list[Any]]]:
    stream: Iterator[Any] = feed(workers).training(EpochPlan(11, 2, 2, seed=7), start)
    try:
        return [
            [batch["ids"].tolist() for batch in step] for step in itertools.islice(stream, count)
        ]
    finally:
        stream.close()  # type: ignore[attr-defined]


def test_the_same_batches_for_any_number_of_workers_from_any_step() -> None:
    whole = served(0, 0, 8)  # over two epochs of three steps
    assert served(1, 0, 8) == whole
    for workers, start in ((0, 3), (2, 1), (0, 5), (1, 4)):
        assert served(workers, start, 3) == whole[start : start + 3]
    assert whole[0] != whole[3]


def test_evaluation_is_the_same_at_every_call_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state().clone()
    first = [batch["ids"].tolist() for batch in feed(0).evaluation(4)]
    assert first == [batch["ids"].tolist() for batch in feed(2).evaluation(4)]
    assert [len(batch) for batch in first] == [4, 4, 3]
    served(2, 0, 2)
    assert torch.equal(torch.get_rng_state(), state)
