"""The messages of the ranks to each other, once a step, before its forward passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from optrun.data.loader import share_of
from optrun.distributed.world import ALONE, World

Item = TypeVar("Item")
_DIGEST_PARTS = 8
"""Numbers of 32 bits that a digest is sent as."""


@dataclass(frozen=True)
class MicroBatchFacts:
    """The facts of a micro-batch, as its own rank counts them."""

    weight: float
    """Tokens or examples that its mean loss is over, or the sum of their class weights."""
    tokens: int
    samples: int
    digest: bytes
    """sha256 of its content."""


@dataclass(frozen=True)
class Requests:
    """Requests to the loop; over ranks, the requests to any of them."""

    stop: int = 0
    """Number of the signal; -1: the time budget is spent; 0: go on."""
    save: bool = False
    written: bool = True
    """No checkpoint is being written; over ranks, on none of them."""


@dataclass(frozen=True)
class GlobalStep:
    """The micro-batches of a step over all ranks."""

    facts: list[MicroBatchFacts]
    """Of each, in their order, which is the same at any number of ranks."""
    numbers: list[int]
    """Of those that this rank runs; one beyond the last counts nothing."""
    requests: Requests

    @cached_property
    def total_weight(self) -> float:
        """Sum the tokens or examples of the step's mean loss."""
        return sum(fact.weight for fact in self.facts)

    def weight_of(self, number: int) -> float:
        """Weight of a micro-batch; 0 where the number stands for none."""
        if number < len(self.facts):
            return self.facts[number].weight
        return 0.0


def in_order(ranks: Sequence[Sequence[Item]], count: int) -> list[Item]:
    """Put the items of all ranks into the order of their micro-batches.

    Args:
        ranks: By rank.
        count: Micro-batches of the step over all ranks.

    Example:
        >>> in_order([["first", "third"], ["second", "one of none"]], 3)
        ['first', 'second', 'third']
    """
    return [ranks[number % len(ranks)][number // len(ranks)] for number in range(count)]


def exchange(
    facts_here: Sequence[MicroBatchFacts], requests: Requests, world: World, count: int
) -> GlobalStep:
    """Exchange the facts of micro-batches and the requests of all ranks, in one all-gather.

    Args:
        facts_here: Of its micro-batches, as many on every rank.
        requests: Of this rank.
        world: The ranks.
        count: Micro-batches of the step over all ranks.

    Raises:
        RuntimeError: A rank is gone, or does not answer in time.
    """
    if world is ALONE:
        return GlobalStep(list(facts_here), list(range(count)), requests)
    row = [float(requests.stop), float(requests.save), float(requests.written)]
    for fact in facts_here:
        parts = (
            int.from_bytes(fact.digest[at : at + 4], "big") for at in range(0, 4 * _DIGEST_PARTS, 4)
        )
        row += [fact.weight, float(fact.tokens), float(fact.samples), *map(float, parts)]
    rows = world.all_gather(row)
    stops = [int(stop) for stop, *_ in rows]
    merged = Requests(
        stop=max(stops) or min(stops),
        save=any(save for _, save, *_ in rows),
        written=all(written for _, _, written, *_ in rows),
    )
    facts = in_order([[*_unpacked(row[3:])] for row in rows], count)
    return GlobalStep(facts, share_of(count, world.rank, world.size), merged)


def _unpacked(row: Sequence[float]) -> Iterator[MicroBatchFacts]:
    for at in range(0, len(row), 3 + _DIGEST_PARTS):
        weight, tokens, samples, *parts = row[at : at + 3 + _DIGEST_PARTS]
        digest = b"".join(int(part).to_bytes(4, "big") for part in parts)
        yield MicroBatchFacts(weight, int(tokens), int(samples), digest)
