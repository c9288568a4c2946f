"""`datasets.load_dataset`: a hub name, or a local dataset folder."""

from __future__ import annotations

from pathlib import Path

from optrun.config.data import HubConfig
from optrun.data.source import Split
from optrun.errors import ConfigError, did_you_mean

USUAL_EVAL_SPLITS = ("validation", "dev", "eval", "test")


def read_hub(config: HubConfig) -> tuple[Split, Split | None]:
    """Load a dataset; no code that comes with it is run.

    Returns:
        Training rows, and evaluation rows where the dataset has such a split or one is named.

    Raises:
        ConfigError: An unknown dataset, subset or split.
    """
    import datasets

    try:
        loaded = datasets.load_dataset(config.path, name=config.subset, revision=config.revision)
    except Exception as error:  # the hub client, the reader and the network each have errors of their own
        local = Path(config.path).expanduser()
        hint = "" if local.exists() else " It is no local folder either."
        raise ConfigError(
            f"data.path={config.path}: cannot be loaded: {type(error).__name__}: {str(error).splitlines()[0]}{hint}"
        ) from error
    splits = list(loaded)
    if config.train_split not in splits:
        raise ConfigError(f"data.train_split={config.train_split}: no such split. {did_you_mean(config.train_split, splits)}")
    name = config.eval_split
    if name is not None and name not in splits:
        raise ConfigError(f"data.eval_split={name}: no such split. {did_you_mean(name, splits)}")
    if name is None:
        name = next((usual for usual in USUAL_EVAL_SPLITS if usual in splits and usual != config.train_split), None)
    for split in (config.train_split, name):
        if split is not None and len(loaded[split]) == 0:
            raise ConfigError(f"data.path={config.path}: split {split} has no rows.")
    train = Split(loaded[config.train_split], f"split {config.train_split}")
    return train, None if name is None else Split(loaded[name], f"split {name}")
