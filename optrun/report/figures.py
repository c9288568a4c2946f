"""The pictures of a comparison: differences, curves over seeds, lr basins, the front, a search."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from matplotlib.figure import Figure

from optrun.report.basin_figure import basin_data, draw_basins
from optrun.report.differences import (
    LINES,
    Difference,
    difference_data,
    differences,
    draw_differences,
    draw_scores,
    score_data,
)
from optrun.report.findings import Findings, Row
from optrun.report.pareto import draw_pareto, pareto_data, points
from optrun.report.picture import SHOWN, Data, Picture, drawn_rows
from optrun.report.searched import importances, searched_keys
from optrun.report.searched_figure import MOST, draw_parallel, searched_data
from optrun.report.seed_curves import Axis, curve_data, draw_seed_curves, progress, seed_curves
from optrun.report.statistics import Comparison as Versus
from optrun.report.theme import Theme
from optrun.report.workloads import Comparison, Workload

_WITHIN = ("differences", "metric", "basin", "pareto")
"""Pictures of each of several workloads, by name."""


def drawn_names(comparison: Comparison) -> list[str]:
    """List the contenders that the page can switch off: the same ones in every picture, or none."""
    if not comparison.several:
        return [row.name for row in drawn_rows(comparison.findings.rows)]
    names = [[row.name for row in drawn_rows(_ordered(each, comparison).rows)] for each in comparison.workloads]
    return names[0] if all(each == names[0] for each in names) else []


def all_pictures(comparison: Comparison) -> list[Picture]:
    """List the pictures of a report: of its one workload, or over several and then of each."""
    if not comparison.several:
        return pictures(comparison.findings)
    judged, found = comparison.judgement, []
    if judged is not None:
        versus = {name: judged.comparisons[name] for name in judged.ranking}
        each_score = {
            each.name: {name: sum(own.values()) / len(own) for name, own in each.scores().items() if own}
            for each in comparison.workloads if not each.left_out
        }  # fmt: skip
        found = joint_pictures(versus, comparison.scores, each_score, judged.matters)
    for number, each in enumerate(comparison.workloads, start=1):
        found += [
            replace(picture, name=f"workload-{number}-{picture.name}", title=f"{each.name}: {picture.title}")
            for picture in pictures(_ordered(each, comparison))
            if picture.name in _WITHIN
        ]
    return found


def _ordered(workload: Workload, comparison: Comparison) -> Findings:
    """Put the rows of a workload in the order of all, so that a contender has one colour in all pictures."""
    names = [] if comparison.judgement is None else comparison.judgement.ranking
    order = {name: index for index, name in enumerate([*names, *comparison.scores])}
    rows = sorted(workload.findings.rows, key=lambda row: order.get(row.name, len(order)))
    return replace(workload.findings, rows=rows)


def pictures(findings: Findings) -> list[Picture]:
    """List the pictures that this comparison has data for, that of the verdict first."""
    rows, metric, mode = drawn_rows(findings.rows), findings.metric, findings.mode
    note = f" The best {len(rows)} of {len(findings.rows)} are drawn." if len(rows) < len(findings.rows) else ""
    axis = progress(rows)
    found: list[Picture] = []

    def add(name: str, title: str, caption: str, draw: Callable[[Theme], Figure], data: Callable[[], Data]) -> None:
        found.append(Picture(name, title, caption + note, draw, data))

    def add_curves(name: str, title: str, caption: str, of: str, axis: Axis, mode: str) -> None:
        runs = [run for row in rows for run in row.arm.runs]
        if curves := seed_curves(rows, of, axis):
            draw = partial(draw_seed_curves, curves, of, mode, axis, runs=runs)
            add(name, title, caption, lambda theme: draw(theme=theme), partial(curve_data, curves, of, axis))

    versus = {row.name: row.versus if row.rank else None for row in findings.rows}
    if any(versus.values()):
        scores = {row.name: row.arm.scores for row in findings.rows}
        lost = {row.name: row.arm.lost for row in findings.rows}
        matters = math.nan if findings.judgement is None else findings.judgement.matters
        found += verdict_picture(differences(versus, scores, lost), metric, mode, matters, len(findings.rows))
    bands = "the band spans all seeds" if len(rows) < 4 else "bands: the best two; pointing shows seeds of others"
    caption = f"Mean over seeds of the best configuration; {bands}."
    same = " Batch sizes differ, so the axis is the data seen." if axis == "epoch" else ""
    add_curves("metric", f"{metric} during training", caption + same, metric, axis, mode)
    if any(len(row.basin.tried) > 1 for row in rows):
        caption = (
            "Mean over seeds at each lr; the ring is the best. The dashed line is one level for all: a line is thick "
            "where it reaches it. Cross: diverged; arrowhead: outside."
        )
        title = f"Final {metric} against learning rate"
        add("basin", title, caption, partial(draw_basins, rows, findings), partial(basin_data, rows, metric))
    if findings.objectives and points(findings):
        first, second = findings.objectives[:2]
        caption = "A dot is a configuration; none is better than those on the line in one number and as good in all."
        if len(findings.objectives) > 2:
            caption += f" The first two of {len(findings.objectives)} are drawn: the line may bend back."
        title = f"{second.name} against {first.name}"
        add("pareto", title, caption, partial(draw_pareto, rows, findings), partial(pareto_data, findings))
    _add_search(findings, rows, add)
    caption = "Median time over seeds; runs side by side on one machine slow each other."
    add_curves("time", f"{metric} against wall time", caption, metric, "time", mode)
    add_curves("train-loss", "train/loss during training", f"Smoothed.{same}", "train/loss", axis, "min")
    return found


def verdict_picture(found: Sequence[Difference], metric: str, mode: str, matters: float, total: int) -> list[Picture]:
    """Describe the picture of the verdict; nothing where less than two contenders have a difference.

    Args:
        found: What `differences` made.
        metric: What differs.
        mode: "min" or "max".
        matters: The smallest difference that counts; NaN: none is known.
        total: So many contenders there are.
    """
    if len(found) < 2:
        return []
    caption = "Mean over shared seeds (small dots), the bar its interval; hollow: ruled out."
    caption += " Shaded: too small to matter." if math.isfinite(matters) else ""
    caption += " Arrowhead: outside, with its value." if len(found) > 2 else ""
    caption += f" The best {LINES} of {total} are drawn." if total > LINES else ""
    return [
        Picture(
            "differences", f"Differences to {found[0].versus.reference}", caption,
            partial(draw_differences, found, metric, mode, matters), partial(difference_data, found, metric),
        )
    ]  # fmt: skip


def joint_pictures(
    comparisons: Mapping[str, Versus],
    scores: Mapping[str, Mapping[int, float]],
    by_workload: Mapping[str, Mapping[str, float]],
    matters: float,
) -> list[Picture]:
    """List the pictures over several workloads: the verdict, and the scores behind it.

    Args:
        comparisons: Of mean scores, by contender, best first; higher is better.
        scores: Mean over workloads by contender and seed.
        by_workload: Mean over seeds by workload and contender.
        matters: The smallest difference of scores that counts.
    """
    found = verdict_picture(differences(comparisons, scores), "mean score", "max", matters, len(comparisons))
    names = list(comparisons)[:SHOWN]
    if any(name in each for each in by_workload.values() for name in names):
        caption = "A dot is the mean over seeds on one workload; an arrowhead lies further left."
        draw, data = partial(draw_scores, names, by_workload), partial(score_data, by_workload)
        found.append(Picture("scores", "Score on each workload", caption, draw, data))
    return found


def _add_search(findings: Findings, rows: Sequence[Row], add: Callable[..., None]) -> None:
    """Show a search over other settings than lr alone, whose basin says it: all settings in one picture."""
    keys, shares = searched_keys(findings), importances(findings)
    if keys in ([], ["lr"]):
        return
    caption = "A line is a configuration: blue is good, dotted diverged, thick chosen."
    caption += " Above a setting: its importance (PED-ANOVA)." if shares else ""
    caption += f" {len(keys) - MOST} more settings are in the data alone." if len(keys) > MOST else ""
    title = f"{len(keys)} setting{'s' * (len(keys) > 1)} searched"
    draw, data = partial(draw_parallel, rows, findings, shares), partial(searched_data, rows, findings)
    add("search", title, caption, draw, data)
