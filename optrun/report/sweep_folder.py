"""Read what the folder of a sweep says of its jobs, tuned keys and looks.

Name a new folder by date and time.

A folder that is no sweep, or whose `sweep.json` cannot be read, says nothing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from optrun.artifacts.atomic import replace_text
from optrun.artifacts.run_dir import SWEEP, RunDir
from optrun.base.reading import read_json

T = TypeVar("T")
LOOKS = "report-looks.json"
"""How often a growing set of seeds was asked: whoever adds seeds until a verdict shows finds one
that is not there."""


def dated_folder(beneath: Path) -> Path:
    """Name a folder by date and time that is not there yet."""
    now = datetime.now().astimezone()
    day, stem = beneath / now.strftime("%Y-%m-%d"), now.strftime("%H-%M-%S")
    return next(
        each for n in count(1) if not (each := day / (f"{stem}-{n}" if n > 1 else stem)).exists()
    )


def in_sweep(run: Path) -> bool:
    """Tell whether a run directory is that of a job: a sweep keeps its books beside it.

    There a job that failed always has a summary. One with no more than Hydra's folder was handed to
    a launcher, and left when the sweep was stopped.
    """
    return (run.parent / SWEEP).is_file() or (run.parent / ".sweep").is_dir()


def is_search(sweep: Path) -> bool:
    """Tell whether trials of a sweep were proposed: its learning rates are no grid."""
    return (sweep / ".sweep" / "ask.lock").exists()


def find_waiting(sweep: Path) -> dict[Path, list[str]]:
    """Find the jobs of a sweep's last command that have not begun: folder -> overrides."""
    rows = _read(
        sweep, "jobs", lambda row: (str(row["name"]), row["status"], [*map(str, row["overrides"])])
    )
    # A name is one folder beneath the sweep, whatever a file from elsewhere says.
    new = {
        sweep / name: overrides
        for name, status, overrides in rows
        if status == "new" and Path(name).name == name
    }
    return {
        path: overrides
        for path, overrides in new.items()
        if not path.exists() or RunDir(path).is_unbegun()
    }


def tuned_keys(sweeps: Iterable[Path]) -> set[str]:
    """Collect the keys that sweeps tuned, groups as `GROUP.name`."""
    return with_group_names(key for sweep in {*sweeps} for key in _read(sweep, "tuned", str))


def with_group_names(keys: Iterable[str]) -> set[str]:
    """Collect the keys of configurations that typed ones may mean."""
    return {name for key in keys for name in (key, f"{key}.name")}


def _read(sweep: Path, key: str, parse: Callable[[Any], T]) -> list[T]:
    try:
        return [parse(each) for each in read_json(sweep / SWEEP)[key]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def count_looks(folders: Sequence[Path], metric: str, seeds: int) -> int:
    """Count the looks up to this one.

    Args:
        folders: The sweeps of a report.
        metric: What it compares by: each has its own looks.
        seeds: How many seeds its contenders have, the most of one.

    Returns:
        1 for the first; as before where this number of seeds was looked at before.
    """
    numbers = [1]
    for folder in folders:
        held: dict[str, list[int]] = {}
        with contextlib.suppress(OSError, ValueError, AttributeError):
            noted = read_json(folder / LOOKS).items()
            held = {
                str(name): [n for n in own if type(n) is int]
                for name, own in noted
                if isinstance(own, list)
            }
        own = held.setdefault(metric, [])
        if seeds not in own:
            own.append(seeds)
            with contextlib.suppress(OSError):  # a report of what lies on a disk that is not ours
                replace_text(folder / LOOKS, json.dumps(held) + "\n")
        numbers.append(own.index(seeds) + 1)
    return max(numbers)
