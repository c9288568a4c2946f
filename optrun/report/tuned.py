"""Find what a sweep says of itself: the keys that it tuned, and the objectives that it weighed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

from optrun.artifacts.objective import Objective
from optrun.artifacts.run_dir import SWEEP
from optrun.reading import read_json
from optrun.report.collect import Run


def objectives_of(runs: Iterable[Run]) -> list[Objective]:
    """Collect what the sweeps of some runs weighed against each other, in their order; nothing where none says so."""
    found: dict[Objective, None] = {}
    for sweep in dict.fromkeys(run.path.parent for run in runs):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            for each in read_json(sweep / SWEEP)["objectives"]:
                found[Objective(str(each["name"]), "max" if each["mode"] == "max" else "min")] = None
    return list(found)


def tuned_keys(runs: Iterable[Run]) -> set[str]:
    """Collect the keys that the sweeps of some runs tuned, groups as `GROUP.name`; nothing where none says so."""
    found: set[str] = set()
    for sweep in {run.path.parent for run in runs}:
        try:
            keys = read_json(sweep / SWEEP)["tuned"]
            found |= {name for key in keys for name in (str(key), f"{key}.name")}
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def untuned(keys: Sequence[str], tuned: Iterable[str]) -> list[str]:
    """Leave out the keys that were tuned, unless nothing would be left to compare.

    Example:
        >>> untuned(["optimizer.name", "scheduler.warmup_ratio"], {"scheduler.warmup_ratio"})
        ['optimizer.name']
        >>> untuned(["scheduler.warmup_ratio"], {"scheduler.warmup_ratio"})
        ['scheduler.warmup_ratio']
    """
    left = set(tuned)
    return [key for key in keys if key not in left] or list(keys)
