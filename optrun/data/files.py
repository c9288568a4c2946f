"""The user's own csv, tsv, json, jsonl, parquet and text files, read by `datasets`."""

from __future__ import annotations

import difflib
import glob
import json
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optrun.base.errors import ConfigError, OptrunError
from optrun.base.reading import kind_of, open_file
from optrun.config.schema.data import FilesConfig, eval_key
from optrun.data.cache import cached, digest, versions
from optrun.data.content import COMPRESSED, ELSEWHERE, refuse_broken_row, refuse_other_content
from optrun.data.delimited import read_csv
from optrun.data.known_files import content_of
from optrun.data.long_text import LONG, long_text
from optrun.data.shapes import refuse_one_object
from optrun.data.source import Source, Split
from optrun.data.stream import open_stream
from optrun.data.text_rows import TextRows

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


def load_files(config: FilesConfig, *, documents: bool) -> Source:
    """Read the files that `data.train` and `data.eval` name.

    Raises:
        ConfigError: As `read_files`.
    """
    notes: list[str] = []
    if config.streaming:
        rows: Any = open_stream("data.train", resolve("data.train", config.train), config.shuffle_window, notes)
        train = Split(rows, "data.train")
    else:
        train = _split("data.train", config.train, documents=documents)
    sets = {}
    for name, paths in config.eval_files():
        key = eval_key(name)
        sets[name] = _split(key, paths, documents=documents)
    return Source(train, sets, config, notes=[*notes, *_common_files(config)])


def _split(key: str, paths: Any, *, documents: bool) -> Split:
    """Read rows of files, with a digest of what decides them, by which later findings are remembered."""
    rows = read_files(key, paths, documents=documents)
    contents = map(_content, resolve(key, paths))
    return Split(rows, key, content=digest("rows-2", versions("datasets", "pyarrow"), str(documents), *contents))


def _content(path: Path) -> str:
    """Digest a file's bytes with its format."""
    return f"{path.suffixes} {content_of(path)}"


def _common_files(config: FilesConfig) -> Iterator[str]:
    train = {path.resolve() for path in resolve("data.train", config.train)}
    for name, paths in config.eval_files():
        both = [str(path) for path in resolve(eval_key(name), paths) if path.resolve() in train]
        if both:
            yield f"{', '.join(both)}: in data.train and in {eval_key(name)}; evaluation sees training rows"


