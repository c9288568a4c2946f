"""Draw `curves.png`: one run at a glance."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from optrun.artifacts.run_dir import RunDir
from optrun.base.formatting import duration, plain, rate
from optrun.report import branches
from optrun.report.chart import Chart
from optrun.report.collect import Run, load_run
from optrun.report.theme import LIGHT, Theme, count_axis, legend, new_figure, number_axis, ring, save_png, style_axes

Array = NDArray[np.float64]
Line = tuple[Array, Array]

_BOOKKEEPING = re.compile(r"(runtime|seconds|time|per_second|examples|samples|tokens|batches|steps)$")
_LESS_IS_BETTER = re.compile(r"(loss|perplexity|error|mse|mae|bits_per_\w+)$")
_LEGEND_LIMIT = 6


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
    rates = [name for name in ("train/lr", *names) if name in names and name.startswith(("train/lr", "lr/"))]
    rates = list(dict.fromkeys(rates))
    draw: list[Callable[[Axes], None]] = []
    if metrics:
        draw.append(lambda ax: _draw_metrics(ax, run, metrics, theme))
    if rates:
        draw.append(lambda ax: _draw_rates(ax, run, rates, theme))
    if "train/grad_norm" in names:
        draw.append(lambda ax: _draw_grad_norm(ax, run, theme))
    size = (4.3, 3.2 + 2.3 * len(draw)) if stacked else (10.0, 6.4 if draw else 4.0)
    figure = new_figure(*size, theme)
    if title:
        figure.suptitle(title, x=0.012, ha="left", fontsize=12, color=theme.ink, fontweight="bold")
    rows, columns = (1 + len(draw), 1) if stacked else (1 + bool(draw), max(1, len(draw)))
    grid = figure.add_gridspec(rows, columns, height_ratios=[1.45, *[1] * (rows - 1)])
    _draw_loss(figure.add_subplot(grid[0, :]), run, theme, inside=stacked)
    for index, panel in enumerate(draw):
        panel(figure.add_subplot(grid[1 + index, 0] if stacked else grid[1, index]))
    for ax in figure.axes:
        _let_points_tell(figure, ax)
    return figure


def _let_points_tell(figure: Chart, ax: Axes) -> None:
    """Let points of every line tell their values, with its name, or the panel's for one that has none."""
    for line in ax.get_lines():
        steps, values = (np.asarray(numbers, dtype=np.float64) for numbers in line.get_data())
        name = str(line.get_label())
        name = ax.get_title(loc="left") if name.startswith("_") else name
        if len(steps) < 2 or line.get_transform() is not ax.transData:
            continue
        figure.mark_line(ax, steps, values, partial(_told, name, steps, values))


def _told(name: str, steps: Array, values: Array, index: int) -> str:
    return f"{name}, step {steps[index]:,.0f}: {values[index]:.4g}"


def evaluation_names(names: list[str]) -> list[str]:
    """Choose the evaluation metrics that belong into one panel: those on a common scale, bounded ones first.

    Example:
        >>> evaluation_names(["train/loss", "eval/loss", "eval/accuracy", "eval/f1", "eval/perplexity", "eval/seconds"])
        ['eval/accuracy', 'eval/f1']
        >>> evaluation_names(["eval/loss", "eval/perplexity"])
        ['eval/perplexity']
    """
    found = [
        name for name in names
        if name.startswith("eval/") and not name.endswith("/loss") and not _BOOKKEEPING.search(name.rsplit("/", 1)[-1])
    ]  # fmt: skip
    unbounded = ("perplexity", "loss", "mse", "rmse", "mae", "/chosen", "/rejected", "/margins")
    bounded = [name for name in found if not name.endswith(unbounded)]
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
    finite = np.isfinite(values)

    def moment(what: Array, power: int) -> Array:
        # np.convolve flips the kernel: at lag k it multiplies what[i - k], whose offset from i is -k.
        kernel = np.exp(-0.5 * (offset / width) ** 2) * (-offset) ** power
        return np.convolve(what, kernel, mode="full")[reach : reach + len(values)]

    s0, s1, s2 = (moment(finite.astype(np.float64), power) for power in range(3))
    t0, t1 = (moment(np.where(finite, values, 0.0), power) for power in range(2))
    determinant = s2 * s0 - s1**2
    alone = determinant <= 1e-9  # one point has no slope
    with np.errstate(invalid="ignore", divide="ignore"):
        result = np.where(alone, t0 / s0, (s2 * t0 - s1 * t1) / determinant)
    return np.where(finite, result, np.nan)


