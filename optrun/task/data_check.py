"""What a person is told of the data before the first step, and by `optrun explain`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optrun.task.data_facts import DataFacts, SplitFacts

TOLD_UNKNOWN = 0.01
"""Share of unknown tokens above which it is told."""
MOST_LABELS = 4
"""Labels that are told one by one."""
MOST_LETTERS = 24
"""Of a label's name."""


def data_check(facts: DataFacts) -> list[str]:
    """Write a line for each split, and one for each doubt about it."""
    evals = {f"eval/{name}" if name else "eval": split for name, split in facts.eval_sets.items()}
    sources = {f"train/{name}": split for name, split in facts.sources.items()}
    every = {"train": facts.train, **sources, **evals}
    splits = {name: split for name, split in every.items() if split.examples}
    cells = [
        [f"{split.examples:,} examples", _describe_tokens(split), _describe_labels(split)]
        for split in splits.values()
    ]
    columns = [
        column for column in zip(*cells, strict=True) if any(column)
    ]  # of a stream no tokens are known
    widths = [max(map(len, column)) for column in columns]
    widest = max(map(len, splits), default=0)
    lines = []
    for (name, split), row in zip(splits.items(), zip(*columns, strict=True), strict=True):
        line = "".join(
            f"{' · ' if cell else '   '}{cell:>{width}}"
            for cell, width in zip(row, widths, strict=True)
        )
        lines.append(f"{name:<{widest}}  {line[3:].rstrip()}")
        for cut in split.cuts:
            rest = f"{percent(cut.share)} of all tokens are lost; the longest has {cut.longest:,}"
            lines.append(
                f"{name:<{widest}}  {cut.limit} cuts {cut.rows:,} of {split.texts:,} examples:"
                f" {rest}"
            )
        if split.unknown is not None and split.unknown > TOLD_UNKNOWN:
            lines.append(
                f"warning: {percent(split.unknown)} of the tokens of {split.key} are unknown to the"
                " tokenizer"
            )
    for split in facts.eval_sets.values():
        if split.known:
            repeated = f"{split.known:,} of {split.texts:,} texts of {split.key}"
            lines.append(
                f"warning: {repeated} stand in {facts.train.key}, too: evaluation sees what was"
                " trained on"
            )
    return lines


def percent(share: float) -> str:
    """Format a share for people; a small one is never shown as nothing.

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
    if split.tokens is None:
        return ""
    return f"{split.tokens:,} tokens"


def _describe_labels(split: SplitFacts) -> str:
    total = max(sum(split.labels.values()), 1)
    shares = {
        name: (
            f"{name if len(name) <= MOST_LETTERS else name[:MOST_LETTERS] + '...'}:"
            f" {percent(count / total)}"
        )
        for name, count in split.labels.items()
    }
    if len(shares) <= MOST_LABELS:
        return ", ".join(shares.values())
    rarest, *_, first = sorted(split.labels, key=split.labels.__getitem__)
    return f"{len(shares)} labels, from {shares[first]} to {shares[rarest]}"
