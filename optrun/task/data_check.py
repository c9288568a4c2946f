"""Describe the data in a few lines, before the first step and in `optrun explain`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optrun.task.data_facts import DataFacts, SplitFacts

REPORTED_UNKNOWN = 0.01
"""Share of unknown tokens above which a warning names it."""
MAX_LABELS = 4
"""Labels that are listed one by one."""
MAX_LETTERS = 24
"""Letters of a label's name that are shown."""


def describe_data(facts: DataFacts) -> list[str]:
    """Describe the data: a line for each split that is not empty, then its problems.

    The problems are truncated examples, unknown tokens above `REPORTED_UNKNOWN`, a label of its own
    for each of 20 or more training examples, and evaluation texts that are also training texts.
    Splits are named as metrics are: `train`, `train/SOURCE`, `eval`, `eval/SET`.
    """
    # 1. The names of the splits with examples; an unnamed evaluation set is `eval`.
    splits = {"train": facts.train}
    splits |= {f"train/{name}": split for name, split in facts.sources.items()}
    splits |= {f"eval/{name}".rstrip("/"): split for name, split in facts.eval_sets.items()}
    splits = {name: split for name, split in splits.items() if split.examples}
    width = max(map(len, splits), default=0)

    # 2. Each split: its size, what is cut off, unknown tokens.
    lines = []
    for name, split in splits.items():
        columns = [f"{split.examples:,} examples", _describe_tokens(split), _describe_labels(split)]
        lines.append(f"{name:<{width}}  {' · '.join(filter(None, columns))}")
        lines.extend(
            f"{name:<{width}}  {cut.limit} cuts {cut.rows:,} of {split.texts:,} examples:"
            f" {percent(cut.share)} of all tokens are lost; the longest has {cut.longest:,}"
            for cut in split.cuts
        )
        if split.unknown_share is not None and split.unknown_share > REPORTED_UNKNOWN:
            lines.append(
                f"warning: the tokenizer does not know {percent(split.unknown_share)} of the tokens"
                f" of {split.key}"
            )

    # 3. No label occurs twice. (Tags of words and sets of labels may be many, but do occur twice.)
    train = facts.train
    if train.examples >= 20 and max(train.labels.values(), default=0) == 1:
        lines.append(
            f"warning: {len(train.labels):,} labels for {train.examples:,} examples of {train.key}:"
            " nothing can be learnt. data.label_column=NAME names another column"
        )

    # 4. Evaluation texts that were trained on.
    lines.extend(
        f"warning: {split.texts_in_train:,} of {split.texts:,} texts of {split.key} are in"
        f" {facts.train.key}, too: evaluation sees texts that were trained on"
        for split in facts.eval_sets.values()
        if split.texts_in_train
    )
    return lines


def percent(share: float) -> str:
    """Format a share in percent; only 0 is "0 %".

    Example:
        >>> percent(0.5578), percent(0.00001), percent(0)
        ('55.8 %', 'below 0.1 %', '0 %')
    """
    if 0 < share < 0.0005:
        return "below 0.1 %"
    if share:
        return f"{100 * share:.1f} %"
    return "0 %"


def _describe_tokens(split: SplitFacts) -> str:
    """Write the number of tokens; empty if it is unknown, as for a stream, or without text."""
    if split.tokens is None:
        return ""
    return f"{split.tokens:,} tokens"


def _describe_labels(split: SplitFacts) -> str:
    """Write the share of each label; with more than four, of the most and the least frequent.

    Such as "no: 75.0 %, yes: 25.0 %" or "20 labels, from a: 12.0 % to b: 0.3 %". Names longer than
    24 letters are shortened. Empty without labels.
    """
    # 1. The labels to list.
    total = max(sum(split.labels.values()), 1)
    labels = list(split.labels)
    are_many = len(labels) > MAX_LABELS
    if are_many:
        by_count = sorted(labels, key=split.labels.__getitem__)
        labels = [by_count[-1], by_count[0]]

    # 2. Their shares.
    shares = []
    for label in labels:
        name = label if len(label) <= MAX_LETTERS else f"{label[:MAX_LETTERS]}..."
        shares.append(f"{name}: {percent(split.labels[label] / total)}")
    if are_many:
        return f"{len(split.labels)} labels, from {' to '.join(shares)}"
    return ", ".join(shares)