def _plot(ax: Axes, line: Line, colour: str, label: str | None, *, smoothed: bool = False, **style: Any) -> None:
    """Draw a line, with markers where it has few points; one that is smoothed over what was logged."""
    steps, values = line
    few = len(values) < (12 if smoothed else 40)
    if smoothed and not few:
        ax.plot(steps, values, color=colour, linewidth=0.8, alpha=0.3)
        values, label = smooth(values, max(1.0, len(values) / 60)), label and f"{label}, smoothed"
    look: dict[str, Any] = {"marker": "o" if smoothed else "s", "markersize": 4.0 if few else 0.0, "linewidth": 1.7}
    ax.plot(steps, values, color=colour, label=label, **(look | style))


def _finish(ax: Axes, lines: Sequence[Line], theme: Theme) -> None:
    """Scale the axes, logarithmic where a linear one would press almost everything against its bottom.

    Every value that is NaN or infinite is a cross on the upper edge.
    """
    values, steps = (np.concatenate([line[index] for line in lines]) for index in (1, 0))
    finite = values[np.isfinite(values)]
    log = len(finite) > 2 and finite.min() > 0 and bool(finite.max() > 30 * np.median(finite))
    number_axis(ax, list(finite), log=log)
    count_axis(ax)
    if len(gone := steps[~np.isfinite(values)]):
        ax.plot(
            gone, np.ones(len(gone)), transform=ax.get_xaxis_transform(), marker="x", linewidth=0,
            markersize=6, markeredgewidth=1.6, color=theme.alarm, label=f"not finite ({len(gone)})", clip_on=False,
        )  # fmt: skip


def _draw_loss(ax: Axes, run: Run, theme: Theme, *, inside: bool) -> None:
    style_axes(ax, theme, title="Loss", xlabel="optimizer step")
    train = run.series("train/loss")
    names = [name for name in run.log.names() if name.startswith("eval/") and name.endswith("/loss")]
    lines = [branches.joined(run, name, "step", run.series(name)) for name in names]
    if not any(len(steps) for steps, _ in (train, *lines)):
        ax.set(xticks=[], yticks=[])
        ax.text(0.5, 0.5, "no loss logged yet", transform=ax.transAxes, ha="center", color=theme.muted)
        return
    if len(train[0]):
        _plot(ax, train, theme.series[0], "train", smoothed=True)
    branches.draw_trunks(ax, [run], names[0] if names else "train/loss", "step", theme)
    for index, (name, line) in enumerate(zip(names, lines, strict=True), start=1):
        of = name.removeprefix("eval/").removesuffix("loss").rstrip("/")
        _plot(ax, line, theme.series[index % len(theme.series)], f"evaluation, {of}" if of else "evaluation")
    if names and (best := run.best(names[0], "min")) is not None:
        ring(ax, best[1], best[0], theme.series[1], label=f"best {best[0]:.4g} at step {best[1]:,}")
    _finish(ax, [train, *lines], theme)
    for index, step in enumerate(_resumes(run)):
        ax.axvline(step, color=theme.muted, linestyle=":", linewidth=1.1, label=None if index else "resumed")
    legend(ax, theme, **({"loc": "upper right"} if inside else {"above": True}))


def _resumes(run: Run) -> list[int]:
    """List the steps at which a later process took over."""
    entries = run.summary.get("resumes")
    known = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    found = [entry.get(key) for entry in known for key in ("global_step", "step", "from_step")]
    return sorted({step for step in found if isinstance(step, int)})


