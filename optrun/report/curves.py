"""Draw `curves.png`: one run at a glance."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from optrun.artifacts.run_dir import RunDir
from optrun.formatting import duration, plain, rate
from optrun.report import branches
from optrun.report.chart import Chart
from optrun.report.collect import Run, load_run
from optrun.report.theme import (
    LIGHT,
    Theme,
    count_axis,
    legend,
    new_figure,
    number_axis,
    save_png,
    style_axes,
    write,
)

Array = NDArray[np.float64]

_BOOKKEEPING = re.compile(r"(runtime|seconds|time|per_second|examples|samples|tokens|batches|steps)$")
_LESS_IS_BETTER = re.compile(r"(loss|perplexity|error|mse|mae|bits_per_\w+)$")
_LEGEND_LIMIT = 6
_MARKS = 40
"""Points of a line that tell their values on the page."""


def draw_curves(run_dir: Path | str) -> Path:
    """Draw the picture of one run: losses, evaluation metrics, learning rates, gradient norm.

    Args:
        run_dir: A run directory with `metrics.jsonl`; summary and configuration add the title where they are readable.

    Returns:
        The path of `curves.png`, replaced by one rename.

    Raises:
        OSError: There is no `metrics.jsonl`, or the picture cannot be written.
    """
    files = RunDir(run_dir)
    files.metrics.stat()
    run = load_run(files.path)
    return save_png(curves_figure(run, title=run_title(run), theme=LIGHT), files.curves)


def curves_figure(run: Run, *, title: str, theme: Theme, stacked: bool = False) -> Chart:
    """Draw losses over the whole width; below them evaluation metrics, learning rates and gradient norm, where logged.

    Args:
        run: What its files say.
        title: One line above all panels.
        theme: Colours.
        stacked: The panels stand one below the other, as wide as a phone.
    """
    names = run.log.names()
    metrics = evaluation_names(names)
    rates = [name for name in names if name.startswith("lr/")]
    if "train/lr" in names:
        rates.insert(0, "train/lr")
    norms = "train/grad_norm" in names
    small = bool(metrics) + bool(rates) + norms
    wide = (10.0, 6.4 if small else 4.0)
    figure = new_figure(*((4.3, 3.2 + 2.3 * small) if stacked else wide), theme)
    if title:
        write(figure.suptitle(title, x=0.012, ha="left", fontsize=12, color=theme.ink, fontweight="bold"))
    rows, columns = (1 + small, 1) if stacked else (1 + bool(small), max(1, small))
    grid = figure.add_gridspec(rows, columns, height_ratios=[1.45, *[1] * (rows - 1)])
    places = iter(grid[1 + index, 0] if stacked else grid[1, index] for index in range(small))
    _draw_loss(figure.add_subplot(grid[0, :]), run, theme, inside=stacked)
    if metrics:
        _draw_metrics(figure.add_subplot(next(places)), run, metrics, theme)
    if rates:
        _draw_rates(figure.add_subplot(next(places)), run, rates, theme)
    if norms:
        _draw_grad_norm(figure.add_subplot(next(places)), run, theme)
    _let_points_tell(figure)
    return figure


def _let_points_tell(figure: Chart) -> None:
    """Let points of every line with a name tell their values, on the page; of an unnamed one with the panel's."""
    for ax in figure.axes:
        for line in ax.get_lines():
            steps, values = (np.asarray(numbers, dtype=np.float64) for numbers in line.get_data())
            label = str(line.get_label())
            name = ax.get_title(loc="left") if label.startswith("_") else label
            if len(steps) < 2 or line.get_transform() is not ax.transData:
                continue
            for index in np.unique(np.linspace(0, len(steps) - 1, min(len(steps), _MARKS)).astype(int)):
                told = ax.get_title(loc="left") if name.startswith("_") else name
                if math.isfinite(values[index]):
                    figure.mark(
                        ax, steps[index], values[index], f"{told}, step {steps[index]:,.0f}: {values[index]:.4g}"
                    )


