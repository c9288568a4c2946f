"""Print and write the learning rate for another size: a page and a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes
from rich.console import Console
from rich.text import Text

from optrun.artifacts.atomic import replace_text
from optrun.base.errors import ConfigError, StorageError
from optrun.base.formatting import rate
from optrun.report.lr_scaling.predict import Answer, Transfer, predict, write_interval
from optrun.report.lr_scaling.sizes import Size, Sweep, write_size
from optrun.report.picture import set_limits, short_name, style_of
from optrun.report.sweep_folder import dated_folder
from optrun.report.table import Table, format_metric, to_rich
from optrun.report.templating import fill_markdown
from optrun.report.theme import LIGHT, Chart, legend, log_axis, save_png, style_axes

_SHOWN = 6
"""Contenders in the picture at most; the tables have all."""


def transfer(
    dirs: Sequence[Path],
    target: Mapping[str, object],
    *,
    out: Path | None = None,
    metric: str | None = None,
    console: Console | None = None,
) -> Transfer:
    """Predict the learning rate for another size from sweeps over lr at two sizes or more.

    Args:
        dirs: The sweeps, or folders of them.
        target: Keys of the configuration that varied between sizes, and their values at the size
            that is asked for.
        out: Where to write; default: a new folder, `outputs/transfer/` and date and time.
        metric: What to judge by; default: the main metric of the runs.
        console: Where the answer is printed; None prints nothing.

    Raises:
        ConfigError: The sweeps do not tell, and the message says which runs are missing; `out` has
            such files already.
        StorageError: A file cannot be written.
    """
    prediction = predict(dirs, target, metric)
    files = _write(out or dated_folder(Path("outputs", "transfer")), prediction)
    if console is not None:
        _print(prediction, files, console)
    return replace(prediction, files=files)


def _print(prediction: Transfer, files: Sequence[Path], console: Console) -> None:
    for answer in prediction.answers:
        line = f"\n{_sentence(answer, prediction.target)}"
        console.print(Text(line, style="bold"), soft_wrap=True)
        for table in _tables(answer, prediction.metric):
            console.print(to_rich(table, width=console.width))
        for note in answer.notes:
            console.print(f"{note}.", markup=False, highlight=False)
        console.print("The two runs that would test it:", highlight=False)
        for command in answer.tests:
            console.print(f"  {command}", markup=False, highlight=False, soft_wrap=True)
    for contender, reason in prediction.refused.items():
        console.print(f"\n{contender}: no answer. {reason}.", markup=False, highlight=False)
    for path in files:
        console.print(Text.assemble(("wrote ", "dim"), str(path)), soft_wrap=True)


def _sentence(answer: Answer, target: Mapping[str, float]) -> str:
    """Write the answer as one line."""
    return (
        f"{answer.contender}: lr {rate(answer.lr.value)} (90 % interval"
        f" {write_interval(answer.lr)}) for {write_size(target)}"
    )


def _tables(answer: Answer, metric: str) -> list[Table]:
    """Tabulate the exponents, and the optimum of each size."""
    exponents = []
    for key, exponent in answer.exponents.items():
        ends = f"{exponent.low:+.3f} to {exponent.high:+.3f}" if exponent.is_bounded else "none"
        exponents.append([key, f"{exponent.value:+.3f}", ends])
    sizes = []
    for optimum in answer.optima:
        name = write_size(optimum.size)
        lr = [rate(optimum.lr.value), write_interval(optimum.lr)]
        sizes.append([name, *lr, format_metric(optimum.cost), str(optimum.seeds)])
    heads = ["lr* ~ key^exponent", "exponent", "90 % interval"]
    columns = ["size", "best lr", "90 % interval", metric, "seeds"]
    return [
        Table(heads, [False, True, True], exponents, [""] * len(exponents)),
        Table(columns, [False, True, True, True, True], sizes, [""] * len(sizes)),
    ]


def _write(folder: Path, prediction: Transfer) -> list[Path]:
    """Write page and picture, over no existing file."""
    page = folder / "transfer.md"
    picture = folder / "transfer.png"
    answers = [
        {
            "line": _sentence(answer, prediction.target),
            "tables": _tables(answer, prediction.metric),
            "notes": answer.notes,
            "tests": "\n".join(answer.tests),
        }
        for answer in prediction.answers
    ]
    size = write_size(prediction.target)
    refused = prediction.refused
    text = fill_markdown("transfer.md", target=size, answers=answers, refused=refused)
    for path in (page, picture):
        if path.exists():
            raise ConfigError(f"{path} exists and is not written over: choose another out=DIR.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(page, text)
        save_png(draw_lr_curves(prediction), picture)
    except OSError as error:
        raise StorageError(
            f"transfer: cannot write to {folder} ({error.strerror}); choose another out=DIR."
        ) from error
    return [page, picture]


def draw_lr_curves(prediction: Transfer) -> Chart:
    """Draw the metric over lr for each size, the optima, and the predicted interval as a band."""
    drawn = list(zip(prediction.answers, prediction.sweeps, strict=True))[:_SHOWN]
    columns = min(2, len(drawn))
    rows = math.ceil(len(drawn) / columns)
    figure = Chart(5.2 * columns, 3.9 * rows, LIGHT)
    for at, (answer, sweep) in enumerate(drawn, 1):
        ax = figure.add_subplot(rows, columns, at)
        style_axes(
            ax,
            LIGHT,
            title=short_name(answer.contender),
            subtitle=f"lr for {short_name(write_size(prediction.target))}",
            xlabel="peak learning rate",
            ylabel=f"final {prediction.metric}",
        )
        _draw_sizes(ax, answer, sweep, prediction.mode)
        legend(ax, LIGHT)
    return figure


def _draw_sizes(ax: Axes, answer: Answer, sweep: Sweep, mode: str) -> None:
    """Draw a line for each size with its parabola; diverged learning rates are crosses."""
    sign = 1.0 if mode == "min" else -1.0
    means = [_means(size) for size in sweep.sizes]
    lrs = [lr for size in sweep.sizes for lr in (*size.scores, *size.diverged)]
    log_axis(ax, "x", [*lrs, answer.lr.value])
    set_limits(ax, [mean for curve in means for mean in curve], mode)
    if answer.lr.is_bounded:
        ax.axvspan(answer.lr.low, answer.lr.high, color=LIGHT.muted, alpha=0.15)
    predicted = f"predicted {rate(answer.lr.value)}"
    ax.axvline(answer.lr.value, color=LIGHT.ink, linestyle="--", linewidth=1.1, label=predicted)
    for series, size in enumerate(sweep.sizes):
        style = style_of(LIGHT, series)
        curve = size.curve
        label = write_size(size.values)
        ax.plot([*size.scores], means[series], label=label, linewidth=1.2, **style)
        x = np.linspace(*curve.window, 60)
        fitted = sign * (curve.level + curve.curvature * (x - curve.best) ** 2)
        ax.plot(np.exp(x), fitted, color=style["color"], linewidth=4, alpha=0.25)
        star = style | {"marker": "*", "markersize": 12, "linewidth": 0}
        ax.plot(math.exp(curve.best), sign * curve.level, **star)
        cross = style | {"marker": "x", "linewidth": 0}
        edge = [0.97 if mode == "min" else 0.03] * len(size.diverged)
        ax.plot(size.diverged, edge, transform=ax.get_xaxis_transform(), **cross)


def _means(size: Size) -> list[float]:
    """List the mean over seeds at each learning rate."""
    return [fmean(scores.values()) for scores in size.scores.values()]
