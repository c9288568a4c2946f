"""Whole entities in labels such as `B-PER`: where in an entity a word stands, and of which type it is; `O` is none.

One rule reads IOB1, IOB2, IOE1, IOE2, IOBES and BILOU: that of the CoNLL-2000 evaluation script (Tjong Kim Sang and
Buchholz 2000), which is seqeval's default. What the scheme does not allow is read, too: an `I-` that follows another
type, or nothing, begins an entity. seqeval's strict mode counts such an entity as none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Entity = tuple[str, int, int]
"""Type, first word, word after the last."""

SCHEMES = {"IOB": {"B", "I"}, "IOE": {"I", "E"}, "IOBES": {"B", "I", "E", "S"}, "BILOU": {"B", "I", "L", "U"}}
"""Prefixes by scheme; both forms of IOB, and of IOE, are read alike."""

_GOES_ON = ("I", "E", "L")
_ENDS = ("E", "S", "L", "U")


def scheme_of(labels: Sequence[str]) -> str | None:
    """Name the scheme of a set of labels; None where they are no prefixes and types.

    Args:
        labels: All that there are; `O` may be missing.

    Example:
        >>> scheme_of(["B-LOC", "I-LOC", "O"]), scheme_of(["S-LOC", "O"]), scheme_of(["NOUN", "VERB"])
        ('IOB', 'IOBES', None)
    """
    parts = [label.partition("-") for label in labels if label != "O"]
    prefixes = {prefix for prefix, _, _ in parts}
    if not parts or not all(kind for _, _, kind in parts):
        return None
    return next((name for name, allowed in SCHEMES.items() if prefixes <= allowed), None)


def continuations(labels: Sequence[str]) -> list[int]:
    """Map each class to the one that later pieces of a word carry: itself, but `I-...` for `B-...` if there is one.

    Example:
        >>> continuations(["B-LOC", "I-LOC", "O"])
        [1, 1, 2]
    """
    number = {label: index for index, label in enumerate(labels)}
    return [
        number.get("I-" + label.removeprefix("B-"), index) if label.startswith("B-") else index
        for index, label in enumerate(labels)
    ]


def entities(labels: Sequence[str]) -> list[Entity]:
    """Find the entities of one text.

    Args:
        labels: One for each word, of any of `SCHEMES`.

    Example:
        >>> entities(["B-PER", "I-PER", "O", "B-LOC", "B-LOC", "I-PER"])
        [('PER', 0, 2), ('LOC', 3, 4), ('LOC', 4, 5), ('PER', 5, 6)]
    """
    found: list[Entity] = []
    kind, begin, before = "", 0, "O"
    for index, label in enumerate([*labels, "O"]):
        prefix, _, here = label.partition("-")
        if not (kind and here == kind and prefix in _GOES_ON and before not in _ENDS):
            if kind:
                found.append((kind, begin, index))
            kind, begin = here, index
        before = prefix
    return found


_NONE = (0, 0, 0)


def _sum(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, int, int]:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


@dataclass
class Tally:
    """Entities over many texts."""

    predicted: int = 0
    actual: int = 0
    right: int = 0
    by_type: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Right, predicted and actual ones of each type."""

    def add(self, predicted: Sequence[str], actual: Sequence[str]) -> None:
        """Count one text; an entity is right where type and both borders are.

        Args:
            predicted: One label for each word.
            actual: As many.
        """
        made, there = set(entities(predicted)), set(entities(actual))
        self.predicted += len(made)
        self.actual += len(there)
        self.right += len(made & there)
        for kind in {entity[0] for entity in made | there}:
            here = (sum(entity[0] == kind for entity in group) for group in (made & there, made, there))
            self.by_type[kind] = _sum(self.by_type.get(kind, _NONE), tuple(here))

    def __add__(self, other: Tally) -> Tally:
        """Count both."""
        kinds = {kind: _sum(self.by_type.get(kind, _NONE), counts) for kind, counts in other.by_type.items()}
        return Tally(
            self.predicted + other.predicted,
            self.actual + other.actual,
            self.right + other.right,
            {**self.by_type, **kinds},
        )

    @property
    def precision(self) -> float:
        """Share of predicted entities that are right; 0 where none is predicted."""
        return self.right / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        """Share of actual entities that are found; 0 where there is none."""
        return self.right / self.actual if self.actual else 0.0

    @property
    def f1(self) -> float:
        """2 right / (predicted + actual); 0 where there is none of either."""
        total = self.predicted + self.actual
        return 2 * self.right / total if total else 0.0
