"""Answer in one line: which optimizer, at which lr, and how sure.

The sentences stand in `templates/line.txt`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from optrun.artifacts.generalisation import NOTHING_LEARNT, Generalisation, generalisation_of
from optrun.artifacts.objective import loss_beside
from optrun.base.formatting import rate
from optrun.report.configurations import Contender
from optrun.report.findings import Findings
from optrun.report.runs import Run
from optrun.report.statistics import UNSET, TtestResult, Verdict
from optrun.report.table import format_metric
from optrun.report.tables import format_mean
from optrun.report.templating import fill_text
from optrun.report.workloads import Comparison

_EDGES = 3
"""Contenders at the edge of their grid that the line names."""


@dataclass(frozen=True)
class SweepVerdict:
    """The verdict of a report, as values and as its first line."""

    kind: str
    """- `none`: nothing is ranked.
    - `single`: there is one contender.
    - `pilot`: a contender shares fewer than 3 seeds with every other.
    - `selected`: judged by the seeds that chose the configurations.
    - `compared`: no configuration was chosen by these seeds.
    - `confirmed`: fresh seeds, configurations fixed before.
    - `undecided`: the same, and no test decides.
    - `exploratory`: by another metric than the sweep's own.
    """
    metric: str
    possible: tuple[str, ...]
    """Contenders that could be the best, best mean first; with a baseline, those that are not worse
    than it."""
    ruled_out: tuple[str, ...]
    """Contenders that could not; with a baseline, those that are worse."""
    chosen: Mapping[str, str]
    """Contender -> its chosen configuration, as `lamb at lr 2e-3`; over several workloads that of
    each."""
    text: str
    """The line."""
    next: str = ""
    """The command that would tell more; empty: none."""
    cost: str = ""
    """How many runs this command starts, and how long they train."""

    def __str__(self) -> str:
        return self.text


def _name_kind(comparison: Comparison, *, is_confirmed: bool) -> str:
    """Name the kind of a verdict, see `SweepVerdict.kind`; the first case that applies.

    1. Nothing is ranked: `none`.
    2. The runs are those of an ended confirmation (`is_confirmed`): `confirmed` if a test has
       decided or there is one contender, else `undecided`.
    3. There is one contender: `single`.
    4. A workload was compared by another metric than its own: `exploratory`.
    5. Nothing was tested, or one of the contenders was not: `pilot`.
    6. A chosen configuration won against another one by these seeds: `selected`.
    7. Else `compared`.
    """
    # Case 1.
    ttest = comparison.ttest
    ranked = comparison.ranked
    if ttest is None or not ranked:
        return "none"
    # Cases 2 to 4.
    is_single = len(ttest.ranking) < 2
    if is_confirmed:
        is_decided = any(result.verdict in DECIDED for result in ttest.comparisons.values())
        return "confirmed" if is_single or is_decided else "undecided"
    if is_single:
        return "single"
    if any(workload.metric != workload.own_metric for workload in comparison.workloads):
        return "exploratory"
    # Case 5. A contender that shares too few seeds is not tested; with a baseline that is no matter
    # to the others.
    if not ttest.is_tested or (
        not ttest.has_baseline and Verdict.too_few in map(ttest.verdict_text, ttest.ranking)
    ):
        return "pilot"
    # Cases 6 and 7.
    return "selected" if any(map(is_selected_by_metric, ranked)) else "compared"


def is_selected_by_metric(contender: Contender) -> bool:
    """Tell whether the chosen configuration of a contender won against another one by the metric.

    Then its score on these seeds is better than it would be on fresh ones. Another configuration
    with fewer seeds, none of them a seed of the chosen one, does not count: it lost by its number
    of seeds.
    """
    chosen = contender.configuration
    # The chosen one wins by its number of seeds first, then by the metric, see `build_contenders`.
    for configuration in contender.configurations:
        if configuration is chosen or not configuration.scores:
            continue
        shares_seed = not chosen.scores.keys().isdisjoint(configuration.scores)
        if shares_seed or len(configuration.scores) >= len(chosen.scores):
            return True
    return False


def write_verdict(
    comparison: Comparison,
    *,
    confirmed: str = "",
    looks: int = 1,
    note: str = "",
    waits: int = 0,
) -> SweepVerdict:
    """Write the verdict: the first line of a report.

    The kind is one of `none`, `single`, `pilot`, `selected`, `compared`, `confirmed`, `undecided`
    and `exploratory`, see `SweepVerdict.kind`; `_name_kind` chooses it. If runs are left (`waits`),
    it is `none`. The template `line.txt` renders the sentences.

    Args:
        comparison: Comparison of the runs.
        confirmed: Seeds of a confirmation, such as `5-9`; its configurations were fixed before any
            of these runs.
        looks: How often these contenders were judged while seeds were added, this time included.
        note: A note on unfinished or unplanned confirmations.
        waits: How many runs are left of an unfinished sweep or confirmation; nothing is decided.
    """
    # 1. The kind, and what the template takes in any case.
    ttest = comparison.ttest
    kind = "none" if waits else _name_kind(comparison, is_confirmed=bool(confirmed))
    content: dict[str, object] = {
        "comparison": comparison,
        "ttest": ttest,
        "kind": kind,
        "confirmed": confirmed,
        "looks": looks,
        "note": note,
        "waits": waits,
    }
    # 2. If contenders are ranked, it also takes the contenders with the best mean and those that
    # could be the best, the others by verdict, the differences, and the advice on what to do next.
    possible: list[str] = []
    ruled_out: list[str] = []
    if ttest is not None and kind != "none":
        possible = ttest.possible
        ruled_out = [name for name in ttest.ranking if name not in possible]
        content |= _content_of_line(comparison, ttest)
        # Whether the line says that any contender will do: no test decided on fresh seeds, and all
        # differences are too small to matter.
        differences_are_small = ttest.has_intervals and not could_more_seeds_decide(ttest)
        content["any_will_do"] = kind == "undecided" and differences_are_small
    # 3. The template renders these values.
    return SweepVerdict(
        kind=kind,
        metric=comparison.findings.metric,
        possible=tuple(possible),
        ruled_out=tuple(ruled_out),
        chosen=_write_choices(comparison),
        text=fill_text("line.txt", **content),
    )


def _write_choices(comparison: Comparison) -> dict[str, str]:
    """Map each ranked contender to its chosen configuration, see `SweepVerdict.chosen`."""
    texts: dict[str, list[str]] = defaultdict(list)
    for workload in comparison.workloads:
        for contender in workload.ranked:
            text = write_contender(contender, workload)
            if workload.name:
                text += f" on {workload.name}"
            texts[contender.name].append(text)
    return {name: "; ".join(choices) for name, choices in texts.items()}


DECIDED = (
    Verdict.ruled_out,
    Verdict.either_will_do,
    Verdict.better,
    Verdict.worse,
    Verdict.differs_little,
)
"""Verdicts that say more than that nothing is known."""


_OPEN = (Verdict.could_be_best, Verdict.no_difference, Verdict.too_few)


def could_more_seeds_decide(ttest: TtestResult) -> bool:
    """Tell whether more seeds could decide on a contender.

    They could if no test decided on the contender yet, and the interval of its difference is not
    within +-`matters`, so that the difference may matter.
    """
    for name, result in ttest.comparisons.items():
        # False without an interval, whose ends are NaN.
        is_small = max(abs(result.low), abs(result.high)) <= ttest.matters
        if name != ttest.reference and result.verdict in _OPEN and not is_small:
            return True
    return False


def find_contenders_at_edge(findings: Findings) -> list[tuple[Contender, float]]:
    """List the contenders whose best lr is at an edge of its grid, each with the lr to try next.

    Contenders that could be the best come first. If nothing was tested, only those with the best
    mean are listed. A contender whose best lr is chance is left out, see `is_best_lr_chance`.
    """
    ttest = findings.ttest
    contenders = findings.ranked
    if ttest is not None and ttest.is_tested:
        possible = ttest.possible
        contenders = sorted(contenders, key=lambda contender: contender.name not in possible)
    else:
        contenders = [
            contender
            for contender in contenders
            if contender.configuration.mean == findings.best_mean
        ]
    edges = []
    for contender in contenders:
        lr = next_lr(contender, findings)
        if lr is not None and not is_best_lr_chance(contender, findings):
            edges.append((contender, lr))
    return edges


def is_best_lr_chance(contender: Contender, findings: Findings) -> bool:
    """Tell whether a contender's best lr is only the best by chance, so that its edge says nothing.

    That takes a contender whose chosen configuration learnt nothing. A wider grid may help it
    nonetheless if it could be the best and no other contender learnt anything either: then False.
    """
    if not _learnt_nothing(contender):
        return False
    ttest = findings.ttest
    if ttest is not None and contender.name not in ttest.possible:
        return True
    return not all(map(_learnt_nothing, findings.ranked))


def _content_of_line(comparison: Comparison, ttest: TtestResult) -> dict[str, object]:
    """Collect the numbers and names for the template of the first line.

    These are the values of step 3, those of `_content_of_differences`, and the advice of
    `_content_of_advice`, which is empty for several workloads. The line calls each contender by a
    title, such as "lamb at lr 2e-3 (1 of 5 seeds diverged)".
    """
    possible = ttest.possible
    # 1. The title of each contender, and those with the best mean.
    titles = {}
    means = {}
    for name in ttest.ranking:
        titles[name] = _write_with_diverged(name, comparison)
        means[name] = fmean(comparison.scores[name].values())
    best_mean = means[ttest.ranking[0]]
    best = [name for name in titles if means[name] == best_mean]
    # 2. The titles by verdict, such as {"ruled out": ["lion at lr 1e-4"]}; that of the baseline
    # itself apart.
    titles_by_verdict: dict[str, list[str]] = defaultdict(list)
    for name, title in titles.items():
        titles_by_verdict[ttest.verdict_text(name)].append(title)
    titles_by_verdict.pop(Verdict.baseline, None)
    baseline = ""
    if ttest.has_baseline:
        baseline = _write_with_diverged(ttest.reference, comparison)
    # 3. The values of the template: `first`, the titles of the best mean; `groups`, verdict ->
    # titles; `either`, those ruled out by so little that either will do.
    seeds = len(comparison.scores[best[0]])
    content: dict[str, object] = {
        "first": [titles[name] for name in best],
        "mean": "",
        "seeds": seeds,
        "baseline": baseline,
        "groups": titles_by_verdict,
        "either": titles_by_verdict.get(Verdict.either_will_do.replace(UNSET, ttest.limit), []),
        "possible": [titles[name] for name in possible],
    }
    content |= _content_of_differences(ttest, seeds)
    # With several workloads the line names no rates and no edges, since each has its own.
    if comparison.several:
        return content | {"edges": [], "more_edges": 0, "longer": "", "learnt": ""}
    ranked = comparison.findings.ranked
    if ranked:
        content["mean"] = format_mean(ranked[0].configuration)
    # Without a test all contenders are possible, and the line names only the best.
    named = possible if ttest.is_tested else best
    return content | _content_of_advice(comparison.findings, named)


def _content_of_differences(ttest: TtestResult, seeds: int) -> dict[str, object]:
    """Collect the differences to the reference, for the template of the first line.

    Contenders that share no seed with the reference are left out.

    Args:
        ttest: The test.
        seeds: The number of seeds to name if no contender is left.

    Returns:
        `judged_by`, the fewest seeds that a contender shares with the reference: any contender if
        one is the best, else one that could be the best. `ahead`, the smallest difference of any
        contender. Of those that could be the best: `apart`, the largest difference, empty if all
        are equal; `shared`, whether there are any; and `seen`, the largest of the differences that
        their tests find in 4 of 5 cases, 0 without a test.
    """
    comparisons = {
        name: result
        for name, result in ttest.comparisons.items()
        if name != ttest.reference and result.seeds
    }
    # 1. `undecided` could be the best, `decisive` are behind the verdict: if only one could be the
    # best, and so is the reference, they are all others.
    undecided = [comparisons[name] for name in ttest.possible if name in comparisons]
    decisive = undecided
    if len(ttest.possible) == 1:
        decisive = list(comparisons.values())
    # 2. The differences.
    leads = [abs(result.difference) for result in comparisons.values()]  # of the reference
    gaps = [abs(result.difference) for result in undecided]
    widest_gap = max(gaps, default=0.0)
    largest_gap = ""
    if widest_gap >= 1e-12:  # less is rounding in the means
        largest_gap = format_metric(widest_gap)
    detectable = [result.seen for result in undecided if not math.isnan(result.seen)]
    return {
        "judged_by": min((result.seeds for result in decisive), default=seeds),
        "ahead": format_metric(min(leads, default=0.0)),
        "apart": largest_gap,
        "shared": bool(undecided),
        "seen": max(detectable, default=0.0),
    }


def _content_of_advice(findings: Findings, named: Sequence[str]) -> dict[str, object]:
    """Collect the advice of the first line, for its template.

    Values: `edges`, contenders whose best lr is at the edge of its grid, with the lr to try;
    `more_edges`, how many are not listed; `longer`, the override for longer training, if that is
    the better next step; `learnt`, which of the named contenders learnt nothing.

    Args:
        findings: Findings of the only workload.
        named: Contenders that the line names.
    """
    possible = [] if findings.ttest is None else findings.ttest.possible
    edges = find_contenders_at_edge(findings)
    longer = ""
    if needs_longer_training(findings):
        longer = fill_text("longer.txt", run=findings.ranked[0].configuration.runs[0])
    # `is_out`: it is ruled out, which the line adds to its name.
    shown_edges = [
        {"name": contender.name, "lr": rate(lr), "is_out": contender.name not in possible}
        for contender, lr in edges[:_EDGES]
    ]
    learnt_nothing = [
        contender
        for contender in findings.ranked
        if contender.name in named and _learnt_nothing(contender)
    ]
    return {
        "edges": shown_edges,
        "more_edges": len(edges[_EDGES:]),
        "longer": longer,
        "learnt": fill_text(
            "nothing.txt", contenders=learnt_nothing, results_of=_results_without_learning
        ),
    }


def _write_with_diverged(name: str, comparison: Comparison) -> str:
    """Write a contender with its lr, and how many of its seeds diverged, if any.

    Such as `lamb at lr 2e-3 (1 of 5 seeds diverged)`. With several workloads the lr is left out,
    and the seeds of all workloads are counted.
    """
    text = name
    diverged = 0
    seeds = 0
    for workload in comparison.workloads:
        for contender in workload.contenders:
            if contender.name == name:
                diverged += len(contender.configuration.diverged_seeds)
                seeds += len(contender.configuration.scores)
                if not comparison.several:
                    text = write_contender(contender, workload)
    if diverged:
        return f"{text} ({diverged} of {seeds} seeds diverged)"
    return text


def write_contender(contender: Contender, findings: Findings) -> str:
    """Write a contender with its chosen lr, unless lr separates the contenders."""
    lr = contender.configuration.lr
    if lr is None or "lr" in findings.compared_keys:
        return contender.name
    return f"{contender.name} at lr {rate(lr)}"


def next_lr(contender: Contender, findings: Findings) -> float | None:
    """Double the best lr if it is the highest tried, halve it if it is the lowest; else None.

    With rates 1e-3, 2e-3 and 4e-3, of which 4e-3 is the best, it is 8e-3. Also None if lr was not
    tuned, if fewer than two rates were tried, if a metric to maximise reached 1, or if the
    neighbour is as good: then nothing suggests to go further.
    """
    curve = contender.lr_curve
    if "lr" not in findings.tuned_keys or curve.best is None or len(curve.tried_lrs) < 2:
        return None
    below, above = curve.neighbours_of_best()
    if below and above:
        return None
    if findings.mode == "max" and curve.best.mean == 1:
        return None
    # At an edge one of the two is None, and the other is the neighbour, since two rates were tried.
    # The neighbour has no point if no run at it finished.
    neighbour = curve.points.get(below or above or 0.0)
    if neighbour is not None and neighbour.mean == curve.best.mean:
        return None
    best = curve.best.lr or 0.0  # it has an lr; 0.0 is for the type checker
    return best * 2 if above is None else best / 2


def needs_longer_training(findings: Findings) -> bool:
    """Tell whether longer training is a better next step than other rates or more seeds.

    - No best lr lies at the edge of its grid: if nothing was learnt, see `learns_nothing`.
    - One does: if all contenders were trained too briefly to choose an lr, see `_is_too_short`.
    """
    if not find_contenders_at_edge(findings):
        return learns_nothing(findings)
    # A wider grid would not help runs that were too short to tell one lr from another.
    loss = loss_beside(findings.metric)
    return all(_is_too_short(contender, loss) for contender in findings.ranked)


def _is_too_short(contender: Contender, loss: str) -> bool:
    """Tell whether a contender was trained too briefly to choose its lr.

    It was if most of its runs learnt nothing in a task with classes, or if in each run at least
    half of the fall of the evaluation loss came in the second half of training.

    Args:
        contender: The contender.
        loss: Name of the evaluation loss, such as `eval/loss`.
    """
    # 1. Nothing learnt in a task with classes: only such a task has a share of the majority class.
    if _learnt_nothing(contender):
        result = _results_without_learning(contender)[0]
        if result.majority is not None:
            return True
    # 2. The loss still falls.
    return all(_falls_late(run, loss) for run in contender.configuration.runs)


def _falls_late(run: Run, loss: str) -> bool:
    """Tell whether half of the fall of a loss, or more, came in the second half of a run.

    Of a loss of 4.0, 3.5 and 2.0 at steps 0, 50 and 100, 0.5 of the fall came first and 1.5 later:
    True. False with fewer than three evaluations, and if the loss did not fall.
    """
    steps, values = run.finite_values(loss, "step")
    if len(steps) < 3 or values[-1] >= values[0]:
        return False
    middle = np.interp(steps[-1] / 2, steps, values)
    return bool(middle - values[-1] >= values[0] - middle)


def learns_nothing(findings: Findings) -> bool:
    """Tell whether every contender that could be the best learnt nothing, see `_learnt_nothing`.

    False if nothing is ranked, and if no contender could be the best.
    """
    ttest = findings.ttest
    if ttest is None:
        return False
    possible = [contender for contender in findings.ranked if contender.name in ttest.possible]
    return bool(possible) and all(map(_learnt_nothing, possible))


def _learnt_nothing(contender: Contender) -> bool:
    """Tell whether more than half of a contender's finished runs learnt nothing.

    A run learnt nothing if it memorised the training data, is no better on evaluation than before
    training or than the majority class, or was evaluated on its training data. A run whose
    summary has no such verdict counts as one that learnt.
    """
    # The results are those of the finished runs that learnt nothing, one for each of them.
    finished = [run for run in contender.configuration.runs if run.finished]
    return 2 * len(_results_without_learning(contender)) > len(finished)


def _results_without_learning(contender: Contender) -> list[Generalisation]:
    """List the verdicts on a contender's finished runs without learning."""
    results = [
        generalisation_of(run.summary) for run in contender.configuration.runs if run.finished
    ]
    return [result for result in results if result and result.verdict in NOTHING_LEARNT]
