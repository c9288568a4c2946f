"""Decide whether runs may stand in one ranking: the same task, judged on the same rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from optrun.base.formatting import plain
from optrun.report.collect import Run

_SOURCE = ("name", "path", "subset", "revision", "eval_split", "max_eval_examples", "eval_text_column", "label_column")
_PREPARING = ("data.", "model.", "task.")


def incomparable(runs: Sequence[Run]) -> str:
    """Say why runs with a score cannot be ranked against each other; empty where they can.

    Another length of texts or another tokenizer makes other examples of the same evaluation rows, and is what a sweep
    may be about; other rows are not.

    Returns:
        A clause that names the tasks, or the data.
    """
    tasks = sorted({_task(run) for run in runs if run.config.get("task.name")})
    if len(tasks) > 1:
        return f"the runs are of different tasks ({', '.join(tasks)}), whose numbers cannot be compared"
    # A split that is cut with the seed differs between seeds by design.
    reasons = (_other_rows([run for run in runs if run.seed == seed]) for seed in {run.seed: None for run in runs})
    return next(filter(None, reasons), "")


def workload_of(run: Run) -> tuple[object, ...]:
    """Collect what says that two runs may stand in one ranking: the task, and which rows are evaluation rows."""
    return (_task(run) if run.config.get("task.name") else "", *_rows(run))


def _task(run: Run) -> str:
    kind = run.config.get("task.problem_type")
    return plain(str(run.config["task.name"]) + (f" ({kind})" if kind is not None else ""))


def _other_rows(runs: Sequence[Run]) -> str:
    """Say why runs of one seed were evaluated on other rows; empty where they were not."""
    examples = defaultdict[tuple[object, ...], set[str]](set)
    prepared = defaultdict[tuple[tuple[str, str], ...], set[str]](set)
    for run in runs:
        if digest := str(run.at("data", "fingerprint")).partition("-")[2]:  # of the evaluation examples
            examples[_rows(run)].add(digest)
            whole = ((key, str(value)) for key, value in run.config.items())
            prepared[tuple(sorted(each for each in whole if each[0].startswith(_PREPARING)))].add(digest)
    if any(len(digests) > 1 for digests in prepared.values()):
        return "the content of the evaluation data changed between the runs"
    if len(examples) > 1 and len(set.union(*examples.values())) > 1:
        named = sorted({data_of(run) for run in runs})
        return f"the runs were evaluated on different rows ({', '.join(named[:4])})"
    return ""


def _rows(run: Run) -> tuple[object, ...]:
    """Collect the configuration that says which rows are evaluation rows."""
    given = run.config.get("data.eval") is not None
    source = ("data.eval",) if given else ("data.train", "data.train_split", "data.eval_fraction")
    return (*(str(run.setting(key)) for key in source), *(str(run.config.get(f"data.{key}")) for key in _SOURCE))


def data_of(run: Run) -> str:
    """Name the data: files by the evaluation file, hub data by its path, other sources by their choice."""
    keys = ("data.eval", "data.path", "data.train", "data.name")
    return plain(next((str(value) for key in keys if (value := run.setting(key)) is not None), "data"))
