"""Relative paths in the configuration of a run mean files beside the folder that it was started from."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

PATHS = ("data.train", "data.eval", "data.path", "model.path", "model.tokenizer")
"""Keys that may hold a path, or a glob, or a list of them."""


def began_in(hydra_folder: Path) -> Path | None:
    """The folder that a run was started from; None where it is not known.

    Args:
        hydra_folder: `.hydra` of its run directory.
    """
    try:
        folder = OmegaConf.select(OmegaConf.load(hydra_folder / "hydra.yaml"), "hydra.runtime.cwd")
    except Exception:  # missing, or no YAML: PyYAML's errors share no base with OmegaConf's
        return None
    return Path(str(folder)) if folder else None


def take_home(cfg: DictConfig, folder: Path | None) -> None:
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


def _from(folder: Path, value: Any) -> Any:
    if not isinstance(value, str) or Path(value).expanduser().is_absolute():
        return value
    path = str(folder / value)
    return path if Path(path).exists() or glob.glob(path, recursive=True) else value  # noqa: PTH207
