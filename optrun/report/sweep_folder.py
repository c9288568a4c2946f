"""Read what the folder of a sweep says of its jobs, tuned keys and looks.

Name a new folder by date and time.

A folder that is no sweep, or whose `sweep.json` cannot be read, says nothing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from optrun.artifacts.atomic import replace_text
from optrun.artifacts.run_dir import SWEEP, RunDir, unused_path
from optrun.base.reading import read_json

T = TypeVar("T")
LOOKS = "report-looks.json"
"""How often a growing set of seeds was asked: whoever adds seeds until a verdict shows finds one
that is not there."""


def dated_folder(beneath: Path) -> Path:
    """Name a new folder by date and time."""
    now = datetime.now().astimezone()
    return unused_path(beneath / now.strftime("%Y-%m-%d") / now.strftime("%H-%M-%S"))


def in_sweep(run: Path) -> bool:
    """Tell whether a run directory belongs to a sweep, by the records beside it.

    In a sweep a failed job always has a summary. A job with only Hydra's folder was handed to a
    launcher and left when the sweep stopped.
    """
    return (run.parent / SWEEP).is_file() or (run.parent / ".sweep").is_dir()


def is_search(sweep: Path) -> bool:
    """Tell whether a sweep is a search, so that its learning rates form no grid."""
    return (sweep / ".sweep" / "ask.lock").exists()


def find_waiting(sweep: Path) -> dict[Path, list[str]]:
    """Find the waiting jobs of a sweep's last command: folder -> overrides."""
    waiting = {}
    for name, status, overrides in _read(sweep, "jobs", _parse_job):
        # A name is one folder beneath the sweep, whatever a file from elsewhere says.
        if status != "new" or Path(name).name != name:
            continue
        path = sweep / name
        if not path.exists() or RunDir(path).is_unbegun():
            waiting[path] = overrides
    return waiting


def _parse_job(row: Any) -> tuple[str, object, list[str]]:
    """Read name, status and overrides of a job in `sweep.json`."""
    return str(row["name"]), row["status"], [str(token) for token in row["overrides"]]


def tuned_keys(sweeps: Iterable[Path]) -> set[str]:
    """Collect the tuned keys of sweeps: each itself and, for a group, `KEY.name`."""
    keys: set[str] = set()
    for sweep in set(sweeps):
        for key in _read(sweep, "tuned", str):
            keys |= {key, f"{key}.name"}
    return keys


def _read(sweep: Path, key: str, parse: Callable[[Any], T]) -> list[T]:
    """Parse the entries of a list in `sweep.json`; empty if file or entry cannot be read."""
    try:
        return [parse(entry) for entry in read_json(sweep / SWEEP)[key]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def record_look(folders: Sequence[Path], metric: str, seeds: int) -> int:
    """Record this test in the folder of each sweep, and return its place among all tests.

    Args:
        folders: Directories of the sweeps.
        metric: Metric of the test; each metric is counted separately.
        seeds: Largest number of seeds of a contender. A test is known by this number alone: a
            repeated test keeps its place.

    Returns:
        1 for the first test. After tests of 3 and 5 seeds, 1 for 3 and 3 for 8. Of several folders
        the largest place. A folder that cannot be written is counted, not recorded.
    """
    numbers = [1]
    for folder in folders:
        looks = _read_looks(folder)
        of_metric = looks.setdefault(metric, [])
        if seeds not in of_metric:
            of_metric.append(seeds)
            with contextlib.suppress(OSError):  # a report of what lies on a disk that is not ours
                replace_text(folder / LOOKS, json.dumps(looks) + "\n")
        numbers.append(of_metric.index(seeds) + 1)
    return max(numbers)


def _read_looks(folder: Path) -> dict[str, list[int]]:
    """Read the numbers of seeds at earlier looks, by metric; empty if unreadable."""
    looks: dict[str, list[int]] = {}
    with contextlib.suppress(OSError, ValueError, AttributeError):
        for name, numbers in read_json(folder / LOOKS).items():
            if isinstance(numbers, list):
                looks[str(name)] = [number for number in numbers if type(number) is int]
    return looks
