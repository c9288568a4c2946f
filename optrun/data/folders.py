"""Folders as data: splits, a folder for each class, or what `save_to_disk` wrote."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.base import shell
from optrun.base.errors import ConfigError, UnreadableFileError
from optrun.base.reading import read_bytes
from optrun.data.cache import digest_file, digest_of
from optrun.data.content import UNREADABLE_KINDS
from optrun.data.encoding import UTF8, TextEncoding, find_encoding, recode_to_utf8
from optrun.data.reading import Reading

if TYPE_CHECKING:
    from datasets import Dataset

IMAGES = {ending for ending, kind in UNREADABLE_KINDS.items() if kind == UNREADABLE_KINDS[".png"]}
TEXTS = {".txt", ".text", ".md"}
_SPLIT_NAMES = {"train", "training", "test", "testing", "dev", "val", "valid", "validation", "eval"}
HELD_OUT = ("dev", "valid", "validation", "val", "test", "testing", "eval")
"""Names of splits to evaluate on, the first one that exists wins."""
BESIDE_DATA = ("README", "LICENSE")
"""Texts that describe data, by their names without the ending."""
_LARGEST_TEXT = 1 << 24
"""Bytes of one text."""


def files_of(folder: Path) -> list[Path]:
    """List the files in a folder and its subfolders, without hidden ones."""
    paths = folder.rglob("*")
    return sorted(path for path in paths if path.is_file() and not _is_hidden(path, folder))


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def is_saved(folder: Path) -> bool:
    """Tell whether `datasets` wrote a folder by `save_to_disk`; `data=hub` reads these."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def has_classes(folder: Path) -> bool:
    """Tell whether a folder has one folder of texts, or of images, for each class.

    It has at least two, no file beside them, no folder inside them, and none of them has the name
    of a split, such as `test`. Example: a folder with `good/1.txt`, `good/2.txt` and `bad/1.txt`.
    """
    files = files_of(folder)
    classes = {path.parent for path in files}
    endings = {path.suffix.lower() for path in files}
    if len(classes) < 2 or any(path.parent != folder for path in classes):
        return False
    if {path.name.lower() for path in classes} & _SPLIT_NAMES:
        return False
    return endings <= TEXTS or endings <= IMAGES


def suggest_files(folder: Path, endings: Collection[str]) -> str:
    """Advise in a sentence to give files or other keys instead of a folder.

    Args:
        folder: The folder.
        endings: Endings of files that are read.

    Returns:
        Such as `this is a folder. Give files or a glob, such as 'data/*.csv'.`
    """
    hub_keys = f"data=hub data.path={shell.quote(str(folder))}"
    if is_saved(folder):
        return f"this is a folder that save_to_disk wrote. Take {hub_keys}."
    splits = splits_of(folder, endings)
    if splits:
        return (
            f"this is a folder with splits ({', '.join(splits)}), which are not trained on"
            f" together. Take {_keys_of_splits(splits)}"
        )
    files = files_of(folder)[:1000]
    readable = [path for path in files if path.suffix.lower() in endings]
    if not readable:
        return f"this is a folder, and no file in it ends with one of {', '.join(endings)}."
    if any(path.suffix.lower() in IMAGES for path in files):
        return f"this is a folder with images and other files. Take {hub_keys}."
    tables = [path for path in readable if path.suffix.lower() not in TEXTS] or readable
    pattern = f"*{tables[0].suffix}"
    if all(path.parent != folder for path in tables):
        pattern = f"**/{pattern}"
    return f"this is a folder. Give files or a glob, such as {shell.quote(str(folder / pattern))}."


def _keys_of_splits(splits: Mapping[str, str]) -> str:
    """Write `data.train` and `data.eval` for a shell; one is left out if there is no such split."""
    keys = []
    if "train" in splits:
        keys.append(f"data.train={shell.quote(splits['train'])}")
    held_out = held_out_split(splits)
    if held_out is not None:
        keys.append(f"data.eval={shell.quote(held_out)}")
    return " ".join(keys)


def split_name(path: Path, folder: Path) -> str | None:
    """Name the split of a file by the first word of a folder below `folder`, or of its name.

    None: none of them is the name of a split. `training` is called `train`.

    Example:
        >>> folder = Path("data")
        >>> [split_name(folder / name, folder) for name in ("test-0.parquet", "val/a.csv")]
        ['test', 'val']
        >>> split_name(Path("data/a.csv"), Path("data"))
    """
    for part in path.relative_to(folder).parts:
        word = re.split(r"[^a-z]", part.lower())[0]  # `test` of `test-00000.parquet`
        if word in _SPLIT_NAMES:
            return word.replace("training", "train")
    return None


