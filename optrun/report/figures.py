"""The pictures of a comparison: differences, curves, and the metric against lr."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from optrun.report import differences
from optrun.report.configurations import Contender
from optrun.report.findings import Findings
from optrun.report.metric_figures import choose_axis, draw_lr_curves, draw_seed_lines, seed_lines
from optrun.report.picture import SHOWN, Picture
from optrun.report.workloads import Comparison


def all_pictures(comparison: Comparison, confirmed: Comparison) -> list[Picture]:
    """List the pictures of a report: first over all workloads if several, then of each.

    Args:
        comparison: The reported runs.
        confirmed: The runs that give the verdict: those on fresh seeds if a confirmation has ended,
            else `comparison`, the same object.
    """
    # 1. Several workloads.
    if comparison.several:
        drawn = verdict_picture(comparison)
        for number, workload in enumerate(comparison.workloads, start=1):
            for picture in pictures(_order_as_ranked(workload, comparison)):
                name = f"workload-{number}-{picture.name}"
                title = f"{workload.name}: {picture.title}"
                drawn.append(replace(picture, name=name, title=title))
        return drawn
    # 2. One workload.
    drawn = pictures(comparison.findings)
    if confirmed is comparison or confirmed.several:
        return drawn
    # 3. Fresh seeds give the verdict, so the differences are theirs; the other pictures are of the
    # runs that chose.
    fresh = _order_as_ranked(confirmed.findings, comparison)
    of_choice = [picture for picture in drawn if picture.name != "differences"]
    return [*verdict_picture(Comparison.of(fresh)), *of_choice]


def _order_as_ranked(findings: Findings, comparison: Comparison) -> Findings:
    """Order the contenders of a workload as another comparison ranks them.

    The order decides the colours: a contender then has the same one in all pictures.
    """
    names = [*comparison.scores]
    if comparison.ttest is not None:
        names = [*dict.fromkeys([*comparison.ttest.ranking, *names])]

    def position(contender: Contender) -> int:
        if contender.name in names:
            return names.index(contender.name)
        return len(names)

    return replace(findings, contenders=sorted(findings.contenders, key=position))


def pictures(findings: Findings) -> list[Picture]:
    """List the pictures of one workload; a picture without data is left out.

    1. The differences to the reference.
    2. The metric during training, of runs with two evaluations.
    3. The final metric against lr, if a contender has two rates.

    The last two show at most `picture.SHOWN` contenders, and their captions say so.
    """
    with_runs = [contender for contender in findings.contenders if contender.configuration.runs]
    # The index in this list decides colour and marker in all pictures.
    contenders = with_runs[:SHOWN]
    note = ""
    if len(contenders) < len(findings.contenders):
        note = f" The best {len(contenders)} of {len(findings.contenders)} are drawn."
    drawn = verdict_picture(Comparison.of(findings))  # that of the differences, or none
    axis = choose_axis(contenders)
    lines = seed_lines(contenders, findings.metric, axis)
    if lines:
        caption = (
            "One line for each seed of each best configuration. Where lines of two contenders mix,"
            " the seed matters more than the choice."
        )
        if axis == "epoch":
            caption += " Batch sizes differ, so the axis is the data seen."
        title = f"{findings.metric} during training"
        draw = partial(draw_seed_lines, lines, findings.metric, findings.mode, axis)
        drawn.append(Picture("metric", title, caption + note, draw))
    if any(len(contender.lr_curve.finished_lrs) > 1 for contender in contenders):
        caption = (
            "The ring is the best mean over seeds; if it is the first or last of its line, try more"
            " rates. A cross is a diverged run, an arrowhead a value outside the picture."
        )
        title = f"Final {findings.metric} against learning rate"
        draw = partial(draw_lr_curves, contenders, findings)
        drawn.append(Picture("lr", title, caption + note, draw))
    return drawn


def verdict_picture(comparison: Comparison) -> list[Picture]:
    """Describe the picture of the differences to the reference, as a list of one picture.

    Empty if fewer than two contenders have a difference.
    """
    ttest = comparison.ttest
    if ttest is None:
        return []
    # Contenders best first; over several workloads the ranking, without those that lack a score.
    order = [*comparison.scores]
    metric = comparison.findings.metric
    mode = comparison.findings.mode
    if comparison.several:
        order = ttest.ranking
        metric = "mean score"
        mode = "max"
    comparisons = {name: ttest.comparisons.get(name) for name in order}
    lines = differences.differences(comparisons, comparison.scores, comparison.diverged_seeds)
    if len(lines) < 2:
        return []
    caption = (
        "A large mark is the mean difference over shared seeds, the bar its interval, a small dot"
        " one seed. Hollow marks are ruled out."
    )
    if math.isfinite(ttest.matters):
        caption += " Differences in the shaded area are too small to matter."
    if len(lines) > 2:
        caption += " An arrowhead gives a value outside the picture."
    if len(order) > differences.LINES:
        caption += f" The best {differences.LINES} of {len(order)} are drawn."
    draw = partial(differences.draw_differences, lines, metric, mode, ttest.matters)
    return [Picture("differences", f"Differences to {ttest.reference}", caption, draw)]
