"""Resolve relative paths of a run from the folder in which it was started."""

import glob
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from optrun.base.bounded_yaml import yaml_mapping
from optrun.base.reading import expand_home
from optrun.config import registry

PATHS = ("data.train", "data.eval", "data.path", "model.path", "model.tokenizer")
"""Keys that may hold a path, a glob, or a list of them; schemas name more in their `PATHS`."""


def original_cwd(hydra_folder: Path) -> Path | None:
    """Read the working directory of a run's start; None if unknown.

    Args:
        hydra_folder: `.hydra` of the run directory.
    """
    folder = _read_hydra_record(hydra_folder, "runtime", "cwd")
    if not isinstance(folder, str) or not folder or "${" in folder:
        return None
    return Path(folder)


def original_command(hydra_folder: Path) -> tuple[str, list[str]] | None:
    """Read the recipe and the overrides of a run's start; None if unknown.

    Args:
        hydra_folder: `.hydra` of the run directory.
    """
    name = _read_hydra_record(hydra_folder, "job", "config_name")
    tokens = _read_hydra_record(hydra_folder, "overrides", "task")
    if name is None or not isinstance(tokens, list):
        return None
    return str(name), list(map(str, tokens))


def _read_hydra_record(hydra_folder: Path, section: str, key: str) -> object:
    """Read a value from Hydra's record of a run; None if it is missing."""
    try:
        return yaml_mapping(hydra_folder / "hydra.yaml")["hydra"][section][key]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def rebase_paths(cfg: DictConfig, folder: Path | None) -> None:
    """Put `folder` before each relative path of a configuration, if it exists there.

    Other texts stay as they are: a hub name, or a file that moved with the run.

    Args:
        cfg: A run's configuration; changed in place.
        folder: Where the run was started; None: nothing is changed.
    """
    if folder is None or not folder.is_dir() or folder.resolve() == Path.cwd().resolve():
        return
    for key in path_keys(cfg):
        value = OmegaConf.select(cfg, key)
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True)
        if value is not None:
            OmegaConf.update(cfg, key, _rebase(value, folder), merge=False)


def _rebase(value: Any, folder: Path) -> Any:
    """Put a folder before each existing relative path in a value, also in lists and mappings."""
    if isinstance(value, dict):
        return {name: _rebase(item, folder) for name, item in value.items()}
    if isinstance(value, list):
        return [_rebase(item, folder) for item in value]
    return _rebase_if_exists(folder, value)


def path_keys(config: Mapping[Any, Any] | DictConfig) -> list[str]:
    """List the dotted keys for paths in a configuration.

    They are `PATHS` of this module, and the `PATHS` of the schemas of its choices and callbacks.

    Example:
        >>> "data.train" in path_keys({"data": {"name": "files"}})
        True
    """
    keys = list(PATHS)
    for group, kind in registry.GROUPS.items():
        section = config.get(group) or {}
        keys += _schema_paths(group, kind, section.get("name"), section)
    for name, options in (config.get("callbacks") or {}).items():
        keys += _schema_paths(f"callbacks.{name}", "callback", name, options)
    return list(dict.fromkeys(keys))


def _schema_paths(prefix: str, kind: str, name: str | None, values: Any) -> list[str]:
    """List the dotted keys for paths of one choice or callback, by its schema.

    A key of the schema with a star, such as `mixture.*.train`, gives one key for each name.

    Args:
        prefix: Put before each key, such as `data`.
        kind: Such as `tracker`, see `registry.KINDS`.
        name: The registered name; no keys for None and for an unknown one.
        values: The values of the choice.

    Example:
        >>> _schema_paths("data", "data", "mixture", {"mixture": {"code": {"train": "a.txt"}}})
        ['data.mixture.code.train', 'data.mixture.code.eval']
    """
    row = None if name is None else registry.find(kind, name)
    if row is None:
        return []
    keys: list[str] = []
    for key in getattr(row.schema, "PATHS", ()):
        mapping, has_star, rest = key.partition(".*.")
        if not has_star:
            keys.append(f"{prefix}.{key}")
            continue
        items = (values or {}).get(mapping) or {}  # such as `mixture.*.train`
        keys += [f"{prefix}.{mapping}.{item}.{rest}" for item in items]
    return keys


def same_files(before: object, after: object, folder: Path | None) -> bool:
    """Tell whether the saved and the new value of a path key lead to the same files.

    `rows.csv` of a run that was started in /a equals `/a/rows.csv`, if that file exists. Only the
    paths are compared, not the contents.

    Args:
        before: The value in a checkpoint of the run.
        after: The new value, relative to the current folder.
        folder: Where the run was started; None, if unknown: the current folder.
    """
    saved_paths = _resolve_paths(before, folder or Path.cwd())
    return saved_paths == _resolve_paths(after, Path.cwd())


def _resolve_paths(value: object, folder: Path) -> object:
    """Put a folder before each existing relative path of a value, and normalize all paths."""
    if isinstance(value, list):
        return [_resolve_paths(item, folder) for item in value]
    if isinstance(value, str):
        return os.path.normpath(_rebase_if_exists(folder, value))
    return value


def _rebase_if_exists(folder: Path, value: object) -> Any:
    """Put a folder before a relative path or glob if the result exists; else change nothing."""
    if not isinstance(value, str) or expand_home(value).is_absolute():
        return value
    path = str(folder / value)
    if Path(path).exists() or glob.glob(path, recursive=True):  # noqa: PTH207
        return path
    return value
