"""Find which settings a search varied and, if optuna is installed, which of them mattered.

Draw all in one picture.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap

from optrun.base.formatting import rate
from optrun.report.arms import Arm, Contender
from optrun.report.collect import Setting
from optrun.report.findings import Findings
from optrun.report.picture import panel, reach
from optrun.report.table import NONE, value
from optrun.report.theme import Chart, Theme, of_series

FEWEST = 12
"""Fewer configurations of a contender weigh nothing."""
_SHARE = 0.25
"""The share of configurations that count as good ones."""
MOST = 6
"""More settings than this have no axis; the data has them."""
_APART = 5
"""So many values of a setting have a label each."""
_WORDS = 12
"""Characters of a label."""
_GOOD_TO_BAD = LinearSegmentedColormap.from_list("score", ["#1f7fd1", "#8f97a3", "#d9682b"])
"""Colours that are seen on paper, light or dark."""


def searched_keys(findings: Findings) -> list[str]:
    """List the tuned settings of which some contender has tried several values."""

    def is_searched(key: str) -> bool:
        return any(
            len({arm.settings[key] for arm in outcomes(row, key)}) > 1 for row in findings.rows
        )

    return [*filter(is_searched, findings.tuned_keys)]


def outcomes(contender: Contender, key: str = "") -> list[Arm]:
    """List the arms with an outcome that have the setting."""
    return [
        arm
        for arm in contender.arms
        if (not key or key in arm.settings) and (arm.finished or arm.diverged)
    ]


def places(values: Sequence[Setting]) -> dict[Setting, float]:
    """Place the values of a setting between 0 and 1.

    Numbers to scale, linear or logarithmic, words evenly.

    Example:
        >>> places([1, 10, 100, 10]), places(["b", "a", None])
        ({1: 0.0, 10: 0.5, 100: 1.0}, {None: 0.0, 'a': 0.5, 'b': 1.0})
    """
    distinct = list(dict.fromkeys(values))
    numbers = [
        x
        for x in distinct
        if isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)
    ]
    if len(numbers) == len(distinct) > 1:
        wide = min(numbers) > 0 and max(numbers) > 10 * min(numbers)
        scaled = np.log(numbers) if wide else np.asarray(numbers, dtype=np.float64)
        return dict(zip(distinct, ((scaled - scaled.min()) / np.ptp(scaled)).tolist(), strict=True))
    distinct.sort(key=str)
    return {each: at / max(1, len(distinct) - 1) for at, each in enumerate(distinct)}


def importances(findings: Findings) -> dict[str, float]:
    """Weigh the searched settings.

    How much do the good quarter of configurations differ from all in each?

    Each contender is weighed by itself, since its good values are its own, and counts as often as
    it has configurations. One that diverged is as bad as the worst.

    Returns:
        Shares, 1 together, the largest first; empty without optuna or with too few configurations.

    Source: Watanabe, Bansal, Hutter 2023 (PED-ANOVA),
        `optuna.importance.PedAnovaImportanceEvaluator`.
    """
    keys = searched_keys(findings)
    if len(keys) < 2 or importlib.util.find_spec("optuna") is None:
        return {}
    total = dict.fromkeys(keys, 0.0)
    for row in findings.rows:
        arms = [arm for arm in outcomes(row) if arm.settings.keys() >= set(keys)]
        weighed = len(arms) >= FEWEST and any(arm.finished for arm in arms)
        for key, share in _weigh(arms, keys, findings.mode).items() if weighed else ():
            total[key] += share * len(arms)
    whole = sum(total.values())
    return (
        {key: total[key] / whole for key in sorted(keys, key=lambda key: -total[key])}
        if whole
        else {}
    )


def _weigh(arms: Sequence[Arm], keys: Sequence[str], mode: str) -> dict[str, float]:
    """Ask optuna, with the arms as trials of a study."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)  # every study announces itself
    sign = 1.0 if mode == "min" else -1.0
    scores = [sign * arm.mean if arm.finished else math.nan for arm in arms]
    where = {key: places([arm.settings[key] for arm in arms]) for key in keys}
    spaces = {key: optuna.distributions.FloatDistribution(0.0, 1.0) for key in keys}
    study = optuna.create_study()
    for arm, score in zip(arms, np.nan_to_num(scores, nan=np.nanmax(scores)), strict=True):
        params = {key: where[key][arm.settings[key]] for key in keys}
        study.add_trial(
            optuna.create_trial(params=params, distributions=spaces, value=float(score))
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an evaluator that is called experimental
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=_SHARE)
        return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))