def evaluation_names(names: list[str]) -> list[str]:
    """Choose the evaluation metrics that belong into one panel: those on a common scale, bounded ones first.

    Example:
        >>> evaluation_names(["train/loss", "eval/loss", "eval/accuracy", "eval/f1", "eval/perplexity", "eval/seconds"])
        ['eval/accuracy', 'eval/f1']
        >>> evaluation_names(["eval/loss", "eval/perplexity"])
        ['eval/perplexity']
    """
    found = [
        name
        for name in names
        if name.startswith("eval/") and not name.endswith("/loss") and not _BOOKKEEPING.search(name.rsplit("/", 1)[-1])
    ]
    open_ended = ("perplexity", "loss", "mse", "rmse", "mae")
    bounded = [name for name in found if not name.endswith(open_ended)]
    return bounded[:_LEGEND_LIMIT] if bounded else found[:1]


def smooth(values: Array, width: float) -> Array:
    """Smooth by local linear regression over neighbouring points with Gaussian weights.

    It does not lag, follows the steep start of a loss curve up to its first point, and steps over values that are not
    finite.

    Args:
        values: Shape (n,).
        width: Standard deviation of the weights in points; below 0.5 nothing is done.

    Returns:
        Shape (n,); NaN where the value itself is not finite.

    Source: Fan and Gijbels 1996, Local Polynomial Modelling, section 3.2, with weighted sums s_j = sum_i w_i i^j and
    t_j = sum_i w_i i^j y_i: estimate (s_2 t_0 - s_1 t_1) / (s_2 s_0 - s_1^2).
    """
    if width < 0.5 or len(values) < 3:
        return values
    reach = min(math.ceil(3 * width), len(values) - 1)
    offset = np.arange(-reach, reach + 1, dtype=np.float64)
    kernel = np.exp(-0.5 * (offset / width) ** 2)
    finite = np.isfinite(values)
    present, signal = finite.astype(np.float64), np.where(finite, values, 0.0)

    def moment(what: Array, power: int) -> Array:
        # np.convolve flips the kernel: at lag k it multiplies what[i - k], whose offset from i is -k.
        return np.convolve(what, kernel * (-offset) ** power, mode="full")[reach : reach + len(values)]

    s0, s1, s2 = (moment(present, power) for power in range(3))
    t0, t1 = (moment(signal, power) for power in range(2))
    determinant = s2 * s0 - s1**2
    result = np.full(len(values), np.nan)
    np.divide(s2 * t0 - s1 * t1, determinant, out=result, where=determinant > 1e-9)
    np.divide(t0, s0, out=result, where=(determinant <= 1e-9) & (s0 > 1e-9))  # one point alone has no slope
    result[~finite] = np.nan
    return result


def _needs_log(values: Array) -> bool:
    """Tell whether a linear axis would press almost everything against its bottom."""
    finite = values[np.isfinite(values)]
    return len(finite) > 2 and finite.min() > 0 and bool(finite.max() > 30 * np.median(finite))


def _draw_loss(ax: Axes, run: Run, theme: Theme, *, inside: bool) -> None:
    style_axes(ax, theme, title="Loss", xlabel="optimizer step")
    steps, train = run.series("train/loss")
    names = [name for name in run.log.names() if name.startswith("eval/") and name.endswith("/loss")]
    lines = {
        name.removeprefix("eval/").removesuffix("loss").rstrip("/"): branches.joined(
            run, name, "step", run.series(name)
        )
        for name in names
    }
    everything = np.concatenate([train, *(values for _, values in lines.values())])
    finite = everything[np.isfinite(everything)]
    if not len(everything):
        ax.set(xticks=[], yticks=[])
        write(ax.text(0.5, 0.5, "no loss logged yet", transform=ax.transAxes, ha="center", color=theme.muted))
        return
    if len(train):
        few = len(train) < 12
        if few:
            ax.plot(steps, train, color=theme.series[0], marker="o", markersize=4, linewidth=1.6, label="train")
        else:
            smoothed = smooth(train, max(1.0, len(train) / 60))
            ax.plot(steps, train, color=theme.series[0], linewidth=0.8, alpha=0.3)
            ax.plot(steps, smoothed, color=theme.series[0], linewidth=1.9, label="train, smoothed")
    branches.draw_trunks(ax, [run], names[0] if names else "train/loss", "step", theme)
    for index, (name, (eval_steps, evaluated)) in enumerate(lines.items()):
        colour = theme.series[(index + 1) % len(theme.series)]
        size = 5.0 if len(evaluated) < 40 else 0.0
        style: dict[str, Any] = {"color": colour, "marker": "s", "markersize": size, "linewidth": 1.6}
        ax.plot(eval_steps, evaluated, label=f"evaluation, {name}" if name else "evaluation", **style)
    number_axis(ax, list(finite), log=_needs_log(everything))
    count_axis(ax)
    if names and (best := run.best(names[0], "min")) is not None:
        _ring(ax, best, theme.series[1], label=f"best {best[0]:.4g} at step {best[1]:,}")
    _mark_non_finite(ax, [(steps, train), *lines.values()], theme)
    _mark_resumes(ax, run, theme)
    legend(ax, theme, **({"loc": "upper right"} if inside else {"above": True}))


