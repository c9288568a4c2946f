"""Relative paths of a run, read from its starting folder."""

import glob
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from optrun.base.bounded_yaml import yaml_mapping
from optrun.config import registry

PATHS = ("data.train", "data.eval", "data.path", "model.path", "model.tokenizer")
"""Keys that may hold a path, or a glob, or a list of them; those that a registered schema names
come to them."""


def original_cwd(hydra_folder: Path) -> Path | None:
    """Find the starting folder of a run; None if it is not known.

    Args:
        hydra_folder: `.hydra` of its run directory.
    """
    folder = _read_hydra_record(hydra_folder, "runtime", "cwd")
    if not isinstance(folder, str) or not folder or "${" in folder:
        return None
    return Path(folder)


def original_command(hydra_folder: Path) -> tuple[str, list[str]] | None:
    """Read the recipe and the overrides at the start of a run; None if unknown.

    Args:
        hydra_folder: `.hydra` of its run directory.
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
    """Put `folder` before each relative path of a configuration that exists there.

    Other names stay as they are: a hub name, or a file that moved with the run.

    Args:
        cfg: A run's configuration; changed in place.
        folder: Where the run was started from; None: nothing is changed.
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
    """Rewrite a path, or a list or mapping of them, as seen from a folder."""
    if isinstance(value, dict):
        return {name: _rebase(item, folder) for name, item in value.items()}
    if isinstance(value, list):
        return [_rebase(item, folder) for item in value]
    return _rebase_if_exists(folder, value)


def path_keys(config: Mapping[Any, Any] | DictConfig) -> list[str]:
    """List the dotted keys of a configuration that may hold paths.

    They are `PATHS` of this module, and those that the schemas of its choices and callbacks name.

    Example:
        >>> "data.train" in path_keys({"data": {"name": "files"}})
        True
    """
    chosen = [
        (group, kind, (config.get(group) or {}).get("name"))
        for group, kind in registry.GROUPS.items()
    ]
    chosen += [(f"callbacks.{name}", "callback", name) for name in config.get("callbacks") or {}]
    rows = [
        (prefix, registry.find(kind, name)) for prefix, kind, name in chosen if name is not None
    ]
    schema_keys = [
        f"{prefix}.{name}"
        for prefix, row in rows
        if row is not None
        for key in getattr(row.schema, "PATHS", ())
        for name in _expand_star(key, config.get(prefix))
    ]
    return list(dict.fromkeys((*PATHS, *schema_keys)))


def _expand_star(key: str, values: Any) -> list[str]:
    """Expand a key of a mapping's items, such as `mixture.*.train`, for each of them."""
    mapping, star, rest = key.partition(".*.")
    if not star:
        return [key]
    return [f"{mapping}.{name}.{rest}" for name in (values or {}).get(mapping) or {}]


def is_path(key: str, keys: Iterable[str]) -> bool:
    """Tell whether a dotted key is one of these, or below one.

    `data.eval.dev` is one of several evaluation sets.

    Example:
        >>> is_path("data.eval.dev", ["data.eval"]), is_path("data.eval_fraction", ["data.eval"])
        (True, False)
    """
    return any(key == path_key or key.startswith(f"{path_key}.") for path_key in keys)


def same_files(before: object, after: object, folder: Path | None) -> bool:
    """Tell whether two values of such a key lead to the same files.

    Args:
        before: As a checkpoint of the run has it.
        after: As it is in force, seen from here.
        folder: Where the run was started from; None: it is not known, and taken to be here.
    """
    return bool(_resolve_paths(before, folder or Path.cwd()) == _resolve_paths(after, Path.cwd()))


def _resolve_paths(value: object, folder: Path) -> Any:
    """Make each path of a value absolute if it exists below the folder."""
    if isinstance(value, list):
        return [_resolve_paths(item, folder) for item in value]
    return os.path.normpath(_rebase_if_exists(folder, value)) if isinstance(value, str) else value


def _rebase_if_exists(folder: Path, value: object) -> Any:
    if not isinstance(value, str) or Path(value).expanduser().is_absolute():
        return value
    path = str(folder / value)
    return path if Path(path).exists() or glob.glob(path, recursive=True) else value  # noqa: PTH207
