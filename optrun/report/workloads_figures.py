"""Draw what several workloads say together: mean scores, the profile of steps, the profile of scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optrun.report.chart import Chart, of_series
from optrun.report.figures import pictures as pictures_of_one
from optrun.report.findings import Findings
from optrun.report.picture import SHOWN, WIDTH, Data, Picture, series_colour, short_name
from optrun.report.theme import MARKERS, Theme, legend, new_figure, style_axes, write
from optrun.report.workloads import Overview, Standing, Workload
from optrun.report.workloads_statistics import LAST_TAU, performance_profile, resample, score_profile

Array = NDArray[np.float64]
_WITHIN = ("results", "metric", "basin", "pareto")
"""Pictures of each workload by itself, by name."""


def shown(overview: Overview) -> list[Standing]:
    """Pick the contenders that are drawn; their place in this list is their colour, marker and switch everywhere."""
    return [each for each in overview.standings if not each.missing][:SHOWN]


def ordered(workload: Workload, overview: Overview) -> Findings:
    """Put the rows of a workload in the order of all, so that a contender has one colour in all pictures."""
    order = {each.name: index for index, each in enumerate(overview.standings)}
    rows = sorted(workload.findings.rows, key=lambda row: order.get(row.name, len(order)))
    return replace(workload.findings, rows=rows)


def pictures(overview: Overview) -> list[Picture]:
    """List the pictures over workloads, then some of each workload by itself."""
    found = _together(overview)
    for number, each in enumerate(overview.workloads, start=1):
        found += [
            replace(picture, name=f"workload-{number}-{picture.name}", title=f"{each.name}: {picture.title}")
            for picture in pictures_of_one(ordered(each, overview))
            if picture.name in _WITHIN
        ]
    return found


def _together(overview: Overview) -> list[Picture]:
    drawn = shown(overview)
    if not drawn:
        return []
    left_out = len(overview.standings) - len(drawn)
    note = f" {len(drawn)} of {len(overview.standings)} contenders are drawn." if left_out else ""
    return [
        Picture(
            "workloads",
            "Mean score over workloads",
            "0: nothing was learnt, 1: the best contender of each workload; higher is better. Small marks are "
            f"workloads, the line is the mean over them, the bar its 95 % stratified bootstrap interval.{note}",
            lambda theme: _draw_means(overview, drawn, theme),
            lambda: _scores_data(overview, drawn),
        ),
        Picture(
            "workloads-steps",
            "Workloads within a factor of the quickest",
            "Performance profile (Dolan and Moré): steps to the target by those of the quickest contender. Left: how "
            f"often it is the quickest; right: how often it gets there at all.{note}",
            lambda theme: _draw_steps(drawn, theme),
            lambda: _steps_data(overview, drawn),
        ),
        Picture(
            "workloads-scores",
            "Share of runs above a score",
            "Each workload has the same weight; the band is the 95 % stratified bootstrap interval. Further right is "
            f"better.{note}",
            lambda theme: _draw_scores(drawn, theme),
            lambda: _profile_data(drawn),
        ),
    ]


def _scores_data(overview: Overview, standings: Sequence[Standing]) -> Data:
    rows: list[list[object]] = []
    for index, each in enumerate(overview.usable):
        for standing in standings:
            known = standing.scores[index][~np.isnan(standing.scores[index])]
            rows += [[each.name, standing.name, number, float(score)] for number, score in enumerate(known, start=1)]
    return Data(["workload", "contender", "run", "score"], rows)


def _steps_data(overview: Overview, standings: Sequence[Standing]) -> Data:
    names = [each.name for each in overview.usable]
    rows = [
        [name, standing.name, float(ratio)]
        for standing in standings
        for name, ratio in zip(names, standing.ratio, strict=True)
    ]
    return Data(["workload", "contender", "steps by those of the quickest"], rows)


def _profile_data(standings: Sequence[Standing]) -> Data:
    taus = _taus(standings)
    columns = [score_profile(each.scores, taus) for each in standings]
    rows = [[float(tau), *map(float, shares)] for tau, *shares in zip(taus, *columns, strict=True)]
    return Data(["normalised score", *(each.name for each in standings)], rows)


def _taus(standings: Sequence[Standing]) -> Array:
    known = np.concatenate([each.scores[~np.isnan(each.scores)] for each in standings])
    return np.linspace(max(0.0, float(known.min()) - 0.02), max(1.0, float(known.max())) + 0.01, 200)


def _draw_means(overview: Overview, standings: Sequence[Standing], theme: Theme) -> Chart:
    figure = new_figure(WIDTH, 0.9 + 0.42 * len(standings), theme)
    ax = figure.add_subplot()
    style_axes(ax, theme, xlabel="normalised score")
    ax.grid(False, axis="y")
    for index, each in enumerate(standings):
        y, colour = -float(index), series_colour(theme, index)
        points = np.nanmean(each.scores, axis=1)
        artists = ax.plot(each.interval, [y, y], color=colour, linewidth=6, alpha=0.28, solid_capstyle="round")
        artists += ax.plot([each.mean] * 2, [y - 0.2, y + 0.2], color=colour, linewidth=2.4, solid_capstyle="round")
        for place, (workload, point) in enumerate(zip(overview.usable, points, strict=True)):
            marker = MARKERS[place % len(MARKERS)]
            artists += ax.plot(point, y, marker=marker, markersize=4.2, linewidth=0, color=colour, alpha=0.85)
            figure.mark(ax, point, y, f"{each.name}, {workload.name}: {point:.3f}", series=index)
        name: dict[str, Any] = {"transform": ax.get_yaxis_transform(), "ha": "left", "va": "center"}
        label = f"{index + 1}  {short_name(each.name)}"
        of_series([*artists, write(ax.text(0.0, y + 0.42, label, color=theme.ink, fontsize=8.5, **name))], index)
    ax.set_yticks([])
    ax.set_ylim(-len(standings) + 0.6, 0.7)
    ax.spines["left"].set_visible(False)
    ax.margins(x=0.05)
    return figure


def _draw_steps(standings: Sequence[Standing], theme: Theme) -> Chart:
    figure = new_figure(WIDTH, 3.4 + 0.17 * len(standings), theme)
    ax = figure.add_subplot()
    style_axes(ax, theme, xlabel="steps, as a factor of the quickest", ylabel="share of workloads")
    reached = [ratio for each in standings for ratio in each.ratio if math.isfinite(ratio)]
    last = max([LAST_TAU, *(1.1 * ratio for ratio in reached)])
    taus = np.unique([1.0, last, *reached])
    for index, each in enumerate(standings):
        share = performance_profile(each.ratio, taus)
        of_series(ax.step(taus, share, where="post", label=short_name(each.name), **_line(theme, index)), index)
    ax.set_ylim(-0.03, 1.03)
    legend(ax, theme, below=True, series=range(len(standings)))
    return figure


def _draw_scores(standings: Sequence[Standing], theme: Theme) -> Chart:
    figure = new_figure(WIDTH, 3.4 + 0.17 * len(standings), theme)
    ax = figure.add_subplot()
    style_axes(ax, theme, xlabel="normalised score", ylabel="share of runs above it")
    taus = _taus(standings)
    for index, each in enumerate(standings):
        drawn = np.array([score_profile(one, taus) for one in resample(each.scores, resamples=300)])
        low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
        band = ax.fill_between(taus, low, high, color=series_colour(theme, index), alpha=0.12, linewidth=0)
        line = ax.plot(taus, score_profile(each.scores, taus), label=short_name(each.name), **_line(theme, index))
        of_series([band, *line], index)
    ax.set_ylim(-0.03, 1.03)
    legend(ax, theme, below=True, series=range(len(standings)))
    return figure


def _line(theme: Theme, index: int) -> dict[str, Any]:
    return {
        "color": series_colour(theme, index),
        "linewidth": 1.6,
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": 4.5,
        "markevery": 0.2,
    }