def read_files(key: str, paths: Any, *, documents: bool) -> Dataset | TextRows:
    """Read one file, a list of files, or a glob.

    Every field of csv and tsv is text, the words NA, null and None included. A csv field may be quoted; a tsv field is
    taken as it stands.

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
    kind = formats.pop()
    for path in files:
        if path.stat().st_size == 0:
            raise ConfigError(f"{key}={path}: the file is empty.")
        refuse_other_content(key, path, kind)
    return _load(key, files, kind, documents=documents)


def resolve(key: str, paths: Any) -> list[Path]:
    """List the files that paths and globs name, in order, without repeats.

    Raises:
        ConfigError: A path or glob that names nothing; a folder; a file that may not be read.
    """
    found: dict[Path, None] = {}
    for pattern in paths if isinstance(paths, list | tuple) else [paths]:
        name = str(Path(pattern).expanduser())
        if Path(name).is_file():
            matches = [name]
        else:
            matches = sorted(match for match in glob.glob(name, recursive=True) if Path(match).is_file())  # noqa: PTH207
        if not matches:
            raise ConfigError(f"{key}={pattern}: {_why_nothing(name)}")
        found.update(dict.fromkeys(Path(match) for match in matches))
    for path in found:
        try:
            open_file(path, follow=True).close()
        except PermissionError as error:
            raise ConfigError(f"{key}={path}: no permission to read this file.") from error
    return list(found)


def _why_nothing(name: str) -> str:
    path = Path(name)
    if path.is_dir():
        return _why_no_folder(path)
    if path.exists():
        return f"{kind_of(path, follow=True)}; expected a regular file: data are read more than once. Write it to one."
    if glob.has_magic(name):
        return "no file matches this glob."
    beside = {other.name: str(other) for other in path.parent.iterdir()} if path.parent.is_dir() else {}
    # An ending is no likeness: among files of the same kind the rest of the name decides.
    stems = {other.removesuffix(path.suffix): other for other in beside if Path(other).suffix == path.suffix}
    alike = [stems[found] for found in difflib.get_close_matches(path.stem, stems, n=1)]
    alike += difflib.get_close_matches(path.name, [other for other in beside if Path(other).suffix != path.suffix], n=1)
    close = [beside[found] for found in alike[:1]]
    return f"no such file (looked from {Path.cwd()})." + (f" Did you mean {close[0]}?" if close else "")


def _why_no_folder(path: Path) -> str:
    """Explain what to give in place of a folder, by what is in it."""
    endings = [other.suffix.lower() for other in sorted(path.glob("**/*"))[:1000]]
    saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
    if saved or any(ELSEWHERE.get(ending) == ELSEWHERE[".png"] for ending in endings):
        what = "save_to_disk wrote" if saved else "images lie in"
        return f"this is a folder, one that {what}. Take data=hub data.path={path}."
    files = [other for other in sorted(path.glob("**/*"))[:1000] if other.is_file() and other.suffix in FORMATS]
    if not files:
        return f"this is a folder, and no file in it ends with one of {', '.join(FORMATS)}."
    classes = {other.parent.name for other in files}
    pattern = f"{'*' if any(other.parent == path for other in files) else '**/*'}{files[0].suffix}"
    hint = f"this is a folder. Give files or a glob, such as {shlex.quote(str(path / pattern))}."
    if FORMATS[files[0].suffix] != "text" or len(classes) < 2 or pattern[:2] != "**":
        return hint
    table = f"{path.name}.csv"
    rows = f"[p.read_text(), p.parent.name] for p in sorted(pathlib.Path({json.dumps(str(path))}).glob(PATTERN))"
    write = f'w = csv.writer(open({json.dumps(table)}, "w", newline="")); w.writerows([["text", "label"], *({rows})])'
    code = shlex.quote(f"import csv, pathlib; {write.replace('PATTERN', json.dumps(pattern))}")
    return (
        f"{hint} If its folders are classes, write a table and take data.train={shlex.quote(table)}: python -c {code}"
    )


def _format(key: str, path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    ending = suffixes[-1] if suffixes else ""
    if ending not in FORMATS:
        what = f"unknown format: {ELSEWHERE[ending]}" if ending in ELSEWHERE else "unknown format"
        raise ConfigError(
            f"{key}={path}: {what}. Known endings: {', '.join(FORMATS)} (also with {', '.join(COMPRESSED)})."
        )
    return FORMATS[suffixes[-1]]


def _packed(files: list[Path]) -> bool:
    return any(path.suffix.lower() in COMPRESSED for path in files)


def _load(key: str, files: list[Path], kind: str, *, documents: bool) -> Dataset | TextRows:
    # The bytes are part of the address: a file's time and size would be trusted otherwise.
    contents = [_content(path).rpartition(" ")[2] for path in files]
    content = contents[0] if len(contents) == 1 else digest(*contents)
    if kind == "text" and documents and any(path.stat().st_size >= LONG for path in files) and not _packed(files):
        return TextRows([long_text(path, one) for path, one in zip(files, contents, strict=True)])
    rows = (
        read_csv(key, files, kind, content) if kind in ("csv", "tsv") else _read(key, files, kind, content, documents)
    )
    if len(rows) == 0:
        raise ConfigError(f"{key}={files[0]}: no rows in it.")
    if kind == "json" and len(files) == len(rows) == 1:
        refuse_one_object(key, files[0], rows)
    return rows


def _read(key: str, files: list[Path], kind: str, content: str, documents: bool) -> Dataset:
    import datasets

    options = {"sample_by": "document" if documents else "line", "encoding": "utf-8-sig"} if kind == "text" else {}

    def read(cache_dir: str) -> Any:
        names = [glob.escape(str(path.resolve())) for path in files]
        return datasets.load_dataset(kind, data_files=names, cache_dir=cache_dir, keep_in_memory=False, **options)

    try:
        return kept_rows("files", digest(kind, str(options), content), read)["train"]
    except OptrunError:
        raise
    except Exception as error:  # whatever the reader says, the file and its words are what the user needs
        if "corresponds to no data" in str(error):
            raise ConfigError(f"{key}={files[0]}: no rows in it.") from error
        for path in files if kind == "json" else ():
            refuse_broken_row(key, path)
        names = ", ".join(str(path) for path in files[:3]) + (", ..." if len(files) > 3 else "")
        raise ConfigError(f"{key}={names}: cannot be read as {kind}: {reason(error)}") from error


def kept_rows(kind: str, key: str, read: Callable[[str], Mapping[str, Dataset]]) -> dict[str, Dataset]:
    """Read with a reader of `datasets`, and keep the Arrow files in our own cache, which notices damage.

    Args:
        kind: Subfolder of the cache.
        key: Digest of everything the rows depend on besides the packages that read them.
        read: Gives the splits; puts its files into the folder it is given.

    Returns:
        Split to rows, mapped from the cache.

    Raises:
        StorageError: The disk refused.
    """
    import datasets

    def make(folder: Path) -> None:
        with quiet():
            splits = read(str(folder / "reader"))
        for split, rows in splits.items():
            for number, part in enumerate(rows.cache_files):
                Path(part["filename"]).rename(folder / f"{split}-{number:05d}.arrow")
        shutil.rmtree(folder / "reader")

    folder = cached(kind, digest(versions("datasets", "pyarrow"), key), make)
    found: dict[str, list[Dataset]] = {}
    for path in sorted(folder.glob("*.arrow")):
        found.setdefault(path.stem.rsplit("-", 1)[0], []).append(datasets.Dataset.from_file(str(path)))
    return {split: datasets.concatenate_datasets(parts) for split, parts in found.items()}


@contextmanager
def quiet() -> Iterator[None]:
    """Silence progress bars and log lines of `datasets`; what goes wrong is raised."""
    import datasets

    shown = datasets.utils.logging.is_progress_bar_enabled()
    level = datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if shown:
            datasets.enable_progress_bars()


def reason(error: BaseException) -> str:
    """Return the innermost word of a library, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    message = " ".join(str(error).split()) or "no reason given"
    if isinstance(error, UnicodeDecodeError):
        message = f"its bytes are no UTF-8 ({message})"
    return f"{type(error).__name__}: {message if len(message) <= 400 else message[:400] + ' ...'}"
