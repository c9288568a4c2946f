"""A data configuration to its rows."""

from __future__ import annotations

from optrun import registry
from optrun.config.kind import kind_of
from optrun.config.schema.data import SCHEMAS, DataConfig, eval_set_names
from optrun.data.source import Source, Split, cut
from optrun.errors import ConfigError


def load_source(config: DataConfig, *, seed: int, documents: bool) -> Source:
    """Read the rows, and cut evaluation rows from them where the source has none.

    The reader of a choice is the function of its row: `reader(config, *, documents) -> Source`.

    Args:
        config: The data choice.
        seed: Cuts an evaluation split where there is none.
        documents: True where rows will be joined: a text file is then one row, else each of its lines is.

    Raises:
        ConfigError: No such file or dataset, an empty one, a format that cannot be read.
    """
    row = registry.choices("data")[kind_of("data", SCHEMAS, config)]
    source: Source = row.load()(config, documents=documents)
    if not isinstance(source, Source) or not len(source.train.rows):
        got = "no training rows" if isinstance(source, Source) else f"{type(source).__name__}, no data.source.Source"
        raise ConfigError(f"data={config.name}: its reader ({row.origin or 'optrun'}) returned {got}.")
    if source.eval_sets:
        if list(source.eval_sets) != [""]:
            eval_set_names(source.eval_sets)
        for split in source.eval_sets.values():
            if not len(split.rows) and config.eval_fraction:
                raise ConfigError(f"data={config.name}: {split.key} has no rows to evaluate on.")
        return source
    train = source.train
    if config.eval_fraction == 0:
        source.eval_sets = {"": Split(train.rows.select([]), f"{train.key} (held back)")}
        source.notes.append("data.eval_fraction=0: trained on all rows, evaluated on none")
        return source
    source.train, held, note = cut(train, config.eval_fraction, seed=seed, documents=documents)
    source.eval_sets, source.cut_from_train = {"": held}, True
    source.notes.append(note)
    return source
