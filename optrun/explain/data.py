"""Sample the data of a configuration, in little time."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from optrun.base.errors import ConfigError
from optrun.config.schema.data import HubConfig, PathsConfig, StdlibConfig, eval_key
from optrun.config.schema.model import FromConfigConfig
from optrun.config.schema.run import RunConfig
from optrun.data.build import load_source
from optrun.data.images import need_pillow
from optrun.data.randomness import generator
from optrun.data.source import Source, Split
from optrun.data.token_blocks import TokenBlocks
from optrun.model.build import ModelSpec
from optrun.model.images import load_image_preparation
from optrun.model.tokenizer import load_tokenizer, train_tokenizer
from optrun.task import Task, build_task
from optrun.task.build import task_class, vocabulary
from optrun.task.data_facts import DataFacts, data_facts

MOST_BYTES = 256 << 20
"""Files larger than this together are read by a run alone."""
MOST_ROWS = 2_000
MOST_CHARACTERS = 2_000_000
"""What is looked at of a split; all of it where there is less."""


@dataclass(frozen=True)
class Sampled:
    """Facts from a sample of the data.

    Attributes:
        train_rows: Number of training rows.
        eval_rows: Number of evaluation rows in all sets; held out from the training rows if none
            are named.
        looked_at: Number of sampled training and evaluation rows.
        examples: Training examples of an epoch (a row may give several or none); None: only the run
            can count them.
        facts: Facts of the sampled rows; None for images, and if a single text is too long.
        example: A training example as text; None if it is not text.
        spec: Requirements of data and tokenizer on the model; None if nothing was sampled.
    """

    train_rows: int
    eval_rows: int
    looked_at: tuple[int, int]
    examples: int | None
    facts: DataFacts | None
    example: str | None = None
    spec: ModelSpec | None = field(default=None, repr=False)


def look_at(config: RunConfig, notes: list[str]) -> Sampled | None:
    """Load a sample of the configured data, and collect facts of it.

    Args:
        config: The whole configuration.
        notes: Changed in place: decisions, or the reason why nothing was sampled.

    Returns:
        None if no data are named, or if they are on the hub or large.

    Raises:
        ConfigError: Training would refuse the data.
    """
    reason = _left_to_the_run(config)
    if reason is None or reason:
        notes += [reason] if reason else []
        return None
    source = load_source(
        config.data,
        seed=config.seed,
        documents=config.task.joins_documents,
    )
    notes += source.notes
    sizes = _sizes(source)
    most = config.data.max_train_examples or sys.maxsize
    rows = None if getattr(config.task, "packing", False) else min(sizes[0], most)
    unread = Sampled(*sizes, looked_at=(0, 0), examples=rows, facts=None)
    if config.task.PROCESSOR != "AutoTokenizer":
        need_pillow()
        notes_of_loading = len(source.notes)
        task = build_task(
            config.task, config.data, source, load_image_preparation(config.model), seed=config.seed
        )
        notes += source.notes[notes_of_loading:]
        return replace(unread, spec=_spec(config, task, None))
    # A label that the sample has in its evaluation rows alone is one that all of the training rows
    # may have.
    eval_sets = {name: _sample_rows(split) for name, split in source.eval_sets.items()}
    sample = replace(
        source, train=_sample_rows(source.train), eval_sets=eval_sets, cut_from_train=True, notes=[]
    )
    looked_at = _sizes(sample)
    if any(size and not count for size, count in zip(sizes, looked_at, strict=True)):
        return unread  # a single text of more characters than that
    is_complete = looked_at == sizes
    looked_into = source if is_complete else sample
    notes_of_loading = len(looked_into.notes)
    try:
        tokenizer, task = _read(config, looked_into)
        facts = data_facts(task, looked_into, tokenizer)
    except ConfigError as error:
        if is_complete:
            raise
        notes.append(f"In a sample of the data: {error}")
        return unread
    notes += looked_into.notes[notes_of_loading:]
    spec = _spec(config, task, tokenizer)
    examples: int | None = len(task.train)
    if not is_complete:
        read, examples = len(task.train) / min(looked_at[0], most), rows
        if rows is not None and read != 1:
            examples = round(rows * read)
            notes.append(
                f"The steps are those of about {examples:,} examples, as a sample of the rows gives"
                " them."
            )
        if config.task.COUNTED_FROM_DATA:
            notes.append(
                f"The number of {config.task.COUNTED_FROM_DATA} comes from a sample of the data."
            )
        if isinstance(config.model, FromConfigConfig) and config.model.tokenizer is None:
            spec = replace(
                spec, vocab_size=config.model.vocab_size
            )  # of all rows it may have that many
        unknown = {name: replace(split, known=None) for name, split in facts.eval_sets.items()}
        facts = replace(facts, eval_sets=unknown)
    return Sampled(*sizes, looked_at, examples, facts, task.shown(tokenizer), spec)


def _left_to_the_run(config: RunConfig) -> str | None:
    """Explain why the data are not sampled; None if none are named.

    Empty if they are sampled.
    """
    data = config.data
    if isinstance(data, HubConfig):
        folder = Path(data.path).expanduser()
        if not folder.is_dir():
            return "Data of the hub are looked at when a run begins, not here."
        files = [path for path in folder.rglob("*") if path.is_file()]
    elif isinstance(data, PathsConfig):
        from optrun.data.files import resolve

        files = resolve("data.train", data.train)
        for name, paths in data.eval_files():
            files += resolve(eval_key(name), paths)
    else:
        if isinstance(data, StdlibConfig):
            return None
        return ""
    size = sum(path.stat().st_size for path in files)
    needed = config.training.max_steps is None and not getattr(config.task, "packing", False)
    if needed or size <= MOST_BYTES:
        return ""
    return f"The data are {size >> 20:,} MiB, and looked at when a run begins, not here."


def _sizes(source: Source) -> tuple[int, int]:
    """Count the rows to train and to evaluate on."""
    return len(source.train.rows), sum(len(split.rows) for split in source.eval_sets.values())


def _sample_rows(split: Split) -> Split:
    """Sample at most `MOST_ROWS` rows and `MOST_CHARACTERS` characters, in their order.

    Token blocks are not sampled: reading them costs nothing.
    """
    if isinstance(split.rows, TokenBlocks):
        return split
    count = len(split.rows)
    order = generator(0, "explain").permutation(count)[:MOST_ROWS]
    indices: list[int] = []
    characters = 0
    for index, row in zip(order, split.rows.select(order), strict=True):
        characters += sum(map(_characters, row.values()))
        if characters > MOST_CHARACTERS:
            break
        indices.append(index)
    if len(indices) == count:
        return split
    return split.take(np.sort(np.array(indices, dtype=np.int64)))


def _characters(value: object) -> int:
    if isinstance(value, list):
        return sum(map(_characters, value))
    if isinstance(value, str):
        return len(value)
    return 0


def _read(config: RunConfig, source: Source) -> tuple[Any, Task]:
    """Return the tokenizer, and the task with its rows read."""
    kind = task_class(config.task)
    tokenizer = load_tokenizer(config.model, words=kind.reads_words)
    if tokenizer is None:
        assert isinstance(config.model, FromConfigConfig)
        size = config.model.vocab_size
        tokenizer = train_tokenizer(
            lambda: vocabulary(config.task, source), vocab_size=size, kind=kind.text_kind
        )
    return tokenizer, build_task(config.task, config.data, source, tokenizer, seed=config.seed)


def _spec(config: RunConfig, task: Task, tokenizer: Any) -> ModelSpec:
    needs = task.needs()
    return ModelSpec.of_tokenizer(config.task.AUTO_CLASS, needs.config, needs.max_length, tokenizer)
