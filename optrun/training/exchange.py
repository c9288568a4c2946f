"""Exchange facts of micro-batches and requests between ranks, once before each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from optrun.data.loader import share_of
from optrun.distributed.world import ALONE, World

Item = TypeVar("Item")
_DIGEST_PARTS = 8
"""A sha256 digest is sent as this many integers of 32 bits; float64 holds them exactly."""


@dataclass(frozen=True)
class MicroBatchFacts:
    """The facts of a micro-batch, counted by the rank that runs it."""

    weight: float
    """Denominator of its mean loss: tokens, examples, or the sum of their class weights."""
    tokens: int
    samples: int
    digest: bytes
    """`digest_of_batch`, 32 bytes."""


@dataclass(frozen=True)
class Requests:
    """Requests to the training loop, of one rank or merged over all ranks."""

    stop: int = 0
    """Number of the signal that asks to stop; -1: the time budget is spent; 0: no request."""
    save: bool = False
    """Whether a checkpoint is requested."""
    is_writing_done: bool = True
    """Whether no rank is writing a checkpoint."""


@dataclass(frozen=True)
class GlobalStep:
    """The micro-batches of a step over all ranks."""

    facts: list[MicroBatchFacts]
    """Facts of each micro-batch, in the order that is the same for any number of ranks."""
    numbers: list[int]
    """Numbers of the micro-batches of this rank. A number beyond the last one is a repeated
    micro-batch, which counts nothing, so that all ranks run the same number of them."""
    requests: Requests
    """Requests, merged over all ranks."""

    @cached_property
    def total_weight(self) -> float:
        """Return the denominator of the step's mean loss."""
        return sum(fact.weight for fact in self.facts)

    def weight_of(self, number: int) -> float:
        """Return the weight of a micro-batch; 0 for a number beyond the last one."""
        if number < len(self.facts):
            return self.facts[number].weight
        return 0.0


def interleave_ranks(ranks: Sequence[Sequence[Item]], count: int) -> list[Item]:
    """Put the items of all ranks into the order of their micro-batches.

    Micro-batches are dealt like cards: number n is run by rank n % ranks.

    Args:
        ranks: The items of each rank, by rank.
        count: Micro-batches of the step over all ranks; items beyond them are left out.

    Example:
        >>> interleave_ranks([["batch 0", "batch 2"], ["batch 1", "repeated"]], 3)
        ['batch 0', 'batch 1', 'batch 2']
    """
    return [ranks[number % len(ranks)][number // len(ranks)] for number in range(count)]


def exchange(
    facts_here: Sequence[MicroBatchFacts], requests: Requests, world: World, count: int
) -> GlobalStep:
    """Exchange facts of micro-batches and requests with all ranks, in one all-gather.

    Each rank sends one row of numbers: its three requests, then weight, tokens, samples and the 8
    parts of the digest of each of its micro-batches.

    Args:
        facts_here: Facts of this rank's micro-batches; every rank has the same number of them.
        requests: Requests to this rank.
        world: The ranks.
        count: Micro-batches of the step over all ranks.

    Returns:
        The facts of all micro-batches; a stop by signal wins over the time budget.

    Raises:
        LostRankError: A rank is gone, or does not answer in time.
    """
    if world is ALONE:
        return GlobalStep(list(facts_here), list(range(count)), requests)

    # 1. Send and receive the rows.
    row: list[float] = [requests.stop, requests.save, requests.is_writing_done]
    for fact in facts_here:
        row += [fact.weight, fact.tokens, fact.samples, *_digest_parts(fact.digest)]
    rows = world.all_gather(row)

    # 2. Merge the requests. A signal is positive, the time budget -1, no request 0: with a signal
    # on any rank the maximum is that signal; without one it is 0, and the minimum is -1 or 0.
    stops = [int(stop) for stop, *_ in rows]
    merged = Requests(
        stop=max(stops) or min(stops),
        save=any(save for _, save, *_ in rows),
        is_writing_done=all(is_done for _, _, is_done, *_ in rows),
    )

    # 3. Put the facts into the order of the micro-batches.
    facts = interleave_ranks([list(_unpack_facts(row[3:])) for row in rows], count)
    return GlobalStep(facts, share_of(count, world.rank, world.size), merged)


def _digest_parts(digest: bytes) -> list[int]:
    """Split a digest of 32 bytes into 8 integers of 32 bits, which float64 holds exactly."""
    return [int.from_bytes(digest[at : at + 4], "big") for at in range(0, 4 * _DIGEST_PARTS, 4)]


def _unpack_facts(row: Sequence[float]) -> Iterator[MicroBatchFacts]:
    """Yield the facts of a rank's micro-batches from the row that it sent, see `exchange`.

    row: Without the requests: weight, tokens, samples and 8 parts of the digest, for each of them.
    """
    size = 3 + _DIGEST_PARTS
    for at in range(0, len(row), size):
        weight, tokens, samples, *parts = row[at : at + size]
        digest = b"".join(int(part).to_bytes(4, "big") for part in parts)
        yield MicroBatchFacts(weight, int(tokens), int(samples), digest)
