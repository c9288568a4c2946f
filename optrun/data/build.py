"""Read the rows of a data configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from optrun.base.errors import ConfigError
from optrun.config import registry
from optrun.config.kind import kind_of
from optrun.config.schema.data import SCHEMAS, DataConfig, MixtureConfig, eval_set_names
from optrun.data.mixture import MixedSource
from optrun.data.source import Source, Split, cut


def load_source(config: DataConfig, *, seed: int, documents: bool) -> Source:
    """Read the rows, and hold back evaluation rows if the source has none.

    A source with evaluation rows keeps them. Rows that are held back are the only evaluation set,
    whose name is empty; with `data.eval_fraction=0` it has no rows. A note says so.

    Args:
        config: The data choice.
        seed: Picks the rows that are held back.
        documents: The task joins rows: a text file is one row, not a row for each of its lines.

    Raises:
        ConfigError: A file or dataset is missing or empty, or its format cannot be read; the reader
            of a plugin returns no `Source`; an evaluation set has no rows.
    """
    if isinstance(config, MixtureConfig):
        return _load_mixture(config, seed=seed, documents=documents)
    source = _call_reader(config, documents=documents)
    # 1. The reader brought evaluation rows.
    if source.eval_sets:
        _check_eval_sets(config, source)
        return source
    # 2. None are wanted.
    train = source.train
    if config.eval_fraction == 0:
        no_rows = train.rows.select([])
        source.eval_sets = {"": Split(no_rows, f"{train.key} (held out)")}
        source.notes.append("data.eval_fraction=0: trained on all rows, evaluated on none")
        return source
    # 3. Hold some back.
    #    `note` says how many, and which.
    source.train, held_out, note = cut(train, config.eval_fraction, seed=seed, documents=documents)
    source.eval_sets = {"": held_out}
    source.cut_from_train = True
    source.notes.append(note)
    return source


def _call_reader(config: DataConfig, *, documents: bool) -> Source:
    """Read the rows with the function that optrun or a plugin has registered for the choice.

    Raises:
        ConfigError: The reader returns no `Source`, or one without training rows.
    """
    row = registry.choices("data")[kind_of("data", SCHEMAS, config)]  # with the reader's name
    read: Callable[..., object] = row.load()
    source = read(config, documents=documents)
    if not isinstance(source, Source) or not len(source.train.rows):
        got = "no training rows"
        if not isinstance(source, Source):
            got = f"{type(source).__name__}, no data.source.Source"
        raise ConfigError(
            f"data={config.name}: its reader ({row.origin or 'optrun'}) returned {got}."
        )
    return source


def _check_eval_sets(config: DataConfig, source: Source) -> None:
    """Check the names and rows of a reader's evaluation sets.

    A single set may be unnamed. Sets may be empty if `data.eval_fraction=0`.

    Raises:
        ConfigError: A name that cannot be used in metrics, or a set without rows.
    """
    is_single_unnamed = list(source.eval_sets) == [""]
    if not is_single_unnamed:
        eval_set_names(source.eval_sets)  # raises for a wrong name
    for split in source.eval_sets.values():
        if config.eval_fraction and not len(split.rows):
            raise ConfigError(f"data={config.name}: {split.key} has no rows to evaluate on.")


def _load_mixture(config: MixtureConfig, *, seed: int, documents: bool) -> MixedSource:
    """Read each source of a mixture as it would be read alone.

    Keys of splits become `data.mixture.NAME.KEY`: `data.train` of a source `code` is then
    `data.mixture.code.train`. Notes begin with the name of their source.

    Raises:
        ConfigError: A source cannot be read; the message names it.
    """
    sources: dict[str, Source] = {}
    for name, source_config in config.source_configs().items():
        with name_source_in_errors(name):
            sources[name] = load_source(source_config, seed=seed, documents=documents)
        for split in sources[name].splits:
            split.key = f"data.mixture.{name}.{split.key.removeprefix('data.')}"
    first = next(iter(sources.values()))  # a mixture has at least one source
    notes = []
    for name, source in sources.items():
        notes += [f"{name}: {note}" for note in source.notes]
    return MixedSource(
        first.train,
        first.eval_sets,
        first.columns,
        cut_from_train=any(source.cut_from_train for source in sources.values()),
        notes=notes,
        sources=sources,
    )


@contextlib.contextmanager
def name_source_in_errors(name: str) -> Iterator[None]:
    """Name the source of a mixture in a ConfigError about it."""
    try:
        yield
    except ConfigError as error:
        message = str(error)
        key = f"data.mixture.{name}"
        if key not in message:
            message = f"{key}: {message}"
        raise ConfigError(message) from error