def _draw_metrics(ax: Axes, run: Run, names: list[str], theme: Theme) -> None:
    main = run.summary.get("main_metric")
    own = isinstance(main, dict) and main.get("name") in names
    marked, mode = (main["name"], str(main.get("mode"))) if own and main else (names[0], metric_mode(names[0]))
    best = run.best(marked, mode)
    shown = marked.removeprefix("eval/").replace("_", " ")
    title = f"Evaluation {shown}" if len(names) == 1 else "Evaluation metrics"
    subtitle = f"best {shown} {best[0]:.4g} at step {best[1]:,}" if best else "no finite value"
    style_axes(ax, theme, title=title, subtitle=subtitle, xlabel="optimizer step")
    for index, name in enumerate(names, start=1):
        colour = theme.series[index % len(theme.series)]
        _plot(ax, run.series(name), colour, name.removeprefix("eval/").replace("_", " "))
        if name == marked and best:
            ring(ax, best[1], best[0], colour)
    _finish(ax, [run.series(name) for name in names], theme)
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
    distinct = {tuple(run.series(name)[1]): name for name in reversed(names)}
    peaks = [(max(filter(math.isfinite, values), default=-1.0), name) for values, name in distinct.items()]
    lines = sorted((each for each in peaks if each[0] >= 0), reverse=True)
    high, low = (lines[0][0], lines[-1][0]) if lines else (0.0, 0.0)
    subtitle = f"highest logged {rate(high)}" if lines else "no finite value"
    if len(lines) > 1:
        subtitle = f"{len(lines)} different, peaks {rate(low)} to {rate(high)}"
    style_axes(ax, theme, title="Learning rate", subtitle=subtitle, xlabel="optimizer step")
    wide = low > 0 and high > 100 * low
    for index, (_, name) in enumerate(lines):
        steps, values = run.series(name)
        shade = 1 - 0.75 * index / max(1, len(lines) - 1)
        label = "lr" if name == "train/lr" else name.removeprefix("lr/")
        line = steps, np.where(values > 0, values, np.nan) if wide else values
        _plot(ax, line, theme.series[2], label, alpha=shade, marker="o" if len(values) < 12 else None)
    number_axis(ax, [low, high], log=wide)
    # A schedule that ends near zero must not stretch a logarithmic axis.
    ax.set_ylim(bottom=low / 20 if wide else 0.0)
    count_axis(ax)
    if 1 < len(lines) <= _LEGEND_LIMIT:  # more are shades from the highest to the lowest; the subtitle has the range
        legend(ax, theme, loc="best")


def _draw_grad_norm(ax: Axes, run: Run, theme: Theme) -> None:
    line = run.series("train/grad_norm")
    gone = int((~np.isfinite(line[1])).sum())
    subtitle = "global, before clipping" + (f"; {gone} not finite" if gone else "")
    style_axes(ax, theme, title="Gradient norm", subtitle=subtitle, xlabel="optimizer step")
    _plot(ax, line, theme.series[3], None, smoothed=True)
    _finish(ax, [line], theme)


def run_title(run: Run) -> str:
    """Say on one line what was trained, how, and how far."""
    names = [str(run.config.get(f"{group}.name") or "") for group in ("model", "data")]
    pieces = [" on ".join(name for name in names if name)]
    if run.optimizer:
        pieces.append(f"{run.optimizer}, lr {rate(run.lr)}" if run.lr is not None else run.optimizer)
    if not any(pieces):
        pieces = [run.path.resolve().name]
    step, limit, status = (run.summary.get(key) for key in ("global_step", "max_steps", "status"))
    if isinstance(step, int):
        pieces.append(f"{step:,} of {limit:,} steps" if isinstance(limit, int) and step != limit else f"{step:,} steps")
    if run.wall_seconds is not None and math.isfinite(run.wall_seconds):
        pieces.append(duration(run.wall_seconds))
    pieces += [str(status)] if status and status != "finished" else []
    return plain("  ·  ".join(piece for piece in pieces if piece))
