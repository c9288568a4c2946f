"""Tell what is the same in runs: a file by two paths, the rows of evaluation."""

from __future__ import annotations

import ast
import glob
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from optrun.artifacts.run_dir import RunDir
from optrun.base.formatting import plain
from optrun.config.original_cwd import original_cwd
from optrun.report.runs import Run, all_keys

_OF_EXAMPLES = ("data.train.", "data.eval.", "data.path.")
"""Keys whose files the fingerprint of the examples knows."""
_SOURCE = (
    "name",
    "path",
    "subset",
    "revision",
    "eval_split",
    "max_eval_examples",
    "label_column",
)
_PREPARING = ("data.", "model.", "task.")


def unify_paths(runs: Sequence[Run]) -> None:
    """Spell paths to the same files as the first run does.

    A relative path is read from where its run was started. Files that are not there any more, or
    lie elsewhere on another machine, are the same if two runs of one seed saw the same examples.

    Args:
        runs: Changed in place: `respelt` maps keys to the common spelling.
    """
    folder = cache(original_cwd)
    for key in all_keys(runs):
        values = {run.config.get(key) for run in runs}
        texts = [value for value in values if isinstance(value, str)]
        if len(texts) < 2 or not any("/" in text or "." in text for text in texts):
            continue
        spellings: dict[object, str] = {}
        for run in runs:
            value = run.config.get(key)
            if not isinstance(value, str):
                continue
            started_in = folder(RunDir(run.path).hydra)
            contents = [_name_examples(run, key), _name_files(value, started_in)]
            names = [name for name in contents if name is not None]
            known_spellings = [spellings[name] for name in names if name in spellings]
            spelling = known_spellings[0] if known_spellings else value
            for name in names:
                spellings.setdefault(name, spelling)
            if spelling != value:
                run.respelt[key] = spelling


def _name_examples(run: Run, key: str) -> object | None:
    """Name the content of a data file by its recorded examples and seed, if known."""
    fingerprint = run.at("data", "fingerprint")
    if not fingerprint or not f"{key}.".startswith(_OF_EXAMPLES):
        return None
    return run.seed, str(fingerprint)


def _name_files(value: str, folder: Path | None) -> object | None:
    """Return the real path of an existing file, a tuple of them for a list; else None.

    Args:
        value: A path, a glob pattern, or a list of these as text, such as `['a.csv', 'b.csv']`.
        folder: Where a relative path starts; None: unknown, and a relative path has no name.
    """
    if value.startswith("["):
        try:
            items = [str(item) for item in ast.literal_eval(value)]
        except (ValueError, SyntaxError):
            return None
        names = [_name_files(item, folder) for item in items]
        if None in names:
            return None
        return tuple(names)
    if folder is None and not Path(value).is_absolute():
        return None
    path = Path(folder or "/", value).expanduser()
    if path.exists() or glob.glob(str(path), recursive=True):  # noqa: PTH207
        return os.path.realpath(path)
    return None


def shorten_paths(values: Iterable[object]) -> dict[object, str]:
    """Shorten paths by their common first folders and common last pieces.

    Args:
        values: The values of one setting.

    Returns:
        Each path and its short form, no two the same; nothing if a value is no path.

    Example:
        >>> shorten_paths(["/data/a/train.tsv", "/data/b/train.tsv"])
        {'/data/a/train.tsv': 'a', '/data/b/train.tsv': 'b'}
        >>> shorten_paths(["x/a.tsv", "x/b.tsv"]), shorten_paths(["x/a", 3])
        ({'x/a.tsv': 'a.tsv', 'x/b.tsv': 'b.tsv'}, {})
        >>> shorten_paths(["/x/a", "/x/a/b", "/x/a/b/a"])
        {'/x/a': 'a', '/x/a/b': 'a/b', '/x/a/b/a': 'a/b/a'}
    """
    paths = list(dict.fromkeys(values))
    pieces = [path.split("/") if isinstance(path, str) else [] for path in paths]
    shortest = min(map(len, pieces), default=0)
    if len(paths) < 2 or shortest < 2:
        return {}
    start = _count_shared(pieces)
    end = 0
    if start == shortest:
        start -= 1  # one of them is a folder of another
    else:
        end = _count_shared([path_pieces[::-1] for path_pieces in pieces])
        end = min(end, shortest - start - 1)
    short = {}
    for path, path_pieces in zip(paths, pieces, strict=True):
        short[path] = "/".join(path_pieces[start : len(path_pieces) - end])
    return short


