"""Tell what is the same in runs: a file by two paths, the rows of evaluation."""

from __future__ import annotations

import ast
import glob
import itertools
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from optrun.artifacts.run_dir import RunDir
from optrun.base.formatting import plain
from optrun.base.reading import read_text
from optrun.report.runs import Run

_CWD = re.compile(r"^    cwd: (.+)$", re.MULTILINE)
_OF_EXAMPLES = ("data.train.", "data.eval.", "data.path.")
"""Keys whose files the fingerprint of the examples knows."""
_SOURCE = (
    "name",
    "path",
    "subset",
    "revision",
    "eval_split",
    "max_eval_examples",
    "eval_text_column",
    "label_column",
)
_PREPARING = ("data.", "model.", "task.")


def unify_paths(runs: Sequence[Run]) -> None:
    """Give one spelling, that of the first run, to paths which lead to the same files.

    A relative path is read from where its run was started. Files that are not there any more, or
    lie elsewhere on another machine, are the same where two runs of one seed saw the same examples.

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
            names = [
                name
                for name in (_examples(run, key), _files(value, folder(run.path)))
                if name is not None
            ]
            spelling = next((first[name] for name in names if name in first), value)
            first |= {name: first.get(name, spelling) for name in names}
            if spelling != value:
                run.respelt[key] = spelling


def _examples(run: Run, key: str) -> object | None:
    """Name the content of a data file by the examples that a seed made of it.

    None where it is not known.
    """
    fingerprint = run.at("data", "fingerprint")
    return (
        (run.seed, str(fingerprint)) if fingerprint and f"{key}.".startswith(_OF_EXAMPLES) else None
    )


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
    """Find the folder that a run was started from, as Hydra noted it.

    None where it is not known.
    """
    try:
        found = _CWD.search(
            read_text(RunDir(run).hydra / "hydra.yaml")
        )  # to parse this long file takes time
    except (OSError, ValueError):
        return None
    return Path(found[1].strip("'\"")) if found else None


def shorten_paths(values: Iterable[object]) -> dict[object, str]:
    """Shorten paths by the folders that all begin with and the pieces that all end with.

    Args:
        values: Of one setting.

    Returns:
        Each path and its short form, no two the same; nothing where a value is no path.

    Example:
        >>> shorten_paths(["/data/a/train.tsv", "/data/b/train.tsv"])
        {'/data/a/train.tsv': 'a', '/data/b/train.tsv': 'b'}
        >>> shorten_paths(["x/a.tsv", "x/b.tsv"]), shorten_paths(["x/a", 3])
        ({'x/a.tsv': 'a.tsv', 'x/b.tsv': 'b.tsv'}, {})
        >>> shorten_paths(["/x/a", "/x/a/b", "/x/a/b/a"])
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
    return {
        value: "/".join(pieces[start : len(pieces) - end])
        for value, pieces in zip(distinct, parts, strict=True)
    }


def _alike(parts: Sequence[Sequence[str]]) -> int:
    """Count the pieces that all begin with."""
    return len(
        list(itertools.takewhile(lambda column: len({*column}) == 1, zip(*parts, strict=False)))
    )


def explain_incomparable(runs: Sequence[Run]) -> str:
    """Say why runs with a score cannot be ranked against each other; empty where they can.

    Another length of texts or another tokenizer makes other examples of the same evaluation rows,
    and is what a sweep may be about; other rows are not.

    Returns:
        A clause that names the tasks, or the data.
    """
    tasks = sorted({_task(run) for run in runs if run.config.get("task.name")})
    if len(tasks) > 1:
        return (
            f"the runs are of different tasks ({', '.join(tasks)}), whose numbers cannot be"
            " compared"
        )
    # A split that is cut with the seed differs between seeds by design.
    reasons = (
        _other_rows([run for run in runs if run.seed == seed])
        for seed in {run.seed: None for run in runs}
    )
    return next(filter(None, reasons), "")


def identify_workload(run: Run) -> tuple[object, ...]:
    """Collect what says that two runs may stand in one ranking.

    The task, and which rows are evaluation rows.
    """
    return (_task(run) if run.config.get("task.name") else "", *_rows(run))


def _task(run: Run) -> str:
    kind = run.config.get("task.problem_type")
    return plain(str(run.config["task.name"]) + (f" ({kind})" if kind is not None else ""))


def _other_rows(runs: Sequence[Run]) -> str:
    """Say why runs of one seed were evaluated on other rows; empty where they were not."""
    examples = defaultdict[tuple[object, ...], set[str]](set)
    prepared = defaultdict[tuple[tuple[str, str], ...], set[str]](set)
    for run in runs:
        if digest := str(run.at("data", "fingerprint")).partition("-")[
            2
        ]:  # of the evaluation examples
            examples[_rows(run)].add(digest)
            whole = ((key, str(value)) for key, value in run.config.items())
            prepared[tuple(sorted(each for each in whole if each[0].startswith(_PREPARING)))].add(
                digest
            )
    if any(len(digests) > 1 for digests in prepared.values()):
        return "the content of the evaluation data changed between the runs"
    if len(examples) > 1 and len(set.union(*examples.values())) > 1:
        named = sorted({name_data(run) for run in runs})
        return f"the runs were evaluated on different rows ({', '.join(named[:4])})"
    return ""


def _rows(run: Run) -> tuple[object, ...]:
    """Collect the configuration that says which rows are evaluation rows."""
    given = run.config.get("data.eval") is not None
    source = ("data.eval",) if given else ("data.train", "data.train_split", "data.eval_fraction")
    return (
        *(str(run.setting(key)) for key in source),
        *(str(run.config.get(f"data.{key}")) for key in _SOURCE),
    )


def name_data(run: Run) -> str:
    """Name the data.

    Files by the evaluation file, hub data by its path, other sources by their choice.
    """
    keys = ("data.eval", "data.path", "data.train", "data.name")
    return plain(
        next((str(value) for key in keys if (value := run.setting(key)) is not None), "data")
    )
