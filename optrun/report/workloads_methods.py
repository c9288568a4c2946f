"""Write what was done over several workloads as a paper says it: a paragraph to paste, and the commands."""

from __future__ import annotations

from collections.abc import Sequence

from optrun.formatting import plain, span
from optrun.report.collect import NOT_STARTED
from optrun.report.findings import Findings
from optrun.report.methods import (
    Methods,
    alike,
    lost_sentence,
    runs_sentence,
    section,
    some,
    spent_sentence,
    versions_sentence,
)
from optrun.report.moderated import FEWEST
from optrun.report.reproduce import sweep_lines
from optrun.report.selection import find_selection
from optrun.report.statistics import ALPHA, CONFIDENCE
from optrun.report.verdict import listed
from optrun.report.workloads import Overview, Workload
from optrun.report.workloads_statistics import FEWEST_WORKLOADS


def methods(overview: Overview, findings: Findings, command: str) -> Methods:
    """Describe a comparison over several workloads by what was really done.

    Args:
        overview: What was found.
        findings: Of all runs together.
        command: What makes the report.
    """
    within = [each.findings for each in overview.workloads]
    names = list(dict.fromkeys([one.name for one in overview.standings] + [row.name for f in within for row in f.rows]))
    begun = [run for run in findings.runs if run.status != NOT_STARTED]
    sentences = [
        f"We compared {len(names)} contenders ({some(names)}) on {len(within)} workloads, in {runs_sentence(begun)}: "
        f"{'; '.join(map(_described, overview.workloads))}.",
        *_tuned(overview.workloads),
        *_scored(overview),
        lost_sentence(begun),
        _tested(overview),
        spent_sentence(within),
        versions_sentence(begun),
    ]
    # One product over all workloads is a line that makes all; else each workload may be one.
    lines = sweep_lines(findings) or [line for one in within for line in sweep_lines(one)]
    return Methods(
        plain(" ".join(sentence for sentence in sentences if sentence)), [plain(line) for line in [*lines, command]]
    )


def _described(workload: Workload) -> str:
    """Say what a workload is, and by what its runs are judged."""
    findings = workload.findings
    runs = [run for run in findings.runs if run.status != NOT_STARTED]
    facts = [f"model {model}"] if (model := alike(run.config.get("model.name") for run in runs)) else []
    examples = alike(section(run, "data").get("eval_examples") for run in runs)
    on = f" on {examples:,} evaluation examples" if isinstance(examples, int) else ""
    better = "lower" if findings.mode == "min" else "higher"
    facts.append(f"judged by the last {findings.metric}{on}, {better} is better")
    seeds = sorted({seed for row in findings.rows if row.rank for seed in row.arm.scores})
    facts += [f"seeds {', '.join(map(str, seeds))}"] if seeds else []
    return f"{workload.name} ({', '.join(facts)})"


def _tuned(workloads: Sequence[Workload]) -> list[str]:
    """Say how configurations were chosen; what holds for several workloads once."""
    said: dict[str, list[str]] = {}
    for each in workloads:
        said.setdefault(_choice(each.findings), []).append(each.name)
    found = []
    for choice, names in said.items():
        where = "Within each workload" if len(said) == 1 else f"On {listed(names)}"
        found.append(f"{where} {choice}.")
    return found


def _choice(findings: Findings) -> str:
    ranked = [row for row in findings.rows if row.rank]
    if not ranked:
        return "no run has a result yet"
    made = find_selection(findings)
    if not findings.tuned_keys or made.most < 2:
        return "each contender had one configuration, fixed beforehand or elsewhere"
    tried = sorted(made.tried.values())
    each = f"{tried[0]}" if made.equal else f"{tried[0]} to {tried[-1]}"
    lrs = [lr for row in ranked for lr in row.basin.tried]
    over = f" (learning rates from {span(min(lrs), max(lrs)).replace('…', ' to ')})" if len(set(lrs)) > 1 else ""
    return (
        f"{each} configurations of {', '.join(findings.tuned_keys)}{over} were tried for each contender, and the one "
        "with the best mean was chosen, on the evaluation data that is reported"
    )


def _scored(overview: Overview) -> list[str]:
    if not overview.usable:
        return []
    found = [
        "Scores were put on a scale on which 0 is the metric before learning and 1 the mean of the best contender of "
        "the workload, and averaged over seeds and workloads, each workload with the same weight (Agarwal et al. "
        f"2021); their {100 * CONFIDENCE:.0f} % intervals are stratified bootstrap intervals over seeds."
    ]
    if overview.left_out:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in overview.left_out.items())
        found.append(f"Not in these scores: {reasons}.")
    if missing := [each.name for each in overview.standings if each.missing]:
        found.append(f"Without a result on every workload, {listed(missing)} could not be judged over all.")
    return found


def _tested(overview: Overview) -> str:
    tested = [each for each in overview.standings if each.test is not None and each.p == each.p]
    if not tested:
        return "No test was made over all workloads." if len(overview.standings) > 1 else ""
    judged = [each for each in overview.standings if not each.missing]
    moderated = ", with moderated variances (Smyth 2004)" if len(judged) >= FEWEST else ""
    scope = (
        f"the comparisons with {overview.reference}, which was named as the baseline"
        if overview.chosen_baseline
        else f"all pairs of contenders, shown against the best, {overview.reference}"
    )
    chosen = any(find_selection(each.findings).judged_by_choice for each in overview.workloads)
    caution = "; as these seeds chose the configurations, too, the chance of a false claim is higher" if chosen else ""
    elsewhere = (
        "A sign test over workloads, uncorrected, says how far this holds for others like these."
        if len(overview.usable) >= FEWEST_WORKLOADS
        else f"Of other workloads nothing is claimed, which takes at least {FEWEST_WORKLOADS}."
    )
    return (
        "Differences of the mean score were tested with two-sided t tests, seeds paired within each workload"
        f"{moderated}, degrees of freedom by Satterthwaite, p values doubled, with Holm's correction over {scope}, at "
        f"{100 * ALPHA:.0f} %{caution}. {elsewhere}"
    )
