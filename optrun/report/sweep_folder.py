"""Read the records in the folder of a sweep: its jobs, its tuned keys, and earlier tests.

For a folder that is no sweep, or has no readable `sweep.json`, everything is empty.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from optrun.artifacts.atomic import replace_text
from optrun.artifacts.run_dir import SWEEP, unused_path
from optrun.base.reading import read_json

T = TypeVar("T")
LOOKS = "report-looks.json"
"""Record of the tests made while seeds were added. Whoever adds seeds until a test rejects will
find a difference where there is none, so later tests are made at a stricter level."""


def dated_folder(beneath: Path) -> Path:
    """Name a new folder by date and time."""
    now = datetime.now().astimezone()
    return unused_path(beneath / now.strftime("%Y-%m-%d") / now.strftime("%H-%M-%S"))


def in_sweep(run: Path) -> bool:
    """Tell whether a run directory belongs to a sweep, by the records beside it."""
    return (run.parent / SWEEP).is_file() or (run.parent / ".sweep").is_dir()


def is_search(sweep: Path) -> bool:
    """Tell whether a sweep is a search, so that its learning rates form no grid."""
    return (sweep / ".sweep" / "ask.lock").exists()


def find_unended_jobs(sweep: Path) -> dict[Path, list[str]]:
    """Map the folder of each job that a sweep has yet to begin or to end to its overrides.

    A job that finished or failed is left out, as is one that was pruned.
    """
    waiting = {}
    for name, status, overrides in read_list(sweep, "jobs", _parse_job):
        # A name is one folder beneath the sweep, whatever a file from elsewhere says.
        is_folder_name = Path(name).name == name
        if is_folder_name and status in ("new", "running", "interrupted"):
            waiting[sweep / name] = overrides
    return waiting


def _parse_job(row: Any) -> tuple[str, object, list[str]]:
    """Return name, status and overrides of an entry of `jobs` in `sweep.json`."""
    return str(row["name"]), row["status"], [str(token) for token in row["overrides"]]


def tuned_keys(sweeps: Iterable[Path]) -> set[str]:
    """Collect the keys that sweeps declare as tuned: KEY and, if it is a group, KEY.name.

    `sweep.json` does not say which key is a group, so every `KEY.name` is in the result.
    """
    keys: set[str] = set()
    for sweep in set(sweeps):
        for key in read_list(sweep, "tuned", str):
            keys |= {key, f"{key}.name"}
    return keys


def read_list(sweep: Path, key: str, parse: Callable[[Any], T]) -> list[T]:
    """Read the list at a key of `sweep.json`, each entry converted by `parse`.

    Empty if the file or the key cannot be read, or if `parse` refuses one of the entries.
    """
    try:
        return [parse(entry) for entry in read_json(sweep / SWEEP)[key]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def record_look(folders: Sequence[Path], metric: str, seeds: int) -> int:
    """Record a test in the folder of each sweep, and return its number among the tests so far.

    A test made while seeds are still being added is called a look, as in sequential analysis.

    Args:
        folders: Directories of the sweeps.
        metric: Metric of the test; each metric is counted separately.
        seeds: Largest number of seeds of a contender. A test with the same number of seeds is the
            same test, and keeps its number.

    Returns:
        1 for the first test. After tests of 3 and 5 seeds it is 1 for 3 seeds again, 2 for 5, and 3
        for any other number, such as 8. Of several folders the largest number. A folder that cannot
        be written counts, but is not recorded.
    """
    numbers = [1]
    for folder in folders:
        looks = _read_looks(folder)
        # The numbers of seeds of all tests of this metric, in the order of the tests.
        seeds_of_tests = looks.setdefault(metric, [])
        if seeds not in seeds_of_tests:
            seeds_of_tests.append(seeds)
            with contextlib.suppress(OSError):  # the disk may be read-only
                replace_text(folder / LOOKS, json.dumps(looks) + "\n")
        numbers.append(seeds_of_tests.index(seeds) + 1)
    return max(numbers)


def _read_looks(folder: Path) -> dict[str, list[int]]:
    """Read the numbers of seeds of earlier tests, by metric; empty if the file is unreadable."""
    looks: dict[str, list[int]] = {}
    with contextlib.suppress(OSError, ValueError, AttributeError):
        for name, numbers in read_json(folder / LOOKS).items():
            if isinstance(numbers, list):
                looks[str(name)] = [number for number in numbers if type(number) is int]
    return looks
