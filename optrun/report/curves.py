"""Draw `curves.png`: one run at a glance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from optrun.artifacts.run_dir import RunDir
from optrun.base.formatting import duration, plain, rate
from optrun.config.schema.metric import metric_mode
from optrun.report.runs import Array, Run, load_run
from optrun.report.theme import (
    LIGHT,
    PAGE,
    Chart,
    Theme,
    count_axis,
    legend,
    number_axis,
    ring,
    save_png,
    style_axes,
)

_LEGEND_LIMIT = 6


def draw_curves(run_dir: Path | str) -> Path:
    """Draw the picture of one run: losses, evaluation metric, learning rates.

    Args:
        run_dir: A run directory with `metrics.jsonl`; summary and configuration add the title where
            they are readable.

    Returns:
        The path of `curves.png`, replaced by one rename.

    Raises:
        OSError: There is no `metrics.jsonl`, or the picture cannot be written.
    """
    files = RunDir(run_dir)
    files.metrics.stat()
    run = load_run(files.path)
    return save_png(curves_figure(run, LIGHT, run_title(run)), files.curves)


def curves_figure(run: Run, theme: Theme, title: str = "") -> Chart:
    """Draw losses over the whole width.

    Below them the main evaluation metric and learning rates, where logged.

    Args:
        run: What its files say.
        theme: Colours; on a page the panels stand one below the other, as wide as a phone.
        title: One line above all panels.
    """
    stacked = theme is PAGE
    names = run.log.names()
    main = [
        name
        for name in (str(run.at("main_metric", "name")), "eval/accuracy", "eval/perplexity")
        if name in names
    ]
    panels = {
        "Loss": [
            "train/loss",
            *(name for name in names if name.startswith("eval/") and name.endswith("/loss")),
        ],
        "Evaluation": [name for name in main if not name.endswith("/loss")][:1],
        "Learning rate": _rates(run),
    }
    # One point, as of an evaluation at the end alone, is no curve.
    drawn = [
        (name, logged)
        for name, logged in panels.items()
        if name == "Loss" or any(len(run.series(metric)[0]) > 1 for metric in logged)
    ]
    beside = 1 if stacked else max(1, len(drawn) - 1)
    rows = len(drawn) if stacked else min(2, len(drawn))
    figure = Chart(*((4.3, 0.9 + 2.3 * rows) if stacked else (10.0, 2.0 + 2.2 * rows)), theme)
    if title:
        figure.suptitle(title, x=0.012, ha="left", fontsize=12, color=theme.ink, fontweight="bold")
    grid = figure.add_gridspec(rows, beside, height_ratios=[1.45, *[1] * (rows - 1)])
    for place, (name, logged) in enumerate(drawn):
        at = grid[0, :] if not place else grid[place, 0] if stacked else grid[1, place - 1]
        ax = figure.add_subplot(at)
        style_axes(ax, theme, title=name, xlabel="optimizer step")
        _draw_panel(ax, run, logged, theme)
    return figure


def smooth(values: Array, width: float) -> Array:
    """Smooth by local linear regression over neighbouring points with Gaussian weights.

    It does not lag, follows the steep start of a loss curve up to its first point, and steps over
    values that are not finite.

    Args:
        values: Shape (n,).
        width: Standard deviation of the weights in points; below 0.5 nothing is done.

    Returns:
        Shape (n,); NaN where the value itself is not finite.

    Source: Fan and Gijbels 1996, Local Polynomial Modelling, section 3.2, with weighted sums s_j =
    sum_i w_i i^j and t_j = sum_i w_i i^j y_i: estimate (s_2 t_0 - s_1 t_1) / (s_2 s_0 - s_1^2).
    """
    if width < 0.5 or len(values) < 3:
        return values
    reach = min(math.ceil(3 * width), len(values) - 1)
    offset = np.arange(-reach, reach + 1, dtype=np.float64)
    finite = np.isfinite(values)

    def moment(what: Array, power: int) -> Array:
        # np.convolve flips the kernel: at lag k it multiplies what[i - k], whose offset from i is
        # -k.
        kernel = np.exp(-0.5 * (offset / width) ** 2) * (-offset) ** power
        return np.convolve(what, kernel, mode="full")[reach : reach + len(values)]

    s0, s1, s2 = (moment(finite.astype(np.float64), power) for power in range(3))
    t0, t1 = (moment(np.where(finite, values, 0.0), power) for power in range(2))
    determinant = s2 * s0 - s1**2
    alone = determinant <= 1e-9  # one point has no slope
    with np.errstate(invalid="ignore", divide="ignore"):
        result = np.where(alone, t0 / s0, (s2 * t0 - s1 * t1) / determinant)
    return np.where(finite, result, np.nan)


def _rates(run: Run) -> list[str]:
    """List the distinct learning rates, the highest first."""
    logged = [
        name for name in ("train/lr", *run.log.names()) if name.startswith(("train/lr", "lr/"))
    ]
    distinct = {
        tuple(values): name for name in reversed(logged) if len(values := run.series(name)[1])
    }
    return sorted(distinct.values(), key=lambda name: -float(np.nanmax(run.series(name)[1])))


def _draw_panel(ax: Axes, run: Run, names: Sequence[str], theme: Theme) -> None:
    """Draw metrics of a common scale.

    What was logged at every step is thin, with a thick line through it.

    An axis is logarithmic where a linear one would press almost everything against its bottom.
    Every value that is NaN or infinite is a cross on the upper edge, the best of the first
    evaluation metric a ring.
    """
    lines = {name: line for name in names if len((line := run.series(name))[0])}
    if not lines:
        ax.text(
            0.5, 0.5, "nothing logged yet", transform=ax.transAxes, ha="center", color=theme.muted
        )
        return
    steps, values = (np.concatenate([line[index] for line in lines.values()]) for index in (0, 1))
    finite = values[np.isfinite(values)]
    positive = finite[finite > 0]
    low = float(np.min(positive, initial=math.inf))
    log = len(positive) > 2 and bool(finite.max() > 30 * np.median(positive))
    for index, (name, (x, y)) in enumerate(lines.items()):
        many = len(lines) > _LEGEND_LIMIT  # shades from the first to the last
        style: dict[str, Any] = {
            "color": theme.series[0 if many else index % len(theme.series)],
            "linewidth": 1.7,
        }
        style |= {"alpha": 1 - 0.75 * index / len(lines) if many else 1.0, "label": name}
        y = np.where(y > 0, y, np.nan) if log else y
        if name == "train/loss" and len(y) >= 12:  # of single batches
            ax.plot(x, y, color=style["color"], linewidth=0.8, alpha=0.3)
            ax.plot(x, smooth(y, max(1.0, len(y) / 60)), **style)
        else:
            ax.plot(x, y, marker="o" if len(y) < 40 else None, markersize=4.0, **style)
    judged = next((name for name in lines if name.startswith("eval/")), "")
    if judged and (best := run.best(judged, metric_mode(judged))) is not None:
        colour = theme.series[list(lines).index(judged) % len(theme.series)]
        ring(ax, best[1], best[0], colour, label=f"best {best[0]:.4g} at step {best[1]:,}")
    number_axis(ax, list(positive if log else finite), log=log)
    if log:
        ax.set_ylim(
            bottom=max(low, float(np.median(positive)) / 1e3)
        )  # a schedule that ends near zero
    count_axis(ax)
    if len(gone := steps[~np.isfinite(values)]):
        ax.plot(
            gone,
            np.ones(len(gone)),
            transform=ax.get_xaxis_transform(),
            marker="x",
            linewidth=0,
            markersize=6,
            markeredgewidth=1.6,
            color=theme.alarm,
            label=f"not finite ({len(gone)})",
            clip_on=False,
        )
    for index, step in enumerate(sorted({*run.of_resumes("from_step", int)})):
        ax.axvline(
            step,
            color=theme.muted,
            linestyle=":",
            linewidth=1.1,
            label=None if index else "resumed",
        )
    if len(lines) <= _LEGEND_LIMIT:
        legend(ax, theme)


def model_name(run: Run) -> str:
    """Name the model: the end of its path, or the choice if it has none."""
    return _last_part(run.config.get("model.path")) or str(run.config.get("model.name") or "")


def data_name(run: Run) -> str:
    """Name the data: the end of its path or file, or the choice if it has none or several."""
    path = _last_part(run.config.get("data.path")) or _last_part(run.config.get("data.train"))
    return path or str(run.config.get("data.name") or "")


def _last_part(path: object) -> str:
    """Take the end of a path; empty for none, and for a list of them."""
    text = str(path or "").rstrip("/")
    return "" if text.startswith("[") else text.rpartition("/")[2]


def run_title(run: Run) -> str:
    """Write model, data, optimizer and progress of a run on one line."""
    pieces = [" on ".join(name for name in (model_name(run), data_name(run)) if name)]
    if run.optimizer:
        pieces.append(
            f"{run.optimizer}, lr {rate(run.lr)}" if run.lr is not None else run.optimizer
        )
    if not any(pieces):
        pieces = [run.path.resolve().name]
    step, limit, status = (run.summary.get(key) for key in ("global_step", "max_steps", "status"))
    if isinstance(step, int):
        pieces.append(
            f"{step:,} of {limit:,} steps"
            if isinstance(limit, int) and step != limit
            else f"{step:,} steps"
        )
    if run.wall_seconds is not None and math.isfinite(run.wall_seconds):
        pieces.append(duration(run.wall_seconds))
    pieces += [str(status)] if status and status != "finished" else []
    return plain("  ·  ".join(piece for piece in pieces if piece))
