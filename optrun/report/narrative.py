"""Say in sentences what a report found, of what, and how to read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from optrun.formatting import plain
from optrun.report.branches import ADVICE
from optrun.report.confirmed import Confirmed
from optrun.report.curves import run_title
from optrun.report.findings import Findings
from optrun.report.level import LEAST, MARGIN
from optrun.report.moderated import FEWEST
from optrun.report.open_questions import Asked, confirm_line, open_questions
from optrun.report.selection import error_rate
from optrun.report.spent import budget_line
from optrun.report.statistics import MIN_SEEDS, NO_DIFFERENCE
from optrun.report.table import value
from optrun.report.tables import states
from optrun.report.verdict import KINDS, headline, kind, listed


def verdict_line(findings: Findings, confirmed: Sequence[Confirmed] = ()) -> str:
    """Answer in one line, with the kind of the answer: that of the last confirmation where there is one."""
    if confirmed:
        last = confirmed[-1]
        waits = f", {last.missing} of its runs without a result yet" if last.missing else ""
        return f"{last.title}{waits}: {headline(last.findings)}"
    of_kind = kind(findings)
    return f"{of_kind}: {headline(findings)}" if of_kind else headline(findings)


def notes(findings: Findings, confirmed: Sequence[Confirmed] = (), asked: Asked | None = None) -> list[str]:
    """Explain how the numbers came about and what they do not say; one paragraph each.

    Args:
        findings: What was found.
        confirmed: Confirmations of it, or of which it is the result.
        asked: Of what the report is; None: it is not known.
    """
    less = "lower" if findings.mode == "min" else "higher"
    of_itself = next((one for one in confirmed if one.findings is findings), None)
    verb = confirm_line(findings, None if confirmed else asked)
    found = []
    if of_itself is not None:
        found.append(_plan_note(of_itself))
    elif (of_kind := kind(findings)) in KINDS:
        what = f"`{verb}` runs what was chosen on fresh seeds, and judges by these alone."
        if confirmed:
            what = "That is the choice; the verdict above is by fresh seeds alone."
        elif not verb:
            what = f"For a verdict to quote {ADVICE}."
        found.append(f"{of_kind}: {KINDS[of_kind]}. {what}")
    found += [
        f"Score: the last {findings.metric} of a finished run, on the evaluation split; {less} is better. "
        "Unfinished, failed and diverged runs have no score and are listed below.",
        "Seeds: runs that are alike but for the seed are one configuration; the table shows mean and standard "
        "deviation over its seeds.",
    ]
    if findings.tuned_keys and of_itself is None:
        other = "evaluate the chosen configurations on a split of their own."
        advice = f" For a number to quote, {f'confirm it (`{verb}`), or ' if verb else ''}{other}"
        found.append(
            f"Selection: each contender is shown at the {listed(findings.tuned_keys)} with the best mean on the "
            "same evaluation split that is reported. Choosing and reporting on one split flatters every "
            f"contender, and the one with most configurations tried most.{'' if confirmed else advice}"
        )
    if budget := budget_line(findings):
        found.append(budget)
    if len([row for row in findings.rows if row.rank]) > 1:
        if findings.chosen_baseline:
            scope = f"the comparisons with the chosen baseline {findings.reference}"
        else:
            scope = "all pairs of contenders, since the reference is the best of the same numbers (a baseline named "
            scope += "beforehand needs a milder correction)"
        found.append(
            f"Tests: two-sided paired t tests, seed by seed, on the seeds both sides share (at least {MIN_SEEDS}). "
            f"From {FEWEST} contenders on the variance of a difference is moderated by what all contenders show (Smyth "
            "2004), less for one that scatters more and where all differ, and p values are doubled where it counts: "
            "see docs/statistics.md. "
            f"Holm's method corrects over {scope}, {error_rate(findings, verb)} The interval of a difference is the "
            "95 % t interval, uncorrected; effect g is the mean difference in standard deviations of the differences "
            "(Hedges), positive in favour of the contender."
        )
        found.append(
            f"“{NO_DIFFERENCE.capitalize()}” is no proof of equality. The number behind it is the difference that "
            "so many seeds would have shown with a chance of 80 %, were the spread the one observed."
        )
        found += open_questions(findings, confirmed, asked)
        found.append(
            "Intervals of means are bootstrap percentile intervals (2,000 resamples of the seeds). With few seeds "
            "they are too narrow: from five seeds they hold the true mean in about 84 of 100 cases instead of 95."
        )
    if findings.target == findings.target:
        whose = f"the baseline {findings.reference}" if findings.chosen_baseline else "every contender"
        which = "set with target=" if findings.chosen_target else f"which more than half of the seeds of {whose} end at"
        which += "" if findings.chosen_target else " or beyond (target=LEVEL sets another)"
        found.append(
            f"Target: {findings.metric} {value(findings.target)}, {which}. Steps, tokens and time are medians over the "
            "seeds of the configuration shown, up to the first evaluation that saw it. A run that ended or diverged "
            "before counts as one that takes for ever, one that was cut or runs still as one of which no more is known "
            "(Kaplan-Meier); “never”: half of the runs or more do not get there. A schedule made for more steps comes "
            "down later: read this as “within this schedule”."
        )
    if len(findings.arms) > len(findings.rows):
        found.append(
            "Cost: all runs that were begun for a contender, also those that failed or were not chosen, with wall time "
            "as if they had followed each other. Score against budget: the best mean that so many of the contender's "
            "configurations would have given, taken in random order (expectation without replacement, the U-statistic "
            "of Tang et al. 2020 for the curve of Dodge et al. 2019). One that diverged counts as a model that learnt "
            "nothing, one that was stopped early with its last evaluation. Contenders may be compared where all have a "
            "value, however many configurations were tried for one; docs/statistics.md has the equation."
        )
    if any(len(row.basin.tried) > 1 for row in findings.rows) and findings.level.value == findings.level.value:
        level = findings.level
        found.append(
            f"lr basin: the factor between the smallest and largest lr whose mean {findings.metric} is "
            f"{value(level.value)} or {'less' if findings.mode == 'min' else 'more'}, between tried values by "
            "interpolation; “≥” where the grid ended first, “not reached” where no lr tried gets there. "
        )
        found[-1] += (
            "The level is the target."
            if findings.chosen_target
            else f"The level is one for all: the median of the best means, yet at least {LEAST:.0%} of what the best "
            f"contender learnt, from {value(level.start)} (the first value logged) to {value(level.best)}, with a "
            f"margin of {MARGIN:.0%} of that."
        )
    return found


def _plan_note(one: Confirmed) -> str:
    """Say how far a report on a confirmation judges by its plan."""
    plan = f"{one.plan.metric} against {one.plan.reference}"
    if one.as_planned:
        return (
            f"Confirmed: the configurations, their seeds, the metric and the reference were written down before any of "
            f"these runs ({plan})."
        )
    return (
        f"Not as planned: what was written down before any of these runs is {plan}, and another question that is asked "
        "of them afterwards can be chosen by its answer. Without baseline=, metric= and by= the report judges by the "
        "plan, once its reference has a result."
    )


def title(findings: Findings) -> str:
    """Name the one run, or say how many contenders were compared on what."""
    if len(findings.runs) == 1:
        return run_title(findings.runs[0])
    models = sorted({str(run.config["model.name"]) for run in findings.runs if "model.name" in run.config})
    data = sorted({str(run.config["data.name"]) for run in findings.runs if "data.name" in run.config})
    where = " on ".join(", ".join(names) for names in (models, data) if names)
    return f"{len(findings.rows)} contenders: {where}" if where else f"{len(findings.rows)} contenders"


def subtitle(findings: Findings) -> str:
    """Say how many runs there are in which state, and when the report was made."""
    total = "1 run" if len(findings.runs) == 1 else f"{len(findings.runs):,} runs"
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"{total} ({states(findings.runs)}), compared by {findings.metric}, {made}"


@dataclass(frozen=True)
class Command:
    """How to run one contender's best configuration again."""

    name: str
    note: str
    line: str
    """For a shell, quoted."""


def commands(findings: Findings) -> list[Command]:
    """List the shell line of each contender's best configuration."""
    found = []
    for row in findings.rows:
        runs = [run for run in row.arm.runs if run not in row.arm.repeated]
        seeds = sorted({run.seed for run in runs if run.seed is not None})
        if runs and (line := runs[0].command(seeds=seeds)):
            changes = {key: value for run in runs for key, value in run.changed.items()}
            changed = ", ".join(f"{key}={value}" for key, value in changes.items())
            note = [f"{len(seeds)} seeds"] if len(seeds) > 1 else []
            note += [f"changed when resumed: {changed}"] if changed else []
            found.append(Command(row.name, "; ".join(note), plain(line)))
    return found


def footer(findings: Findings) -> str:
    """Say what the runs ran on, as far as all agree."""
    parts = []
    for section in ("versions", "hardware"):
        values = [run.summary.get(section) for run in findings.runs]
        first = next((value for value in values if isinstance(value, dict)), None)
        if first and all(value == first for value in values if value):
            scalars = (f"{key} {value}" for key, value in first.items() if isinstance(value, (str, int, float)))
            parts.append(", ".join(scalars))
    return ". ".join(["Made by optrun report from the files of the runs alone", *parts]) + "."