def _count_shared(paths: Sequence[Sequence[str]]) -> int:
    """Count the common first pieces."""
    count = 0
    for column in zip(*paths, strict=False):
        if len(set(column)) > 1:
            break
        count += 1
    return count


def explain_incomparable(runs: Sequence[Run]) -> str:
    """Explain why runs with a score cannot be ranked together; empty if they can.

    Runs may differ in tokenizer or text length, which a sweep may compare, but not in their
    evaluation rows.

    Returns:
        A clause that names the tasks, or the data.
    """
    tasks = sorted({_name_task(run) for run in runs if run.config.get("task.name")})
    if len(tasks) > 1:
        return (
            f"the runs are of different tasks ({', '.join(tasks)}), whose numbers cannot be"
            " compared"
        )
    # A split that is cut with the seed differs between seeds by design.
    for seed in dict.fromkeys(run.seed for run in runs):
        reason = _explain_other_rows([run for run in runs if run.seed == seed])
        if reason:
            return reason
    return ""


def identify_workload(run: Run) -> tuple[object, ...]:
    """Collect the settings in which runs of one ranking must agree.

    The task, and which rows are evaluation rows.
    """
    return (_name_task(run) if run.config.get("task.name") else "", *_rows(run))


def _name_task(run: Run) -> str:
    name = str(run.config["task.name"])
    kind = run.config.get("task.problem_type")
    return plain(name if kind is None else f"{name} ({kind})")


def _explain_other_rows(runs: Sequence[Run]) -> str:
    """Explain which runs of one seed used other evaluation rows; empty if none did.

    Runs without a recorded fingerprint are ignored. Equal settings with unequal fingerprints
    mean that the file changed; unequal settings with one fingerprint are the same rows.
    """
    by_rows = defaultdict[tuple[object, ...], set[str]](set)
    by_settings = defaultdict[tuple[tuple[str, str], ...], set[str]](set)
    for run in runs:
        of_evaluation = str(run.at("data", "fingerprint")).partition("-")[2]
        if not of_evaluation:
            continue
        by_rows[_rows(run)].add(of_evaluation)
        keys = sorted(key for key in run.config if key.startswith(_PREPARING))
        by_settings[tuple((key, str(run.config[key])) for key in keys)].add(of_evaluation)
    if any(len(digests) > 1 for digests in by_settings.values()):
        return "the content of the evaluation data changed between the runs"
    if len(by_rows) > 1 and len(set.union(*by_rows.values())) > 1:
        names = sorted({name_data(run) for run in runs})
        return f"the runs were evaluated on different rows ({', '.join(names[:4])})"
    return ""


def _rows(run: Run) -> tuple[object, ...]:
    """Collect the settings that choose the evaluation rows."""
    keys = ["data.train", "data.train_split", "data.eval_fraction"]
    if run.config.get("data.eval") is not None:
        keys = ["data.eval"]
    values = [str(run.setting(key)) for key in keys]
    values += [str(run.config.get(f"data.{key}")) for key in _SOURCE]
    return tuple(values)


def name_data(run: Run) -> str:
    """Name the data: the evaluation file, else the path on the hub, else the choice."""
    for key in ("data.eval", "data.path", "data.train", "data.name"):
        value = run.setting(key)
        if value is not None:
            return plain(str(value))
    return "data"
