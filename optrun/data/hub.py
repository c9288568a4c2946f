"""`datasets.load_dataset`: a hub name, or a local dataset folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from optrun.base.errors import ConfigError, OptrunError, did_you_mean
from optrun.config.schema.data import HubConfig
from optrun.data import hub_access as hub
from optrun.data.cache import digest, digest_of, folder_for
from optrun.data.hub_stream import load_stream
from optrun.data.reader import kept_rows, quiet, reason
from optrun.data.source import Source, Split

USUAL_EVAL_SPLITS = ("validation", "dev", "eval", "test")


def load_hub(config: HubConfig, *, documents: bool) -> Source:  # noqa: ARG001
    """Load a dataset; no code that comes with it is run.

    Returns:
        Training rows, and evaluation rows where the dataset has such a split or one is named.

    Raises:
        ConfigError: An unknown dataset, subset or split; a split without rows.
    """
    if config.streaming:
        return load_stream(config, partial(_picked, config))
    loaded = _load(config)
    train_split, name = _picked(config, list(loaded))
    for split in (train_split, name):
        if split is not None and len(loaded[split]) == 0:
            raise ConfigError(f"data.path={config.path}: split {split} has no rows.")
    train = Split(loaded[train_split], f"split {train_split}")
    held = {} if name is None else {"": Split(loaded[name], f"split {name}")}
    return Source(train, held, config)


def _picked(config: HubConfig, splits: list[str]) -> tuple[str, str | None]:
    """Pick the names of the training and of the evaluation split; None: there is no such."""
    if config.train_split not in splits:
        raise ConfigError(
            f"data.train_split={config.train_split}: no such split in {config.path}. "
            f"{did_you_mean(config.train_split, splits)}"
        )
    name = config.eval_split
    if name is not None and name not in splits:
        raise ConfigError(f"data.eval_split={name}: no such split in {config.path}. {did_you_mean(name, splits)}")
    if name is None:
        name = next((usual for usual in USUAL_EVAL_SPLITS if usual in splits and usual != config.train_split), None)
    return config.train_split, name


def _load(config: HubConfig) -> Any:
    import datasets

    local = Path(config.path).expanduser()
    missing = hub.missing(config.path)
    if missing is not None:
        datasets.config.HF_HUB_OFFLINE = True  # it took this over from the hub's client when it was imported
    if local.is_file():
        raise ConfigError(
            f"data.path={config.path}: this is a file. Give its folder, or use data=files data.train={config.path}."
        )
    try:
        with quiet():
            if (local / "dataset_dict.json").is_file() or (local / "state.json").is_file():
                return _from_disk(config, local)
            if not local.is_dir():
                return datasets.load_dataset(config.path, name=config.subset, revision=config.revision)

            # A folder's files are part of the address: `datasets` alone would trust their times.
            key = digest(str(local.resolve()), str(config.subset), str(config.revision), _listing(local))

            def read(cache_dir: str) -> Any:
                # Rows may name images that were taken out of an archive: these stay.
                extracted = datasets.DownloadConfig(cache_dir=str(folder_for("extracted", key)))
                # resolved: `datasets` makes a name of the folder's, and "." has none
                return datasets.load_dataset(
                    str(local.resolve()),
                    name=config.subset,
                    revision=config.revision,
                    cache_dir=cache_dir,
                    download_config=extracted,
                    keep_in_memory=False,
                )

            return kept_rows("folders", key, read)
    except OptrunError:
        raise
    except Exception as error:  # the hub client, the reader and the network each have errors of their own
        there = f"cannot be loaded: {reason(error)}"
        why = there if local.exists() else hub.why_not(config.path, missing, error)
        key = f"data.path={config.path}" + (f" data.subset={config.subset}" if config.subset else "")
        raise ConfigError(f"{key}: {why}") from error


def _from_disk(config: HubConfig, folder: Path) -> Any:
    """Load what `save_to_disk` wrote: one split, or several."""
    import datasets

    if config.subset is not None:
        raise ConfigError(
            f"data.subset={config.subset}: a folder written by save_to_disk has no subsets; leave it null."
        )
    loaded = datasets.load_from_disk(str(folder))
    return loaded if isinstance(loaded, datasets.DatasetDict) else {config.train_split: loaded}


def _listing(folder: Path) -> str:
    """Digest the names, sizes and times of a folder's files."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return digest_of(f"{path.relative_to(folder)} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files)
