"""What is known of the data before the first step.

Sizes, what is cut or unknown, labels, texts that stand twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from optrun.base.errors import ConfigError
from optrun.data.cache import cached_result, digest, key_of
from optrun.data.examples import Examples, Joined, Selected
from optrun.data.loader import ExampleSource
from optrun.data.mixture import MixedExamples, MixedSource
from optrun.data.source import Source
from optrun.task.base import Task
from optrun.task.evaluation import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_UNKNOWN = 0.5
"""Share of unknown tokens above which nothing can be learnt of the texts."""
_LOOKED_AT = 1 << 24
"""Tokens of which the share of unknown ones is counted, evenly spread over the split."""
_HASHES = _LABELS = 1 << 22
"""Texts that are looked up together, labels that are counted together."""
_OTHER_ROLES = (
    "bos_token_id",
    "eos_token_id",
    "sep_token_id",
    "cls_token_id",
    "pad_token_id",
    "mask_token_id",
)


@dataclass(frozen=True)
class CutFacts:
    """Rows that are longer than a limit.

    Attributes:
        limit: The key of the limit with its value.
        share: Of all tokens of the split, those that are lost.
        longest: Tokens of the longest row, uncut.
    """

    limit: str
    rows: int
    share: float
    longest: int


@dataclass(frozen=True)
class SplitFacts:
    """One split.

    Attributes:
        key: Where it comes from, such as `data.train`.
        tokens: After cutting; None where there is no text.
        unknown: Share of the ordinary tokens that the tokenizer does not know; None where it knows
            everything.
        labels: Label to how often it stands there; empty where there are no classes.
        texts: What it was made of: its examples, or the documents that were joined.
        known: How many of these stand in the training split, too; None where that is not known.
    """

    key: str
    examples: int
    texts: int
    tokens: int | None
    cuts: list[CutFacts]
    unknown: float | None
    labels: dict[str, int]
    known: int | None = None


@dataclass(frozen=True)
class DataFacts:
    """All splits.

    Attributes:
        eval_sets: By the name of the evaluation set; that of a single one is empty.
        sources: Of a mixture the training examples of each, by its name.
    """

    train: SplitFacts
    eval_sets: dict[str, SplitFacts]
    sources: dict[str, SplitFacts] = field(default_factory=dict)


def data_facts(task: Task, source: Source, tokenizer: PreTrainedTokenizerBase) -> DataFacts:
    """Look through the examples of a task.

    Args:
        task: After it has read its source.
        source: What the splits are called.
        tokenizer: Of the model; its image preparation where the task is about images.

    Raises:
        ConfigError: The tokenizer knows next to nothing of the texts.
    """
    mixed = task.train if isinstance(task.train, MixedExamples) else None
    sources: dict[str, SplitFacts] = {}
    if mixed is None:
        train = _split_facts(task, task.train, source.train.key, tokenizer, None)
    else:
        assert isinstance(source, MixedSource)
        sources = {
            name: _split_facts(task, part, source.parts[name].train.key, tokenizer, None)
            for name, part in mixed.sources.items()
        }
        labels = {
            label: sum(part.labels.get(label, 0) for part in sources.values())
            for label in task.labels
        }
        train = SplitFacts("data.mixture", len(mixed), len(mixed), None, [], None, labels)
    eval_facts = {
        name: (
            _split_facts(task, examples, source.eval_sets[name].key, tokenizer, task.train)
            if mixed is None
            else _split_facts(task, examples, f"data.mixture (eval/{name})", tokenizer, None)
        )
        for name, examples in task.eval_sets.items()
    }
    for split in (train, *sources.values(), *eval_facts.values()):
        if split.unknown is not None and split.unknown > MOST_UNKNOWN:
            raise ConfigError(
                f"{split.key}: {100 * split.unknown:.0f} % of its tokens are {tokenizer.unk_token},"
                f" unknown to the tokenizer ({len(tokenizer):,} entries): the texts would be lost."
                " Name a tokenizer that knows them with model.tokenizer, or take a model that"
                " does."
            )
    return DataFacts(train, eval_facts, sources)


def _split_facts(
    task: Task,
    examples: ExampleSource,
    key: str,
    tokenizer: PreTrainedTokenizerBase,
    trained: ExampleSource | None,
) -> SplitFacts:
    hashes = getattr(examples, "hashes", None)
    lengths = getattr(examples, "lengths", None)
    documents = getattr(examples, "documents", examples)  # of blocks in which none was cut
    ids = _flat_array(documents, "input_ids")
    return SplitFacts(
        key=key,
        examples=len(examples),
        texts=len(examples) if hashes is None else len(hashes),
        tokens=None if lengths is None else int(lengths.sum()),
        cuts=list(_yield_cuts(task, documents)),
        unknown=None if ids is None else _cached_unknown_share(examples, ids, tokenizer),
        labels=_label_counts(task, examples),
        known=_count_in_both(examples, trained),
    )


def _count_in_both(examples: object, trained: object) -> int | None:
    """Count evaluation texts also in the training set; the count is cached.

    None if that is not known.
    """
    hashes, trained_hashes = (getattr(source, "hashes", None) for source in (examples, trained))
    if hashes is None or trained_hashes is None:
        return None
    origins = (getattr(source, "origin", None) for source in (examples, trained))
    return cached_result(
        key_of("in-both-1", *origins), lambda: _count_members(hashes, trained_hashes)
    )


def _count_members(hashes: np.ndarray, others: np.ndarray) -> int:
    is_known = np.zeros(len(hashes), dtype=bool)
    for at in range(0, len(others), _HASHES):
        is_known |= np.isin(hashes, others[at : at + _HASHES], kind="sort")
    return int(is_known.sum())


def _flat_array(examples: object, name: str) -> np.ndarray | None:
    """Return the flat array of a name, also if only some examples are selected.

    None if there is none.
    """
    while isinstance(examples, Selected):
        examples = examples.examples
    if isinstance(examples, Joined):
        examples = examples.first
    array: np.ndarray | None = examples.ragged.get(name) if isinstance(examples, Examples) else None
    return array


def _yield_cuts(task: Task, examples: Any) -> Iterator[CutFacts]:
    sides = [examples.first, examples.second] if isinstance(examples, Joined) else [examples]
    for side, limit in zip(sides, task.limits, strict=False):
        lost = getattr(side, "lost", None)
        if lost is not None and lost.any():
            full_lengths = side.lengths + lost
            yield CutFacts(
                limit,
                int((lost > 0).sum()),
                float(lost.sum() / full_lengths.sum()),
                int(full_lengths.max()),
            )


def _cached_unknown_share(
    examples: ExampleSource, ids: np.ndarray, tokenizer: PreTrainedTokenizerBase
) -> float | None:
    """Compute `_unknown_share` once for the same examples.

    To look through all takes as long as they are large.
    """
    unknown = tokenizer.unk_token_id
    if unknown is None or any(getattr(tokenizer, role, None) == unknown for role in _OTHER_ROLES):
        return None  # as with GPT-2, which knows every byte
    key = digest(
        "unknown-1", examples.fingerprint(), str(unknown), str(sorted(tokenizer.all_special_ids))
    )
    return cached_result(key, lambda: _unknown_share(ids, tokenizer))


def _unknown_share(ids: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> float:
    unknown = tokenizer.unk_token_id
    looked_at = ids[:: max(1, len(ids) // _LOOKED_AT)]
    special = np.array(sorted({*tokenizer.all_special_ids} - {unknown}), dtype=ids.dtype)
    ordinary = len(looked_at) - int(np.isin(looked_at, special).sum())
    return int((looked_at == unknown).sum()) / ordinary if ordinary else 0.0


def _label_counts(task: Task, examples: object) -> dict[str, int]:
    """Count each label; empty if there are no classes."""
    classes = task.labels
    values = getattr(examples, "labels", None)
    if isinstance(examples, Examples) and task.unit == "examples":
        values = examples.scalars.get("labels")
    elif classes and values is None:
        values = _flat_array(examples, "labels")
    if values is None or not len(values) or not classes:
        return {}
    if values.ndim == 2:  # of any number of labels, 0 or 1 each
        return dict(zip(classes, map(int, values.sum(axis=0)), strict=True))
    origin = (
        None if task.unit == "examples" else getattr(examples, "origin", None)
    )  # else of every token
    counts = cached_result(
        key_of("labels-1", origin, str(len(classes))), lambda: _count_labels(values, len(classes))
    )
    return dict(zip(classes, counts, strict=True))


def _count_labels(labels: np.ndarray, classes: int) -> list[int]:
    total = np.zeros(classes, dtype=np.int64)
    for at in range(0, len(labels), _LABELS):
        piece = labels[at : at + _LABELS]
        total += np.bincount(piece[piece != IGNORED], minlength=classes)
    counts: list[int] = total.tolist()
    return counts