def _ring(ax: Axes, best: tuple[float, int], colour: str, *, label: str | None = None) -> None:
    ax.plot(
        best[1], best[0], marker="o", markersize=10, markerfacecolor="none", color=colour, linewidth=0,
        markeredgewidth=1.8, clip_on=False, zorder=5, label=label,
    )  # fmt: skip


def _mark_non_finite(ax: Axes, lines: list[tuple[Array, Array]], theme: Theme) -> None:
    """Draw a cross on the upper edge for every value that is NaN or infinite."""
    steps = np.concatenate([s[~np.isfinite(v)] for s, v in lines])
    if len(steps):
        ax.plot(
            steps, np.ones(len(steps)), transform=ax.get_xaxis_transform(), marker="x", linewidth=0,
            markersize=6, markeredgewidth=1.6, color=theme.alarm, label=f"not finite ({len(steps)})", clip_on=False,
        )  # fmt: skip


def _mark_resumes(ax: Axes, run: Run, theme: Theme) -> None:
    """Draw a dotted line where a later process took over."""
    entries = run.summary.get("resumes")
    steps = [
        entry[key]
        for entry in (entries if isinstance(entries, list) else [])
        if isinstance(entry, dict)
        for key in ("global_step", "step", "from_step")
        if isinstance(entry.get(key), int)
    ]
    for index, step in enumerate(sorted(set(steps))):
        ax.axvline(step, color=theme.muted, linestyle=":", linewidth=1.1, label="resumed" if index == 0 else None)


def _draw_metrics(ax: Axes, run: Run, names: list[str], theme: Theme) -> None:
    main = run.summary.get("main_metric")
    marked = main["name"] if isinstance(main, dict) and main.get("name") in names else names[0]
    mode = str(main.get("mode")) if isinstance(main, dict) and marked == main.get("name") else metric_mode(marked)
    best = run.best(marked, mode)
    shown = marked.removeprefix("eval/").replace("_", " ")
    title = f"Evaluation {shown}" if len(names) == 1 else "Evaluation metrics"
    subtitle = f"best {shown} {best[0]:.4g} at step {best[1]:,}" if best else "no finite value"
    style_axes(ax, theme, title=title, subtitle=subtitle, xlabel="optimizer step")
    everything: list[float] = []
    for index, name in enumerate(names):
        steps, values = run.series(name)
        everything += [value for value in values if math.isfinite(value)]
        colour = theme.series[(index + 1) % len(theme.series)]
        size = 4.0 if len(values) < 40 else 0.0
        label = name.removeprefix("eval/").replace("_", " ")
        ax.plot(steps, values, color=colour, marker="s", markersize=size, linewidth=1.6, label=label)
        if name == marked and best:
            _ring(ax, best, colour)
    number_axis(ax, everything, log=_needs_log(np.asarray(everything)))
    count_axis(ax)
    _mark_non_finite(ax, [run.series(name) for name in names], theme)
    if len(names) > 1:
        legend(ax, theme, loc="best")


def metric_mode(name: str) -> str:
    """Guess by its name whether less ("min") or more ("max") of a metric is better.

    Example:
        >>> metric_mode("eval/loss"), metric_mode("eval/accuracy")
        ('min', 'max')
    """
    return "min" if _LESS_IS_BETTER.search(name) else "max"


