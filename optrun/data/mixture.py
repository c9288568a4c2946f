"""Examples of several sources in one order, drawn by counter with given probabilities, or by turns.

What is drawn, and when an epoch ends, are those of `datasets.interleave_datasets`; the numbers it
is drawn by are our
own: how many of a block of draws fall to each source is one multinomial draw, and in which order a
shuffle of the block. That is the same distribution as one draw after another, and any place of it
can be looked up at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from optrun.data.cache import digest
from optrun.data.examples import Example
from optrun.data.loader import SOURCE, EpochPlan, ExampleSource, Order
from optrun.data.parts import spans
from optrun.data.randomness import generator
from optrun.data.source import Source

_BLOCK = 4096
"""Draws that are looked up together."""
_AT_ONCE = 1024
"""Blocks whose counts are drawn together."""


@dataclass
class MixedSource(Source):
    """Several sources to be read by one task: `train` and `eval_sets` are those of the first."""

    parts: dict[str, Source] = field(default_factory=dict)
    """Each with its name."""


class Draws:
    """Which source each place of an epoch is drawn from, and how many were drawn from it before.

    Args:
        sizes: Examples of each source.
        probabilities: Of each source; None: by turns.
        strategy: `first_exhausted`: an epoch ends with the draw that takes the last example of a
            source.
            `all_exhausted`: with the one that has taken the last example of every source; one that
            is exhausted before begins anew. `all_exhausted_without_replacement`: each example is
            drawn once, and no longer from a source that is exhausted.
        seed: The run's seed.

    Example:
        >>> draws = Draws([3, 1], None, "all_exhausted_without_replacement", seed=0)
        >>> len(draws), [(int(source), int(number)) for source, number in zip(*draws[0:4])]
        (4, [(0, 0), (1, 0), (0, 1), (0, 2)])
    """

    def __init__(
        self,
        sizes: Sequence[int],
        probabilities: Sequence[float] | None,
        strategy: str,
        *,
        seed: int,
    ) -> None:
        self.sizes = np.array(sizes, dtype=np.int64)
        self._probabilities = None if probabilities is None else np.array(probabilities)
        self._seed = seed
        self._once = strategy == "all_exhausted_without_replacement"
        first = strategy == "first_exhausted"
        if self._probabilities is None:
            draws = len(sizes) * (min(sizes) if first else max(sizes))  # whole rounds
            turns = np.arange(-(-draws // _BLOCK) + 1)[:, None] * _BLOCK
            self._before = np.maximum(-(-(turns - np.arange(len(sizes))) // len(sizes)), 0)
        else:
            self._before = self._counts(self._probabilities, first=first)
            draws = 0 if self._once else self._end(self._probabilities > 0, first=first)
        kept = np.minimum(self._before, self.sizes) if self._once else self._before
        self._ends = kept.sum(axis=1)
        self._length = int(self._ends[-1]) if self._once else draws

    def _counts(self, probabilities: np.ndarray, *, first: bool) -> np.ndarray:
        """Count draws from each source before each block, up to the one that ends the epoch.

        (blocks + 1, sources).
        """
        randomness = generator(self._seed, "mixture")
        total = np.zeros((1, len(self.sizes)), dtype=np.int64)
        while True:
            done = (total >= self.sizes)[:, probabilities > 0]
            ended = np.flatnonzero(done.any(axis=1) if first else done.all(axis=1))
            if len(ended):
                return total[: ended[0] + 1]
            more = randomness.multinomial(_BLOCK, probabilities, size=_AT_ONCE)
            total = np.concatenate([total, total[-1] + np.cumsum(more, axis=0)])

    def _end(self, drawn: np.ndarray, *, first: bool) -> int:
        """Find one past the draw that ends the epoch, which lies in the last block."""
        block = len(self._before) - 2
        sources, numbers = self._block(block)
        taken = numbers == self.sizes[sources] - 1
        earlier = [
            int(self._before[block, source]) >= self.sizes[source]
            for source in range(len(self.sizes))
        ]
        places = [
            0 if earlier[source] else int(np.flatnonzero(taken & (sources == source))[0]) + 1
            for source in np.flatnonzero(drawn)
            if earlier[source] or (taken & (sources == source)).any()
        ]
        return block * _BLOCK + (min(places) if first else max(places))

    def __len__(self) -> int:
        return self._length

    def _block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each draw of a block, and how many were drawn from it before."""
        if self._probabilities is None:
            sources = np.arange(block * _BLOCK, (block + 1) * _BLOCK) % len(self.sizes)
        else:
            counts = self._before[block + 1] - self._before[block]
            sources = np.repeat(np.arange(len(self.sizes)), counts)
            sources = sources[
                generator(self._seed, "mixture block", block).permutation(len(sources))
            ]
        numbers = np.empty(len(sources), dtype=np.int64)
        for source in range(len(self.sizes)):
            own = np.flatnonzero(sources == source)
            numbers[own] = self._before[block, source] + np.arange(len(own))
        if not self._once:
            return sources, numbers
        kept = numbers < self.sizes[sources]
        return sources[kept], numbers[kept]

    def __getitem__(self, places: slice) -> tuple[np.ndarray, np.ndarray]:
        """Source of each place, and how many were drawn from it before.

        Shape (places,) each, int64.
        """
        begin, end, _ = places.indices(len(self))
        found = np.zeros((2, max(0, end - begin)), dtype=np.int64)
        filled = 0
        for block, first, last in spans(self._ends[1:], begin, end):
            for side, values in zip(found, self._block(block), strict=True):
                side[filled : filled + last - first] = values[first:last]
            filled += last - first
        return found[0], found[1]

    def passes(self) -> np.ndarray:
        """Count how often an epoch begins each source; shape (sources,), int64."""
        turns: np.ndarray = np.maximum(1, -(-self._before[-1] // self.sizes))
        return turns


class MixedExamples:
    """Examples of several sources.

    Args:
        parts: Examples of each, by name; none without an example where it is drawn from.
        probabilities: Of each, in this order; None: by turns.
        strategy: As `Draws` takes it.
        seed: The run's seed.
    """

    def __init__(
        self,
        parts: Mapping[str, ExampleSource],
        probabilities: Sequence[float] | None,
        strategy: str,
        *,
        seed: int,
    ) -> None:
        self.sources = dict(parts)
        self.begins = np.concatenate([[0], np.cumsum([len(part) for part in parts.values()])])
        self.draws = Draws(
            [len(part) for part in parts.values()], probabilities, strategy, seed=seed
        )
        self._how = f"{probabilities} {strategy}"
        self._parts = list(parts.values())
        self.arrangement = Mixing(self._parts, self.draws, self.begins)

    def __len__(self) -> int:
        return len(self.draws)

    def __getitem__(self, index: int) -> Example:
        """An example with the number of its source.

        Args:
            index: Over the examples of all sources, one source after another, as the arrangement
                gives it.
        """
        source = int(np.searchsorted(self.begins, index, side="right")) - 1
        return {**self._parts[source][index - int(self.begins[source])], SOURCE: source}

    def fingerprint(self) -> str:
        """Digest of all sources with their names, and of how they are mixed."""
        parts = (
            piece for name, part in self.sources.items() for piece in (name, part.fingerprint())
        )
        return digest("mixture", self._how, *parts)

    def parts(self) -> dict[str, str]:
        """Map each source to the digest of its examples.

        Of a stream, each file to that of its bytes.
        """
        found: dict[str, str] = {}
        for name, part in self.sources.items():
            files: dict[str, str] = (
                part.parts() if hasattr(part, "parts") else {name: part.fingerprint()[:32]}
            )
            found.update(files)
        return found


@dataclass(eq=False)
class Mixing:
    """How a mixture is ordered, for an `EpochPlan`.

    By the draws, and of each source in its own order.
    """

    parts: Sequence[ExampleSource]
    """Examples of each source."""
    draws: Draws
    """Which source is drawn."""
    begins: np.ndarray
    """Where the examples of each source begin."""

    @property
    def name(self) -> str:
        """In words."""
        return f"mixture of {', '.join(plan.ordering for plan in self.plans(0))}"

    def plans(self, seed: int) -> list[EpochPlan]:
        """Plan the examples of each source."""
        return [
            EpochPlan(len(part), 1, 1, seed, arrangement=getattr(part, "arrangement", None))
            for part in self.parts
        ]

    def __call__(self, seed: int, epoch: int) -> Order:
        """The order of an epoch."""
        return MixedOrder(self.draws, self.begins, self.plans(seed), epoch)


@dataclass(eq=False)
class MixedOrder:
    """The order of one epoch of a mixture."""

    draws: Draws
    """Which source is drawn."""
    begins: np.ndarray
    """Where the examples of each source begin."""
    plans: Sequence[EpochPlan]
    """Of each source alone."""
    epoch: int

    def __post_init__(self) -> None:
        """Count the passes before."""
        self._first_pass = self.epoch * self.draws.passes()
        self._orders: dict[tuple[int, int], Order] = {}

    def __len__(self) -> int:
        return len(self.draws)

    def __getitem__(self, places: slice) -> np.ndarray:
        """Which example stands at each place; shape (places,), int64."""
        sources, numbers = self.draws[places]
        found = np.empty(len(sources), dtype=np.int64)
        for source in np.unique(sources).tolist():
            own = np.flatnonzero(sources == source)
            size, begin, end = (
                int(self.draws.sizes[source]),
                int(numbers[own[0]]),
                int(numbers[own[-1]]) + 1,
            )
            passes = spans(
                range(size, end + size, size), begin, end
            )  # numbers of a source follow one another
            taken = [self._order(source, turn)[first:last] for turn, first, last in passes]
            found[own] = self.begins[source] + np.concatenate(taken)
        return found

    def _order(self, source: int, turn: int) -> Order:
        if (source, turn) not in self._orders:
            self._orders = {
                place: order for place, order in self._orders.items() if place[0] != source
            }
            self._orders[source, turn] = self.plans[source].order(
                int(self._first_pass[source]) + turn
            )
        return self._orders[source, turn]
