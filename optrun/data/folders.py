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
from optrun.data.content import ELSEWHERE
from optrun.data.encoding import UTF8, find_encoding, recode_to_utf8
from optrun.data.reading import Reading

if TYPE_CHECKING:
    from datasets import Dataset

IMAGES = frozenset(ending for ending, what in ELSEWHERE.items() if what == ELSEWHERE[".png"])
TEXTS = frozenset({".txt", ".text", ".md"})
_SPLITS = frozenset(
    {"train", "training", "test", "testing", "dev", "val", "valid", "validation", "eval"}
)
HELD_OUT = ("dev", "valid", "validation", "val", "test", "testing", "eval")
"""Names of splits to evaluate on, the first one that exists wins."""
BESIDE_DATA = ("README", "LICENSE")
"""Texts that describe data, by their names without the ending."""
_LARGEST = 1 << 24
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

    It has two at least, no file beside them, no folder in them, and none of them is called as a
    split, such as `test`.
    """
    files = files_of(folder)
    classes = {path.parent for path in files}
    endings = {path.suffix.lower() for path in files}
    if len(classes) < 2 or any(path.parent != folder for path in classes):
        return False
    if {path.name.lower() for path in classes} & _SPLITS:
        return False
    return endings <= TEXTS or endings <= IMAGES


def suggest_files(folder: Path, endings: Collection[str]) -> str:
    """Say in a sentence which files, or which key, to give in place of a folder.

    Args:
        folder: The folder.
        endings: Endings of files that are read.
    """
    if is_saved(folder):
        return (
            "this is a folder that save_to_disk wrote. Take data=hub"
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
    files = [path for path in files_of(folder)[:1000] if path.suffix.lower() in endings]
    if not files:
        return f"this is a folder, and no file in it ends with one of {', '.join(endings)}."
    if any(path.suffix.lower() in IMAGES for path in files_of(folder)[:1000]):
        return (
            "this is a folder with images and other files. Take data=hub"
            f" data.path={shell.quote(str(folder))}."
        )
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
        folder: A folder with a folder for each split, as of classes, or with files named after
            splits, as a dataset of the hub has them.
        endings: Of files that are read.
    """
    splits: dict[str, str] = {}
    for path in sorted(folder.iterdir()):
        name = split_name(path, folder)
        if name is not None and path.is_dir() and has_classes(path):
            splits.setdefault(name, str(path))
    files = [path for path in files_of(folder) if path.suffix.lower() in endings]
    tables = [path for path in files if path.suffix.lower() not in TEXTS]
    if not tables:  # texts beside tables, such as a README.md, are no rows
        tables = [path for path in files if path.stem.upper() not in BESIDE_DATA]
    paths_by_split: dict[str, list[Path]] = {}
    for path in tables:
        name = split_name(path, folder)
        if name is not None and name not in splits:
            paths_by_split.setdefault(name, []).append(path)
    for name, paths in paths_by_split.items():
        splits[name] = _path_or_glob(paths, folder)
    if "train" not in splits and len(splits) < 2:
        return {}
    return dict(sorted(splits.items(), key=lambda item: item[0] != "train"))


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


def digest_folder(folder: Path) -> str:
    """Digest the names and bytes of all files of a folder."""
    return digest_of(f"{path.relative_to(folder)} {digest_file(path)}" for path in files_of(folder))


def read_classes(reading: Reading) -> Dataset:
    """Read texts or images, each labelled by the name of its folder.

    Raises:
        ConfigError: A text that cannot be read.
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
    samples: dict[str, str] = {}
    texts = [_text(reading, path, samples) for path in files]
    reading.notes += [
        f"{reading.key}: some files are no UTF-8, and read as {name}: {sample}"
        for name, sample in samples.items()
    ]
    return Dataset.from_dict({"text": texts, "label": labels})


def _text(reading: Reading, path: Path, samples: dict[str, str]) -> str:
    """Read a text of at most 16 MiB.

    `samples` gets a note for the encoding if that is guessed, unless it has one already.
    """
    try:
        raw = read_bytes(path, _LARGEST, follow=True)
        name, sample = find_encoding(lambda: [raw], reading.options.encoding, b"".join)
        if sample:
            samples.setdefault(name, f"in {path.name} {sample} (data.encoding)")
        return b"".join(recode_to_utf8([raw], name)).decode(UTF8)
    except UnreadableFileError as error:
        raise ConfigError(f"{reading.key}={path}: {error}") from error
