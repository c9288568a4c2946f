"""Say what several workloads say together: sentences, tables, pictures, and the verdict within each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from optrun.report.figures import SHOWN, WIDTH, Picture
from optrun.report.narrative import headline
from optrun.report.statistics import BETTER, WORSE
from optrun.report.table import NONE, Table, value
from optrun.report.tables import p_value, ranking_table, signed
from optrun.report.theme import MARKERS, Theme, legend, new_figure, style_axes
from optrun.report.workloads import Overview, Standing
from optrun.report.workloads_statistics import (
    FEWEST_WORKLOADS,
    LAST_TAU,
    performance_profile,
    resample,
    score_profile,
)

HEADING = "Over several workloads"


@dataclass(frozen=True)
class WorkloadSection:
    """The verdict within one workload."""

    name: str
    finding: str
    table: Table


def lead(overview: Overview) -> str:
    """Say the finding over all workloads in a few sentences, no stronger than the tests allow."""
    judged = [each for each in overview.standings if not each.missing]
    count = len(overview.workloads) - len(overview.left_out)
    if not judged:
        found = f"{len(overview.workloads)} workloads, and no contender has a result on all of them yet"
        return f"{found}: read each by itself."
    first = judged[0]
    text = (
        f"Over {count} workloads {first.name} has the best mean score: {first.mean:.3f} of the way from no learning "
        "(0) to the best contender (1)."
    )
    groups: dict[str, list[str]] = {}
    for each in judged:
        if each.test is not None:
            groups.setdefault(each.verdict, []).append(each.name)
    parts = []
    for verdict, names in groups.items():
        listed = names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
        if verdict in (BETTER, WORSE):
            parts.append(f"{listed} {'is' if len(names) == 1 else 'are'} {verdict}")
        else:
            parts.append(f"{verdict} for {listed}")
    if parts:
        text += f" Against {overview.reference}, on these workloads: {'; '.join(parts)}."
    return f"{text} {_elsewhere(count)}"


def _elsewhere(count: int) -> str:
    if count < FEWEST_WORKLOADS:
        return f"{count} workloads are too few to speak of others: a sign test over workloads needs {FEWEST_WORKLOADS}."
    return "The last column of the table says how far this holds for other workloads like these."


def table(overview: Overview) -> Table:
    """Tabulate all contenders over all workloads, best first."""
    elsewhere = len(overview.workloads) - len(overview.left_out) >= FEWEST_WORKLOADS
    columns = ["#", "contender", "mean score", "95 % interval", "verdict", "difference", "p (Holm)"]
    columns += ["interquartile mean", "optimality gap", "mean rank", "better / worse", "steps profile"]
    columns += ["p (other workloads)"] if elsewhere else []
    made = Table(columns, [True, False, True, True, False, *[True] * (len(columns) - 5)])
    for number, each in enumerate(overview.standings, start=1):
        rank = float(np.mean(each.ranks)) if not np.isnan(each.ranks).any() else math.nan
        test = each.test
        tested = test is not None and not math.isnan(test.low)
        made.rows.append(
            [
                NONE if each.missing else str(number),
                each.name,
                _number(each.mean),
                _interval(each.interval),
                f"no result on {', '.join(each.missing)}" if each.missing else each.verdict,
                NONE if test is None else _difference(test.difference, (test.low, test.high) if tested else None),
                p_value(each.p) if tested else NONE,
                _with_interval(each.middle, each.middle_interval),
                _with_interval(each.gap, each.gap_interval),
                NONE if math.isnan(rank) else f"{rank:.1f}",
                NONE if each.missing or test is None else f"{each.better} / {each.worse}",
                f"{each.profile:.2f}",
                *([NONE if math.isnan(each.p_elsewhere) else p_value(each.p_elsewhere)] if elsewhere else []),
            ]
        )
        best = number == 1 and not each.missing
        style = {BETTER: "better", WORSE: "worse"}.get(each.verdict, "")
        made.styles.append("muted" if each.missing else "best" if best else style)
    return made


def scores_table(overview: Overview) -> Table:
    """Tabulate the normalised score of each contender on each workload, and the scale it is on."""
    usable = [each for each in overview.workloads if each.name not in overview.left_out]
    names = [each.name for each in overview.standings]
    made = Table(
        ["workload", "metric", "before learning (0)", "best (1)", *names], [False, False, *[True] * (2 + len(names))]
    )
    for index, each in enumerate(usable):
        cells = [each.name, each.findings.metric, value(each.floor), value(each.best)]
        for standing in overview.standings:
            known = standing.scores[index][~np.isnan(standing.scores[index])]
            cells.append(f"{known.mean():.3f}" if len(known) else NONE)
        made.rows.append(cells)
        made.styles.append("")
    return made


def sections(overview: Overview) -> list[WorkloadSection]:
    """List the verdict within each workload, as a report of its runs alone says it."""
    return [
        WorkloadSection(each.name, headline(each.findings), ranking_table(each.findings)) for each in overview.workloads
    ]


def notes(overview: Overview) -> list[str]:
    """Explain how the numbers over workloads came about and what they do not say; one paragraph each."""
    seeds = max((each.scores.shape[1] for each in overview.standings), default=0)
    listed = "; ".join(f"{name}: {reason}" for name, reason in overview.left_out.items())
    scope = "the comparisons with the baseline" if overview.chosen_baseline else "all pairs of contenders"
    found = [
        "Workload: runs of one task that are judged on the same rows; they are ranked among themselves alone, each "
        "contender at its best configuration there.",
        "Score: 0 is the metric before learning (the first training loss, or the median first evaluation), 1 the mean "
        "of the best contender of the workload, so that workloads can be averaged, each with the same weight. Since "
        "the best sets the scale, a contender that joins may move all scores. Interquartile mean and optimality gap as "
        "in Agarwal et al. 2021 (rliable). Intervals are stratified bootstrap intervals: 2,000 times, seeds are drawn "
        f"with replacement within each workload, stretched for the small number of them ({seeds} at most).",
        "Verdict over workloads: two-sided t test of the mean difference in score, seeds paired within each workload, "
        f"degrees of freedom by Satterthwaite, Holm's method over {scope}. It speaks of these workloads with other "
        "seeds. Of other workloads only a test that counts workloads can speak, and below "
        f"{FEWEST_WORKLOADS} none can pass: where there are as many, a sign test stands in the last column, "
        "uncorrected. Better / worse counts workloads by means.",
        "Steps profile: the share of workloads on which a contender reached the target within a factor of the steps of "
        f"the quickest, averaged over factors from 1 to {LAST_TAU:g} (Dolan and Moré 2002, AlgoPerf). The target is a "
        "level of the metric that half of the contenders reach; one that does not reach it on a workload gets nothing "
        "there. Steps are whole evaluation intervals.",
    ]
    if listed:
        found.append(f"Not in the score: {listed}.")
    return found


def pictures(overview: Overview) -> list[Picture]:
    """List the pictures over workloads."""
    shown = [each for each in overview.standings if not each.missing][:SHOWN]
    if not shown:
        return []
    note = (
        f" The best {len(shown)} of {len(overview.standings)} are drawn."
        if len(shown) < len(overview.standings)
        else ""
    )
    made: list[tuple[str, str, str, Callable[[Theme], Figure]]] = [
        (
            "workloads",
            "Mean score over workloads (higher is better)",
            "0: nothing was learnt, 1: the best contender of each workload. Small marks are workloads, the line is the "
            "mean over them, the bar its 95 % stratified bootstrap interval.",
            lambda theme: _draw_means(shown, theme),
        ),
        (
            "workloads-steps",
            "Share of workloads within a factor of the quickest",
            "Performance profile (Dolan and Moré): steps to the target by those of the quickest contender. Left: how "
            "often it is the quickest; right: how often it gets there at all.",
            lambda theme: _draw_steps(shown, theme),
        ),
        (
            "workloads-scores",
            "Share of runs above a score",
            "Each workload has the same weight; the band is the 95 % stratified bootstrap interval. Further right is "
            "better.",
            lambda theme: _draw_scores(shown, theme),
        ),
    ]
    return [Picture(name, title, caption + note, draw) for name, title, caption, draw in made]


def _draw_means(shown: Sequence[Standing], theme: Theme) -> Figure:
    figure = new_figure(WIDTH, 0.9 + 0.42 * len(shown), theme)
    ax = figure.add_subplot()
    style_axes(ax, theme, xlabel="normalised score")
    ax.grid(False, axis="y")
    for index, each in enumerate(shown):
        y, colour = -float(index), _colour(theme, index)
        points = np.nanmean(each.scores, axis=1)
        ax.plot(each.interval, [y, y], color=colour, linewidth=6, alpha=0.28, solid_capstyle="round")
        ax.plot([each.mean] * 2, [y - 0.2, y + 0.2], color=colour, linewidth=2.4, solid_capstyle="round")
        for place, point in enumerate(points):
            marker = MARKERS[place % len(MARKERS)]
            ax.plot(point, y, marker=marker, markersize=4.2, linewidth=0, color=colour, alpha=0.85)
        name: dict[str, Any] = {"transform": ax.get_yaxis_transform(), "ha": "left", "va": "center"}
        ax.text(0.0, y + 0.42, f"{index + 1}  {each.name}", color=theme.ink, fontsize=8.5, parse_math=False, **name)
    ax.set_yticks([])
    ax.set_ylim(-len(shown) + 0.6, 0.7)
    ax.spines["left"].set_visible(False)
    ax.margins(x=0.05)
    return figure


def _draw_steps(shown: Sequence[Standing], theme: Theme) -> Figure:
    figure = new_figure(WIDTH, 3.4 + 0.17 * len(shown), theme)
    ax = figure.add_subplot()
    style_axes(ax, theme, xlabel="steps, as a factor of the quickest", ylabel="share of workloads")
    reached = [ratio for each in shown for ratio in each.ratio if math.isfinite(ratio)]
    last = max([LAST_TAU, *(1.1 * ratio for ratio in reached)])
    taus = np.unique([1.0, last, *reached])
    for index, each in enumerate(shown):
        share = performance_profile(each.ratio, taus)
        ax.step(taus, share, where="post", label=each.name, **_line(theme, index))
    ax.set_ylim(-0.03, 1.03)
    legend(ax, theme, below=True)
    return figure


def _draw_scores(shown: Sequence[Standing], theme: Theme) -> Figure:
    figure = new_figure(WIDTH, 3.4 + 0.17 * len(shown), theme)
    ax = figure.add_subplot()
    style_axes(ax, theme, xlabel="normalised score", ylabel="share of runs above it")
    known = np.concatenate([each.scores[~np.isnan(each.scores)] for each in shown])
    taus = np.linspace(max(0.0, float(known.min()) - 0.02), max(1.0, float(known.max())) + 0.01, 200)
    for index, each in enumerate(shown):
        drawn = np.array([score_profile(one, taus) for one in resample(each.scores, resamples=300)])
        low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
        ax.fill_between(taus, low, high, color=_colour(theme, index), alpha=0.12, linewidth=0)
        ax.plot(taus, score_profile(each.scores, taus), label=each.name, **_line(theme, index))
    ax.set_ylim(-0.03, 1.03)
    legend(ax, theme, below=True)
    return figure


def _line(theme: Theme, index: int) -> dict[str, Any]:
    return {
        "color": _colour(theme, index),
        "linewidth": 1.6,
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": 4.5,
        "markevery": 0.2,
    }


def _colour(theme: Theme, index: int) -> str:
    return theme.series[index % len(theme.series)]


def _number(number: float) -> str:
    return NONE if math.isnan(number) else f"{number:.3f}"


def _interval(ends: tuple[float, float]) -> str:
    return NONE if math.isnan(ends[0]) else f"[{ends[0]:.3f}, {ends[1]:.3f}]"


def _with_interval(number: float, ends: tuple[float, float]) -> str:
    return NONE if math.isnan(number) else f"{number:.3f} {_interval(ends)}"


def _difference(difference: float, ends: tuple[float, float] | None) -> str:
    if ends is None:
        return signed(difference, 3)
    return f"{signed(difference, 3)} [{signed(ends[0], 3)}, {signed(ends[1], 3)}]"
