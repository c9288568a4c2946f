"""Plan a confirmation.

The configuration chosen for each contender, on seeds that took no part in the choice.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path

from optrun.artifacts.atomic import replace_text
from optrun.artifacts.forks import MORE_TRUNKS, Fork
from optrun.artifacts.run_dir import find_runs
from optrun.base.errors import ConfigError
from optrun.base.formatting import duration
from optrun.base.reading import read_json
from optrun.report.findings import Findings, analyse_runs
from optrun.report.runs import load_runs
from optrun.report.statistics import MIN_SEEDS, POWER, residual_sd, seeds_for
from optrun.report.sweep_folder import tuned_keys

FOLDER = "confirm"
"""Beneath the sweep that is confirmed."""
RECORD = "confirmation.json"
FORMAT = 1
MOST = 20
"""Seeds of a plan that nobody named."""
BLIND = 5
"""Seeds of a plan if the sweep says nothing of the spread between seeds."""
_OWN = ("resume=", "hydra.", "hydra/", "seed=")


@dataclass(frozen=True)
class ConfirmationPlan:
    """What is run; written beside its runs, so that it stays what was planned."""

    contenders: dict[str, list[str]]
    """Name -> overrides of the chosen configuration, without the seed."""
    reference: str | None
    """A baseline that was named before any of these runs; None: each is asked whether it could be
    the best."""
    by: list[str]
    """Configuration keys that tell contenders apart."""
    metric: str
    seeds: list[int]
    power: float | None = None
    """Chance with which `difference` is found; None: the seeds were named."""
    config_name: str | None = None
    config_dir: list[str] | None = None
    sweep: str | None = None
    """Whose choice it is: the way there from the folder of this record; None in one from before it
    was noted."""
    difference: float | None = None
    """The smallest that matters, which the seeds were planned for; None: they were named, or the
    spread is unknown."""
    spread: float | None = None
    """Standard deviation between seeds that the sweep showed."""

    def points(self) -> list[list[str]]:
        """Return the overrides of each run: each contender on each seed."""
        return [
            [*overrides, f"seed={seed}"]
            for overrides in self.contenders.values()
            for seed in self.seeds
        ]

    def write(self, folder: Path) -> None:
        """Write it into the folder of its runs.

        Raises:
            OSError: The disk refused.
        """
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(
            folder / RECORD, json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n"
        )

    def check(self) -> None:
        """Refuse values that no confirmation has.

        Raises:
            TypeError: There is one.
        """
        texts: list[object] = [
            self.metric,
            self.reference or "",
            self.config_name or "",
            self.sweep or "",
        ]
        for each in (self.by, self.config_dir or [], *self.contenders.values()):
            texts += each if isinstance(each, list) else [None]
        numbers = [each for each in (self.power, self.difference, self.spread) if each is not None]
        right = (
            all(isinstance(text, str) for text in texts)
            and isinstance(self.seeds, list)
            and bool(self.seeds)
        )
        right = right and all(type(seed) is int for seed in self.seeds)
        if not right or not all(
            type(each) in (int, float) and 0 < each < math.inf for each in numbers
        ):
            raise TypeError("no confirmation has such values")


def read_plan(folder: Path) -> ConfirmationPlan | None:
    """Read what a folder confirms; None where it is no confirmation.

    Raises:
        ConfigError: Its record cannot be read.
    """
    try:
        record = read_json(folder / RECORD)
        if record.pop("format") != FORMAT:
            raise ValueError(f"expected format {FORMAT}")
        made = ConfirmationPlan(**record)
        made.check()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{folder / RECORD}: {error}. Move the folder away to confirm anew."
        ) from error
    return made


@dataclass(frozen=True, kw_only=True)
class ConfirmationRequest:
    """What is asked of a confirmation."""

    seeds: Sequence[int] | None = None
    """To run on; None: see `plan`."""
    power: float | None = None
    """Chance with which the difference is found; None: `POWER`."""
    difference: float | None = None
    """The smallest that matters, in units of the metric; None: that of the sweep."""
    baseline: str | None = None
    """As for `findings.find`, as the two that follow."""
    metric: str | None = None
    by: Sequence[str] = ()

    def line(self, sweep: Path, out: Path | None) -> list[str]:
        """Compose the command that goes on with it, as words of a shell line."""
        told = {
            "baseline": self.baseline,
            "metric": self.metric,
            "by": ",".join(self.by),
            "out": out,
        }
        return [
            "optrun",
            "confirm",
            str(sweep),
            *(f"{key}={given}" for key, given in told.items() if given),
        ]


def load_or_make_plan(
    sweep: Path, folder: Path, asked: ConfirmationRequest | None = None
) -> tuple[ConfirmationPlan, str]:
    """Plan the confirmation of a sweep, or find the one that was planned.

    Args:
        sweep: Its runs are what is confirmed.
        folder: Where the confirming runs go.
        asked: How.

    Returns:
        The plan, and what to tell about it.

    Raises:
        ConfigError: As for `plan`; or the folder holds the confirmation of something else.
    """
    asked, earlier, before = asked or ConfirmationRequest(), find_plans([sweep]), read_plan(folder)
    runs = load_runs([sweep], beside=[folder, *earlier])
    if not runs:
        raise ConfigError(
            f"confirm {sweep}: no run found here or beneath (a run has metrics.jsonl or"
            " summary.json)"
        )
    forks = [run.label for run in runs if Fork.of(run.summary) is not None]
    if forks:
        raise ConfigError(
            f"confirm {sweep}: {forks[0]} branched from a trunk, which has one seed: {MORE_TRUNKS}."
        )
    metric, baseline, by = asked.metric, asked.baseline, asked.by
    if before is not None:
        metric, baseline, by = (
            metric or before.metric,
            baseline or before.reference,
            by or before.by,
        )
    if before is not None and _plans_anew(asked, before, folder):
        earlier = {
            each: plans for each, plans in earlier.items() if each.resolve() != folder.resolve()
        }
        before = None
    elif before is None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{folder} is there and is no confirmation: out=DIR names another folder."
        )
    tuned = tuned_keys(run.path.parent for run in runs)
    found = analyse_runs(runs, metric=metric, baseline=baseline, by=by, tuned=tuned)
    if before is None:
        made, said = make_plan(
            found, asked, {seed for each in earlier.values() for seed in each.seeds}
        )
        said = ". ".join(filter(None, (said, _estimate(found, made))))
        return replace(made, sweep=os.path.relpath(sweep.resolve(), folder.resolve())), said
    now, _ = make_plan(found, ConfirmationRequest(seeds=before.seeds))
    if changed := [
        key
        for key in ("contenders", "reference", "metric")
        if getattr(now, key) != getattr(before, key)
    ]:
        names = [
            name for name in now.contenders if now.contenders[name] != before.contenders.get(name)
        ]
        keys = [
            f"{key}={getattr(now, key)}, planned with {getattr(before, key) or 'none'}"
            for key in changed
        ]
        why = (
            f"{', '.join(names)} changed since"
            if names
            else "; ".join(keys).replace("reference=", "baseline=")
        )
        raise ConfigError(f"{folder} confirms another choice: {why}. out=DIR begins another.")
    if any(
        getattr(asked, key) not in (None, getattr(before, key))
        for key in ("seeds", "power", "difference")
    ):
        raise ConfigError(
            f"{folder} was planned with seeds {write_seeds(before.seeds)}: seeds that are added"
            " until something shows raise the error rate. Without seeds=, power= and difference= it"
            " goes on; out=DIR begins another."
        )
    return before, f"goes on with what was planned: seeds {write_seeds(before.seeds)}"


def _plans_anew(asked: ConfirmationRequest, before: ConfirmationPlan, folder: Path) -> bool:
    """Tell whether another plan may take the place of one of which no run has finished."""
    keys = ("seeds", "power", "difference")
    if all(getattr(asked, key) in (None, getattr(before, key)) for key in keys):
        return False
    return not any(run.finished or run.status == "failed" for run in load_runs([folder]))


def _estimate(findings: Findings, made: ConfirmationPlan) -> str:
    """Say how long the runs of a plan take, by how long those of the choice took."""
    seconds = []
    for row in findings.ranked:
        known = [run.wall_seconds for run in row.configuration.counted if run.wall_seconds]
        if not known:
            return ""
        seconds.append(sum(known) / len(known))
    runs = len(made.contenders) * len(made.seeds)
    total = sum(seconds) * len(made.seeds)
    return f"{runs} runs, about {duration(total)} one after the other"


def make_plan(
    findings: Findings, asked: ConfirmationRequest, used: Collection[int] = ()
) -> tuple[ConfirmationPlan, str]:
    """Choose what is run again, and on which seeds.

    Args:
        findings: Of the sweep that is confirmed.
        asked: How; no seeds: as many as find the smallest difference that matters, whatever the
            sweep observed.
        used: Seeds of earlier confirmations of the sweep: none of them is planned, and one that is
            named is told.

    Returns:
        The plan, and what to tell about it.

    Raises:
        ConfigError: Nothing to compare; seeds that took part in the choice; a configuration that
            cannot be typed again.
    """
    rows = findings.ranked
    if findings.incomparable or len(rows) < 2:
        why = (
            findings.incomparable
            or f"a confirmation compares contenders, and {len(rows)} of them has a result"
        )
        raise ConfigError(f"Nothing can be confirmed: {why}.")
    known = {run.seed for run in findings.runs if run.seed is not None}
    runs = {row.name: row.configuration.counted[0] for row in rows}
    if len({(run.config_name, *run.config_dir) for run in runs.values()}) > 1:
        raise ConfigError(
            "The contenders come from several recipes: confirm each recipe's sweep by itself."
        )
    made = ConfirmationPlan(
        contenders={name: _retyped(name, run.overrides) for name, run in runs.items()},
        reference=findings.baseline,
        by=findings.compared_keys,
        metric=findings.metric,
        seeds=list(asked.seeds or ()),
        config_name=runs[rows[0].name].config_name,
        config_dir=list(runs[rows[0].name].config_dir),
    )
    first = max({*known, *used}, default=-1) + 1
    if asked.seeds is None:
        return _sized(made, findings, asked, first)
    refuse_stale(asked.seeds, known)
    again = sorted({*used} & {*asked.seeds})
    return (
        made,
        (
            f"seeds {write_seeds(again)} ran in a confirmation before; unused: from {first} on"
            if again
            else ""
        ),
    )


def _retyped(name: str, tokens: Sequence[str]) -> list[str]:
    """Return what was typed for a run, without what a confirmation says by itself.

    Raises:
        ConfigError: It is an option, or lets code run: that a person says, and no file of a run
            directory.
    """
    for token in tokens:
        if token.startswith("-") or token.lstrip("+").startswith("model.trust_remote_code="):
            raise ConfigError(
                f"{name}: {token} stands in a file; type its command, on fresh seeds, yourself."
            )
    return [token for token in tokens if not token.lstrip("+~").startswith(_OWN)]


def _sized(
    made: ConfirmationPlan, findings: Findings, asked: ConfirmationRequest, first: int
) -> tuple[ConfirmationPlan, str]:
    """Count the seeds that find the smallest difference that matters.

    Never the observed one, which was selected.
    """
    judged, rows, power = findings.judgement, findings.ranked, asked.power or POWER
    difference = asked.difference or (judged.matters if judged is not None else math.nan)
    finished = (
        {
            seed: x
            for seed, x in row.configuration.scores.items()
            if seed not in row.configuration.lost
        }
        for row in rows
    )
    sd, degrees = residual_sd(finished)
    if not (sd > 0 and difference > 0):
        made = replace(
            made, seeds=[*range(first, first + BLIND)], power=power, difference=asked.difference
        )
        return made, f"{BLIND} fresh seeds: the sweep says nothing of the spread between seeds"
    named = findings.baseline is not None
    needed = seeds_for(
        difference,
        sd=sd,
        degrees=degrees,
        contenders=len(rows),
        baseline=named,
        power=power,
        most=MOST,
    )
    seeds, chance = (
        [*range(first, first + (needed or MOST))],
        Fraction(power).limit_denominator(100),
    )
    made = replace(made, seeds=seeds, power=power, difference=difference, spread=sd)
    cases = (
        f"found in {chance.numerator} of {chance.denominator} cases, at the spread of {sd:.2g}"
        " between seeds"
    )
    told = (
        f"is {cases}" if needed else f"takes more to be {cases}; difference= or seeds= plan others"
    )
    return made, f"{len(seeds)} fresh seeds: a difference of {difference:.4g} {made.metric} {told}"


def refuse_stale(seeds: Sequence[int], known: Collection[int]) -> None:
    """Refuse seeds that took part in a choice, or are too few.

    Args:
        seeds: Of a confirmation.
        known: Of the choice.

    Raises:
        ConfigError: With the first fresh ones.
    """
    if clash := sorted(set(known) & set(seeds)):
        first = max(known) + 1
        raise ConfigError(
            f"seeds: {', '.join(map(str, clash))} took part in the choice, and what is judged by"
            f" them flatters whom they chose. Fresh ones begin at {first}:"
            f" seeds={first}-{first + max(len(seeds), MIN_SEEDS) - 1}."
        )
    if len(seeds) < MIN_SEEDS:
        raise ConfigError(
            f"seeds: expected at least {MIN_SEEDS}, got {len(seeds)}: no test is made of fewer."
        )


def write_seeds(seeds: Sequence[int]) -> str:
    """Write seeds shortly.

    Example:
        >>> write_seeds([5, 6, 7]), write_seeds([5, 7])
        ('5-7', '5, 7')
    """
    whole = len(seeds) > 1 and list(seeds) == list(range(seeds[0], seeds[-1] + 1))
    return f"{seeds[0]}-{seeds[-1]}" if whole else ", ".join(map(str, seeds))


def find_plans(directories: Sequence[Path]) -> Mapping[Path, ConfirmationPlan]:
    """Find the confirmations beneath some directories that have a run, at any depth.

    A directory itself is none.
    """
    found: dict[Path, ConfirmationPlan] = {}
    for directory in directories:
        for folder in dict.fromkeys(run.parent for run in find_runs(directory)):
            if (
                directory.resolve() in folder.resolve().parents
                and (made := read_plan(folder)) is not None
            ):
                found[folder] = made
    return found
