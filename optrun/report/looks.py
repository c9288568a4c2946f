"""How often a growing set of seeds was asked: each sweep directory keeps the numbers of seeds of its reports.

Whoever adds seeds until a verdict shows finds one that is not there: the m-th look is judged at alpha / m.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

from optrun.artifacts.atomic import replace_text
from optrun.base.reading import read_json

RECORD = "report-looks.json"


def look(folders: Sequence[Path], metric: str, seeds: int, *, note: bool) -> int:
    """Count the looks up to this one.

    Args:
        folders: The sweeps of a report.
        metric: What it compares by: each has its own looks.
        seeds: How many seeds its contenders have, the most of one.
        note: Whether this look is written down; a page that follows a running sweep shows no verdict.

    Returns:
        1 for the first; as before where this number of seeds was looked at before.
    """
    numbers = [1]
    for folder in folders:
        held = _read(folder)
        own = held.setdefault(metric, [])
        if seeds not in own and note:
            own.append(seeds)
            with contextlib.suppress(OSError):  # a report of what lies on a disk that is not ours
                replace_text(folder / RECORD, json.dumps(held) + "\n")
        numbers.append(own.index(seeds) + 1 if seeds in own else len(own) + 1)
    return max(numbers)


def _read(folder: Path) -> dict[str, list[int]]:
    try:
        held = read_json(folder / RECORD)
    except (OSError, ValueError):
        return {}
    if not isinstance(held, dict):
        return {}
    return {str(name): [one for one in own if type(one) is int] for name, own in held.items() if isinstance(own, list)}
