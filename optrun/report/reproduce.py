"""Compose the commands that make the runs of a comparison again."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from optrun.report.collect import Run
from optrun.report.confirmation import FOLDER
from optrun.report.confirmed import Confirmed
from optrun.report.findings import Findings


def sweep_lines(findings: Findings) -> list[str]:
    """Compose the sweeps that make all runs again: one where they are a product of values, or one for each contender.

    Returns:
        Nothing where the runs of some contender are no product, as those of a search.
    """
    if whole := _product([run for run in findings.runs if run.described]):
        return [whole]
    lines = [_product([run for arm in row.contender.arms for run in arm.runs]) for row in findings.rows]
    return lines if all(lines) else []


def confirm_line(one: Confirmed, choice: Findings) -> str:
    """Compose the command of a confirmation; empty where nobody knows any more of what.

    Args:
        one: The confirmation.
        choice: What was confirmed; or the findings of `one` itself.
    """
    beside = one.findings is not choice
    sweep = one.sweep or (one.folder.parent if beside else None)
    if sweep is None:
        return ""
    named = not beside or choice.chosen_baseline or choice.reference != one.plan.reference
    line = ["optrun", "confirm", str(sweep), *([f"baseline={one.plan.reference}"] if named else [])]
    line.append(f"seeds={','.join(map(str, one.plan.seeds))}")
    beneath = one.folder.resolve() == (sweep / FOLDER).resolve()
    return shlex.join(line if beneath else [*line, f"out={one.folder}"])


def _product(runs: Sequence[Run]) -> str:
    """Compose the command of runs that are all combinations of some values; empty where they are not."""
    typed = [_typed(run) for run in runs]
    if not typed or any(each.keys() != typed[0].keys() for each in typed) or any(run.changed for run in runs):
        return ""
    values = {key: list(dict.fromkeys(each[key] for each in typed)) for key in typed[0]}
    size = math.prod(map(len, values.values()))
    varied = [value for found in values.values() if len(found) > 1 for value in found]
    if len({tuple(each.items()) for each in typed}) != size or any("," in value for value in varied):
        return ""
    if len({(run.config_name, *run.config_dir) for run in runs}) > 1:
        return ""
    line = ["optrun", *(["-m"] if size > 1 else [])]
    if runs[0].config_name:
        line += ["-cn", runs[0].config_name]
        line += ["hydra/sweeper=grid", "hydra.sweeper.grids=[]"] if size > 1 else []  # the recipe may be a sweep itself
    return shlex.join([*line, *runs[0].config_dir, *(f"{key}={','.join(found)}" for key, found in values.items())])


def _typed(run: Run) -> dict[str, str]:
    """Split the overrides of a run, in one order for all."""
    kept = [item for item in run.overrides if "=" in item and not item.lstrip("+").startswith(("resume=", "hydra"))]
    return dict(sorted((key, text) for key, _, text in (item.partition("=") for item in kept)))
