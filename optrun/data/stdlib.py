"""The source text of the running Python's standard library: real input without a download."""

from __future__ import annotations

import ast
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.base.errors import ConfigError
from optrun.config.schema.data import ColumnsConfig, DataConfig, StdlibConfig
from optrun.data.randomness import generator
from optrun.data.source import Source, Split
from optrun.data.text_rows import TextRows

if TYPE_CHECKING:
    from datasets import Dataset, Features

_NOT_LIBRARY = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "__pycache__",
    "lib2to3",
    "config",
}
_TABLES = {
    "encodings",
    "pydoc_data",
}  # thousands of lines of the same shape: a low loss, and nothing learnt
_LEFT_OUT = _NOT_LIBRARY | _TABLES


def stdlib_files() -> list[Path]:
    """List the `.py` files of the standard library, sorted by path.

    Left out are tests, tables such as `encodings`, and packages that pip has installed.

    Raises:
        ConfigError: This Python has no source files.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, folders, names in os.walk(root):
        # os.walk enters the folders that stay in its own list. Those of pip, such as site-packages,
        # may hold a hundred times as many files.
        folders[:] = set(folders) - _LEFT_OUT
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise ConfigError(
            f"data=stdlib: no .py files below {root}: this Python came without the source of its"
            " library. Use data=files data.train=PATH."
        )
    return sorted(files)


def stdlib_source(
    config: DataConfig,
    rows: Callable[[list[Path]], Dataset | TextRows],
    noun: str = "",
    max_files: int | None = None,
    columns: ColumnsConfig | None = None,
) -> Source:
    """Read training and evaluation rows from different files, the same files for every seed.

    Args:
        config: The data choice; `eval_fraction` of its files are for evaluation, at least one.
        rows: Makes the rows of some files.
        noun: Noun of the rows for the note, such as `lines of `.
        max_files: Number of files to read, since all would take seconds at the start of every run;
            None: all.
        columns: Names of the columns.

    Raises:
        ConfigError: This Python has no source files.
    """
    files = stdlib_files()
    # Shuffled files: the first blocks of the packed stream are not all from modules that begin with
    # "a". The first ones are for evaluation.
    picked = [files[index] for index in generator(0, "split").permutation(len(files))[:max_files]]
    held_files = 0
    if config.eval_fraction:
        held_files = max(1, round(config.eval_fraction * len(picked)))
    note = (
        f"{noun}{len(picked) - held_files} files of the standard library to train on,"
        f" {'of ' if noun else ''}{held_files} others"
    )
    key = f"data={config.name}"
    train = Split(rows(picked[held_files:]), key)
    evaluation = Split(rows(picked[:held_files]), f"{key} (held out)")
    return Source(
        train, {"": evaluation}, columns, cut_from_train=True, notes=[f"{note} to evaluate on"]
    )


def stdlib_table(
    config: DataConfig,
    read: Callable[[Path], Iterable[Mapping[str, object]]],
    features: Features,
    noun: str,
    max_files: int,
    columns: ColumnsConfig | None = None,
    key: Callable[[Mapping[str, object]], object] = str,
) -> Source:
    """Make tables of training and evaluation rows from the files of Python's library.

    Different files give training and evaluation rows, as in `stdlib_source`.

    Args:
        config: The data choice.
        read: Yields the rows of a file.
        features: Types of the columns.
        noun: Noun of the rows for people, such as `lines of `.
        max_files: Number of files to read, not of rows.
        columns: Names of the columns.
        key: Identifies equal rows. Only the last of equal rows stays: a row that stands a hundred
            times would be learnt by heart.
    """

    def rows(paths: list[Path]) -> Dataset:
        from datasets import Dataset

        rows_by_key: dict[object, Mapping[str, object]] = {}
        for path in paths:
            for row in read(path):
                rows_by_key[key(row)] = row
        cells: dict[str, list[object]] = {}
        for name in features:
            cells[name] = [row[name] for row in rows_by_key.values()]
        return Dataset.from_dict(cells, features)

    return stdlib_source(config, rows, noun, max_files, columns)


def load_stdlib(config: StdlibConfig, *, documents: bool) -> Source:  # noqa: ARG001
    """Read each file as a text; as `stdlib_source`."""
    source = stdlib_source(config, lambda paths: TextRows(map(source_text, paths)))
    source.prompt = "def read_lines(path):\n    "
    return source


def source_text(path: Path) -> str:
    """Read a source file; bytes beyond UTF-8 are replaced."""
    return path.read_text(encoding="utf-8", errors="replace")


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions_of(path: Path) -> Iterator[tuple[Function, str]]:
    """Yield each function of a Python file with the first paragraph of its docstring."""
    try:
        tree = ast.parse(source_text(path))
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node, " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
