"""Draw the basins of all sizes in one picture, and where the prediction lies."""

from __future__ import annotations

import math
from statistics import fmean

import numpy as np
from matplotlib.figure import Figure

from optrun.base.formatting import rate
from optrun.report.picture import limit, short_name, style_of
from optrun.report.theme import Chart, Theme, legend, log_axis, style_axes
from optrun.report.transfer.answer import Transfer
from optrun.report.transfer.sizes import Size, label

SHOWN = 6
"""Contenders in the picture at most; the tables have all."""


def draw_basins(found: Transfer, theme: Theme) -> Figure:
    """Draw the metric over lr, a line for each size with its parabola and optimum.

    The band is the prediction.
    """
    shown = [*zip(found.answers, found.sweeps, strict=True)][:SHOWN]
    columns = min(2, len(shown))
    figure = Chart(5.2 * columns, 3.9 * math.ceil(len(shown) / columns), theme)
    for at, (answer, sweep) in enumerate(shown, 1):
        ax = figure.add_subplot(math.ceil(len(shown) / columns), columns, at)
        title = {
            "title": short_name(answer.contender),
            "subtitle": f"lr for {short_name(label(found.target))}",
        }
        style_axes(ax, theme, xlabel="peak learning rate", ylabel=f"final {found.metric}", **title)
        lrs = [lr for size in sweep.sizes for lr in (*size.scores, *size.diverged)]
        log_axis(ax, "x", [*lrs, answer.lr.value])
        means = [_mean(size, lr) for size in sweep.sizes for lr in size.scores]
        limit(ax, means, found.mode)
        if answer.lr.is_bounded:
            ax.axvspan(answer.lr.low, answer.lr.high, color=theme.muted, alpha=0.15)
        ax.axvline(
            answer.lr.value,
            color=theme.ink,
            linestyle="--",
            linewidth=1.1,
            label=f"predicted {rate(answer.lr.value)}",
        )
        for series, size in enumerate(sweep.sizes):
            style = style_of(theme, series)
            ax.plot(
                [*size.scores],
                [_mean(size, lr) for lr in size.scores],
                label=size.label,
                linewidth=1.2,
                **style,
            )
            basin, sign = size.basin, 1.0 if found.mode == "min" else -1.0
            x = np.linspace(*basin.window, 60)
            fitted = sign * (basin.level + basin.curvature * (x - basin.best) ** 2)
            ax.plot(np.exp(x), fitted, color=style["color"], linewidth=4, alpha=0.25)
            look = style | {"marker": "*", "markersize": 12}
            ax.plot(math.exp(basin.best), sign * basin.level, linewidth=0, **look)
            crosses = style | {"marker": "x", "linewidth": 0}
            for lr in size.diverged:
                ax.plot(
                    lr,
                    0.97 if found.mode == "min" else 0.03,
                    transform=ax.get_xaxis_transform(),
                    **crosses,
                )
        legend(ax, theme)
    return figure


def _mean(size: Size, lr: float) -> float:
    return fmean(size.scores[lr].values())
