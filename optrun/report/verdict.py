"""Say in a sentence who is best, how sure that is, and what the sentence may be quoted as."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from optrun.report.findings import Findings, Row
from optrun.report.selection import find_selection
from optrun.report.statistics import BETTER, MIN_SEEDS, WORSE
from optrun.report.tables import mean_sd

KINDS = {
    "Pilot": f"fewer than {MIN_SEEDS} seeds, so nothing is tested",
    "Selected": "contenders are judged by seeds that took part in choosing their configurations",
}
"""Kinds of verdicts that are not to be quoted, and why."""


def headline(findings: Findings) -> str:
    """Say the finding in a few sentences, no stronger than the tests allow."""
    ranked = [row for row in findings.rows if row.rank]
    if findings.incomparable:
        return f"Nothing is ranked: {findings.incomparable}. Make a report of each kind by itself."
    if not ranked:
        return "No run has finished with a result yet."
    lead = _lead(findings, ranked[0])
    if len(ranked) == 1:
        return lead.replace("has the best mean", "ends at")
    verdicts = {
        row.name: row.versus.verdict for row in ranked if row.versus is not None and row.name != findings.reference
    }
    against = f"Against {findings.reference}: {by_verdict(verdicts)}."
    if not {BETTER, WORSE} & set(verdicts.values()):
        against += " The order of the table may be chance."
    return f"{lead} {against}"


def by_verdict(verdicts: Mapping[str, str]) -> str:
    """Say the verdict on each contender, those with the same one together: `a is better; b and c are worse`."""
    groups: dict[str, list[str]] = {}
    for name, verdict in verdicts.items():
        groups.setdefault(verdict, []).append(name)
    parts = []
    for verdict, names in groups.items():
        if verdict in (BETTER, WORSE):
            parts.append(f"{listed(names)} {'is' if len(names) == 1 else 'are'} {verdict}")
        else:
            parts.append(f"{verdict} for {listed(names)}")
    return "; ".join(parts)


def kind(findings: Findings) -> str:
    """Name the kind of a verdict: what it may be quoted as."""
    ranked = [row for row in findings.rows if row.rank]
    if len(ranked) < 2:
        return ""
    shared = [row.versus.pairs for row in ranked if row.versus is not None and row.name != findings.reference]
    if max(shared, default=0) < MIN_SEEDS:
        return "Pilot"
    return "Selected" if find_selection(findings).judged_by_choice else "Compared"


def brief(findings: Findings) -> str:
    """Answer in one short line, without the tests: what is about to be confirmed."""
    ranked = [row for row in findings.rows if row.rank]
    if not ranked:
        return headline(findings)
    of_kind, lead = kind(findings), _lead(findings, ranked[0])
    if len(ranked) == 1:
        lead = lead.replace("has the best mean", "ends at")
    return f"{of_kind}: {lead}" if of_kind else lead


def _lead(findings: Findings, first: Row) -> str:
    seeds = len(first.arm.scores)
    over = "one seed" if seeds == 1 else f"{seeds} seeds"
    return f"{first.name} has the best mean {findings.metric}: {mean_sd(first.arm)} over {over}."


def listed(names: Sequence[str]) -> str:
    """Join names as a sentence does."""
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
