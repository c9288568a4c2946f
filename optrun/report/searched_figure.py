"""Draw slices through a search: the score against each setting that was searched, a dot for each configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from optrun.formatting import rate
from optrun.report.arms import Arm
from optrun.report.chart import Chart, of_series
from optrun.report.findings import Findings, Row
from optrun.report.picture import SHOWN, WIDTH, Data, series_colour, short_name
from optrun.report.searched import importance, is_number, outcomes, searched_keys, tried
from optrun.report.table import value
from optrun.report.theme import MARKERS, Theme, legend, log_axis, new_figure, number_axis, style_axes, tell_cut, write

MOST = 6
"""More settings than this are not drawn; the data has them."""
_APART = 5
"""So few numbers stand side by side as words do."""
_WORDS = 14
"""Characters of a tick label."""


def searched_data(rows: Sequence[Row], findings: Findings, first: str) -> Data:
    """List all configurations with an outcome; the setting that is drawn comes first."""
    keys = sorted(searched_keys(findings), key=lambda key: key != first)
    found = [
        [row.name, *(arm.settings.get(key) for key in keys), arm.mean if arm.scores else None, len(arm.scores),
         bool(arm.diverged), arm is row.arm]
        for row in rows for arm in row.contender.arms if arm.scores or arm.diverged
    ]  # fmt: skip
    return Data(["contender", *keys, f"mean {findings.metric}", "seeds", "diverged", "chosen"], found)


def slice_title(findings: Findings, key: str) -> str:
    """Name a setting, and how much of the outcome it explains."""
    share = importance(findings.rows, key, findings.mode)
    told = "too few configurations to weigh it" if share is None else f"{100 * share:.0f} % of the variance of ranks"
    return f"{leaf(key)}: {told}"


def draw_slice(rows: Sequence[Row], findings: Findings, key: str, theme: Theme) -> Chart:
    """Draw the score against one setting."""
    figure = new_figure(WIDTH, 2.7 + 0.17 * len(rows), theme)
    ax = figure.add_subplot()
    style_axes(ax, theme, xlabel=key, ylabel=f"final {findings.metric}")
    drawn = [series for series, row in enumerate(rows) if outcomes(row.contender, key)]
    place = _scale(ax, [found for series in drawn for found in tried(rows[series].contender, key)])
    if (limits := _limits(rows, findings)) is not None:
        number_axis(ax, limits)
        ax.set_ylim(*limits)
    for series in drawn:
        _dots(figure, ax, series, rows[series], key, place, findings.mode, theme)
    tell_cut(ax, theme, [arm.mean for row in rows for arm in row.contender.arms if arm.scores], findings.mode)
    legend(ax, theme, below=True, series=drawn)
    return figure


def leaf(key: str) -> str:
    """Shorten a key to what tells it from others of a report."""
    return key.removesuffix(".name") if key.endswith(".name") else key.partition(".")[2] or key


def _scale(ax: Axes, values: Sequence[Any]) -> dict[Any, float] | None:
    """Prepare the x axis; for words, and numbers of which there are few, return where each stands."""
    distinct = list(dict.fromkeys(values))
    if is_number(values):
        if len(distinct) > _APART:
            if min(values) > 0 and max(values) / min(values) > 10:
                log_axis(ax, "x", values)
            ax.margins(x=0.05)
            return None
        distinct.sort()
    words = [rate(each) if isinstance(each, float) else str(each) for each in distinct]
    ax.set_xticks(range(len(distinct)))
    short = [word if len(word) <= _WORDS else word[: _WORDS - 1] + "…" for word in words]
    apart = math.ceil(len(words) / _APART)
    for text in ax.set_xticklabels(["" if index % apart else word for index, word in enumerate(short)]):
        write(text)
    ax.set_xlim(-0.5, len(distinct) - 0.5)
    ax.grid(False, axis="x")
    return {each: float(index) for index, each in enumerate(distinct)}


def _dots(
    figure: Chart, ax: Axes, series: int, row: Row, key: str, place: dict[Any, float] | None, mode: str, theme: Theme
) -> None:
    """Draw the configurations of a contender; a ring around the chosen one, diverged and cut ones on the edge."""
    arms, colour = outcomes(row.contender, key), series_colour(theme, series)
    low, high = ax.get_ylim()
    xs, ys, artists = [], [], []
    edge = 0.97 if mode == "min" else 0.03
    for arm in arms:
        setting = arm.settings[key]
        x = float(setting) if place is None else place[setting] + 0.09 * (series - (SHOWN - 1) / 2)
        if arm.scores and low <= arm.mean <= high:
            xs.append(x)
            ys.append(arm.mean)
            figure.mark(ax, x, arm.mean, _told(row, arm), series=series)
            continue
        style: dict[str, Any] = {"marker": "x" if arm.diverged else "^" if mode == "min" else "v", "markersize": 5}
        artists += ax.plot(x, edge, transform=ax.get_xaxis_transform(), color=colour, linewidth=0, alpha=0.7, **style)
        figure.mark(ax, x, edge, _told(row, arm), series=series, transform=ax.get_xaxis_transform())
    marker: dict[str, Any] = {"marker": MARKERS[series % len(MARKERS)], "markersize": 4, "markeredgewidth": 0}
    artists += ax.plot(xs, ys, color=colour, linewidth=0, alpha=0.65, label=short_name(row.name), **marker)
    if row.arm.scores and key in row.arm.settings:
        setting = row.arm.settings[key]
        x = float(setting) if place is None else place[setting] + 0.09 * (series - (SHOWN - 1) / 2)
        ring: dict[str, Any] = {"marker": "o", "markersize": 11, "markerfacecolor": "none", "markeredgewidth": 1.6}
        artists += ax.plot(x, row.arm.mean, color=colour, linewidth=0, **ring)
    of_series(artists, series)


def _told(row: Row, arm: Arm) -> str:
    """Describe a configuration and its outcome."""
    rest = {key: found for key, found in arm.settings.items() if key not in row.contender.settings}
    settings = ", ".join(f"{leaf(key)} {rate(v) if isinstance(v, float) else v}" for key, v in rest.items())
    result = "diverged" if not arm.scores else value(arm.mean) + (" (a seed diverged)" if arm.diverged else "")
    return f"{row.name}, {settings}: {result}"


def _limits(rows: Sequence[Row], findings: Findings) -> tuple[float, float] | None:
    """Show what is good; the worst third may lie on the edge."""
    sign = 1.0 if findings.mode == "min" else -1.0
    means = np.array([sign * arm.mean for row in rows for arm in row.contender.arms if arm.scores])
    if not len(means):
        return None
    bests = [sign * row.arm.mean for row in rows if row.arm.scores]
    reach = max(float(np.quantile(means, 0.7)) - float(means.min()), 1.3 * (max(bests) - min(bests)))
    reach = reach or 0.02 * abs(float(means.min())) or 0.01
    if not math.isfinite(reach):
        return None
    best, far = sign * (float(means.min()) - 0.08 * reach), sign * (float(means.min()) + 1.15 * reach)
    return (best, far) if findings.mode == "min" else (far, best)
