"""Relative paths in the configuration of a run mean files beside the folder that it was started from."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from optrun.bounded_yaml import yaml_mapping

PATHS = ("data.train", "data.eval", "data.path", "model.path", "model.tokenizer")
"""Keys that may hold a path, or a glob, or a list of them."""


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
    for key in PATHS:
        value = OmegaConf.select(cfg, key)
        if isinstance(value, str):
            OmegaConf.update(cfg, key, _from(folder, value))
        elif OmegaConf.is_list(value):
            OmegaConf.update(cfg, key, [_from(folder, item) for item in value])


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
