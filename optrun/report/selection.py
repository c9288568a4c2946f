"""Say what choosing a configuration does to the error rate of the tests that follow.

The tests take the contenders as given. Where one is the best of several configurations, judged by the numbers it was
chosen by, its luck was chosen with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from optrun.report.arms import Contender
from optrun.report.findings import Findings, Row
from optrun.report.spent import spent
from optrun.report.statistics import ALPHA

RATES = {
    3: {2: 0.05, 4: 0.06, 8: 0.08, 16: 0.11, 32: 0.13},
    5: {2: 0.05, 4: 0.07, 8: 0.10, 16: 0.14, 32: 0.18},
    10: {2: 0.05, 4: 0.08, 8: 0.11, 16: 0.16, 32: 0.22},
    math.inf: {2: 0.05, 4: 0.08, 8: 0.12, 16: 0.19, 32: 0.26},
}
"""Seeds -> configurations -> share of reports that call the best of so many configurations better or worse than a
single one, where all of them are equally good and their noise is normal and of one spread; simulated by
`benchmarks/selection.py`. Where the chosen one is ten times as noisy, the best of 8 is called so in 16 %, ten seeds."""


@dataclass(frozen=True)
class Selection:
    """How the ranked contenders were chosen."""

    tried: dict[str, int]
    """Contender -> configurations that took part in the choice."""
    judged_by_choice: bool
    """Whether some contender is judged by seeds that took part in its choice."""
    seeds: int
    """The most seeds that one is judged by."""

    @property
    def equal(self) -> bool:
        """Whether all were chosen of equally many."""
        return len(set(self.tried.values())) < 2

    @property
    def most(self) -> int:
        """The most configurations that one was chosen of."""
        return max(self.tried.values(), default=1)

    @property
    def rate(self) -> float:
        """The error rate of the nearest case simulated that has at least as many seeds, and configurations up to 32."""
        by_number = RATES[min(n for n in RATES if n >= self.seeds)]
        return by_number[min((n for n in by_number if n >= self.most), default=max(by_number))]

    @property
    def rate_label(self) -> str:
        """Format the rate as a bound, or as what is surpassed where more were tried than simulated."""
        return f"{'up to' if self.most <= max(RATES[math.inf]) else 'more than'} {self.rate:.0%}"


def find_selection(findings: Findings) -> Selection:
    """Find out how the contenders that are ranked were chosen."""
    rows = [row for row in findings.rows if row.rank]
    return Selection(
        {row.name: configurations(row, findings) for row in rows},
        any(_judged_by_choice(row.contender) for row in rows),
        max((len(row.arm.scores) for row in rows), default=0),
    )


def configurations(row: Row, findings: Findings) -> int:
    """Count the configurations of a contender that took part in its choice, those stopped early too."""
    return spent(row, findings).configurations


def _judged_by_choice(contender: Contender) -> bool:
    """Tell whether another configuration was compared with the chosen one by what it is judged by.

    One that was run on other seeds, and on fewer, was not: the chosen one stands there for its number of seeds.
    """
    best = contender.best
    others = [arm for arm in contender.arms if arm is not best and arm.scores]
    return any(set(arm.scores) & set(best.scores) or len(arm.scores) >= len(best.scores) for arm in others)


def error_rate(findings: Findings, verb: str) -> str:
    """Say which rate of false verdicts the tests keep, as far as the way the contenders were chosen lets them.

    Args:
        findings: What was found.
        verb: The command that confirms it; empty: there is none.
    """
    made = find_selection(findings)
    claim = "the chance of even one false “better” or “worse” in this report"
    if not made.judged_by_choice:
        return f"so that {claim} is at most {ALPHA:.0%}, for noise of the kinds that docs/statistics.md lists."
    tried = f"{made.most}" if made.equal else f"{min(made.tried.values())} to {made.most}"
    then = f"With so few it stays at {ALPHA:.0%}"
    if made.rate > ALPHA:
        then = "Where most of the configurations of one are hopeless, it" if made.equal else "It"
        then += f" may be {made.rate_label}"
    keeps = f"`{verb}`, which runs the chosen configurations, fixed now, on fresh seeds and judges by these alone"
    if not verb:
        keeps = "the chosen configurations, fixed now, on fresh seeds, judged by these alone"
    return (
        f"which keeps {claim} to {ALPHA:.0%} for contenders that are fixed beforehand. These are not: each is the best "
        f"of {tried} configurations on the seeds it is judged by, and its luck was chosen with it. {then} (simulated: "
        f"of two contenders equally good in truth, one is the best of {made.most} equally good configurations, the "
        f"other had one; {made.seeds} seeds or a few more, normal noise of one spread; more where the first is the "
        f"noisier). What keeps the rate: {keeps}. Equally many configurations for each, all of them serious and "
        "equally noisy, keep it, too."
    )
