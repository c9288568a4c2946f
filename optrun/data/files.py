"""The rows of the user's own files and folders."""

from __future__ import annotations

import difflib
import glob
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optrun.base.errors import ConfigError
from optrun.base.formatting import list_names
from optrun.base.reading import expand_home, kind_of, open_file
from optrun.config.schema.data import FilesConfig, eval_key
from optrun.data.cache import digest, digest_file, versions
from optrun.data.encoding import UTF8
from optrun.data.folders import digest_folder, has_classes, split_name, suggest_files
from optrun.data.formats import FORMATS, by_ending, check_file, format_of, one_format
from optrun.data.reading import Reading, ReadOptions
from optrun.data.source import Source, Split
from optrun.data.stream import open_stream

Paths = str | Path | Sequence[str | Path]
"""A path or a glob, or several."""


def load_files(config: FilesConfig, *, documents: bool) -> Source:
    """Read the files of `data.train`, as a stream if `data.streaming=true`, and of `data.eval`.

    Notes say which files are in both, and which training files are named after other splits.

    Raises:
        ConfigError: A path names no file, an option has no effect, or as `read_split`.
    """
    notes: list[str] = []
    options = ReadOptions(config.format, config.delimiter, config.encoding, config.column_names)
    # 1. Find the files.
    train_files = resolve("data.train", config.train)
    eval_files = {name: resolve(eval_key(name), paths) for name, paths in config.eval_files()}
    unstreamed = {eval_key(name): files for name, files in eval_files.items()}
    if not config.streaming:
        unstreamed["data.train"] = train_files
    _refuse_unused_options(config, options, unstreamed)
    # 2. Read their rows.
    if config.streaming:
        rows: Any = open_stream("data.train", train_files, config.shuffle_window, notes)
        train = Split(rows, "data.train")
    else:
        train = read_split("data.train", train_files, options, notes, documents=documents)
    eval_sets = {
        name: read_split(eval_key(name), files, options, notes, documents=documents)
        for name, files in eval_files.items()
    }
    # 3. Note what looks like a mistake.
    for name, files in eval_files.items():
        notes += _note_files_in_both(train_files, eval_key(name), files)
    notes += _note_other_splits(train_files)
    return Source(train, eval_sets, config, notes=notes)


def _note_files_in_both(train_files: list[Path], key: str, eval_files: list[Path]) -> list[str]:
    """Return a note if files of an evaluation set are training files as well; else no notes."""
    training_paths = {path.resolve() for path in train_files}
    both = [str(path) for path in eval_files if path.resolve() in training_paths]
    if not both:
        return []
    return [f"{', '.join(both)}: in data.train and in {key}; evaluation sees training rows"]


def _note_other_splits(files: list[Path]) -> list[str]:
    """Return a note if some training files are named after `train`, others after other splits.

    No notes for other files. The name of a file counts, and that of its folder: `train/a.csv` and
    `test/a.csv`.
    """
    # Below the folder that holds the folder of the file: both names are looked at.
    split_of_file = {path: split_name(path, path.parent.parent) for path in files}
    other_files = [str(path) for path, name in split_of_file.items() if name not in (None, "train")]
    if not other_files or "train" not in split_of_file.values():
        return []
    return [
        f"data.train holds {len(other_files):,} files that are named after other splits:"
        f" {list_names(other_files, 3)}"
    ]


def _refuse_unused_options(
    config: FilesConfig, options: ReadOptions, files: Mapping[str, list[Path]]
) -> None:
    """Refuse options without effect on any of the files.

    Args:
        config: `streaming` and `format` of it are used.
        options: The options that the user set.
        files: Key of the configuration, such as `data.eval`, to paths, of all splits that are not
            streamed.

    Raises:
        ConfigError: With the option, and the formats that it is read for.
    """
    if config.streaming and config.format is not None:
        raise ConfigError(
            f"data.format={config.format}: a stream is read by the endings of its files. Leave"
            " it out."
        )
    formats: set[str] = set()
    for key, paths in files.items():
        formats.update(format_of(key, path, options.format).name for path in paths)
    for name in ("delimiter", "column_names", "encoding"):
        value = getattr(options, name)
        # The formats that have a use for the option; one file of them is enough.
        affected = [
            file_format.name for file_format in FORMATS.values() if name in file_format.options
        ]
        has_effect = not formats.isdisjoint(affected)
        if value is None or has_effect:
            continue
        remedy = "Leave it out."
        if formats == {"text"} and "csv" in affected:
            remedy = "Leave it out, or add data.format=csv if the lines are rows of a table."
        raise ConfigError(
            f"data.{name}={value}: has no effect on"
            f" {' and '.join(sorted(formats)) or 'a stream'}; it is read for"
            f" {', '.join(affected)}. {remedy}"
        )


