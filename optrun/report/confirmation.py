"""Plan a confirmation: the configuration chosen for each contender, on seeds that took no part in the choice."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from optrun.artifacts.atomic import replace_text
from optrun.artifacts.run_dir import find_runs
from optrun.errors import ConfigError
from optrun.reading import read_json
from optrun.report import moderated
from optrun.report.branches import KEY, fork_of
from optrun.report.collect import load_runs
from optrun.report.findings import Findings, Row, find
from optrun.report.power import POWER, seeds_for
from optrun.report.statistics import ALPHA, MIN_SEEDS
from optrun.report.tuned import tuned_keys
from optrun.report.verdict import listed

FOLDER = "confirm"
"""Beneath the sweep that is confirmed."""
RECORD = "confirmation.json"
FORMAT = 1
FEWEST, MOST = 5, 20
"""Seeds of a confirmation that is planned from the spread."""
_OWN = ("resume=", "hydra.", "hydra/", "seed=")


@dataclass(frozen=True)
class Confirmation:
    """What is run; written beside its runs, so that it stays what was planned."""

    contenders: dict[str, list[str]]
    """Name -> overrides of the chosen configuration, without the seed."""
    reference: str
    """The contender that the others are compared with, named before any of these runs."""
    by: list[str]
    """Configuration keys that tell contenders apart."""
    metric: str
    seeds: list[int]
    power: float | None = None
    """What the seeds were planned for; None: they were named."""
    config_name: str | None = None
    config_dir: list[str] | None = None
    sweep: str | None = None
    """Whose choice it is: the way there from the folder of this record; None in one from before it was noted."""

    def points(self) -> list[list[str]]:
        """The overrides of each run: each contender on each seed."""
        return [[*overrides, f"seed={seed}"] for overrides in self.contenders.values() for seed in self.seeds]

    def write(self, folder: Path) -> None:
        """Write it into the folder of its runs.

        Raises:
            OSError: The disk refused.
        """
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / RECORD, json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n")


def read(folder: Path) -> Confirmation | None:
    """Read what a folder confirms; None where it is no confirmation.

    Raises:
        ConfigError: Its record cannot be read.
    """
    path = folder / RECORD
    try:
        record = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}. Move the folder away to confirm anew.") from error
    if not isinstance(record, dict) or record.pop("format", None) != FORMAT:
        raise ConfigError(f"{path}: expected format {FORMAT}. Move the folder away to confirm anew.")
    try:
        made = Confirmation(**record)
    except TypeError as error:
        raise ConfigError(f"{path}: {error}. Move the folder away to confirm anew.") from error
    if not _is_well_formed(made):
        raise ConfigError(f"{path}: no confirmation has such values. Move the folder away to confirm anew.")
    return made


def _is_well_formed(made: Confirmation) -> bool:
    lists = isinstance(made.contenders, dict) and [*made.contenders.values(), made.by, made.config_dir or []]
    texts = bool(lists) and all(isinstance(one, list) and all(isinstance(item, str) for item in one) for one in lists)
    seeds = isinstance(made.seeds, list) and made.seeds and all(type(seed) is int for seed in made.seeds)
    named = all(
        isinstance(each, str) for each in (made.reference, made.metric, "" if made.sweep is None else made.sweep)
    )
    return bool(texts and seeds and named)


def prepare(
    sweep: Path,
    folder: Path,
    *,
    seeds: Sequence[int] | None = None,
    power: float | None = None,
    baseline: str | None = None,
    metric: str | None = None,
    by: Sequence[str] = (),
) -> tuple[Confirmation, list[str]]:
    """Plan the confirmation of a sweep, or find the one that was planned.

    Args:
        sweep: Its runs are what is confirmed.
        folder: Where the confirming runs go.
        seeds: See `plan`.
        power: See `plan`; None: 0.8.
        baseline: See `findings.find`, as the two that follow.
        metric: The metric to compare by.
        by: What separates contenders.

    Returns:
        The plan, and what to tell about it.

    Raises:
        ConfigError: As for `plan`; or the folder holds the confirmation of something else.
    """
    if seeds is not None and power is not None:
        raise ConfigError(f"power={power}: plans how many seeds are run, and seeds= names them. Leave one of them out.")
    earlier = confirmations([sweep])
    runs = load_runs([sweep], beside=[folder, *earlier])
    if not runs:
        raise ConfigError(f"confirm {sweep}: no run found here or beneath (a run has metrics.jsonl or summary.json)")
    if branches := [run.label for run in runs if fork_of(run) is not None]:
        raise ConfigError(
            f"confirm {sweep}: {listed(branches[:3])} branched from a trunk ({KEY}=), whose seed is theirs: on "
            "another seed nobody has trained one. Train trunks on fresh seeds, and sweep over branches of these."
        )
    findings = find(runs, metric=metric, baseline=baseline, by=by, tuned=tuned_keys(runs))
    before = read(folder)
    if before is None:
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise ConfigError(f"{folder} is there and is no confirmation: out=DIR names another folder.")
        used = {path: each.seeds for path, each in earlier.items()}
        made, said = plan(findings, seeds=seeds, power=POWER if power is None else power, used=used)
        return replace(made, sweep=os.path.relpath(sweep.resolve(), folder.resolve())), said
    now, _ = plan(findings, seeds=before.seeds)
    changed = [
        name
        for name in {**before.contenders, **now.contenders}
        if before.contenders.get(name) != now.contenders.get(name)
    ]
    if changed or (before.reference, before.metric) != (now.reference, now.metric):
        judged = f"{now.metric} against {now.reference}, where it was {before.metric} against {before.reference}"
        what = f"the choice has changed since ({', '.join(changed) or judged})"
        raise ConfigError(f"{folder} confirms what was chosen before: {what}. out=DIR begins another confirmation.")
    if power not in (None, before.power) or (seeds is not None and list(seeds) != before.seeds):
        raise ConfigError(
            f"{folder} holds a confirmation that was planned with seeds {label(before.seeds)}: seeds that are added "
            "until something shows raise the error rate. Without seeds= and power= it goes on; out=DIR begins another."
        )
    return before, [f"goes on with what was planned: seeds {label(before.seeds)}"]


def plan(
    findings: Findings,
    *,
    seeds: Sequence[int] | None = None,
    power: float = POWER,
    used: Mapping[Path, Sequence[int]] | None = None,
) -> tuple[Confirmation, list[str]]:
    """Choose what is run again, and on which seeds.

    Args:
        findings: Of the sweep that is confirmed.
        seeds: To run on; None: as many as find each difference that was observed, at its spread, from 5 to 20.
        power: Chance with which such a difference is found.
        used: Seeds of earlier confirmations of the sweep: none of them is planned, and one that is named is told.

    Returns:
        The plan, and what to tell about it.

    Raises:
        ConfigError: Nothing to compare; seeds that took part in the choice; a configuration that cannot be typed again.
    """
    if findings.incomparable:
        raise ConfigError(f"Nothing can be confirmed: {findings.incomparable}.")
    rows = [row for row in findings.rows if row.rank]
    if len(rows) < 2 or findings.reference is None:
        raise ConfigError(f"A confirmation compares contenders, and {len(rows)} of them has a result.")
    known = {run.seed for run in findings.runs if run.seed is not None}
    first = max(known.union(*(used or {}).values()), default=-1) + 1
    said: list[str] = []
    named = seeds is not None
    for path, of_it in (used or {}).items():
        if again := sorted(set(seeds or ()) & set(of_it)):
            said.append(
                f"seeds {label(again)} ran in {path}, too, and what they found is known; unused: from {first} on"
            )
    if seeds is None:
        number, said = _planned(rows, findings.reference, power)
        seeds = range(first, first + number)
    refuse_stale(seeds, known)
    runs = {row.name: next(run for run in row.arm.runs if run not in row.arm.repeated) for row in rows}
    overrides = {name: _retyped(name, run.overrides) for name, run in runs.items()}
    names = {(run.config_name, tuple(run.config_dir)) for run in runs.values()}
    if len(names) > 1:
        raise ConfigError("The contenders come from several recipes: confirm each recipe's sweep by itself.")
    ((config_name, config_dir),) = names
    made = Confirmation(
        contenders=overrides,
        reference=findings.reference,
        by=findings.compared_keys,
        metric=findings.metric,
        seeds=list(seeds),
        power=None if named else power,
        config_name=config_name,
        config_dir=list(config_dir),
    )
    return made, said


def _retyped(name: str, tokens: Sequence[str]) -> list[str]:
    """What was typed for a run, without what a confirmation says by itself.

    Raises:
        ConfigError: It is an option, or lets code run: that a person says, and no file of a run directory.
    """
    for token in tokens:
        if token.startswith("-") or token.lstrip("+").startswith("model.trust_remote_code="):
            raise ConfigError(
                f"{name}: {token} stands in a file; type its command of the report, on fresh seeds, yourself."
            )
    return [token for token in tokens if not token.lstrip("+~").startswith(_OWN)]


def _planned(rows: Sequence[Row], reference: str, power: float) -> tuple[int, list[str]]:
    """Count the seeds that find what was observed, with the milder correction of a reference named beforehand."""
    caution, _ = moderated.expected(len(rows), FEWEST)
    bar = ALPHA / max(1, len(rows) - 1)
    needed: dict[str, int | None] = {}
    for row in rows:
        versus = row.versus
        if row.name == reference or versus is None or not versus.degrees > 0:
            continue
        learnt = versus.degrees > (1 + moderated.CAUTIOUS_FROM) * (versus.pairs - 1)
        needed[row.name] = seeds_for(
            versus.difference,
            versus.spread,
            versus.pairs,
            bar / (caution if learnt else 1),
            versus.degrees,
            power=power,
            fewest=MIN_SEEDS,
        )
    within = [n for n in needed.values() if n is not None and n <= MOST]
    number = max([FEWEST, *within])
    beyond = [name for name, n in needed.items() if n is None or n > MOST]
    said = [f"{number} fresh seeds, planned from the spread"]
    if beyond:
        said.append(
            f"{', '.join(beyond)} against {reference}: a difference as small as the one observed takes more than "
            f"{MOST}; seeds=FIRST-LAST runs more"
        )
    return number, said


def parse_seeds(given: object) -> list[int]:
    """Read `5-9`, `5,6,7` or a mixture; in YAML also 5 or [5, 6, 7].

    Raises:
        ConfigError: Anything else.

    Example:
        >>> parse_seeds("5-7,11"), parse_seeds([5, 6])
        ([5, 6, 7, 11], [5, 6])
    """
    text = ",".join(map(str, given)) if isinstance(given, list | tuple) else str(given)
    found: list[int] = []
    for piece in text.split(","):
        first, dash, last = piece.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ConfigError(f"seeds={text}: expected numbers and ranges, as in seeds=5-9 or seeds=5,6,7.")
        if dash and int(last) - int(first) > 10_000:
            raise ConfigError(f"seeds={text}: {int(last) - int(first) + 1:,} seeds; one of the ends is mistyped.")
        found += range(int(first), int(last or first) + 1)
    if len(set(found)) < len(found):
        raise ConfigError(f"seeds={text}: each seed once.")
    return found


def refuse_stale(seeds: Sequence[int], known: Collection[int]) -> None:
    """Refuse seeds that took part in a choice, or are too few.

    Args:
        seeds: Of a confirmation.
        known: Of the choice.

    Raises:
        ConfigError: With the first fresh ones.
    """
    clash = sorted(set(known) & set(seeds))
    if clash:
        listed, first = ", ".join(map(str, clash)), max(known) + 1
        raise ConfigError(
            f"seeds: {listed} took part in the choice, and what is judged by them flatters whom they chose. Fresh ones "
            f"begin at {first}: seeds={first}-{first + len(seeds) - 1}."
        )
    if len(seeds) < MIN_SEEDS:
        raise ConfigError(f"seeds: expected at least {MIN_SEEDS}, got {len(seeds)}: no test is made of fewer.")


def parse_power(text: str) -> float:
    """Read a chance.

    Raises:
        ConfigError: It is no number between 0 and 1.
    """
    try:
        power = float(text)
    except ValueError:
        power = 0.0
    if not 0 < power < 1:
        raise ConfigError(f"power={text}: expected a chance between 0 and 1, such as 0.8.")
    return power


def label(seeds: Sequence[int]) -> str:
    """Write seeds shortly.

    Example:
        >>> label([5, 6, 7]), label([5, 7])
        ('5-7', '5, 7')
    """
    whole = len(seeds) > 1 and list(seeds) == list(range(seeds[0], seeds[-1] + 1))
    return f"{seeds[0]}-{seeds[-1]}" if whole else ", ".join(map(str, seeds))


def confirmations(directories: Sequence[Path]) -> Mapping[Path, Confirmation]:
    """Find the confirmations beneath some directories that have a run, at any depth; a directory itself is none."""
    found: dict[Path, Confirmation] = {}
    for directory in directories:
        for folder in dict.fromkeys(run.parent for run in find_runs(directory)):
            beneath = folder.resolve() != directory.resolve() and folder.resolve().is_relative_to(directory.resolve())
            if beneath and (made := read(folder)) is not None:
                found[folder] = made
    return found
