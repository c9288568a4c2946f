"""Find the configuration keys of a file, a folder, a data choice or a dataset of the hub."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from optrun.base.errors import ConfigError
from optrun.base.reading import expand_home
from optrun.config import registry
from optrun.data.content import name_inside
from optrun.data.files import resolve
from optrun.data.folders import (
    BESIDE_DATA,
    HELD_OUT,
    files_of,
    has_classes,
    held_out_split,
    is_saved,
    splits_of,
    suggest_files,
)
from optrun.data.formats import by_ending
from optrun.data.hub_access import may_be_name


def data_keys(name: str) -> dict[str, str]:
    """Find the configuration keys to read data of a name, for `optrun start`.

    Args:
        name: A file, a folder, the name of a data choice, or one of the hub.

    Returns:
        Key to value, such as `{"data": "files", "data.train": "reviews.csv"}`.

    Raises:
        ConfigError: Nothing has this name, or it is not clear what a folder holds.
    """
    path = expand_home(name)
    # 1. A folder.
    if path.is_dir():
        return _folder_keys(path)
    # 2. A file, or a glob with a path; `resolve` raises if it names no file.
    if path.exists() or path.is_symlink() or not may_be_name(name):
        resolve("data.train", str(path))
        kind = "tokens" if path.suffix == ".bin" else "files"
        return _keys(kind, path, _sibling_split(path))
    # 3. The name of a data choice, such as `stdlib`.
    if name in registry.choices("data"):
        return {"data": name}
    # 4. A glob such as `*.csv` or `data/*.csv`.
    if path.suffix.lower() in by_ending() or "/" not in name:
        resolve("data.train", name)
        return _keys("files", name)
    # 5. A dataset of the hub.
    return {"data": "hub", "data.path": name}


def unused_splits(name: str, keys: Mapping[str, str]) -> list[str]:
    """List the splits of a folder not read by its configuration keys.

    Args:
        name: As for `data_keys`.
        keys: What `data_keys` returned for it.

    Returns:
        Paths or globs, as `splits_of` writes them; none for a name that is no folder, and for a
        folder of `save_to_disk` or of classes.
    """
    folder = expand_home(name)
    if not folder.is_dir() or is_saved(folder) or has_classes(folder):
        return []
    splits = splits_of(folder, by_ending())
    return [path for path in splits.values() if path not in keys.values()]


def _keys(kind: str, train: Path | str, held_out: Path | str | None = None) -> dict[str, str]:
    """Write the keys of training rows, and of evaluation rows if there are any."""
    keys = {"data": kind, "data.train": str(train)}
    if held_out is not None:
        keys["data.eval"] = str(held_out)
    return keys


def _sibling_split(path: Path) -> Path | None:
    """Find the evaluation rows beside training rows, such as `a-test.csv` beside `a-train.csv`.

    The word `train` is replaced by each of `HELD_OUT`. None: the name of the training rows has no
    word `train`, or no file or folder of classes has such a name.
    """
    match = re.search(r"(?i)(?<![a-z])train(?![a-z])", path.name)
    if match is None:
        return None
    for name in HELD_OUT:
        sibling = path.with_name(path.name[: match.start()] + name + path.name[match.end() :])
        if sibling.is_file() or (sibling.is_dir() and has_classes(sibling)):
            return sibling
    return None


def _folder_keys(folder: Path) -> dict[str, str]:
    """Find the configuration keys to read a folder, by what it holds.

    1. what `save_to_disk` wrote: `{"data": "hub", "data.path": "FOLDER"}`;
    2. a folder for each class, such as `good/1.txt` and `bad/1.txt`: `data.train=FOLDER`, with
       `data.eval` if `test` lies beside a folder called `train`;
    3. files named after splits: `data.train=FOLDER/train.csv`, and `data.eval=FOLDER/dev.csv`;
    4. files with one ending: `data.train=FOLDER/*.csv`; texts such as README.md do not count.

    Raises:
        ConfigError: It holds none of these.
    """
    # 1. What `save_to_disk` wrote.
    if is_saved(folder):
        return {"data": "hub", "data.path": str(folder)}
    # 2. A folder for each class.
    if has_classes(folder):
        return _keys("files", folder, _sibling_split(folder))
    # 3. Files named after splits, as path or glob by split.
    formats = by_ending()
    splits = splits_of(folder, formats)
    if "train" in splits:
        return _keys("files", splits["train"], held_out_split(splits))
    # 4. Files with one ending, here or in subfolders.
    tables = [
        path
        for path in files_of(folder)
        if Path(name_inside(path)).suffix.lower() in formats
        and path.stem.upper() not in BESIDE_DATA
    ]
    endings = {path.suffix for path in tables}
    if not splits and len(endings) == 1:
        pattern = f"*{endings.pop()}"
        if any(path.parent != folder for path in tables):
            pattern = f"**/{pattern}"
        return _keys("files", f"{folder}/{pattern}")
    raise ConfigError(f"data.train={folder}: {suggest_files(folder, formats)}")
