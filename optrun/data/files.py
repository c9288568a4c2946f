"""The user's own csv, tsv, json, jsonl, parquet and text files, read by `datasets`."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optrun.data.cache import cache_dir, digest
from optrun.errors import ConfigError, nearest

if TYPE_CHECKING:
    from datasets import Dataset

FORMATS = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".txt": "text",
    ".text": "text",
    ".py": "text",
    ".md": "text",
}


def read_files(key: str, paths: Any, *, documents: bool) -> Dataset:
    """Read one file, a list of files, or a glob.

    A csv field may be quoted; a tsv field is taken as it stands, quotes included. The words NA, null and None are text.

    Args:
        key: The configuration key, for messages.
        paths: A path, a list of them; each may be a glob.
        documents: True: a text file is one row; False: each of its lines is one.

    Returns:
        Rows of all files, in order.

    Raises:
        ConfigError: No such file, an empty one, mixed or unknown formats, content that cannot be read.
    """
    files = resolve(key, paths)
    formats = {_format(key, path) for path in files}
    if len(formats) > 1:
        raise ConfigError(f"{key}: files of several formats ({', '.join(sorted(formats))}). Give files of one format.")
    for path in files:
        if path.stat().st_size == 0:
            raise ConfigError(f"{key}={path}: the file is empty.")
    return _load(key, files, formats.pop(), documents=documents)


def resolve(key: str, paths: Any) -> list[Path]:
    """The files that paths and globs name, in order, without repeats.

    Raises:
        ConfigError: A path or glob that names nothing; a folder; a file that may not be read.
    """
    found: dict[Path, None] = {}
    for pattern in paths if isinstance(paths, list | tuple) else [paths]:
        name = str(Path(pattern).expanduser())
        if Path(name).is_file():
            matches = [name]
        else:
            matches = sorted(match for match in glob.glob(name, recursive=True) if Path(match).is_file())
        if not matches:
            raise ConfigError(f"{key}={pattern}: {_why_nothing(name)}")
        found.update(dict.fromkeys(Path(match) for match in matches))
    for path in found:
        try:
            path.open("rb").close()
        except PermissionError as error:
            raise ConfigError(f"{key}={path}: no permission to read this file.") from error
    return list(found)


def _why_nothing(name: str) -> str:
    path = Path(name)
    if path.is_dir():
        return "this is a folder. Give files or a glob, such as " + str(path / "*.jsonl") + "."
    if glob.has_magic(name):
        return "no file matches this glob."
    beside = [str(other) for other in path.parent.iterdir()] if path.parent.is_dir() else []
    close = nearest(name, beside, limit=1)
    return f"no such file (looked from {Path.cwd()})." + (f" Did you mean {close[0]}?" if close else "")


def _format(key: str, path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in (".gz", ".bz2", ".xz", ".zst"):
        suffixes.pop()
    if not suffixes or suffixes[-1] not in FORMATS:
        raise ConfigError(f"{key}={path}: unknown format. Known endings: {', '.join(FORMATS)} (also with .gz).")
    return FORMATS[suffixes[-1]]


def _load(key: str, files: list[Path], kind: str, *, documents: bool) -> Dataset:
    import datasets

    options: dict[str, Any] = {}
    if kind in ("csv", "tsv"):
        options = {"keep_default_na": False, "na_values": [""]}  # "NA" and "null" are words; nothing is nothing
        if kind == "tsv":
            options |= {"sep": "\t", "quoting": 3, "quotechar": None}
    if kind == "text":
        options = {"sample_by": "document" if documents else "line"}
    # The bytes are part of the address: `datasets` would otherwise trust a file's time and size.
    content = digest(*(path.read_bytes() for path in files))
    bars = datasets.utils.logging.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        rows = datasets.load_dataset(
            "csv" if kind == "tsv" else kind,
            data_files=[str(path.resolve()) for path in files],
            split="train",
            cache_dir=str(cache_dir() / "files" / content[:32]),
            **options,
        )
    except Exception as error:  # whatever the reader says, the file and its words are what the user needs
        names = ", ".join(str(path) for path in files[:3]) + (", ..." if len(files) > 3 else "")
        raise ConfigError(f"{key}={names}: cannot be read as {kind}: {_innermost(error)}") from error
    finally:
        if bars:
            datasets.enable_progress_bars()
    if len(rows) == 0:
        raise ConfigError(f"{key}={files[0]}: no rows in it.")
    return rows


def _innermost(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip() or 'no reason given'}"
