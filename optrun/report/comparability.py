"""Find out whether runs can be compared: the same files by two paths, the same evaluation rows."""

from __future__ import annotations

import ast
import glob
import os
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from optrun.artifacts.run_dir import RunDir
from optrun.base.formatting import plain
from optrun.base.reading import expand_home
from optrun.config.original_cwd import original_cwd
from optrun.report.runs import Run, all_keys

_DATA_FILES = ("data.train.", "data.eval.", "data.path.")
"""Keys of the files that the fingerprint of the examples is computed from, with a final dot."""
_EVALUATION_KEYS = (
    "name",
    "path",
    "subset",
    "revision",
    "eval_split",
    "max_eval_examples",
    "label_column",
)
_GROUPS_OF_EXAMPLES = ("data.", "model.", "task.")
"""Groups whose settings decide which examples are made of the same files."""


def unify_paths(runs: Sequence[Run]) -> None:
    """Replace paths to the same files by one spelling, that of the first run.

    Two paths lead to the same files if both exist and resolve to the same place; a relative path
    starts where its run was started. They also do if two runs of one seed saw the same examples
    through them, even if the files were moved since.

    If one run was started in /data with `data.train=a.csv`, and a later one has
    `data.train=/data/a.csv`, the later one gets `respelt["data.train"] = "a.csv"`.

    Args:
        runs: Changed in place: `respelt` maps keys to the common spelling.
    """
    folder_of_start = cache(original_cwd)
    for key in all_keys(runs):
        values = {run.config.get(key) for run in runs}
        texts = [value for value in values if isinstance(value, str)]
        # Most keys have one value, or hold no path.
        if len(texts) < 2 or not any("/" in text or "." in text for text in texts):
            continue
        # What the files are -> their first spelling.
        spellings: dict[object, str] = {}
        for run in runs:
            value = run.config.get(key)
            if not isinstance(value, str):
                continue
            folder = folder_of_start(RunDir(run.path).hydra)
            # Identify the files by their examples and by their real path, whichever is known.
            candidates = (_identify_examples(run, key), _identify_files(value, folder))
            identities = [identity for identity in candidates if identity is not None]
            # Take the spelling of an earlier run with the same files, else the value itself.
            earlier_spellings = (
                spellings[identity] for identity in identities if identity in spellings
            )
            spelling = next(earlier_spellings, value)
            for identity in identities:
                spellings.setdefault(identity, spelling)
            if spelling != value:
                run.respelt[key] = spelling


def _identify_examples(run: Run, key: str) -> object | None:
    """Return the seed and the fingerprint of the examples of a run, as the identity of its files.

    None for a key of other files, and if the run recorded no fingerprint.
    """
    fingerprint = run.from_summary("data", "fingerprint")
    # With a dot, `data.train` and `data.train.fr` are keys of files, `data.train_split` is not.
    if not fingerprint or not f"{key}.".startswith(_DATA_FILES):
        return None
    return run.seed, str(fingerprint)


def _identify_files(value: str, folder: Path | None) -> object | None:
    """Return the real path of an existing file, or a tuple of them for a list; else None.

    Args:
        value: A path, a glob pattern, or a list of these as text, such as `['a.csv', 'b.csv']`.
        folder: Where a relative path starts; None: unknown, so that a relative path gives None.
    """
    if value.startswith("["):
        try:
            items = [str(item) for item in ast.literal_eval(value)]
        except (ValueError, SyntaxError):
            return None
        paths = [_identify_files(item, folder) for item in items]
        if None in paths:
            return None
        return tuple(paths)
    if folder is None and not Path(value).is_absolute():
        return None
    # An absolute path stays as it is, whatever the folder.
    path = expand_home(Path(folder or "/", value))
    if path.exists() or glob.glob(str(path), recursive=True):  # noqa: PTH207
        return os.path.realpath(path)
    return None


def shorten_paths(values: Iterable[object]) -> dict[object, str]:
    """Shorten paths: cut the first folders and the last parts that all of them have.

    Args:
        values: The values of one setting.

    Returns:
        Path -> short form, no two the same. Empty if there is only one path, or a value without a
        slash.

    Example:
        >>> shorten_paths(["/data/a/train.tsv", "/data/b/train.tsv"])
        {'/data/a/train.tsv': 'a', '/data/b/train.tsv': 'b'}
        >>> shorten_paths(["x/a.tsv", "x/b.tsv"]), shorten_paths(["x/a", 3])
        ({'x/a.tsv': 'a.tsv', 'x/b.tsv': 'b.tsv'}, {})
        >>> shorten_paths(["/x/a", "/x/a/b", "/x/a/b/a"])
        {'/x/a': 'a', '/x/a/b': 'a/b', '/x/a/b/a': 'a/b/a'}
    """
    paths = list(dict.fromkeys(values))
    parts = [path.split("/") if isinstance(path, str) else [] for path in paths]
    shortest = min(map(len, parts), default=0)
    if len(paths) < 2 or shortest < 2:
        return {}
    # 1. Count the parts to cut at both ends.
    shared_first = _count_shared(parts)
    shared_last = 0
    if shared_first == shortest:
        shared_first -= 1  # one path is a folder of all others, and keeps its own name
    else:
        shared_last = _count_shared([path_parts[::-1] for path_parts in parts])
        # The shortest path keeps one part.
        shared_last = min(shared_last, shortest - shared_first - 1)
    # 2. Cut them.
    short = {}
    for path, path_parts in zip(paths, parts, strict=True):
        short[path] = "/".join(path_parts[shared_first : len(path_parts) - shared_last])
    return short


