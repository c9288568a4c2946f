"""A data configuration to its rows."""

from __future__ import annotations

from optrun.config.schema.data import DataConfig, FilesConfig, HubConfig, StdlibConfig
from optrun.data.source import Source, Split, cut
from optrun.errors import ConfigError


def load_source(config: DataConfig, *, seed: int, documents: bool) -> Source:
    """Read the rows.

    Args:
        config: The data choice.
        seed: Cuts an evaluation split where there is none.
        documents: True where rows will be joined: a text file is then one row, else each of its lines is.

    Raises:
        ConfigError: No such file or dataset, an empty one, a format that cannot be read.
    """
    if isinstance(config, StdlibConfig):
        from optrun.data.stdlib import load_stdlib

        return load_stdlib(config)
    if isinstance(config, FilesConfig):
        from optrun.data.files import read_files

        train = Split(read_files("data.train", config.train, documents=documents), "data.train")
        held = None
        if config.eval is not None:
            held = Split(read_files("data.eval", config.eval, documents=documents), "data.eval")
    elif isinstance(config, HubConfig):
        from optrun.data.hub import read_hub

        train, held = read_hub(config)
    else:
        raise ConfigError(f"data={config.name}: no reader for this choice.")
    if held is not None:
        notes = _common_files(config) if isinstance(config, FilesConfig) else []
        return Source(train=train, eval=held, columns=config, notes=notes)
    if config.eval_fraction == 0:
        nothing = Split(train.rows.select([]), f"{train.key} (held back)")
        note = "data.eval_fraction=0: trained on all rows, evaluated on none"
        return Source(train=train, eval=nothing, columns=config, notes=[note])
    train, held, note = cut(train, config.eval_fraction, seed=seed, documents=documents)
    return Source(train=train, eval=held, columns=config, cut_from_train=True, notes=[note])


def _common_files(config: FilesConfig) -> list[str]:
    from optrun.data.files import resolve

    train = {path.resolve() for path in resolve("data.train", config.train)}
    both = [str(path) for path in resolve("data.eval", config.eval) if path.resolve() in train]
    return [f"{', '.join(both)}: in data.train and in data.eval; evaluation sees training rows"] if both else []
