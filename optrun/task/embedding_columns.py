"""Which columns hold texts that are compared.

One, another that belongs to it or has a score, and some that do not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from optrun.base.errors import ConfigError
from optrun.config.schema.data import ColumnsConfig
from optrun.config.schema.task import EmbeddingConfig, EmbeddingLoss
from optrun.data.columns import label_column, missing_column, named_column
from optrun.data.row_advice import columns_in_words
from optrun.data.source import Source, Split

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


def compared_columns(
    config: EmbeddingConfig, source: Source, split: Split
) -> tuple[list[str], str | None]:
    """Find the columns of texts, and the scores if the loss reads them.

    Args:
        config: The loss.
        source: Carries the names.
        split: Where the columns must be; without a row those of the training rows.

    Returns:
        Names of the columns of the first text, the second one and the negatives; and of the scores,
        or None.

    Raises:
        ConfigError: No such column, several that may be meant, or one that the loss does not read.
    """
    split = split if len(split.rows) else source.train
    columns = source.columns
    loss = f"task.loss={config.loss.value}"
    if config.of_numbers:
        score = label_column(source, split, _first_usual_name(USUAL_SCORES, split) or USUAL_SCORES)
    else:
        score = None
    negatives = negative_columns(columns, split)
    pair = pair_columns(columns, split, (*negatives, score))
    if score is None:
        _refuse_unused_scores(columns, split, loss)
    elif negatives:
        raise ConfigError(
            f"{loss} reads pairs with a score, and no negatives: {split.key} has"
            f" {', '.join(negatives)}. Take task.loss=multiple_negatives_ranking or triplet, or"
            " rows without them."
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
    """List the first usual name among the split's columns; scores come before labels."""
    return [name for name in names if name in split.rows.column_names][:1]


def _refuse_unused_scores(columns: ColumnsConfig | None, split: Split, loss: str) -> None:
    """Refuse scores the loss would ignore, unless the text columns are named."""
    score_column = columns.label_column if columns is not None else None
    if score_column is not None:
        score_columns = [score_column]
    else:
        score_columns = _first_usual_name(USUAL_SCORES[:3], split)
    if score_columns and (
        score_column is not None
        or columns is None
        or None in (columns.text_column, columns.text_pair_column)
    ):
        raise ConfigError(
            f"{loss} takes every pair for texts that belong together, and {split.key} has scores in"
            f" column {score_columns[0]}. Take task.loss=cosent, which reads them; or name"
            " data.text_column"
            " and data.text_pair_column alone."
        )


def negative_columns(columns: ColumnsConfig | None, split: Split) -> list[str]:
    """List the columns of negatives.

    As named, else `negative`, `negative_1`, ...

    Raises:
        ConfigError: The split has no column of a name.
    """
    configured = columns.negative_columns if columns is not None else None
    if configured is None:
        numbered = [name for name in split.rows.column_names if _NEGATIVE.fullmatch(name)]
        return sorted(numbered, key=lambda name: (len(name), name))
    for name in configured:
        if name not in split.rows.column_names:
            raise missing_column("data.negative_columns", name, split)
    return list(configured)


def pair_columns(
    columns: ColumnsConfig | None, split: Split, taken: Sequence[str | None] = ()
) -> tuple[str, str]:
    """Find the columns of the first and the second text.

    As named, by usual names, else the only two of texts.

    Raises:
        ConfigError: No such columns, or several that may be meant.
    """
    keys = ("text_column", "text_pair_column")
    first, second = (named_column(columns, key, split) for key in keys)
    if first is not None and second is not None:
        return first, second
    names = split.rows.column_names
    fitting = [
        pair
        for pair in USUAL_PAIRS
        if first in (None, pair[0])
        and second in (None, pair[1])
        and pair[0] in names
        and pair[1] in names
    ]
    texts = [
        name
        for name, feature in split.rows.features.items()
        if getattr(feature, "dtype", None) in ("string", "large_string") and name not in taken
    ]
    if not fitting and len(texts) == 2:
        rest = [name for name in texts if name not in (first, second)]
        fitting = [(texts[0], texts[1])] if first is second is None else []
        fitting += [(first or rest[0], second or rest[0])] if len(rest) == 1 else []
    if len(fitting) != 1:
        missing = " and ".join(
            f"data.{key}" for key, name in zip(keys, (first, second), strict=True) if name is None
        )
        if fitting:
            why = f"several pairs of usual names ({fitting})"
        else:
            why = "no two columns that are known for a pair"
        raise ConfigError(
            f"{missing} {'is' if ' and ' not in missing else 'are'} needed: {split.key} has {why},"
            f" such as anchor and positive. {columns_in_words(split.rows)}"
        )
    return fitting[0]
