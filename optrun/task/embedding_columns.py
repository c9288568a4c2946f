"""Find the columns of `task=embedding`: an anchor, its positive, negatives, and scores."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import permutations

from optrun.base.errors import ConfigError
from optrun.config.schema.data import ColumnsConfig
from optrun.config.schema.task import EmbeddingConfig, EmbeddingLoss
from optrun.data.columns import label_column, missing_column, named_column
from optrun.data.row_advice import columns_in_words
from optrun.data.source import Source, Split

KEYS = ("text_column", "text_pair_column")
USUAL_PAIRS = (
    ("anchor", "positive"),
    ("query", "positive"),
    ("sentence1", "sentence2"),
    ("sentence_A", "sentence_B"),
    ("question", "answer"),
    ("query", "answer"),
    ("query", "document"),
    ("query", "passage"),
    ("text1", "text2"),
)
USUAL_SCORES = ("score", "similarity", "similarity_score", "label", "labels")
_NEGATIVE = re.compile(r"negative(_\d+)?")


def text_and_score_columns(
    config: EmbeddingConfig, source: Source, split: Split
) -> tuple[list[str], str | None]:
    """Find the columns of texts, and the column of scores if the loss reads scores.

    Args:
        config: Has the loss.
        source: Has the configured names (`data.*_column`).
        split: The rows with the columns. If it has no row, the training split is read instead.

    Returns:
        The columns of the first text, of the second text and of negatives; and the column of
        scores, None if the loss does not read them. The split remembers that they are read.

    Raises:
        ConfigError: A configured column is missing; several pairs of columns may be meant; or the
            rows have scores or negatives that the loss does not read, or lack those that it reads.
    """
    if not len(split.rows):
        split = source.train
    columns = source.columns
    loss = f"task.loss={config.loss.value}"

    # 1. Find the columns; that of scores first, since it may hold strings, and would be taken for
    # a text.
    score = None
    if config.of_numbers:
        # Only the first usual name that exists: with several, `label_column` would refuse.
        usual_names = _first_usual_name(USUAL_SCORES, split) or USUAL_SCORES
        score = label_column(source, split, usual_names)
    negatives = negative_columns(columns, split)
    pair = pair_columns(columns, split, (*negatives, score))

    # 2. Refuse what the loss does not read, and what it lacks.
    if score is None:
        _refuse_unused_scores(columns, split, loss)
    elif negatives:
        raise ConfigError(
            f"{loss} reads pairs with a score, and {split.key} has negatives:"
            f" {', '.join(negatives)}. Take task.loss=multiple_negatives_ranking or triplet, or"
            " rows without negatives."
        )
    if config.loss is EmbeddingLoss.triplet and len(negatives) != 1:
        raise ConfigError(
            f"{loss} needs one column of negatives, and {split.key} has"
            f" {', '.join(negatives) or 'none'}. Name it with data.negative_columns=[NAME], or take"
            f" task.loss=multiple_negatives_ranking. {columns_in_words(split.rows)}"
        )
    split.columns_read.update((*pair, *negatives))
    return [*pair, *negatives], score


def _first_usual_name(names: Sequence[str], split: Split) -> list[str]:
    """Return the first of some names among the columns of a split, in a list.

    The list is empty if none is a column.
    """
    return [name for name in names if name in split.rows.column_names][:1]


def _refuse_unused_scores(columns: ColumnsConfig | None, split: Split, loss: str) -> None:
    """Refuse rows with scores, for a loss that takes none.

    Scores are the column that `data.label_column` names, else a column `score`, `similarity` or
    `similarity_score`. A usual name passes if both text columns are configured, since the user then
    chose what is read; a column that `data.label_column` names never does.

    Raises:
        ConfigError: With the column and what to do.
    """
    # 1. What is configured.
    configured = None
    has_both_texts = False
    if columns is not None:
        configured = columns.label_column
        has_both_texts = None not in (columns.text_column, columns.text_pair_column)

    # 2. The column that has scores, if there is one.
    if configured is not None:
        score_columns = [configured]
    elif has_both_texts:
        return
    else:
        score_columns = _first_usual_name(USUAL_SCORES[:3], split)
    if score_columns:
        raise ConfigError(
            f"{loss} takes every pair for texts that belong together, and {split.key} has scores in"
            f" column {score_columns[0]}. Take task.loss=cosent, which reads them; or, to ignore"
            " them, name data.text_column and data.text_pair_column alone."
        )


def negative_columns(columns: ColumnsConfig | None, split: Split) -> list[str]:
    """List the columns of negatives: `data.negative_columns`, else `negative`, `negative_1`, ...

    Those that are not configured are sorted by number. Empty if there are none.

    Raises:
        ConfigError: A configured column is missing.
    """
    configured = columns.negative_columns if columns is not None else None
    if configured is None:
        numbered = [name for name in split.rows.column_names if _NEGATIVE.fullmatch(name)]
        # By length first, so that negative_10 comes after negative_9.
        return sorted(numbered, key=lambda name: (len(name), name))
    for name in configured:
        if name not in split.rows.column_names:
            raise missing_column("data.negative_columns", name, split)
    return list(configured)


def pair_columns(
    columns: ColumnsConfig | None, split: Split, taken: Sequence[str | None] = ()
) -> tuple[str, str]:
    """Find the columns of the first and the second text.

    They are the configured ones; if one or both are not configured, the only pair of usual names
    that fits, else the two text columns if there are exactly two.

    Args:
        columns: The configured names; None: none are.
        split: The rows.
        taken: Columns with another use, such as scores.

    Raises:
        ConfigError: A configured column is missing; no pair fits, or several do.
    """
    # 1. Both are configured.
    configured = [named_column(columns, key, split) for key in KEYS]
    first, second = configured
    if first is not None and second is not None:
        return first, second

    # 2. One pair of usual names is there; or there are exactly two text columns. Both orders of
    # these are tried: first their own, then the other, which fits if the configured first text is
    # the second column.
    names = split.rows.column_names
    usual_pairs = [pair for pair in USUAL_PAIRS if pair[0] in names and pair[1] in names]
    candidates = _agreeing_pairs(usual_pairs, first, second)
    texts = [name for name in string_columns(split) if name not in taken]
    if not candidates and len(texts) == 2:
        both_orders = list(permutations(texts, 2))
        candidates = _agreeing_pairs(both_orders, first, second)[:1]
    if len(candidates) == 1:
        return candidates[0]

    # 3. No pair, or several: name the keys that are not configured.
    missing = [f"data.{key}" for key, name in zip(KEYS, configured, strict=True) if name is None]
    verb = "is" if len(missing) == 1 else "are"
    problem = "no two columns with usual names of a pair"
    if candidates:
        problem = f"several pairs of usual names ({candidates})"
    raise ConfigError(
        f"{' and '.join(missing)} {verb} needed: {split.key} has {problem}, such as anchor and"
        f" positive. {columns_in_words(split.rows)}"
    )


def _agreeing_pairs(
    pairs: Sequence[tuple[str, str]], first: str | None, second: str | None
) -> list[tuple[str, str]]:
    """Select the pairs with the configured first and second column; None: any column.

    Example:
        >>> _agreeing_pairs([("query", "answer"), ("question", "answer")], "query", None)
        [('query', 'answer')]
    """
    return [pair for pair in pairs if first in (None, pair[0]) and second in (None, pair[1])]


def string_columns(split: Split) -> list[str]:
    """List the columns of strings."""
    return [
        name
        for name, feature in split.rows.features.items()
        if getattr(feature, "dtype", None) in ("string", "large_string")
    ]
