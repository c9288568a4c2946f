"""Draw the schedule and the peaks of the groups as a PNG."""

from __future__ import annotations

from pathlib import Path

from matplotlib.ticker import MaxNLocator

from optrun.base.errors import StorageError
from optrun.base.formatting import rate
from optrun.explain.facts import Facts, by_layer, groups_of, peaks_by_layer
from optrun.report.theme import LIGHT, Chart, count_axis, legend, number_axis, save_png, style_axes


def draw(facts: Facts, path: Path) -> Path:
    """Draw the lr over the run, one line per layer, and the peak of each layer beside it.

    Args:
        facts: What to show.
        path: Where to write; replaced by one rename.

    Raises:
        StorageError: The picture cannot be written.
    """
    theme = LIGHT
    lines: dict[tuple[str, int], float] = {}
    for group in by_layer(groups_of(facts)):
        key = (group.first.layer, group.first.curve)
        lines[key] = max(lines.get(key, 0.0), group.lr_peaks[1])
    layered = len(set(lines.values())) > 1
    figure = Chart(10.0, 4.2, theme)
    grid = figure.add_gridspec(1, 2 if layered else 1, width_ratios=[1.5, 1] if layered else [1])
    ax = figure.add_subplot(grid[0, 0])
    subtitle = f"{facts.optimizer} on {facts.model}, {facts.param_groups} groups"
    xlabel = "step" if facts.in_steps else "% of the run"
    style_axes(ax, theme, title=f"lr: {facts.scheduler}", subtitle=subtitle, xlabel=xlabel)
    highest = max(lines.values(), default=1.0)
    for (layer, index), peak in lines.items():
        curve = facts.curves[index]
        top = curve.peak or 1.0
        steps = (
            curve.steps if facts.in_steps else [100 * step / facts.steps for step in curve.steps]
        )
        main = peak == highest
        ax.plot(
            steps,
            [peak * value / top for value in curve.multipliers],
            color=theme.series[0],
            alpha=1.0 if main else 0.35,
            linewidth=1.8 if main else 0.9,
            label=layer if main and layered else None,
        )
    count_axis(ax)
    number_axis(ax, [0.0, highest])
    ax.set_ylim(bottom=0)
    legend(ax, theme)
    if layered:
        peaks = peaks_by_layer(facts)
        beside = figure.add_subplot(grid[0, 1])
        style_axes(beside, theme, title="peak by layer")
        names = list(peaks)
        beside.barh(
            range(len(names)), [peaks[name] for name in names], color=theme.series[0], height=0.7
        )
        beside.set_yticks(range(len(names)), names if len(names) <= 30 else ["" for _ in names])
        beside.xaxis.set_major_locator(MaxNLocator(nbins=4))
        beside.xaxis.set_major_formatter(lambda value, _: rate(value))
        beside.grid(False, axis="y")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return save_png(figure, path)
    except OSError as error:
        raise StorageError(f"{path}: the picture cannot be written: {error.strerror}.") from error
