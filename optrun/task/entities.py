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
    """Name the scheme of a set of labels, such as `IOB`; None if they follow none.

    Args:
        labels: All labels of the data; `O` may be missing.

    Example:
        >>> scheme_of(["B-LOC", "I-LOC", "O"]), scheme_of(["S-LOC", "O"])
        ('IOB', 'IOBES')
        >>> scheme_of(["NOUN", "VERB"]) is None
        True
    """
    parts = [label.partition("-") for label in labels if label != "O"]  # "B-LOC": B, -, LOC
    prefixes = {prefix for prefix, _, _ in parts}
    all_have_types = all(entity_type for _, _, entity_type in parts)
    if not parts or not all_have_types:
        return None
    return next((name for name, allowed in SCHEMES.items() if prefixes <= allowed), None)


def entities(labels: Sequence[str]) -> list[Entity]:
    """Find the entities of one text.

    A word continues an entity of the same type if its prefix is I, E or L, and the word before it
    does not end one. A type without a predecessor begins an entity, whatever its prefix.

    Args:
        labels: One for each word, in any of `SCHEMES`.

    Example:
        >>> entities(["B-PER", "I-PER", "O", "B-LOC", "B-LOC", "I-PER"])
        [('PER', 0, 2), ('LOC', 3, 4), ('LOC', 4, 5), ('PER', 5, 6)]
    """
    spans: list[Entity] = []
    open_type = ""  # of the entity that the word before belongs to; empty: none
    begin = 0
    prefix_before = "O"
    for index, label in enumerate([*labels, "O"]):  # the last O closes an open entity
        prefix, _, entity_type = label.partition("-")
        can_continue = prefix in _GOES_ON and prefix_before not in _ENDS
        continues = open_type and entity_type == open_type and can_continue
        if not continues:  # close the open entity, and open the one of this word
            if open_type:
                spans.append((open_type, begin, index))
            open_type = entity_type
            begin = index
        prefix_before = prefix
    return spans


def count_entities(
    texts: Iterable[tuple[Sequence[str], Sequence[str]]],
) -> Counter[tuple[str, int]]:
    """Count right, predicted and actual entities of each type.

    An entity is right if its type, first and last word are.

    Args:
        texts: Predicted and actual labels of each text, one label for each word.

    Returns:
        Counts by type and 0 (right), 1 (predicted) or 2 (actual).

    Example:
        >>> sorted(count_entities([(["B-PER", "O"], ["B-PER", "B-LOC"])]).items())
        [(('LOC', 2), 1), (('PER', 0), 1), (('PER', 1), 1), (('PER', 2), 1)]
    """
    counts: Counter[tuple[str, int]] = Counter()
    for predicted_labels, actual_labels in texts:
        predicted = set(entities(predicted_labels))
        actual = set(entities(actual_labels))
        for index, spans in enumerate((predicted & actual, predicted, actual)):
            for entity_type, _, _ in spans:
                counts[entity_type, index] += 1
    return counts
