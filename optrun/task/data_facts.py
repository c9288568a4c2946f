"""Facts of the data before the first step: sizes, truncation, unknown tokens, labels, overlap."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from optrun.base.errors import ConfigError
from optrun.data.cache import cached_result, digest, digest_if_known
from optrun.data.examples import Examples, Joined, Selected
from optrun.data.loader import ExampleSource
from optrun.data.mixture import MixedExamples, MixedSource
from optrun.data.source import Source
from optrun.task.base import Task
from optrun.task.evaluation import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_UNKNOWN = 0.5
"""Share of unknown tokens above which the data are refused."""
_SAMPLED_TOKENS = 1 << 24
"""Tokens in which unknown ones are counted, evenly spread over the split."""
_CHUNK = 1 << 22
"""Texts that are looked up at a time, labels that are counted at a time."""
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
    """Texts of a split that are longer than a limit and lose their end.

    Attributes:
        limit: The key of the limit with its value, such as `data.max_length=128`.
        rows: Number of truncated texts.
        share: Share of lost tokens in all tokens of the split before truncation.
        longest: Tokens of the longest text before truncation.
    """

    limit: str
    rows: int
    share: float
    longest: int


@dataclass(frozen=True)
class SplitFacts:
    """Facts of one split.

    Attributes:
        key: The configuration key of its files, such as `data.train`.
        examples: Number of examples.
        texts: Number of texts: as many as examples, or the documents that blocks are cut from.
        tokens: Number of tokens after truncation; None without text, and for a stream.
        cuts: One for each limit that truncates texts.
        unknown_share: Share of the tokenizer's unknown token in the tokens that are not special;
            None if the tokenizer has no unknown token, or the examples have no text.
        labels: Number of examples, or of tokens, by label; empty without classes.
        texts_in_train: Number of texts that are also in the training split; None if they were not
            counted.
    """

    key: str
    examples: int
    texts: int
    tokens: int | None
    cuts: list[CutFacts]
    unknown_share: float | None
    labels: dict[str, int]
    texts_in_train: int | None = None


@dataclass(frozen=True)
class DataFacts:
    """Facts of all splits.

    Attributes:
        train: The training split; for a mixture the sum of its sources.
        eval_sets: By the name of the evaluation set; the name of a single one is empty.
        sources: For a mixture the training examples of each source, by its name; else empty.
    """

    train: SplitFacts
    eval_sets: dict[str, SplitFacts]
    sources: dict[str, SplitFacts]


def collect_data_facts(task: Task, source: Source, tokenizer: PreTrainedTokenizerBase) -> DataFacts:
    """Collect the facts of a task's examples.

    The training split of a mixture has the labels of its sources added up; tokens and truncation
    are given for each source alone, and texts are not looked up in the training split.

    Args:
        task: The task with its examples.
        source: Has the configuration keys of the splits.
        tokenizer: Of the model; for a task on images the model's image preparation.

    Raises:
        ConfigError: More than half of the tokens of a split are unknown to the tokenizer.
    """
    sources: dict[str, SplitFacts] = {}
    evals: dict[str, SplitFacts] = {}
    # 1. A mixture: each source, then their sum.
    if isinstance(task.train, MixedExamples):
        assert isinstance(source, MixedSource)
        for name, examples in task.train.sources.items():
            key = source.sources[name].train.key
            sources[name] = _split_facts(task, examples, key, tokenizer, None)
        for name, examples in task.eval_sets.items():
            key = f"data.mixture (eval/{name})"
            evals[name] = _split_facts(task, examples, key, tokenizer, None)
        labels = {
            label: sum(split.labels.get(label, 0) for split in sources.values())
            for label in task.labels
        }
        count = len(task.train)
        train = SplitFacts("data.mixture", count, count, None, [], None, labels)
    # 2. One source.
    else:
        train = _split_facts(task, task.train, source.train.key, tokenizer, None)
        for name, examples in task.eval_sets.items():
            key = source.eval_sets[name].key
            evals[name] = _split_facts(task, examples, key, tokenizer, task.train)

    # 3. Refuse a tokenizer that does not know the texts.
    for split in (train, *sources.values(), *evals.values()):
        if split.unknown_share is not None and split.unknown_share > MAX_UNKNOWN:
            raise ConfigError(
                f"{split.key}: {100 * split.unknown_share:.0f} % of its tokens are"
                f" {tokenizer.unk_token}, unknown to the tokenizer ({len(tokenizer):,} entries):"
                " the texts would be lost. Name a tokenizer that knows them with model.tokenizer,"
                " or take a model that does."
            )
    return DataFacts(train, evals, sources)


def _split_facts(
    task: Task,
    examples: ExampleSource,
    key: str,
    tokenizer: PreTrainedTokenizerBase,
    trained: ExampleSource | None,
) -> SplitFacts:
    """Collect the facts of one split.

    Streams and images are not read for facts: their examples lack some of the attributes `hashes`
    (one for each text), `lengths` (tokens of each example) and `input_ids`. Facts that need a
    missing one are None or left out.

    Args:
        task: The task.
        examples: Examples of the split.
        key: The configuration key of the split.
        tokenizer: Of the model.
        trained: Training examples, in which the texts of the split are looked up; None: they are
            not looked up.
    """
    hashes = getattr(examples, "hashes", None)  # a number for each text, equal for equal texts
    lengths = getattr(examples, "lengths", None)

    # 1. Truncation and unknown tokens are those of the documents, if blocks are packed from them.
    documents = getattr(examples, "documents", examples)
    ids = _flat_array(documents, "input_ids")  # of all documents, joined; None for a stream
    unknown_share = None
    if ids is not None:
        unknown_share = _cached_unknown_share(examples, ids, tokenizer)

    # 2. The rest: without hashes an example counts as a text.
    return SplitFacts(
        key=key,
        examples=len(examples),
        texts=len(examples if hashes is None else hashes),
        tokens=None if lengths is None else int(lengths.sum()),
        cuts=list(_yield_cuts(task, documents)),
        unknown_share=unknown_share,
        labels=_label_counts(task, examples),
        texts_in_train=_count_in_both(examples, trained),
    )


def _count_in_both(examples: object, trained: object) -> int | None:
    """Count the texts of a split among the training texts, by their hashes; cached.

    None if the examples have no hashes, as those of a stream, or if `trained` is None.
    """
    hashes = getattr(examples, "hashes", None)
    trained_hashes = getattr(trained, "hashes", None)
    if hashes is None or trained_hashes is None:
        return None
    key = digest_if_known(
        "in-both-1", getattr(examples, "origin", None), getattr(trained, "origin", None)
    )
    return cached_result(key, lambda: _count_members(hashes, trained_hashes))


def _count_members(hashes: np.ndarray, others: np.ndarray) -> int:
    """Count the hashes among the others, `_CHUNK` of the others at a time."""
    is_member = np.zeros(len(hashes), dtype=bool)
    for begin in range(0, len(others), _CHUNK):
        is_member |= np.isin(hashes, others[begin : begin + _CHUNK], kind="sort")
    return int(is_member.sum())


def _flat_array(examples: object, name: str) -> np.ndarray | None:
    """Return an array, such as `input_ids`, of all examples joined, one after another.

    For pairs that of the chosen answers, and for texts with targets that of the texts. Examples
    that a selection left out are included. None if the examples have no such array, as those of a
    stream.

    Example: texts with the ids [5, 6], [7] and [8, 9, 4] give [5, 6, 7, 8, 9, 4].
    """
    while isinstance(examples, Selected):  # the selected ones of selected ones
        examples = examples.examples
    if isinstance(examples, Joined):
        examples = examples.first
    if not isinstance(examples, Examples):
        return None
    return examples.ragged.get(name)


def _yield_cuts(task: Task, examples: Any) -> Iterator[CutFacts]:
    """Yield facts of truncation, one for each limit with truncated examples.

    `task.limits` has a limit for the examples; for pairs one for the chosen and one for the
    rejected answers, for texts with targets one for each.
    """
    sides = [examples.first, examples.second] if isinstance(examples, Joined) else [examples]
    for side, limit in zip(sides, task.limits, strict=False):
        lost = getattr(side, "lost", None)  # the tokens cut off each example
        if lost is None or not lost.any():
            continue
        full_lengths = side.lengths + lost
        yield CutFacts(
            limit,
            rows=int((lost > 0).sum()),
            share=float(lost.sum() / full_lengths.sum()),
            longest=int(full_lengths.max()),
        )


def _cached_unknown_share(
    examples: ExampleSource, ids: np.ndarray, tokenizer: PreTrainedTokenizerBase
) -> float | None:
    """Return the share of unknown tokens, as `_unknown_share`; cached.

    None if the tokenizer has no unknown token, or uses it as another special token, too. GPT-2's
    tokenizer does so, and knows every byte.
    """
    unknown = tokenizer.unk_token_id
    if unknown is None or any(getattr(tokenizer, role, None) == unknown for role in _OTHER_ROLES):
        return None
    key = digest(
        "unknown-1", examples.fingerprint(), str(unknown), str(sorted(tokenizer.all_special_ids))
    )
    return cached_result(key, lambda: _unknown_share(ids, tokenizer))


def _unknown_share(ids: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> float:
    """Compute the share of the unknown token among the ordinary ids, in a sample of the ids.

    All special tokens but the unknown one are left out. 0 if the sample has no ordinary id, or if
    the tokenizer has no unknown token: `unk_token_id` is None then, which equals no id.
    """
    unknown = tokenizer.unk_token_id
    sample = ids[:: max(1, len(ids) // _SAMPLED_TOKENS)]
    special = np.array(sorted({*tokenizer.all_special_ids} - {unknown}), dtype=ids.dtype)
    ordinary = len(sample) - int(np.isin(sample, special).sum())
    if not ordinary:
        return 0.0
    return int((sample == unknown).sum()) / ordinary


def _label_counts(task: Task, examples: object) -> dict[str, int]:
    """Count the examples, or labelled tokens, of each class; empty without classes or labels.

    The counts of labelled tokens are cached.
    """
    classes = task.labels
    labels = _labels_of(task, examples)
    if labels is None or not len(labels) or not classes:
        return {}
    if labels.ndim == 2:  # sets of labels: 0 or 1 for each class, shape (examples, classes)
        counts = labels.sum(axis=0).astype(int).tolist()
    elif task.unit == "examples":
        counts = _count_labels(labels, len(classes))
    else:  # those of tokens may be very many
        key = digest_if_known("labels-1", getattr(examples, "origin", None), str(len(classes)))
        counts = cached_result(key, lambda: _count_labels(labels, len(classes)))
    return dict(zip(classes, counts, strict=True))


def _labels_of(task: Task, examples: object) -> np.ndarray | None:
    """Return the labels: one number or set for each example, or one number for each token.

    None if the examples have none.
    """
    if isinstance(examples, Examples) and task.unit == "examples":
        return examples.scalars.get("labels")
    labels: np.ndarray | None = getattr(examples, "labels", None)  # of streams and images
    return _flat_array(examples, "labels") if labels is None else labels


def _count_labels(labels: np.ndarray, classes: int) -> list[int]:
    """Count how often each class number occurs, without `IGNORED`.

    `_CHUNK` labels are in memory at a time.
    """
    totals = np.zeros(classes, dtype=np.int64)
    for begin in range(0, len(labels), _CHUNK):
        chunk = labels[begin : begin + _CHUNK]
        totals += np.bincount(chunk[chunk != IGNORED], minlength=classes)
    return totals.tolist()
