"""Draw the differences to the best with their intervals: the picture of the verdict."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from optrun.report.picture import WIDTH, find_reach, short_name, style_of
from optrun.report.statistics import ReferenceComparison, Scores, Verdict
from optrun.report.theme import INK, MUTED, PAPER, Chart, style_axes

LINES = 16
"""Most contenders in the picture; the table has all."""


@dataclass(frozen=True)
class Difference:
    """One contender against the reference."""

    series: int
    """Index of the contender, which decides its colour."""
    comparison: ReferenceComparison
    seeds: dict[int, float]
    """Paired differences by seed."""
    diverged_seeds: Collection[int]
    """Seeds on which the contender or the reference diverged: a bad value replaces its score."""


def differences(
    comparisons: Mapping[str, ReferenceComparison | None],
    scores: Scores,
    diverged_seeds: Mapping[str, Collection[int]],
) -> list[Difference]:
    """Subtract the reference's score from each contender's, seed by seed.

    Only seeds that both have. One without a difference is left out; of the others the first
    `LINES` are returned. `series` is the position among all, so that colours do not shift.

    Args:
        comparisons: Contender -> comparison, in the order of the pictures; None: not ranked.
        scores: Contender -> seed -> score.
        diverged_seeds: Contender -> seeds that diverged.
    """
    lines = []
    for series, (name, comparison) in enumerate(comparisons.items()):
        if comparison is None or math.isnan(comparison.difference):
            continue
        reference_scores = scores[comparison.reference]
        paired = {}
        for seed, score in scores[name].items():
            if seed in reference_scores:
                paired[seed] = score - reference_scores[seed]
        diverged = set(diverged_seeds.get(name, ()))
        diverged.update(diverged_seeds.get(comparison.reference, ()))
        lines.append(Difference(series, comparison, paired, diverged))
    return lines[:LINES]


def draw_differences(lines: Sequence[Difference], metric: str, mode: str, matters: float) -> Chart:
    """Draw one line per contender, best on top.

    A dot is the mean, a bar its interval, small dots the seeds.

    Args:
        lines: The contenders; the dot of one that is ruled out is hollow.
        metric: Name of the metric.
        mode: "min" or "max".
        matters: The smallest difference that counts, drawn as a band around 0; NaN: unknown.
    """
    better = "lower" if mode == "min" else "higher"
    reference = short_name(lines[0].comparison.reference)
    label = f"{metric} minus that of {reference} ({better} is better)"
    figure = Chart(WIDTH, 0.95 + 0.46 * len(lines))
    ax = figure.add_subplot()
    style_axes(ax, xlabel=label)
    ax.grid(False, axis="y")
    ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.set_yticks([])
    # The line of index i lies at y = -i.
    ax.set_ylim(0.55 - len(lines), 0.7)
    ax.set_xlim(_limits(lines, matters))
    ax.spines["left"].set_visible(False)
    ax.axvline(0, color=MUTED, linewidth=1.0, zorder=1)
    if math.isfinite(matters):
        ax.axvspan(
            -matters,
            matters,
            color=MUTED,
            alpha=0.13,
            linewidth=0,
            zorder=0,
        )
    possible = [line for line in lines if line.comparison.verdict is Verdict.could_be_best]
    for index, line in enumerate(lines):
        _draw_line(ax, index, line, is_sole_best=possible == [line])
    return figure


def _write_above(ax: Axes, index: int, name: str, verdict: str) -> None:
    """Write the name of a contender above its line on the left, and the verdict on the right."""
    box = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.8, "alpha": 0.85}
    look: dict[str, Any] = {"va": "center", "bbox": box, "transform": ax.get_yaxis_transform()}
    y = 0.33 - index
    ax.text(0.0, y, name, ha="left", color=INK, fontsize=8.5, **look)
    ax.text(1.0, y, verdict, ha="right", color=MUTED, fontsize=7.5, **look)


def _limits(lines: Sequence[Difference], matters: float) -> tuple[float, float]:
    """Choose x limits around 0, all differences and their intervals, without outliers.

    See `find_reach`; the band of `matters` is always shown on the side of the values.
    """
    values = [0.0]
    for line in lines:
        values += [line.comparison.difference, *line.seeds.values()]
        if not math.isnan(line.comparison.low):
            values += [line.comparison.low, line.comparison.high]
    least = matters if math.isfinite(matters) else 0.0
    reach = find_reach(map(abs, values), least)
    low = max(min(values), -reach)
    high = min(max(values), reach)
    margin = 0.07 * (high - low) or 0.01
    return low - margin, high + margin


def _draw_line(ax: Axes, index: int, line: Difference, *, is_sole_best: bool) -> None:
    """Draw the mean, its interval and the seeds of one contender, with name and verdict above.

    1. The mean is a large mark, hollow if the contender is ruled out. A mean outside the limits is
       an arrowhead at the border, with its value.
    2. Above it stand the name and the verdict.
    3. The interval is a bar, cut at the limits; none for a mean outside of them.
    4. Seeds within the limits are dots, a diverged one a cross; none for the reference.

    Args:
        ax: The axes, whose limits are set already.
        index: Position of the contender from the top, at y = -index.
        line: Its differences to the reference.
        is_sole_best: Whether it is the only one that could be the best.
    """
    comparison = line.comparison
    verdict = str(comparison.verdict)
    left, right = ax.get_xlim()
    style = style_of(line.series)
    is_out = verdict.startswith(("ruled out", "worse"))
    # 1. The mean.
    x = min(max(comparison.difference, left), right)  # clipped to the limits
    is_inside = x == comparison.difference
    mark: dict[str, Any] = {"markersize": 7.5, "markeredgewidth": 1.6, "zorder": 4}
    if not is_inside:
        mark["marker"] = ">" if x == right else "<"
        _write_value(ax, x, -index, comparison.difference)
    elif is_out:
        mark["markerfacecolor"] = PAPER
    ax.plot(x, -index, clip_on=False, **(style | mark))
    # 2. Name and verdict.
    # "ruled out, but by less than ..." is too long for the picture.
    text = "the best" if is_sole_best else verdict.partition(",")[0]
    _write_above(ax, index, short_name(comparison.name), text)
    # 3. The interval.
    if is_inside and not math.isnan(comparison.low):
        ends = [max(comparison.low, left), min(comparison.high, right)]
        alpha = 0.22 if is_out else 0.42
        ax.plot(
            ends,
            [-index, -index],
            color=style["color"],
            linewidth=5,
            alpha=alpha,
            zorder=2,
        )
    # 4. The seeds, a little below the mean.
    if comparison.name == comparison.reference:
        return
    for seed, difference in line.seeds.items():
        if not left <= difference <= right:
            continue
        small_mark = {"marker": "o", "markersize": 2.6}
        if seed in line.diverged_seeds:
            small_mark = {"marker": "x", "markersize": 4.5}
        ax.plot(difference, -index - 0.14, **(style | small_mark), alpha=0.8, zorder=3)


def _write_value(ax: Axes, x: float, y: float, difference: float) -> None:
    """Write a value from outside the limits beside its arrowhead."""
    offset = 8
    side = "left"
    if difference > x:
        offset = -8
        side = "right"
    ax.annotate(
        f"{difference:+.4g}",
        (x, y),
        xytext=(offset, 0),
        textcoords="offset points",
        ha=side,
        va="center",
        fontsize=8,
        color=INK,
    )
