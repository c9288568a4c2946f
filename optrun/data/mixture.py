"""Examples of several sources in one order, drawn with given probabilities, or by turns.

What is drawn, and when an epoch ends, are those of `datasets.interleave_datasets`. The draws of an
epoch are made once, with ten bytes each, so that any place of it can be looked up at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from optrun.data.cache import digest
from optrun.data.examples import Example
from optrun.data.loader import SOURCE, EpochPlan, ExampleSource, Order
from optrun.data.randomness import generator
from optrun.data.source import Source
from optrun.data.spans import spans

_DRAWS_AT_ONCE = 1 << 16
"""Sources that are drawn together."""


@dataclass
class MixedSource(Source):
    """Several sources of one task; `train` and `eval_sets` come from the first."""

    sources: dict[str, Source] = field(default_factory=dict)
    """Each source by its name."""


class Draws:
    """The source of each position of an epoch, and how many were drawn from it before.

    Args:
        sizes: Examples of each source.
        probabilities: The probability of each source; None: the sources take turns.
        strategy: When an epoch ends. `first_exhausted`: with the last example of any source.
            `all_exhausted`: when the last example of each source was drawn; a source that ends
            earlier begins again. `all_exhausted_without_replacement`: the same, but a source that
            has ended is no longer drawn from, so that each example is drawn once.
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
        ends_with_first = strategy == "first_exhausted"
        if probabilities is None:
            rounds = min(sizes) if ends_with_first else max(sizes)
            sources = np.tile(np.arange(len(sizes), dtype=np.int16), rounds)
        else:
            sources = self._draw_sources(
                np.array(probabilities), seed, ends_with_first=ends_with_first
            )
        numbers = np.empty(len(sources), dtype=np.int64)
        for source in range(len(sizes)):
            positions = np.flatnonzero(sources == source)
            numbers[positions] = np.arange(len(positions))
        if strategy == "all_exhausted_without_replacement":
            is_new = numbers < self.sizes[sources]
            sources = sources[is_new]
            numbers = numbers[is_new]
        self._sources = sources
        self._numbers = numbers

    def _draw_sources(
        self, probabilities: np.ndarray, seed: int, *, ends_with_first: bool
    ) -> np.ndarray:
        """Draw sources until the first one ends, or until all with a probability have ended.

        A source ends when as many examples were drawn from it as it has. Example: of sources with 2
        and 9 examples the draws 1, 0, 1, 0, ... are cut behind the second 0 if `ends_with_first`.

        Returns:
            The source of each position; shape (positions,), int16.
        """
        randomness = generator(seed, "mixture")
        is_drawn = probabilities > 0
        # 1. Draw 65,536 sources at a time until one has ended, or all that are drawn from.
        is_enough = np.any if ends_with_first else np.all
        pieces: list[np.ndarray] = []
        totals = np.zeros(len(self.sizes), dtype=np.int64)  # draws of each source
        has_ended = np.zeros(len(self.sizes), dtype=bool)
        while not is_enough(has_ended[is_drawn]):
            piece = randomness.choice(len(self.sizes), size=_DRAWS_AT_ONCE, p=probabilities)
            totals += np.bincount(piece, minlength=len(self.sizes))
            has_ended = is_drawn & (totals >= self.sizes)
            pieces.append(piece.astype(np.int16))
        sources = np.concatenate(pieces)
        # 2. Each source that has ended did so behind the draw of its last example.
        ends = []
        for source in np.flatnonzero(has_ended):
            positions = np.flatnonzero(sources == source)
            last_example = positions[self.sizes[source] - 1]
            ends.append(int(last_example) + 1)
        # 3. Cut behind the first of these ends, or behind the last one.
        return sources[: min(ends) if ends_with_first else max(ends)]

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, positions: slice) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each position, and how many were drawn from it before.

        Shape (positions,) each, an integer type.
        """
        return self._sources[positions], self._numbers[positions]

    def passes(self) -> np.ndarray:
        """Count how often an epoch begins each source; shape (sources,), int64."""
        totals = np.bincount(self._sources, minlength=len(self.sizes))
        begun: np.ndarray = np.maximum(1, -(-totals // self.sizes))
        return begun


class MixedExamples:
    """Examples of several sources.

    Args:
        parts: Examples of each source by its name; a source that is drawn from has some.
        probabilities: The probability of each source, in this order; None: they take turns.
        strategy: When an epoch ends, see `Draws`.
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
        sizes = [len(part) for part in parts.values()]
        self.begins = np.concatenate([[0], np.cumsum(sizes)])
        self.draws = Draws(sizes, probabilities, strategy, seed=seed)
        self._how = f"{probabilities} {strategy}"
        self._parts = list(parts.values())
        self.arrangement = Mixing(self._parts, self.draws, self.begins)

    def __len__(self) -> int:
        return len(self.draws)

    def __getitem__(self, index: int) -> Example:
        """Return an example, with the number of its source.

        Args:
            index: Over the examples of all sources, one source after another, as the arrangement
                gives it.
        """
        source = int(np.searchsorted(self.begins, index, side="right")) - 1
        return {**self._parts[source][index - int(self.begins[source])], SOURCE: source}

    def fingerprint(self) -> str:
        """Digest all sources with their names, and how they are mixed."""
        pieces: list[str] = []
        for name, examples in self.sources.items():
            pieces += [name, examples.fingerprint()]
        return digest("mixture", self._how, *pieces)

    def source_digests(self) -> dict[str, str]:
        """Map each source to a digest of its examples; for a stream, each file to its digest."""
        digests: dict[str, str] = {}
        for name, examples in self.sources.items():
            if hasattr(examples, "source_digests"):
                digests.update(examples.source_digests())
            else:
                digests[name] = examples.fingerprint()[:32]
        return digests


