"""The pictures of a comparison: differences, curves over seeds, lr basins, the front, a search."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from optrun.report import differences, pareto, searched, seed_curves
from optrun.report.findings import Findings
from optrun.report.picture import Picture, drawn_rows
from optrun.report.theme import Chart, Theme
from optrun.report.workloads import Comparison

_WITHIN = ("differences", "metric", "basin", "pareto")
"""Pictures of each of several workloads, by name."""


def drawn_names(comparison: Comparison) -> list[str]:
    """List the contenders that the page can switch off: the same ones in every picture, or none."""
    names = [
        [row.name for row in drawn_rows(_ordered(each, comparison).rows)]
        for each in comparison.workloads
    ]
    return names[0] if all(each == names[0] for each in names) else []


def all_pictures(comparison: Comparison) -> list[Picture]:
    """List the pictures of a report: of its one workload, or over several and then of each."""
    if not comparison.several:
        return pictures(comparison.findings)
    found = verdict_picture(comparison)
    for number, each in enumerate(comparison.workloads, start=1):
        found += [
            replace(
                picture,
                name=f"workload-{number}-{picture.name}",
                title=f"{each.name}: {picture.title}",
            )
            for picture in pictures(_ordered(each, comparison))
            if picture.name in _WITHIN
        ]
    return found


def _ordered(findings: Findings, comparison: Comparison) -> Findings:
    """Put the rows of a workload in the order of all.

    So that a contender has one colour in all pictures.
    """
    names = [] if comparison.judgement is None else comparison.judgement.ranking
    order = {name: index for index, name in enumerate(dict.fromkeys([*names, *comparison.scores]))}
    return replace(
        findings, rows=sorted(findings.rows, key=lambda row: order.get(row.name, len(order)))
    )


def pictures(findings: Findings) -> list[Picture]:
    """List the pictures that this comparison has data for, that of the verdict first."""
    rows, metric, mode = drawn_rows(findings.rows), findings.metric, findings.mode
    note = (
        f" The best {len(rows)} of {len(findings.rows)} are drawn."
        if len(rows) < len(findings.rows)
        else ""
    )
    found = verdict_picture(Comparison.of(findings))

    def add(name: str, title: str, caption: str, draw: Callable[[Theme], Chart]) -> None:
        found.append(Picture(name, title, caption + note, draw))

    axis = seed_curves.progress(rows)
    same = " Batch sizes differ, so the axis is the data seen." if axis == "epoch" else ""
    if curves := seed_curves.seed_curves(rows, metric, axis):
        bands = (
            "the band spans all seeds"
            if len(rows) < 4
            else "bands: the best two; pointing shows seeds of others"
        )
        caption = f"Mean over seeds of the best configuration; {bands}.{same}"
        draw = partial(seed_curves.draw_seed_curves, curves, metric, mode, axis)
        add("metric", f"{metric} during training", caption, draw)
    if any(len(row.basin.tried) > 1 for row in rows):
        caption = (
            "Mean over seeds at each lr; the ring is the best. Cross: diverged; arrowhead: outside."
        )
        add(
            "basin",
            f"Final {metric} against learning rate",
            caption,
            partial(seed_curves.draw_basins, rows, findings),
        )
    if findings.objectives and pareto.points(findings):
        first, second = findings.objectives[:2]
        caption = (
            "A dot is a configuration; none is better than those on the line in one number and as"
            " good in all."
        )
        if len(findings.objectives) > 2:
            caption += (
                f" The first two of {len(findings.objectives)} are drawn: the line may bend back."
            )
        add(
            "pareto",
            f"{second.name} against {first.name}",
            caption,
            partial(pareto.draw_pareto, rows, findings),
        )
    keys, shares = searched.searched_keys(findings), searched.importances(findings)
    if keys not in ([], ["lr"]):  # a search over lr alone is seen in its basin
        caption = "A line is a configuration: blue is good, dotted diverged, thick chosen."
        caption += " Above a setting: its importance (PED-ANOVA)." if shares else ""
        more = len(keys) - searched.MOST
        caption += f" {more} more settings are in the table alone." if more > 0 else ""
        title = f"{len(keys)} setting{'s' * (len(keys) > 1)} searched"
        add("search", title, caption, partial(searched.draw_parallel, rows, findings, shares))
    if losses := seed_curves.seed_curves(rows, "train/loss", axis):
        draw = partial(seed_curves.draw_seed_curves, losses, "train/loss", "min", axis)
        add("train-loss", "train/loss during training", f"Smoothed.{same}", draw)
    return found


def verdict_picture(comparison: Comparison) -> list[Picture]:
    """Describe the picture of the verdict.

    Nothing where less than two contenders have a difference.
    """
    judged, scores, found = comparison.judgement, comparison.scores, comparison.findings
    if judged is None:
        return []
    order, metric, mode = [*scores], found.metric, found.mode
    if comparison.several:
        order, metric, mode = judged.ranking, "mean score", "max"
    lines = differences.differences(
        {name: judged.comparisons.get(name) for name in order}, scores, comparison.lost
    )
    if len(lines) < 2:
        return []
    caption = "Mean over shared seeds (small dots), the bar its interval; hollow: ruled out."
    caption += " Shaded: too small to matter." if math.isfinite(judged.matters) else ""
    caption += " Arrowhead: outside, with its value." if len(lines) > 2 else ""
    caption += (
        f" The best {differences.LINES} of {len(order)} are drawn."
        if len(order) > differences.LINES
        else ""
    )
    draw = partial(differences.draw_differences, lines, metric, mode, judged.matters)
    return [Picture("differences", f"Differences to {judged.reference}", caption, draw)]
