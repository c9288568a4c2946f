"""What a folder of data holds: splits, tables, images, or what `save_to_disk` wrote."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from optrun.base import shell
from optrun.data.content import ELSEWHERE

IMAGES = frozenset(ending for ending, what in ELSEWHERE.items() if what == ELSEWHERE[".png"])
TEXTS = frozenset({".txt", ".text", ".md"})
_SPLITS = frozenset(
    {"train", "training", "test", "testing", "dev", "val", "valid", "validation", "eval"}
)
HELD_OUT = ("dev", "valid", "validation", "val", "test", "testing", "eval")
"""Names of splits to evaluate on, the first one that exists wins."""
_LOOKED_AT = 1000
"""Files of a folder that are looked at."""
BESIDE_DATA = ("README", "LICENSE")
"""Texts that describe data, by their names without the ending."""


def files_of(folder: Path) -> list[Path]:
    """List the files in a folder and its subfolders, without hidden ones."""
    paths = folder.rglob("*")
    return sorted(path for path in paths if path.is_file() and not _is_hidden(path, folder))


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def is_for_hub(folder: Path, endings: Collection[str]) -> bool:
    """Tell whether `data=hub data.path=FOLDER` reads a folder.

    It does if `save_to_disk` wrote the folder, or there are images and no tables in it.

    Args:
        folder: The folder; of its files the first 1,000 are looked at.
        endings: Endings of files that `data=files` reads, texts included.
    """
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        return True
    present = {path.suffix.lower() for path in files_of(folder)[:_LOOKED_AT]}
    return bool(present & IMAGES) and not present & (set(endings) - TEXTS)


def suggest_files(folder: Path, endings: Collection[str]) -> str:
    """Say in a sentence which files, or which key, to give in place of a folder.

    Args:
        folder: The folder.
        endings: Endings of files that are read.
    """
    if is_for_hub(folder, endings):
        return (
            "this is a folder of images, or one that save_to_disk wrote. Take data=hub"
            f" data.path={shell.quote(str(folder))}."
        )
    splits = splits_of(folder, endings)
    if splits:
        keys = []
        if "train" in splits:
            keys.append(f"data.train={shell.quote(splits['train'])}")
        eval_pattern = held_out_split(splits)
        if eval_pattern is not None:
            keys.append(f"data.eval={shell.quote(eval_pattern)}")
        return (
            f"this is a folder with splits ({', '.join(splits)}), which are not trained on"
            f" together. Take {' '.join(keys)}"
        )
    files = [path for path in files_of(folder)[:_LOOKED_AT] if path.suffix.lower() in endings]
    if not files:
        return f"this is a folder, and no file in it ends with one of {', '.join(endings)}."
    tables = [path for path in files if path.suffix.lower() not in TEXTS] or files
    is_flat = any(path.parent == folder for path in tables)
    pattern = f"{'*' if is_flat else '**/*'}{tables[0].suffix}"
    return f"this is a folder. Give files or a glob, such as {shell.quote(str(folder / pattern))}."


def split_name(path: Path, folder: Path) -> str | None:
    """Name the split of a file by its name or a folder above it; None if none.

    Example:
        >>> folder = Path("data")
        >>> [split_name(folder / name, folder) for name in ("test-0.parquet", "val/a.csv")]
        ['test', 'val']
        >>> split_name(Path("data/a.csv"), Path("data"))
    """
    for part in path.relative_to(folder).parts:
        word = re.split(r"[^a-z]", part.lower())[0]
        if word in _SPLITS:
            return word.replace("training", "train")
    return None


def splits_of(folder: Path, endings: Collection[str]) -> dict[str, str]:
    """Map each split in a folder to the path or glob of its rows, `train` first.

    Args:
        folder: A folder with a folder for each split, or with files named after splits, as a
            dataset of the hub has them.
        endings: Of files that are read.
    """
    files = [path for path in files_of(folder) if path.suffix.lower() in endings]
    tables = [path for path in files if path.suffix.lower() not in TEXTS]
    if not tables:  # texts beside tables, such as a README.md, are no rows
        tables = [path for path in files if path.stem.upper() not in BESIDE_DATA]
    paths_by_split: dict[str, list[Path]] = {}
    for path in tables:
        name = split_name(path, folder)
        if name is not None:
            paths_by_split.setdefault(name, []).append(path)
    if "train" not in paths_by_split and len(paths_by_split) < 2:
        return {}
    names = sorted(paths_by_split, key=lambda name: name != "train")
    return {name: _path_or_glob(paths_by_split[name], folder) for name in names}


def _path_or_glob(paths: Sequence[Path], folder: Path) -> str:
    """Write a single path, or a glob for several files of one split below a folder."""
    first = paths[0]
    if len(paths) == 1:
        return str(first)
    top = Path(os.path.commonpath([path.parent for path in paths]))
    is_flat = all(path.parent == top for path in paths)
    begin = ""
    if split_name(top, folder) is None:  # the files have the name of the split, not their folder
        begin = re.split(r"[^A-Za-z]", first.name)[0]
    return str(top / f"{'' if is_flat else '**/'}{begin}*{first.suffix}")


def held_out_split(splits: Mapping[str, str]) -> str | None:
    """Pick the split to evaluate on while training: a validation split before a test split.

    Example:
        >>> held_out_split({"train": "train.csv", "test": "test.csv", "valid": "valid.csv"})
        'valid.csv'
    """
    return next((splits[name] for name in HELD_OUT if name in splits), None)
