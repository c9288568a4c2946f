"""Draw `curves.png`: one run at a glance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from optrun.artifacts.atomic import replace_bytes
from optrun.artifacts.objective import is_better
from optrun.artifacts.run_dir import RunDir
from optrun.base.formatting import duration, plain, rate
from optrun.config.schema.metric import metric_mode
from optrun.report.runs import Array, Run, load_run
from optrun.report.theme import (
    ALARM,
    MUTED,
    SERIES,
    Chart,
    count_axis,
    legend,
    number_axis,
    ring,
    style_axes,
    to_png,
)

_LEGEND_LIMIT = 6
"""More lines than this in a panel have no legend, and shades of one colour."""
_SMOOTHED_POINTS = 12
"""A training loss with at least this many values is smoothed."""
_MARKED_POINTS = 40
"""A line with fewer values has a marker at each."""


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
    files.metrics.stat()  # raises if it is missing, which `load_run` does not
    run = load_run(files.path)
    replace_bytes(files.curves, to_png(curves_figure(run, run_title(run))))
    return files.curves


def curves_figure(run: Run, title: str = "") -> Chart:
    """Draw the losses of a run, and below them its main evaluation metric and learning rates.

    A lower panel is left out if no metric in it has two values. Without a main metric other than a
    loss, accuracy or perplexity is drawn.

    Args:
        run: The run to draw.
        title: Text above all panels; one line.
    """
    # 1. Choose the metrics of each panel.
    names = run.log.names()
    eval_losses = [name for name in names if name.startswith("eval/") and name.endswith("/loss")]
    main_metric = str(run.from_summary("main_metric", "name"))
    candidates = (main_metric, "eval/accuracy", "eval/perplexity")
    eval_metrics = [name for name in candidates if name in names and not name.endswith("/loss")]
    lower_panels = {
        "Evaluation": eval_metrics[:1],
        "Learning rate": _distinct_learning_rates(run),
    }
    panels = {"Loss": ["train/loss", *eval_losses]}
    for panel_title, metrics in lower_panels.items():
        # One point, as of an evaluation at the end alone, is no curve.
        if any(len(run.series(metric)[0]) > 1 for metric in metrics):
            panels[panel_title] = metrics
    # 2. Draw the losses over the whole width, and the lower panels side by side.
    height_ratios = [1.45]
    if len(panels) > 1:
        height_ratios.append(1)
    rows = len(height_ratios)
    figure = Chart(10.0, 2.0 + 2.2 * rows)
    if title:
        figure.write_title(title)
    columns = max(1, len(panels) - 1)
    grid = figure.add_gridspec(rows, columns, height_ratios=height_ratios)
    for index, (panel_title, metrics) in enumerate(panels.items()):
        # The first panel, of the losses, has the whole upper row.
        cell = grid[0, :] if index == 0 else grid[1, index - 1]
        ax = figure.add_subplot(cell)
        style_axes(ax, title=panel_title, xlabel="optimizer step")
        _draw_panel(ax, run, metrics)
    return figure


def smooth(values: Array, width: float) -> Array:
    """Smooth values by a local straight line over `4 * width` neighbouring points.

    This is a Savitzky-Golay filter of order 1. Unlike a moving average it follows the steep start
    of a loss curve up to its first point. Values that are not finite are interpolated first.

    Args:
        values: Shape (n,).
        width: Width in points; below 0.5 the values are returned unsmoothed.

    Returns:
        Shape (n,); NaN where the value itself is not finite.
    """
    from scipy.signal import savgol_filter

    finite = np.isfinite(values)
    if width < 0.5 or finite.sum() < 3:
        return values
    indices = np.arange(len(values))
    filled = np.interp(indices, indices[finite], values[finite])
    # The filter takes an odd number of points, no more than there are.
    most_points = (len(values) - 1) // 2 * 2 + 1
    points = min(2 * round(2 * width) + 1, most_points)
    return np.where(finite, savgol_filter(filled, points, polyorder=1), np.nan)


def _distinct_learning_rates(run: Run) -> list[str]:
    """List the metrics of learning rates, each different curve once, the highest peak first.

    Names are `train/lr` and those of layers with an lr of their own, such as `lr/head`.
    """
    logged = [
        name for name in ("train/lr", *run.log.names()) if name.startswith(("train/lr", "lr/"))
    ]
    # Values of a curve -> name. From the last to the first, so that of equal curves the first name
    # overwrites the others.
    name_of_values = {}
    for name in reversed(logged):
        values = run.series(name)[1]
        if len(values):
            name_of_values[tuple(values)] = name
    # By falling peak.
    return sorted(name_of_values.values(), key=lambda name: -float(np.nanmax(run.series(name)[1])))


def _draw_panel(ax: Axes, run: Run, names: Sequence[str]) -> None:
    """Draw metrics of a common scale into one panel.

    The axis is logarithmic if the largest value is more than 30 times the median. Each NaN or
    infinite value is a cross on the upper edge. A ring marks the best value of the first evaluation
    metric, unless the untrained model was better. Resumes are dotted lines. Metrics without a value
    are left out; if none has one, the panel says so.
    """
    lines = {}
    for name in names:
        line = run.series(name)
        if len(line[0]):
            lines[name] = line
    if not lines:
        ax.text(
            0.5,
            0.5,
            "nothing logged yet",
            transform=ax.transAxes,
            ha="center",
            color=MUTED,
        )
        return
    steps = np.concatenate([line[0] for line in lines.values()])
    values = np.concatenate([line[1] for line in lines.values()])
    finite = values[np.isfinite(values)]
    positive = finite[finite > 0]
    # On a linear axis one high value would press all others against its bottom.
    log = len(positive) > 2 and bool(finite.max() > 30 * np.median(positive))
    # 1. The lines and the ring.
    _draw_lines(ax, lines, log=log)
    for index, name in enumerate(lines):
        if name.startswith("eval/"):
            _ring_best(ax, run, name, SERIES[index % len(SERIES)])
            break
    # 2. The axes.
    number_axis(ax, list(positive if log else finite), log=log)
    if log:
        # A schedule may end near zero: the axis does not follow it there.
        lowest = float(np.min(positive))
        ax.set_ylim(bottom=max(lowest, float(np.median(positive)) / 1e3))
    count_axis(ax)
    # 3. The marks.
    _mark_steps_not_finite(ax, steps[~np.isfinite(values)])
    _mark_resumes(ax, run)
    if len(lines) <= _LEGEND_LIMIT:
        legend(ax)


def _ring_best(ax: Axes, run: Run, metric: str, colour: str) -> None:
    """Draw a ring around the best value of a metric after step 0.

    No ring if nothing was evaluated after it, or if the value before training was better.
    """
    mode = metric_mode(metric)
    best = run.best(metric, mode)  # step 0 does not count
    if best is None:
        return
    value, step = best
    before = run.before_training(metric)
    if before is None or not is_better(before, value, mode):
        ring(ax, step, value, colour, label=f"best {value:.4g} at step {step:,}")


def _draw_lines(ax: Axes, lines: Mapping[str, tuple[Array, Array]], *, log: bool) -> None:
    """Draw each metric as one line, with a marker at each value if there are few.

    A training loss of many steps is thin, with a thick smoothed line through it.
    """
    for index, (name, (x, y)) in enumerate(lines.items()):
        style: dict[str, Any] = {"linewidth": 1.7, "label": name}
        style["color"] = SERIES[index % len(SERIES)]
        if len(lines) > _LEGEND_LIMIT:  # shades of one colour, from the first to the last
            style |= {"color": SERIES[0], "alpha": 1 - 0.75 * index / len(lines)}
        if log:  # a logarithmic axis has no place for values up to 0
            y = np.where(y > 0, y, np.nan)
        if name == "train/loss" and len(y) >= _SMOOTHED_POINTS:
            ax.plot(
                x,
                y,
                color=style["color"],
                linewidth=0.8,
                alpha=0.3,
            )
            width = max(1.0, len(y) / 60)
            ax.plot(x, smooth(y, width), **style)
            continue
        if len(y) < _MARKED_POINTS:
            style["marker"] = "o"
        ax.plot(x, y, markersize=4.0, **style)


def _mark_steps_not_finite(ax: Axes, steps: Array) -> None:
    """Mark steps of NaN or infinite values with crosses on the upper edge."""
    if len(steps) == 0:
        return
    ax.plot(
        steps,
        np.ones(len(steps)),
        transform=ax.get_xaxis_transform(),
        marker="x",
        linewidth=0,
        markersize=6,
        markeredgewidth=1.6,
        color=ALARM,
        label=f"not finite ({len(steps)})",
        clip_on=False,
    )


def _mark_resumes(ax: Axes, run: Run) -> None:
    """Mark the step of each resume with a dotted line; the first is in the legend."""
    for index, step in enumerate(sorted({*run.values_in_records("resumes", "from_step", int)})):
        ax.axvline(
            step,
            color=MUTED,
            linestyle=":",
            linewidth=1.1,
            label=None if index else "resumed",
        )


def model_name(run: Run) -> str:
    """Name the model of a run: the last part of `model.path`, else the choice `model=`."""
    return _last_part(run.config.get("model.path")) or str(run.config.get("model.name") or "")


def data_name(run: Run) -> str:
    """Name the data of a run for a title: the last part of its path or training file.

    Without these, and for a list of files, it is the choice `data=`.
    """
    path = _last_part(run.config.get("data.path")) or _last_part(run.config.get("data.train"))
    return path or str(run.config.get("data.name") or "")


def _last_part(path: object) -> str:
    """Return the last part of a path; empty for None and for a list of paths as text."""
    text = str(path or "").rstrip("/")
    if text.startswith("["):
        return ""
    return text.rpartition("/")[2]


def run_title(run: Run) -> str:
    """Write model, data, optimizer and progress of a run on one line.

    Parts that are not known are left out; without model, data and optimizer it begins with the
    name of the folder. The status is written unless the run finished.

    Such as `gpt_tiny on stdlib  ·  lamb, lr 2e-3  ·  200 steps  ·  12.3 s`.
    """
    pieces = [" on ".join(name for name in (model_name(run), data_name(run)) if name)]
    if run.optimizer and run.lr is not None:
        pieces.append(f"{run.optimizer}, lr {rate(run.lr)}")
    elif run.optimizer:
        pieces.append(run.optimizer)
    if not any(pieces):
        pieces = [run.path.resolve().name]
    step = run.summary.get("global_step")
    limit = run.summary.get("max_steps")
    status = run.summary.get("status")
    if isinstance(step, int) and isinstance(limit, int) and step != limit:
        pieces.append(f"{step:,} of {limit:,} steps")
    elif isinstance(step, int):
        pieces.append(f"{step:,} steps")
    if run.wall_seconds is not None and math.isfinite(run.wall_seconds):
        pieces.append(duration(run.wall_seconds))
    if status and status != "finished":
        pieces.append(str(status))
    return plain("  ·  ".join(piece for piece in pieces if piece))
