"""Say how many fresh seeds would settle what a report could not tell, and the command that runs them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from optrun.errors import ConfigError
from optrun.report.branches import ADVICE, fork_of
from optrun.report.collect import Run, load_runs
from optrun.report.confirmation import FOLDER, confirmations, label, plan, read
from optrun.report.confirmed import Confirmed, shown
from optrun.report.findings import Findings, choose_metric, find
from optrun.report.power import MOST_SEEDS
from optrun.report.statistics import ALPHA, MIN_SEEDS, NO_DIFFERENCE
from optrun.report.table import value
from optrun.report.tuned import tuned_keys

_ALONE = "by these alone: seeds that are added until something shows raise the error rate."


@dataclass(frozen=True)
class Asked:
    """Of what a report was asked for."""

    directories: Sequence[Path]
    options: Sequence[str]
    """What was typed of baseline=, metric= and by=."""

    @property
    def sweep(self) -> Path | None:
        """The one directory; None where there are several: a confirmation is of one."""
        return self.directories[0] if len(self.directories) == 1 else None


def confirm_line(findings: Findings, asked: Asked | None) -> str:
    """Compose the command that confirms what a report chose, as far as it is of one directory; empty for branches."""
    if any(fork_of(run) for run in findings.runs):
        return ""
    if asked is None or asked.sweep is None:
        return "optrun confirm DIR"
    return _line(asked.sweep, asked.options)


def open_questions(findings: Findings, confirmed: Sequence[Confirmed] = (), asked: Asked | None = None) -> list[str]:
    """Say how many seeds would tell what was not told apart; one paragraph for all, or none.

    Args:
        findings: Of the report.
        confirmed: Confirmations of them, or of which they are the result: the open question is that of the last one.
        asked: Of what the report is; None: no command is known.
    """
    if confirmed:
        return _after(confirmed[-1], findings, asked)
    told, most = _needed(findings)
    if not told:
        return []
    said = (
        f"Open: seeds that would tell a contender from {findings.reference} with a chance of 80 %, were the difference "
        f"the one observed: {told}."
    )
    sweep = None if asked is None else asked.sweep
    if most is None:
        return [said]
    if any(fork_of(run) for run in findings.runs):
        return [f"{said} For as many {ADVICE}."]
    if sweep is None or asked is None:
        return [f"{said} {_next('', 1)}"]
    if (begun := read(sweep / FOLDER)) is not None:
        line = _line(sweep, _options(begun.reference, begun.metric, begun.by, findings.runs))
        return [f"{said} `{line}` goes on with the confirmation that was planned, on seeds {label(begun.seeds)}."]
    return [f"{said} {_next(_fresh(sweep, findings, asked.options, most, sweep / FOLDER), 1)}"]


def _after(last: Confirmed, findings: Findings, asked: Asked | None) -> list[str]:
    """Say what a confirmation left open."""
    found, sweep = last.findings, last.sweep
    if last.pending:
        told = f"Open: {last.pending} of the runs that were planned have not come to their end."
        if sweep is None:
            return [f"{told} The line that began them goes on."]
        options = _options(last.plan.reference, last.plan.metric, last.plan.by, found.runs)
        return [f"{told} `{_line(sweep, [*options, *_out(sweep, last.folder)])}` goes on with them."]
    told, most = _needed(found)
    if not told:
        return []
    said = (
        f"Open: fresh seeds that would tell a contender from {found.reference} with a chance of 80 %, were the "
        f"difference and its spread those of the confirmation: {told}."
    )
    if most is None:
        return [said]
    if sweep is None:
        return [f"{said} {_next('', 2)}"]
    earlier = confirmations([sweep])
    of_sweep = found is not findings and asked is not None and asked.sweep is not None
    runs = findings.runs if of_sweep else load_runs([sweep], beside=[*earlier, last.folder])
    options = _options(str(found.reference), found.metric, found.compared_keys, found.runs)
    try:
        chosen = find(
            runs, metric=found.metric, baseline=found.reference, by=found.compared_keys, tuned=tuned_keys(runs)
        )
    except (ConfigError, ValueError):  # the sweep is another by now, or gone
        return [f"{said} {_next('', 2)}"]
    line = _fresh(sweep, chosen, options, most, last.folder, used=last.plan.seeds)
    return [f"{said} {_next(line, 1 + len({*earlier, last.folder}))}"]


def _needed(findings: Findings) -> tuple[str, int | None]:
    """List the seeds that each question takes, fewest first, and the most of them; None where all take too many."""
    versus = [row.versus for row in findings.rows if row.rank and row.versus is not None]
    tested = [each for each in versus if each.verdict == NO_DIFFERENCE and each.degrees > 0]
    needed = sorted(((each.needed, each) for each in tested), key=lambda pair: pair[0] or MOST_SEEDS + 1)
    told = [
        f"{each.name} ({value(abs(each.difference))}): {seeds or f'more than {MOST_SEEDS}'}" for seeds, each in needed
    ]
    return "; ".join(told), max((seeds for seeds, _ in needed if seeds), default=None)


def _fresh(
    sweep: Path, chosen: Findings, options: Sequence[str], number: int, folder: Path, *, used: Sequence[int] = ()
) -> str:
    """Compose the command that confirms a choice on seeds that nothing is known of; empty where it would be refused."""
    known = {run.seed for run in chosen.runs if run.seed is not None}.union(used)
    known = known.union(*(each.seeds for each in confirmations([sweep]).values()))
    first = max(known, default=-1) + 1
    seeds = range(first, first + max(MIN_SEEDS, number))
    try:
        plan(chosen, seeds=seeds)
    except ConfigError:
        return ""
    return _line(sweep, [*options, f"seeds={label(seeds)}", *_out(sweep, _free(folder))])


def _free(folder: Path) -> Path:
    """Find a folder that a confirmation may go to: this one, or the next by number that is not there."""
    stem, number, free = re.sub(r"-\d+$", "", folder.resolve().name), 2, folder.resolve()
    while free.exists():
        free, number = free.with_name(f"{stem}-{number}"), number + 1
    return shown(free)


def _next(line: str, count: int) -> str:
    """Say how the question would be settled.

    Args:
        line: The command; empty: there is none.
        count: Confirmations there would be then.
    """
    how = f"`{line}` runs as many fresh ones and judges" if line else "Run as many fresh ones and judge"
    each = (
        f" Each confirmation has its own chance of {ALPHA:.0%} to mislead, and one of {count} does in up to "
        f"{1 - (1 - ALPHA) ** count:.0%}."
    )
    return f"{how} {_ALONE}{each if count > 1 else ''}"


def _options(reference: str, metric: str, by: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """Compose what a confirmation has to be asked to be judged so."""
    default, _ = choose_metric(runs, None)
    options = [f"baseline={reference}", *([] if metric == default else [f"metric={metric}"])]
    return [*options, f"by={','.join(by)}"] if by else options


def _out(sweep: Path, folder: Path) -> list[str]:
    return [] if folder.resolve() == (sweep / FOLDER).resolve() else [f"out={shown(folder)}"]


def _line(sweep: Path, words: Sequence[str]) -> str:
    return shlex.join(["optrun", "confirm", str(sweep), *words])