def _count_shared(paths: Sequence[Sequence[str]]) -> int:
    """Count the first parts common to all paths."""
    count = 0
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        count += 1
    return count


def explain_incomparable(runs: Sequence[Run]) -> str:
    """Explain why runs with a score cannot be ranked together; empty if they can.

    They cannot if their tasks differ, or if runs of one seed were evaluated on different rows, see
    `_explain_different_rows`. A sweep may compare tokenizers or text lengths.

    Returns:
        A clause that names the tasks or the data, such as "the runs were evaluated on different
        rows (a.csv, b.csv)".
    """
    tasks = sorted({_name_task(run) for run in runs if run.config.get("task.name")})
    if len(tasks) > 1:
        return (
            f"the runs are of different tasks ({', '.join(tasks)}), whose numbers cannot be"
            " compared"
        )
    # A split that is drawn with the seed differs between seeds by design, never within one.
    for seed in dict.fromkeys(run.seed for run in runs):
        reason = _explain_different_rows([run for run in runs if run.seed == seed])
        if reason:
            return reason
    return ""


def identify_workload(run: Run) -> tuple[object, ...]:
    """Collect the settings in which runs of one ranking must agree: task and evaluation rows."""
    task = _name_task(run) if run.config.get("task.name") else ""
    return (task, *_evaluation_settings(run))


def _name_task(run: Run) -> str:
    """Name the task of a run, with its problem type if it is set; the run must have a task."""
    name = str(run.config["task.name"])
    kind = run.config.get("task.problem_type")
    return plain(name if kind is None else f"{name} ({kind})")


def _explain_different_rows(runs: Sequence[Run]) -> str:
    """Explain why runs of one seed were evaluated on different rows; empty if they were not.

    A fingerprint is that of the encoded evaluation examples; runs without one are ignored.

    1. Equal fingerprints mean equal rows, whatever the settings.
    2. If runs with equal settings of data, model and task have different fingerprints, the files
       changed between them.
    3. If the settings that choose the evaluation rows (`_evaluation_settings`) differ, too, the
       runs chose different rows.
    4. Else the same rows were encoded in different ways, such as by another tokenizer: empty.
    """
    evaluation_settings: set[tuple[object, ...]] = set()
    fingerprints: set[str] = set()
    # Settings of data, model and task -> the fingerprint of the first run with them.
    fingerprint_of_example_settings: dict[tuple[tuple[str, str], ...], str] = {}
    for run in runs:
        # A fingerprint is that of the training examples, a dash, that of the evaluation examples;
        # without a dash there is no evaluation, and `None` has none.
        fingerprint = str(run.from_summary("data", "fingerprint")).partition("-")[2]
        if not fingerprint:
            continue
        evaluation_settings.add(_evaluation_settings(run))
        fingerprints.add(fingerprint)
        keys = sorted(key for key in run.config if key.startswith(_GROUPS_OF_EXAMPLES))
        example_settings = tuple((key, str(run.config[key])) for key in keys)
        first = fingerprint_of_example_settings.setdefault(example_settings, fingerprint)
        if first != fingerprint:  # case 2
            return "the content of the evaluation data changed between the runs"
    # Case 3; one fingerprint is case 1, one choice of rows case 4.
    if len(evaluation_settings) > 1 and len(fingerprints) > 1:
        names = sorted({name_data(run) for run in runs})
        return f"the runs were evaluated on different rows ({', '.join(names[:4])})"
    return ""


def _evaluation_settings(run: Run) -> tuple[object, ...]:
    """Collect the values of the settings that choose the evaluation rows, as a key to compare by.

    These are `data.eval` and `_EVALUATION_KEYS`. Without `data.eval` the rows are held out from the
    training data, whose settings count in its place.
    """
    # Paths are compared in their common spelling (`Run.setting`), other values as they are.
    keys = ["data.train", "data.train_split", "data.eval_fraction"]
    if run.config.get("data.eval") is not None:
        keys = ["data.eval"]
    values = [str(run.setting(key)) for key in keys]
    values += [str(run.config.get(f"data.{key}")) for key in _EVALUATION_KEYS]
    return tuple(values)


def name_data(run: Run) -> str:
    """Name the evaluation data of a run.

    By the first that it has: `data.eval`, `data.path` (of the hub), `data.train`, and the choice
    `data=`.
    """
    for key in ("data.eval", "data.path", "data.train", "data.name"):
        value = run.setting(key)
        if value is not None:
            return plain(str(value))
    return "data"
