"""Write what was done as a paper says it: a paragraph to paste, and the commands that do it again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optrun.formatting import count, duration, plain, span
from optrun.report.collect import NOT_STARTED, Run
from optrun.report.confirmation import label
from optrun.report.confirmed import Confirmed
from optrun.report.cost import cost
from optrun.report.findings import Findings, Row
from optrun.report.moderated import FEWEST
from optrun.report.reproduce import confirm_line, sweep_lines
from optrun.report.selection import find_selection
from optrun.report.statistics import ALPHA, CONFIDENCE, MIN_SEEDS


@dataclass(frozen=True)
class Methods:
    """What a paper says of a comparison."""

    text: str
    commands: list[str]
    """For a shell: the runs, the confirmation, the report; as far as they are known."""


def methods(findings: Findings, confirmed: Sequence[Confirmed], command: str) -> Methods:
    """Describe a comparison by what was really done.

    Args:
        findings: What was found.
        confirmed: Confirmations of it, or of which it is the result.
        command: What makes the report.
    """
    ranked = [row for row in findings.rows if row.rank]
    sentences = [_compared(findings), _tuned(findings, ranked), _scored(findings, ranked), _tested(findings, ranked)]
    sentences += [_confirmed(one, of_itself=one.findings is findings) for one in confirmed]
    beside = [one.findings for one in confirmed if one.findings is not findings]
    sentences += [spent_sentence([findings, *beside]), versions_sentence(findings.runs)]
    lines = [line for one in confirmed if (line := confirm_line(one, findings))]
    if len(beside) == len(confirmed) or not lines:
        lines = [*sweep_lines(findings), *lines]
    return Methods(
        plain(" ".join(sentence for sentence in sentences if sentence)), [plain(line) for line in [*lines, command]]
    )


def _compared(findings: Findings) -> str:
    names = [row.name for row in findings.rows]
    runs = [run for run in findings.runs if run.status != NOT_STARTED]
    on = [alike(run.config.get(key) for run in runs) for key in ("task.name", "model.name", "data.name")]
    task, model, data = on
    where = f" for {str(task).replace('_', ' ')}" if task else ""
    where += f" with the model {model}" if model else ""
    where += f" on the data {data}" if data else ""
    return f"We compared {len(names)} contenders ({some(names)}){where}, in {runs_sentence(runs)}."


def some(names: Sequence[str]) -> str:
    """List names, the first dozen of many."""
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def runs_sentence(runs: Sequence[Run]) -> str:
    """Say how many runs of which length there are."""
    steps = sorted({run.max_steps for run in runs if run.max_steps})
    length = f" of {steps[0]:,} optimizer steps each" if len(steps) == 1 else ""
    if len(steps) > 1:
        length = f" of {steps[0]:,} to {steps[-1]:,} optimizer steps"
    return f"{len(runs):,} training runs{length}"


def _tuned(findings: Findings, ranked: Sequence[Row]) -> str:
    """Say how the configurations were chosen."""
    made = find_selection(findings)
    if not ranked:
        return ""
    if not findings.tuned_keys or made.most < 2:
        return "Each contender had one configuration, fixed beforehand or elsewhere; nothing was tuned on these runs."
    tried = sorted(made.tried.values())
    each = f"{tried[0]}" if made.equal else f"{tried[0]} to {tried[-1]}"
    unequal = "" if made.equal else " (" + ", ".join(f"{name} {n}" for name, n in made.tried.items()) + ")"
    lrs = [lr for row in ranked for lr in row.basin.tried]
    over = f", learning rates from {span(min(lrs), max(lrs)).replace('…', ' to ')}" if len(set(lrs)) > 1 else ""
    goal = "lowest" if findings.mode == "min" else "highest"
    return (
        f"For each contender {each} configurations{unequal} of {', '.join(findings.tuned_keys)} were tried{over}, and "
        f"the one with the {goal} mean {findings.metric} was chosen, on the evaluation data that is reported."
    )


def _scored(findings: Findings, ranked: Sequence[Row]) -> str:
    seeds = Counter(tuple(row.arm.scores) for row in ranked)
    if not seeds:
        return ""
    listed = ", ".join(map(str, seeds.most_common(1)[0][0]))
    over = f"the seeds {listed}" if len(seeds) == 1 else f"up to {max(map(len, seeds))} seeds"
    runs = [run for row in ranked for run in row.arm.runs]
    examples = alike(section(run, "data").get("eval_examples") for run in runs)
    on = f" ({examples:,} evaluation examples)" if isinstance(examples, int) else ""
    lost = lost_sentence([run for run in findings.runs if run.status != NOT_STARTED])
    return f"A score is the last {findings.metric} of a run{on}, and we report its mean over {over}. {lost}".rstrip()


def lost_sentence(begun: Sequence[Run]) -> str:
    """Say how many runs have no score, and why; empty where all have one."""
    diverged = sum(bool(run.diverged) for run in begun)
    rest = sum(not (run.finished or run.diverged) for run in begun)
    lost = [f"{number} {how}" for how, number in (("diverged", diverged), ("did not finish", rest)) if number]
    return f"Of all runs {' and '.join(lost)}; these have no score." if lost else ""


def _tested(findings: Findings, ranked: Sequence[Row]) -> str:
    """Say which test was made, if one was."""
    tested = [row.versus for row in ranked if row.versus is not None and row.versus.p == row.versus.p]
    if not tested:
        return "No test was made." if len(ranked) > 1 else ""
    moderated = (
        " with a moderated variance (Smyth 2004; prior of at most 4 times the own degrees of freedom,"
        " p doubled where it counts)"
        if len(ranked) >= FEWEST
        else ""
    )
    if findings.chosen_baseline:
        scope = f"the {len(tested)} comparisons with {findings.reference}, which was named as the baseline"
    else:
        scope = f"all pairs of contenders, shown against the best, {findings.reference}"
    made = find_selection(findings)
    caution = "; as these seeds chose the configurations, too, the chance of a false claim is higher"
    if made.rate > ALPHA:
        caution += f" ({made.rate_label}, simulated)"
    return (
        f"Differences were tested with two-sided paired t tests over shared seeds (at least {MIN_SEEDS}){moderated}, "
        f"with Holm's correction over {scope}, at {100 * ALPHA:.0f} %{caution if made.judged_by_choice else ''}. "
        f"Intervals are {100 * CONFIDENCE:.0f} % intervals."
    )


def _confirmed(one: Confirmed, *, of_itself: bool) -> str:
    plan = one.plan
    waits = f" ({one.missing} runs have no result yet)" if one.missing else ""
    power = f", as many as find the differences seen with a power of {plan.power:g}" if plan.power else ""
    if not one.as_planned:
        return (
            f"The verdict{waits} is not what was planned before these runs, on the fresh seeds {label(plan.seeds)}: "
            f"{plan.metric} against {plan.reference}."
        )
    if of_itself:
        return (
            f"The configurations had been chosen on other seeds; {label(plan.seeds)} are fresh{power}, and the "
            f"reference, {plan.reference}, was named before these runs{waits}."
        )
    return (
        f"The chosen configurations were then run on the fresh seeds {label(plan.seeds)}{power}, and the verdict is "
        f"from these runs alone{waits}, by the same tests against {plan.reference}, which was named before them."
    )


def spent_sentence(everything: Sequence[Findings]) -> str:
    """Say what all runs took."""
    costs = [cost(row.contender) for findings in everything for row in findings.rows]
    steps, untold = sum(each.steps for each in costs), any(each.untold for each in costs)
    parts = [f"{steps:,} optimizer steps"]
    parts += [f"{count(tokens)} tokens"] if (tokens := sum(each.tokens or 0.0 for each in costs)) else []
    parts += [f"{duration(seconds)} of run time"] if (seconds := sum(each.seconds or 0.0 for each in costs)) else []
    return f"All runs together took {'at least ' if untold else ''}{', '.join(parts)}."


def versions_sentence(runs: Sequence[Run]) -> str:
    """Say on what the runs ran, as far as all that know agree."""
    known = {name: [text for run in runs if (text := _scalars(run, name))] for name in ("versions", "hardware")}
    versions, hardware = alike(known["versions"]), alike(known["hardware"])
    commit = alike(section(run, "git").get("commit") for run in runs)
    if not known["versions"]:
        return ""
    on = f" on {hardware}" if hardware else ""
    on += f", code at commit {str(commit)[:12]}" if commit else ""
    return f"Runs were made with {versions or 'several versions'}{on}."


def section(run: Run, name: str) -> Mapping[str, Any]:
    """Find a section of the summary; empty where it has none."""
    found = run.summary.get(name)
    return found if isinstance(found, dict) else {}


def _scalars(run: Run, name: str) -> str:
    items = section(run, name).items()
    return ", ".join(f"{key} {item}" for key, item in items if isinstance(item, (str, int, float)) and item != "")


def alike(values: Iterable[object]) -> object | None:
    """Find the one value there is; None where there are several, or none."""
    distinct = {str(value): value for value in values if value is not None}
    return next(iter(distinct.values())) if len(distinct) == 1 else None
