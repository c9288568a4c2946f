"""Relative paths in the configuration of a run mean files beside the folder that it was started from."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from optrun import registry
from optrun.bounded_yaml import yaml_mapping

PATHS = ("data.train", "data.eval", "data.path", "model.path", "model.tokenizer")
"""Keys that may hold a path, or a glob, or a list of them; those of a registered data source come to them."""


def original_cwd(hydra_folder: Path) -> Path | None:
    """The folder that a run was started from; None where it is not known.

    Args:
        hydra_folder: `.hydra` of its run directory.
    """
    try:
        folder = yaml_mapping(hydra_folder / "hydra.yaml")["hydra"]["runtime"]["cwd"]
    except (OSError, ValueError, KeyError, TypeError):  # missing, or not written by Hydra
        return None
    return Path(folder) if isinstance(folder, str) and folder and "${" not in folder else None


def rebase_paths(cfg: DictConfig, folder: Path | None) -> None:
    """Put `folder` before the relative paths that lead somewhere from there.

    A name that leads nowhere from there stays as it is: a hub name, or a file that moved with the run.

    Args:
        cfg: A run's configuration; changed in place.
        folder: Where the run was started from; None: nothing is changed.
    """
    if folder is None or not folder.is_dir() or folder.resolve() == Path.cwd().resolve():
        return
    for key in dict.fromkeys((*PATHS, *_paths_of(OmegaConf.select(cfg, "data.name")))):
        value = OmegaConf.select(cfg, key)
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value)
        if value is not None:
            OmegaConf.update(cfg, key, _rebased(value, folder), merge=False)


def _rebased(value: Any, folder: Path) -> Any:
    """A path, or a list or mapping of them, seen from a folder."""
    if isinstance(value, dict):
        return {name: _rebased(item, folder) for name, item in value.items()}
    if isinstance(value, list):
        return [_rebased(item, folder) for item in value]
    return _from(folder, value)


def is_path(key: str, data: str | None) -> bool:
    """Whether a dotted key may hold a path; `data.eval.dev` is one of several evaluation sets.

    Args:
        key: Such as `model.path`.
        data: The name of the data source, where it is known.
    """
    return key in PATHS or key in _paths_of(data) or key.startswith("data.eval.")


def _paths_of(data: str | None) -> list[str]:
    """The keys of a data source that hold paths, by what its schema says of itself."""
    row = None if data is None else registry.find("data", data)
    return [] if row is None else [f"data.{key}" for key in row.schema.PATHS]


def same_files(before: Any, after: Any, folder: Path | None) -> bool:
    """Whether two values of such a key lead to the same files.

    Args:
        before: As a checkpoint of the run has it.
        after: As it is in force, seen from here.
        folder: Where the run was started from; None: it is not known, and taken to be here.
    """
    return bool(_whole(before, folder or Path.cwd()) == _whole(after, Path.cwd()))


def _whole(value: Any, folder: Path) -> Any:
    """A value with every path in it as a whole one, as far as it leads somewhere."""
    if isinstance(value, list):
        return [_whole(item, folder) for item in value]
    return os.path.normpath(_from(folder, value)) if isinstance(value, str) else value


def _from(folder: Path, value: Any) -> Any:
    if not isinstance(value, str) or Path(value).expanduser().is_absolute():
        return value
    path = str(folder / value)
    return path if Path(path).exists() or glob.glob(path, recursive=True) else value  # noqa: PTH207