def splits_of(folder: Path, endings: Collection[str]) -> dict[str, str]:
    """Map each split in a folder to the path or glob of its rows, `train` first.

    A split is a folder of classes, or files named after it, as in datasets of the hub. Texts such
    as README.md are no rows if there are tables. Empty if there is a single split other than
    `train`.

    Example: `train-0.csv`, `train-1.csv` and `dev.csv` in a folder `data` give
    `{"train": "data/train*.csv", "dev": "data/dev.csv"}`.

    Args:
        folder: The folder.
        endings: Endings of files that are read.
    """
    # 1. Folders of classes.
    splits: dict[str, str] = {}
    for path in sorted(folder.iterdir()):
        name = split_name(path, folder)
        if name is not None and path.is_dir() and has_classes(path):
            splits.setdefault(name, str(path))
    # 2. Files of rows: tables, else texts without those that describe data.
    files = [path for path in files_of(folder) if path.suffix.lower() in endings]
    row_files = [path for path in files if path.suffix.lower() not in TEXTS]
    if not row_files:
        row_files = [path for path in files if path.stem.upper() not in BESIDE_DATA]
    # 3. Those named after a split that has no folder of classes.
    paths_by_split: dict[str, list[Path]] = {}
    for path in row_files:
        name = split_name(path, folder)
        if name is not None and name not in splits:
            paths_by_split.setdefault(name, []).append(path)
    for name, paths in paths_by_split.items():
        splits[name] = _path_or_glob(paths, folder)
    # 4. `train` first: False is before True.
    if "train" not in splits and len(splits) < 2:
        return {}
    return dict(sorted(splits.items(), key=lambda item: item[0] != "train"))


def _path_or_glob(paths: Sequence[Path], folder: Path) -> str:
    """Write the path of a single file, or a glob for several files of one split below a folder.

    Example:
        >>> folder = Path("data")
        >>> _path_or_glob([folder / "train-0.csv", folder / "train-1.csv"], folder)
        'data/train*.csv'
        >>> _path_or_glob([folder / "train/a/0.csv", folder / "train/b/1.csv"], folder)
        'data/train/**/*.csv'
    """
    first = paths[0]
    if len(paths) == 1:
        return str(first)
    top = Path(os.path.commonpath([path.parent for path in paths]))
    pattern = f"*{first.suffix}"
    if split_name(top, folder) is None:  # then the names of the files begin with the split's
        pattern = re.split(r"[^A-Za-z]", first.name)[0] + pattern
    if any(path.parent != top for path in paths):
        pattern = f"**/{pattern}"
    return str(top / pattern)


def held_out_split(splits: Mapping[str, str]) -> str | None:
    """Pick the split to evaluate on while training: a validation split before a test split.

    Example:
        >>> held_out_split({"train": "train.csv", "test": "test.csv", "valid": "valid.csv"})
        'valid.csv'
    """
    return next((splits[name] for name in HELD_OUT if name in splits), None)


def digest_folder(folder: Path) -> str:
    """Digest the names and bytes of all files in a folder and its subfolders."""
    return digest_of(f"{path.relative_to(folder)} {digest_file(path)}" for path in files_of(folder))


def read_classes(reading: Reading) -> Dataset:
    """Read texts or images, each with the name of its folder as label.

    Notes say how many there are, and which guessed encodings texts have.

    Raises:
        ConfigError: A text cannot be read.
    """
    from datasets import Dataset, Features, Image, Value

    files: list[Path] = []
    for folder in reading.files:
        files += files_of(folder)
    labels = [path.parent.name for path in files]
    summary = f"{len(files):,} files of {len(set(labels)):,} folders, which are the labels"
    reading.notes.append(f"{reading.key}={', '.join(map(str, reading.files))}: {summary}")
    if files[0].suffix.lower() in IMAGES:
        features = Features({"image": Image(), "label": Value("string")})
        return Dataset.from_dict(
            {"image": [str(path.resolve()) for path in files], "label": labels}, features=features
        )
    texts = []
    samples: dict[str, str] = {}  # guessed encoding -> a line by which a person can check it
    for path in files:
        text, encoding = _read_text(reading, path)
        texts.append(text)
        if encoding.sample:
            line = f"in {path.name} {encoding.sample} (data.encoding)"
            samples.setdefault(encoding.name, line)
    reading.notes += [
        f"{reading.key}: some files are not UTF-8, and are read as {name}: {sample}"
        for name, sample in samples.items()
    ]
    return Dataset.from_dict({"text": texts, "label": labels})


def _read_text(reading: Reading, path: Path) -> tuple[str, TextEncoding]:
    """Read a text of at most 16 MiB, and find its encoding unless `data.encoding` names it.

    Raises:
        ConfigError: It is larger, or cannot be decoded.
    """
    try:
        raw = read_bytes(path, _LARGEST_TEXT, follow=True)
        encoding = find_encoding(lambda: [raw], reading.options.encoding, b"".join)
        return b"".join(recode_to_utf8([raw], encoding.name)).decode(UTF8), encoding
    except UnreadableFileError as error:
        raise ConfigError(f"{reading.key}={path}: {error}") from error
