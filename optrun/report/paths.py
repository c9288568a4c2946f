"""Tell files apart by what they are, and name them by where their paths differ."""

from __future__ import annotations

import ast
import glob
import itertools
import os
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from optrun.artifacts.run_dir import RunDir
from optrun.base.reading import read_text
from optrun.report.collect import Run

_CWD = re.compile(r"^    cwd: (.+)$", re.MULTILINE)
_DATA = ("data.train.", "data.eval.", "data.path.")
"""Keys whose files the fingerprint of the examples knows."""


def respell(runs: Sequence[Run]) -> None:
    """Give one spelling, that of the first run, to paths which lead to the same files.

    A relative path is read from where its run was started. Files that are not there any more, or lie elsewhere on
    another machine, are the same where two runs of one seed saw the same examples.

    Args:
        runs: Their `respelt` is filled.
    """
    folder = cache(_started_in)
    for key in dict.fromkeys(key for run in runs for key in run.config):
        values = {value for run in runs if isinstance(value := run.config.get(key), str)}
        if len(values) < 2 or not any("/" in value or "." in value for value in values):
            continue
        first: dict[object, str] = {}
        for run in runs:
            if not isinstance(value := run.config.get(key), str):
                continue
            names = [name for name in (_examples(run, key), _files(value, folder(run.path))) if name is not None]
            spelling = next((first[name] for name in names if name in first), value)
            first |= {name: first.get(name, spelling) for name in names}
            if spelling != value:
                run.respelt[key] = spelling


def _examples(run: Run, key: str) -> object | None:
    """Name the content of a data file by the examples that a seed made of it; None where it is not known."""
    fingerprint = run.at("data", "fingerprint")
    return (run.seed, str(fingerprint)) if fingerprint and f"{key}.".startswith(_DATA) else None


def _files(value: str, folder: Path | None) -> object | None:
    """Name the files that a value leads to, seen from a folder; None where it leads nowhere."""
    if value.startswith("["):
        try:
            found = [_files(str(item), folder) for item in ast.literal_eval(value)]
        except (ValueError, SyntaxError):
            return None
        return None if None in found else tuple(found)
    path = Path(folder or "/", value).expanduser()
    if folder is None and not Path(value).is_absolute():
        return None
    return os.path.realpath(path) if path.exists() or glob.glob(str(path), recursive=True) else None  # noqa: PTH207


def _started_in(run: Path) -> Path | None:
    """Find the folder that a run was started from, as Hydra noted it; None where it is not known."""
    try:
        found = _CWD.search(read_text(RunDir(run).hydra / "hydra.yaml"))  # to parse this long file takes time
    except (OSError, ValueError):
        return None
    return Path(found[1].strip("'\"")) if found else None


def shortened(values: Iterable[Any]) -> dict[str, str]:
    """Shorten paths by the folders that all begin with and the pieces that all end with.

    Args:
        values: Of one setting.

    Returns:
        Each path and its short form, no two the same; nothing where a value is no path.

    Example:
        >>> shortened(["/data/a/train.tsv", "/data/b/train.tsv"])
        {'/data/a/train.tsv': 'a', '/data/b/train.tsv': 'b'}
        >>> shortened(["x/a.tsv", "x/b.tsv"]), shortened(["x/a", 3])
        ({'x/a.tsv': 'a.tsv', 'x/b.tsv': 'b.tsv'}, {})
        >>> shortened(["/x/a", "/x/a/b", "/x/a/b/a"])
        {'/x/a': 'a', '/x/a/b': 'a/b', '/x/a/b/a': 'a/b/a'}
    """
    distinct = list(dict.fromkeys(values))
    parts = [value.split("/") if isinstance(value, str) else [] for value in distinct]
    if len(distinct) < 2 or not all(len(pieces) > 1 for pieces in parts):
        return {}
    start = _alike(parts)
    rest = [pieces[start:] for pieces in parts]
    shortest = min(map(len, rest))
    end = min(_alike([pieces[::-1] for pieces in rest]), max(0, shortest - 1))
    start -= not shortest  # one of them is a folder of another
    return {value: "/".join(pieces[start : len(pieces) - end]) for value, pieces in zip(distinct, parts, strict=True)}


def _alike(parts: Sequence[Sequence[str]]) -> int:
    """Count the pieces that all begin with."""
    return len(list(itertools.takewhile(lambda column: len({*column}) == 1, zip(*parts, strict=False))))