@dataclass(eq=False)
class Mixing:
    """The arrangement of a mixture, for an `EpochPlan`: the draws, and the order of each source."""

    parts: Sequence[ExampleSource]
    """Examples of each source."""
    draws: Draws
    """The source of each position."""
    begins: np.ndarray
    """Where the examples of each source begin."""

    @property
    def name(self) -> str:
        """The arrangement in words, by which a resumed run recognises it."""
        return f"mixture of {', '.join(plan.ordering for plan in self.plans(0))}"

    def plans(self, seed: int) -> list[EpochPlan]:
        """Make an epoch plan for each source alone; only the order of its examples is used."""
        return [
            EpochPlan(len(part), 1, 1, seed, arrangement=getattr(part, "arrangement", None))
            for part in self.parts
        ]

    def __call__(self, seed: int, epoch: int) -> Order:
        """Make the order of an epoch."""
        return MixedOrder(self.draws, self.begins, self.plans(seed), epoch)


@dataclass(eq=False)
class MixedOrder:
    """The order of one epoch of a mixture."""

    draws: Draws
    """The source of each position."""
    begins: np.ndarray
    """Where the examples of each source begin."""
    plans: Sequence[EpochPlan]
    """Of each source alone."""
    epoch: int

    def __post_init__(self) -> None:
        """Count the passes over each source in earlier epochs."""
        self._first_pass = self.epoch * self.draws.passes()
        # The last order of each source, behind the number of its pass.
        self._orders: dict[int, tuple[int, Order]] = {}

    def __len__(self) -> int:
        return len(self.draws)

    def __getitem__(self, positions: slice, /) -> np.ndarray:
        """Return the example of each position; shape (positions,), int64."""
        sources, numbers = self.draws[positions]
        indices = np.empty(len(sources), dtype=np.int64)
        for source in np.unique(sources).tolist():
            positions_of_source = np.flatnonzero(sources == source)
            size = int(self.draws.sizes[source])
            # The numbers of a source follow one another.
            begin = int(numbers[positions_of_source[0]])
            end = int(numbers[positions_of_source[-1]]) + 1
            passes = spans(range(size, end + size, size), begin, end)
            examples = [self._order(source, number)[first:last] for number, first, last in passes]
            indices[positions_of_source] = self.begins[source] + np.concatenate(examples)
        return indices

    def _order(self, source: int, number: int) -> Order:
        """Return the order of a source in its pass with this number inside of the epoch.

        A source that ends before others begins again in a new order. The last order of each source
        stays in memory.
        """
        pass_number = int(self._first_pass[source]) + number  # over all epochs
        in_memory, order = self._orders.get(source, (None, None))
        if order is None or in_memory != pass_number:
            order = self.plans[source].order(pass_number)
            self._orders[source] = (pass_number, order)
        return order