def _draw_rates(ax: Axes, run: Run, names: list[str], theme: Theme) -> None:
    """Draw every distinct learning rate; many groups become shades from the highest to the lowest."""
    distinct: dict[tuple[float, ...], tuple[str, Array, Array]] = {}
    for name in names:
        steps, values = run.series(name)
        distinct.setdefault(tuple(values), (name, steps, values))
    lines = sorted(distinct.values(), key=lambda line: -float(np.nanmax(line[2])) if len(line[2]) else 0.0)
    peaks = [float(np.nanmax(values)) for _, _, values in lines if np.isfinite(values).any()]
    everything = np.concatenate([values for _, _, values in lines])
    finite = everything[np.isfinite(everything)]
    wide = len(peaks) > 1 and min(peaks) > 0 and max(peaks) / min(peaks) > 100
    subtitle = f"highest logged {rate(max(peaks))}" if peaks else "no finite value"
    if len(lines) > 1 and peaks:
        subtitle = f"{len(lines)} different, peaks {rate(min(peaks))} to {rate(max(peaks))}"
    style_axes(ax, theme, title="Learning rate", subtitle=subtitle, xlabel="optimizer step")
    for index, (name, steps, values) in enumerate(lines):
        label = "lr" if name == "train/lr" else name.removeprefix("lr/")
        few = len(values) < 12
        ax.plot(
            steps, np.where(values > 0, values, np.nan) if wide else values, linewidth=1.7,
            color=theme.series[2], alpha=1 - 0.75 * index / max(1, len(lines) - 1) if len(lines) > 1 else 1,
            marker="o" if few else None, markersize=3.5, label=label,
        )  # fmt: skip
    positive = finite[finite > 0]
    if wide and len(positive):
        number_axis(ax, list(positive), log=True)
        ax.set_ylim(bottom=min(peaks) / 20)  # a schedule that ends near zero must not stretch the axis
    else:
        number_axis(ax, list(finite))
        ax.set_ylim(bottom=min(0.0, float(finite.min()) if len(finite) else 0.0))
    count_axis(ax)
    if 1 < len(lines) <= _LEGEND_LIMIT:  # more are shades from the highest to the lowest; the subtitle has the range
        legend(ax, theme, loc="best")


def _draw_grad_norm(ax: Axes, run: Run, theme: Theme) -> None:
    steps, values = run.series("train/grad_norm")
    few = len(values) < 12
    finite = values[np.isfinite(values)]
    subtitle = "global, before clipping" + (
        f"; {len(values) - len(finite)} not finite" if len(finite) < len(values) else ""
    )
    style_axes(ax, theme, title="Gradient norm", subtitle=subtitle, xlabel="optimizer step")
    ax.plot(steps, values, color=theme.series[3], linewidth=1.6 if few else 0.8, alpha=1 if few else 0.35,
            marker="o" if few else None, markersize=3.5)  # fmt: skip
    if not few:
        ax.plot(steps, smooth(values, max(1.0, len(values) / 60)), color=theme.series[3], linewidth=1.7)
    number_axis(ax, list(finite), log=_needs_log(values))
    count_axis(ax)
    _mark_non_finite(ax, [(steps, values)], theme)


def run_title(run: Run) -> str:
    """Say on one line what was trained, how, and how far."""
    model, data = (str(run.config.get(f"{group}.name") or "") for group in ("model", "data"))
    pieces = [" on ".join(name for name in (model, data) if name)]
    if run.optimizer:
        pieces.append(f"{run.optimizer}, lr {rate(run.lr)}" if run.lr is not None else run.optimizer)
    if not any(pieces):
        pieces = [run.path.resolve().name]
    step, limit = run.summary.get("global_step"), run.summary.get("max_steps")
    if isinstance(step, int):
        whole = not isinstance(limit, int) or step == limit
        pieces.append(f"{step:,} steps" if whole else f"{step:,} of {limit:,} steps")
    if run.wall_seconds is not None and math.isfinite(run.wall_seconds):
        pieces.append(duration(run.wall_seconds))
    status = run.summary.get("status")
    if status and status != "finished":
        pieces.append(str(status))
    return plain("  ·  ".join(piece for piece in pieces if piece))