def read_split(
    key: str, files: list[Path], options: ReadOptions, notes: list[str], *, documents: bool = False
) -> Split:
    """Read rows of files, in order, with a digest of their content.

    Every field of csv and tsv is text, the words NA, null and None included. A csv field may be
    quoted; quotation marks in a tsv field are characters like others.

    Args:
        key: The configuration key, for messages.
        files: Files of one format, or folders of classes.
        options: How they are read, as the user said.
        notes: Gets sentences about what was found instead, such as encodings.
        documents: True: a text file is one row; False: each of its lines is one.

    Raises:
        ConfigError: An empty file, mixed or unknown formats, content that cannot be read.
    """
    # 1. Check the files, and find their encodings.
    kind = one_format(key, (format_of(key, path, options.format) for path in files))
    encodings = []
    for path in files:
        if path.is_file() and path.stat().st_size == 0:
            raise ConfigError(f"{key}={path}: the file is empty. Leave it out.")
        encoding, sample = check_file(key, path, kind, options.encoding)
        encodings.append(encoding)
        if encoding != UTF8 and options.encoding is None:
            line = f": {sample}" if sample else ""
            notes.append(f"{key}={path}: read as {encoding}{line} (data.encoding)")
    # 2. Read the rows, or map them from the cache.
    contents = [digest_folder(path) if path.is_dir() else digest_file(path) for path in files]
    rows = kind.read(Reading(key, files, encodings, contents, documents, options, notes))
    if len(rows) == 0:
        raise ConfigError(f"{key}={files[0]}: no rows in it.")
    # 3. Digest everything that decides them; options count only if the user set one.
    digests = (f"{path.suffixes} {content}" for path, content in zip(files, contents, strict=True))
    typed_options = () if options == ReadOptions() else (repr(options),)
    content = digest(
        "rows-2", versions("datasets", "pyarrow"), str(documents), *digests, *typed_options
    )
    return Split(rows, key, content=content, folder=files[0].parent)


def resolve(key: str, paths: Paths) -> list[Path]:
    """List the files of paths and globs, in order, without repeats.

    The files of a glob are sorted. A folder with one folder for each class, see `has_classes`, is
    in the list itself, not its files; any other folder is refused.

    Args:
        key: The key that has the paths, such as `data.train`; for messages.
        paths: One path or glob, or several; `~` is the home folder.

    Raises:
        ConfigError: A path or glob names nothing, a folder has no folder for each class, or a file
            may not be read.
    """
    files: dict[Path, None] = {}  # an ordered set
    for pattern in [paths] if isinstance(paths, str | Path) else paths:
        name = str(expand_home(pattern))
        matches = _match_files(name)  # the folder itself if it has classes
        if not matches:
            raise ConfigError(f"{key}={pattern}: {_why_no_file(name)}")
        files.update(dict.fromkeys(map(Path, matches)))
    # Each file must be readable. The files in a folder of classes are not opened here.
    for path in files:
        if path.is_dir():
            continue
        try:
            open_file(path, follow=True).close()
        except PermissionError as error:
            raise ConfigError(f"{key}={path}: no permission to read this file.") from error
    return list(files)


def _match_files(name: str) -> list[str]:
    """List the files of a path or glob, in order, or the one folder of classes; none: no match."""
    path = Path(name)
    if path.is_file() or (path.is_dir() and has_classes(path)):
        return [name]
    # Path.glob takes no pattern that begins at the root.
    matches = glob.glob(name, recursive=True)  # noqa: PTH207
    return sorted(match for match in matches if Path(match).is_file())


def _why_no_file(name: str) -> str:
    """Explain why a path or glob names no file, and advise."""
    path = Path(name)
    if path.is_dir():
        return suggest_files(path, by_ending())
    if path.exists():
        return (
            f"{kind_of(path, follow=True)}; expected a regular file, since data are read more than"
            " once. Write the rows to a file."
        )
    if path.is_symlink():
        return (
            f"a link to {path.readlink()}, which does not exist. Link to the file again, or give"
            " the file itself."
        )
    if glob.has_magic(name):
        return "no file matches this glob."
    # Names are compared without endings, which would make any two csv files alike.
    siblings = {}
    if path.parent.is_dir():
        siblings = {sibling.stem: str(sibling) for sibling in path.parent.iterdir()}
    nearest = difflib.get_close_matches(path.stem, siblings, n=1, cutoff=0.75)
    hint = f" Did you mean {siblings[nearest[0]]}?" if nearest else ""
    return f"no such file (looked from {Path.cwd()}).{hint}"
