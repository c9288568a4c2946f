"""Folders as data: what `save_to_disk` wrote, and one folder of texts or images for each class."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.base.errors import ConfigError, UnreadableFileError
from optrun.base.reading import read_bytes
from optrun.data.cache import content_of, digest_of
from optrun.data.content import ELSEWHERE
from optrun.data.encoding import UTF8, NotDecodableError, marked, recoded, western
from optrun.data.reader import quiet, understood
from optrun.data.reading import Reading

if TYPE_CHECKING:
    from datasets import Dataset

IMAGES = frozenset(ending for ending, what in ELSEWHERE.items() if what == ELSEWHERE[".png"])
TEXTS = frozenset({".txt", ".text", ".md"})
_SPLITS = frozenset(
    {"train", "training", "test", "testing", "dev", "val", "valid", "validation", "eval"}
)
_LARGEST = 1 << 24
"""Bytes of one text."""


def files_of(folder: Path) -> list[Path]:
    """List the files of a folder and of those in it, hidden ones left out."""
    there = folder.rglob("*")
    return sorted(
        path
        for path in there
        if path.is_file() and not any(p[0] == "." for p in path.relative_to(folder).parts)
    )


def is_read(folder: Path) -> bool:
    """Tell whether a folder is data as it stands."""
    return (folder / "state.json").is_file() or _kind(folder) is not None


def _kind(folder: Path) -> Collection[str] | None:
    """Name the endings of the files of class folders: texts or images; None: these are none."""
    files = files_of(folder)
    classes = {path.parent for path in files}
    endings = {path.suffix.lower() for path in files}
    flat = len(classes) > 1 and all(path.parent == folder for path in classes)
    if not flat or {path.name.lower() for path in classes} & _SPLITS:
        return None
    return next((kind for kind in (TEXTS, IMAGES) if endings <= kind), None)


def why_not(folder: Path, endings: Collection[str]) -> str:
    """Explain what to give in place of a folder, by what is in it.

    Args:
        folder: It.
        endings: Of files that are read.
    """
    parts = sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")
    splits = [path for path in parts if path.name.lower() in _SPLITS and is_read(path)]
    if splits:
        train = next((path for path in splits if path.name.lower().startswith("train")), splits[0])
        held = [path for path in splits if path != train]
        keys = [
            f"data.train={shlex.quote(str(train))}",
            *(f"data.eval={shlex.quote(str(held[0]))}" for _ in held[:1]),
        ]
        return (
            f"this is a folder, and its folders {', '.join(p.name for p in splits)} are splits."
            f" Take {' '.join(keys)}"
        )
    files = [path for path in files_of(folder)[:1000] if path.suffix.lower() in endings]
    if not files:
        return f"this is a folder, and no file in it ends with one of {', '.join(endings)}."
    if any(path.suffix.lower() in IMAGES for path in files_of(folder)[:1000]):
        return (
            "this is a folder with images and other files. Take data=hub"
            f" data.path={shlex.quote(str(folder))}."
        )
    pattern = f"{'*' if any(path.parent == folder for path in files) else '**/*'}{files[0].suffix}"
    return f"this is a folder. Give files or a glob, such as {shlex.quote(str(folder / pattern))}."


def content_of_folder(folder: Path) -> str:
    """Digest names and bytes of all files of a folder."""
    return digest_of(f"{path.relative_to(folder)} {content_of(path)}" for path in files_of(folder))


def read_saved(asked: Reading) -> Dataset:
    """Read folders that `Dataset.save_to_disk` wrote.

    Raises:
        ConfigError: One cannot be read.
    """
    import datasets

    parts = []
    for folder in asked.files:
        with understood(f"{asked.key}={folder}: cannot be read as save_to_disk wrote it"), quiet():
            parts.append(datasets.load_from_disk(str(folder)))
    return datasets.concatenate_datasets(parts)


def read_classes(asked: Reading) -> Dataset:
    """Read folders whose folders are classes.

    Each file is a text or an image, its folder is its label.

    Raises:
        ConfigError: A text that cannot be read.
    """
    from datasets import Dataset, Features, Image, Value

    files = [path for folder in asked.files for path in files_of(folder)]
    labels = [path.parent.name for path in files]
    found = f"{len(files):,} files of {len(set(labels)):,} folders, which are the labels"
    asked.notes.append(f"{asked.key}={', '.join(map(str, asked.files))}: {found}")
    if files[0].suffix.lower() in IMAGES:
        features = Features({"image": Image(), "label": Value("string")})
        return Dataset.from_dict(
            {"image": [str(path.resolve()) for path in files], "label": labels}, features=features
        )
    others: dict[str, str] = {}
    texts = [_text(asked, path, others) for path in files]
    asked.notes += [
        f"{asked.key}: some files are no UTF-8, and read as {name}: {told}"
        for name, told in others.items()
    ]
    return Dataset.from_dict({"text": texts, "label": labels})


def _text(asked: Reading, path: Path, others: dict[str, str]) -> str:
    said = asked.options.encoding
    try:
        raw = read_bytes(path, _LARGEST, follow=True)
        name = said or marked(raw)
        try:
            return b"".join(recoded([raw], name)).decode(UTF8)
        except NotDecodableError as error:
            if name != UTF8 or said is not None:
                raise
            name, shown = western([raw], error)
            others.setdefault(name, f"in {path.name} {shown} (data.encoding)")
            return raw.decode(name)
    except UnreadableFileError as error:
        raise ConfigError(f"{asked.key}={path}: {error}") from error
