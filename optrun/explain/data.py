"""Read a sample of the data of a configuration, in little time."""

import sys
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from optrun.base.errors import ConfigError
from optrun.base.reading import expand_home
from optrun.config.schema.data import HubConfig, PathsConfig, StdlibConfig, eval_key
from optrun.config.schema.model import FromConfigConfig
from optrun.config.schema.run import RunConfig
from optrun.data.build import load_source
from optrun.data.images import need_pillow
from optrun.data.mixture import MixedSource
from optrun.data.randomness import generator
from optrun.data.source import Source, Split
from optrun.data.token_blocks import TokenBlocks
from optrun.model.build import ModelSpec
from optrun.model.images import load_image_preparation
from optrun.model.tokenizer import load_tokenizer, train_tokenizer
from optrun.task import Task, build_task
from optrun.task.build import task_class, vocabulary
from optrun.task.data_facts import DataFacts, collect_data_facts

MOST_BYTES = 256 << 20
"""Files with more bytes in all are not sampled, unless their rows decide the number of steps."""
MOST_ROWS = 2_000
MOST_CHARACTERS = 2_000_000
"""Limits of the sample of a split."""


@dataclass(frozen=True)
class Sampled:
    """Facts of the data, most of them from a sample of the rows.

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


def sample_data(config: RunConfig, notes: list[str]) -> Sampled | None:
    """Load a sample of the configured data, and collect facts of it.

    Args:
        config: The whole configuration.
        notes: Changed in place: decisions, or the reason why nothing was sampled.

    Returns:
        None if no data are named, or if they are on the hub or large. Facts and spec are missing if
        a text is too long for a sample, or if the task refuses the sample; a note says why.

    Raises:
        ConfigError: Training would refuse the data.
    """
    if isinstance(config.data, StdlibConfig):
        return None
    reason = _reason_not_to_sample(config)
    if reason:
        notes.append(reason)
        return None

    # 1. Count the rows, which is all that can be said without reading texts.
    source = load_source(
        config.data,
        seed=config.seed,
        documents=config.task.joins_documents,
    )
    notes += source.notes
    source = replace(source, notes=[])  # the task adds its notes to this list
    sizes = _count_rows(source)
    most = config.data.max_train_examples or sys.maxsize
    rows = None if getattr(config.task, "packing", False) else min(sizes[0], most)
    unread = Sampled(*sizes, looked_at=(0, 0), examples=rows, facts=None)

    # 2. Of images only the labels are read; no image is decoded.
    if config.task.PROCESSOR != "AutoTokenizer":
        images = _build_image_task(config, source)
        notes += source.notes
        spec = _spec_of_task(config, images, None)
        return replace(unread, examples=len(images.train), spec=spec)

    # 3. Draw the sample.
    drawn = _draw_sample(source)
    looked_at = _count_rows(drawn)
    if any(size and not count for size, count in zip(sizes, looked_at, strict=True)):
        return unread  # the first drawn text is longer than the whole sample may be
    is_complete = looked_at == sizes
    sample = source if is_complete else drawn

    # 4. Build tokenizer and task on the sample. A sample may be refused where all rows are not.
    try:
        tokenizer, task = _load_tokenizer_and_task(config, sample)
        facts = collect_data_facts(task, sample, tokenizer)
    except ConfigError as error:
        if is_complete:
            raise
        notes.append(f"In {sum(looked_at):,} rows drawn at random: {error}")
        return unread
    notes += [*sample.notes, *task.notes]
    spec = _spec_of_task(config, task, tokenizer)
    examples: int | None = len(task.train)

    # 5. A sample gives estimates in place of counts.
    if not is_complete:
        examples_per_row = len(task.train) / min(looked_at[0], most)
        examples = _estimate_examples(rows, examples_per_row, notes)
        if config.task.COUNTED_FROM_DATA:
            notes.append(
                f"The number of {config.task.COUNTED_FROM_DATA} comes from {looked_at[0]:,} rows,"
                " drawn at random."
            )
        if isinstance(config.model, FromConfigConfig) and config.model.tokenizer is None:
            # A tokenizer that is trained on all rows may have as many entries as configured.
            spec = replace(spec, vocab_size=config.model.vocab_size)
        # A sample does not show which evaluation texts are also training texts.
        facts_of_sets = {
            name: replace(split, texts_in_train=None) for name, split in facts.eval_sets.items()
        }
        facts = replace(facts, eval_sets=facts_of_sets)
    return Sampled(*sizes, looked_at, examples, facts, task.shown(tokenizer), spec)


def _estimate_examples(rows: int | None, examples_per_row: float, notes: list[str]) -> int | None:
    """Estimate the examples of all rows, and add a note unless each sampled row gives one.

    rows: None if the task packs examples, so that their number is not estimated; returns None then.
    """
    if rows is None or examples_per_row == 1:
        return rows  # unknown, or known without an estimate
    examples = round(rows * examples_per_row)
    notes.append(
        f"The steps are those of about {examples:,} examples, estimated from a sample of the rows."
    )
    return examples


def _build_image_task(config: RunConfig, source: Source) -> Task:
    """Build the task on images; adds notes to `source.notes`.

    Raises:
        ConfigError: Pillow is not installed, or the task refuses the rows.
    """
    need_pillow()
    preparation = load_image_preparation(config.model)
    return build_task(config.task, config.data, source, preparation, seed=config.seed)


def _reason_not_to_sample(config: RunConfig) -> str:
    """Explain why the data are not sampled: on the hub, or too large; empty if they are sampled.

    Local files of more than `MOST_BYTES` are sampled all the same if their rows decide the number
    of steps: without `training.max_steps`, if a row is an example.
    """
    data = config.data
    if isinstance(data, HubConfig):
        folder = expand_home(data.path)
        if not folder.is_dir():
            return "Data on the hub are read when a run begins, not here."
        files = [path for path in folder.rglob("*") if path.is_file()]
    elif isinstance(data, PathsConfig):
        from optrun.data.files import resolve

        files = resolve("data.train", data.train)
        for name, paths in data.eval_files():
            files += resolve(eval_key(name), paths)
    else:
        return ""
    size = sum(path.stat().st_size for path in files)
    # With packing the number of steps follows from the tokens, which a sample does not tell.
    packs_rows = getattr(config.task, "packing", False)
    rows_decide_steps = config.training.max_steps is None and not packs_rows
    if rows_decide_steps or size <= MOST_BYTES:
        return ""
    return f"The data have {size >> 20:,} MiB, and are read when a run begins, not here."


def _count_rows(source: Source) -> tuple[int, int]:
    """Count training and evaluation rows, in all sets and in all sources of a mixture."""
    parts = source.sources.values() if isinstance(source, MixedSource) else [source]
    train_rows = 0
    eval_rows = 0
    for part in parts:
        train_rows += len(part.train.rows)
        eval_rows += sum(len(split.rows) for split in part.eval_sets.values())
    return train_rows, eval_rows


def _draw_sample(source: Source) -> Source:
    """Draw a sample of each split, without notes; see `_sample_rows`.

    A mixture is returned itself: the sizes of all its sources decide how they are mixed.
    """
    if isinstance(source, MixedSource):
        return source
    return replace(
        source,
        train=_sample_rows(source.train),
        eval_sets={name: _sample_rows(split) for name, split in source.eval_sets.items()},
        # Allows labels that only evaluation rows have: training rows outside the sample may have
        # them, too.
        cut_from_train=True,
        notes=[],
    )


def _sample_rows(split: Split) -> Split:
    """Draw at most `MOST_ROWS` random rows with `MOST_CHARACTERS` characters, in their order.

    Every call draws the same rows. A split within the limits is returned whole, and so are token
    blocks, whose reading costs nothing. The result is empty if the first drawn row is too long.
    """
    if isinstance(split.rows, TokenBlocks):
        return split
    count = len(split.rows)
    # Indices of rows; at most `MOST_ROWS` of them are read.
    random_order = generator(0, "explain").permutation(count)[:MOST_ROWS]
    # Take rows in random order until their characters are too many; the row that is too much is
    # left out.
    indices: list[int] = []
    characters = 0
    for index, row in zip(random_order, split.rows.select(random_order), strict=True):
        characters += sum(map(_count_characters, row.values()))
        if characters > MOST_CHARACTERS:
            break
        indices.append(index)
    if len(indices) == count:
        return split
    # Without a dtype an empty array would be one of floats.
    return split.take(np.sort(np.array(indices, dtype=np.int64)))


def _count_characters(value: object) -> int:
    """Count the characters of a text, or of all texts in nested lists; 0 for anything else."""
    if isinstance(value, list):
        return sum(map(_count_characters, value))
    if isinstance(value, str):
        return len(value)
    return 0


def _load_tokenizer_and_task(config: RunConfig, source: Source) -> tuple[Any, Task]:
    """Load the tokenizer, or train one on these rows, and build the task over them."""
    kind = task_class(config.task)
    tokenizer = load_tokenizer(config.model, words=kind.reads_words)
    if tokenizer is None:  # the model is made from scratch, without a given tokenizer
        assert isinstance(config.model, FromConfigConfig)
        size = config.model.vocab_size
        tokenizer = train_tokenizer(
            lambda: vocabulary(config.task, source), vocab_size=size, kind=kind.text_kind
        )
    return tokenizer, build_task(config.task, config.data, source, tokenizer, seed=config.seed)


def _spec_of_task(config: RunConfig, task: Task, tokenizer: Any) -> ModelSpec:
    """Collect the requirements of task and data on the model; tokenizer is None for images."""
    needs = task.needs()
    return ModelSpec.of_tokenizer(config.task.AUTO_CLASS, needs.config, needs.max_length, tokenizer)
