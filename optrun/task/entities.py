"""Whole entities in labels such as `B-PER`.

Where in an entity a word stands, and of which type it is; `O` is none.

One rule reads IOB1, IOB2, IOE1, IOE2, IOBES and BILOU: that of the CoNLL-2000 evaluation script
(Tjong Kim Sang and Buchholz 2000), which is seqeval's default. What the scheme does not allow is
read, too: an `I-` that follows another type, or nothing, begins an entity. seqeval's strict mode
counts such an entity as none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

Entity = tuple[str, int, int]
"""Type, first word, word after the last."""

SCHEMES = {
    "IOB": {"B", "I"},
    "IOE": {"I", "E"},
    "IOBES": {"B", "I", "E", "S"},
    "BILOU": {"B", "I", "L", "U"},
}
"""Prefixes by scheme; both forms of IOB, and of IOE, are read alike."""

_GOES_ON = ("I", "E", "L")
_ENDS = ("E", "S", "L", "U")


def scheme_of(labels: Sequence[str]) -> str | None:
    """Name the scheme of a set of labels; None if they are no prefixes with types.

    Args:
        labels: All that there are; `O` may be missing.

    Example:
        >>> scheme_of(["B-LOC", "I-LOC", "O"]), scheme_of(["S-LOC", "O"])
        ('IOB', 'IOBES')
        >>> scheme_of(["NOUN", "VERB"]) is None
        True
    """
    parts = [label.partition("-") for label in labels if label != "O"]
    prefixes = {prefix for prefix, _, _ in parts}
    if not parts or not all(kind for _, _, kind in parts):
        return None
    return next((name for name, allowed in SCHEMES.items() if prefixes <= allowed), None)


def entities(labels: Sequence[str]) -> list[Entity]:
    """Find the entities of one text.

    Args:
        labels: One for each word, of any of `SCHEMES`.

    Example:
        >>> entities(["B-PER", "I-PER", "O", "B-LOC", "B-LOC", "I-PER"])
        [('PER', 0, 2), ('LOC', 3, 4), ('LOC', 4, 5), ('PER', 5, 6)]
    """
    spans: list[Entity] = []
    kind = ""
    begin = 0
    before = "O"
    for index, label in enumerate([*labels, "O"]):
        prefix, _, entity_type = label.partition("-")
        if not (kind and entity_type == kind and prefix in _GOES_ON and before not in _ENDS):
            if kind:
                spans.append((kind, begin, index))
            kind = entity_type
            begin = index
        before = prefix
    return spans


def count_entities(
    texts: Iterable[tuple[Sequence[str], Sequence[str]]],
) -> Counter[tuple[str, int]]:
    """Count entities of each type in predicted and actual labels of texts, one label for each word.

    Returns:
        By type and 0, 1 or 2: right, predicted and actual ones; an entity is right where type and
        both borders are.

    Example:
        >>> sorted(count_entities([(["B-PER", "O"], ["B-PER", "B-LOC"])]).items())
        [(('LOC', 2), 1), (('PER', 0), 1), (('PER', 1), 1), (('PER', 2), 1)]
    """
    counts: Counter[tuple[str, int]] = Counter()
    for predicted, actual in texts:
        predicted_entities = set(entities(predicted))
        actual_entities = set(entities(actual))
        for index, group in enumerate(
            (predicted_entities & actual_entities, predicted_entities, actual_entities)
        ):
            counts.update((kind, index) for kind, _, _ in group)
    return counts