def leaf(key: str) -> str:
    """Shorten a key to what tells it from others of a report."""
    return key.removesuffix(".name") if key.endswith(".name") else key.partition(".")[2] or key


def draw_parallel(
    rows: Sequence[Contender], findings: Findings, shares: Mapping[str, float], theme: Theme
) -> Chart:
    """Draw an axis for each setting and one for the score, a line for each configuration, good ones on top.

    Args:
        rows: The contenders that are drawn.
        findings: Of all.
        shares: How important each setting is; empty: unknown.
        theme: Colours.
    """
    keys = (list(shares) or searched_keys(findings))[:MOST]
    figure, ax = panel(theme, 3, "", "")
    ax.grid(False)
    lines = [(series, row, arm) for series, row in enumerate(rows) for arm in outcomes(row)]
    settings: dict[str, list[Setting]] = (
        {"contender": [row.name for _, row, _ in lines]} if len(rows) > 1 else {}
    )
    settings |= {key: [arm.settings.get(key) for *_, arm in lines] for key in keys}
    columns = [
        [where[each] for each in values]
        for values in settings.values()
        if (where := places(values))
    ]
    sign = 1.0 if findings.mode == "min" else -1.0
    scores = np.array([sign * arm.mean if arm.finished else math.inf for *_, arm in lines])
    best, last, ranks = (
        float(scores.min()),
        len(columns),
        np.argsort(np.argsort(scores)) / len(scores),
    )
    far = reach(scores - best) or 1.0
    columns.append([max(-0.06, 1 - (score - best) / far) for score in scores])
    for index, (series, row, arm) in enumerate(lines):
        heights = [column[index] for column in columns]
        colour = _GOOD_TO_BAD(ranks[index]) if arm.finished else theme.alarm
        look: dict[str, Any] = {
            "linewidth": 1.3 - 0.7 * ranks[index],
            "alpha": 0.8 - 0.55 * ranks[index],
        }
        look |= (
            {"linewidth": 3.0, "alpha": 1.0}
            if arm is row.arm
            else {"linestyle": "-" if arm.finished else ":"}
        )
        order = 5 if arm is row.arm else 3 - ranks[index]
        of_series(ax.plot(range(last + 1), heights, color=colour, zorder=order, **look), series)
        figure.mark(ax, last, heights[-1], _told(row, arm), series=series)
    for x, (key, values) in enumerate(settings.items()):
        _label(ax, x, {each: _word(each) for each in places(values)}, places(values), theme)
        if key in shares:
            ax.text(
                x, 1.09, f"{100 * shares[key]:.0f} %", fontsize=7.5, color=theme.muted, ha="center"
            )
    _label(
        ax,
        last,
        {best: value(sign * best), far: value(sign * (best + far))},
        {best: 1.0, far: 0.0},
        theme,
    )
    ax.set(xlim=(-0.15, last + 0.15), ylim=(-0.08, 1.15), yticks=[], xticks=range(last + 1))
    ax.set_xticklabels(
        [*map(leaf, settings), findings.metric], rotation=30, ha="right", fontsize=7.5
    )
    ax.spines[["left", "bottom"]].set_visible(False)
    return figure


def _label(
    ax: Axes, x: int, words: Mapping[Setting, str], heights: Mapping[Setting, float], theme: Theme
) -> None:
    """Draw the axis of a setting, with all of few values and the ends of many."""
    ax.plot([x, x], [0, 1], color=theme.muted, linewidth=1)
    shown = sorted(words, key=lambda each: heights[each])
    for each in shown if len(shown) <= _APART else (shown[0], shown[-1]):
        look: dict[str, Any] = {"fontsize": 7, "color": theme.ink, "va": "center", "zorder": 6}
        box = {"facecolor": theme.paper, "alpha": 0.8, "edgecolor": "none", "pad": 0.6}
        ax.text(x + 0.05, heights[each], words[each], bbox=box, **look)


def _word(setting: object) -> str:
    text = (
        NONE if setting is None else rate(setting) if isinstance(setting, float) else str(setting)
    )
    return text if len(text) <= _WORDS else text[: _WORDS - 1] + "…"


def _told(row: Contender, arm: Arm) -> str:
    """Describe a configuration and its outcome."""
    rest = {key: found for key, found in arm.settings.items() if key not in row.settings}
    settings = ", ".join(
        f"{leaf(key)} {rate(v) if isinstance(v, float) else v}" for key, v in rest.items()
    )
    result = (
        "diverged"
        if not arm.finished
        else value(arm.mean) + (" (a seed diverged)" if arm.diverged else "")
    )
    return f"{row.name}, {settings}: {result}"
