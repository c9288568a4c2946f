"""Plan a confirmation.

The configuration chosen for each contender, on seeds that took no part in the choice.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path

from optrun.artifacts.atomic import replace_text
from optrun.artifacts.forks import MORE_TRUNKS, Fork
from optrun.artifacts.run_dir import find_runs
from optrun.base.errors import ConfigError
from optrun.base.formatting import duration, plural
from optrun.base.reading import read_json
from optrun.report.findings import Findings, analyse_runs
from optrun.report.runs import Run, load_runs, require_runs
from optrun.report.statistics import MIN_SEEDS, POWER, residual_sd, seeds_for
from optrun.report.sweep_folder import tuned_keys

FOLDER = "confirm"
"""Beneath the sweep that is confirmed."""
RECORD = "confirmation.json"
FORMAT = 1
MOST_SEEDS = 20
"""Most seeds that are planned without seeds=."""
SEEDS_WITHOUT_SPREAD = 5
"""Seeds of a plan if the sweep says nothing of the spread between seeds."""
_ALL_RUN = "They are judged when all have ended; seeds=FIRST-LAST runs other seeds, at least 3"
_SET_ANEW = ("resume=", "hydra.", "hydra/", "seed=")
"""Beginnings of overrides that a confirmation does not repeat."""


@dataclass(frozen=True)
class ConfirmationPlan:
    """The planned runs of a confirmation, recorded before the first of them starts."""

    contenders: dict[str, list[str]]
    """Name -> overrides of the chosen configuration, without the seed."""
    reference: str | None
    """A baseline that was named before any of these runs; None: each contender is tested for being
    the best."""
    by: list[str]
    """Configuration keys that separate the contenders."""
    metric: str
    seeds: list[int]
    power: float | None = None
    """Chance to detect `difference`; None: the seeds were named."""
    config_name: str | None = None
    config_dir: list[str] | None = None
    sweep: str | None = None
    """Path of the confirmed sweep, relative to the folder of this record; None: unknown."""
    difference: float | None = None
    """The smallest difference that matters, for which the seeds were planned; None: the seeds were
    named, or the spread is unknown."""
    spread: float | None = None
    """Standard deviation between seeds that the sweep showed."""

    def points(self) -> list[list[str]]:
        """List the overrides of each planned run: each contender on each seed."""
        points = []
        for overrides in self.contenders.values():
            points += [[*overrides, f"seed={seed}"] for seed in self.seeds]
        return points

    def write(self, folder: Path) -> None:
        """Write the plan into the folder of its runs.

        Raises:
            OSError: The disk refused the write.
        """
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(
            folder / RECORD, json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n"
        )

    def check(self) -> None:
        """Refuse a plan whose file holds values of wrong types.

        Raises:
            TypeError: A value has a wrong type, there is no seed, or a number is not above 0.
        """
        # 1. Texts, and lists of texts.
        optional = (self.reference, self.config_name, self.sweep)
        texts: list[object] = [self.metric, *(text for text in optional if text is not None)]
        for tokens in (self.by, self.config_dir or [], *self.contenders.values()):
            if not isinstance(tokens, list):
                raise TypeError(f"expected a list of strings, got {tokens!r}")
            texts += tokens
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("names, keys and overrides: expected strings")
        # 2. Seeds.
        if not isinstance(self.seeds, list) or not self.seeds:
            raise TypeError("seeds: expected a list")
        if not all(type(seed) is int for seed in self.seeds):  # True is none
            raise TypeError("seeds: expected whole numbers")
        # 3. Numbers; None is unknown.
        for number in (self.power, self.difference, self.spread):
            if number is None:
                continue
            if type(number) not in (int, float) or not 0 < number < math.inf:
                raise TypeError("power, difference, spread: expected numbers above 0")


def read_plan(folder: Path) -> ConfirmationPlan | None:
    """Read the plan of a confirmation folder; None for any other folder.

    Raises:
        ConfigError: The plan file cannot be read.
    """
    try:
        record = read_json(folder / RECORD)
        if record.pop("format") != FORMAT:
            raise ValueError(f"expected format {FORMAT}")
        plan = ConfirmationPlan(**record)  # a TypeError if a field is unknown or missing
        plan.check()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{folder / RECORD}: {error}. Move the folder away to plan a new confirmation."
        ) from error
    return plan


@dataclass(frozen=True, kw_only=True)
class ConfirmationRequest:
    """The options of a confirmation."""

    seeds: Sequence[int] | None = None
    """The fresh seeds; None: as many as needed, see `make_plan`."""
    power: float | None = None
    """Chance to detect the difference; None: `POWER`."""
    difference: float | None = None
    """The smallest difference that matters, in units of the metric; None: that of the sweep."""
    baseline: str | None = None
    """Baseline, metric and keys as for `analyse_runs`."""
    metric: str | None = None
    by: Sequence[str] = ()

    def line(self, sweep: Path, out: Path | None) -> list[str]:
        """Compose the `optrun confirm` command with these options, as shell words.

        Such as `["optrun", "confirm", "outputs/sweeps/a", "metric=eval/accuracy"]`. Without seeds,
        power and difference, which the recorded plan fixes.

        Args:
            sweep: The sweep to confirm.
            out: Directory of the confirming runs; None: the usual one, which needs no `out=`.
        """
        tokens = ["optrun", "confirm", str(sweep)]
        by = ",".join(self.by)
        options = {"baseline": self.baseline, "metric": self.metric, "by": by, "out": out}
        for key, value in options.items():
            if value:
                tokens.append(f"{key}={value}")
        return tokens


def load_or_make_plan(
    sweep: Path,
    folder: Path,
    request: ConfirmationRequest | None = None,
) -> tuple[ConfirmationPlan, str]:
    """Plan the confirmation of a sweep, or load the existing plan; nothing is written.

    Args:
        sweep: The sweep to confirm.
        folder: Directory of the confirming runs, where the existing plan lies; may be missing.
        request: The typed options.

    Returns:
        The plan, and a note about it for the user: why so many seeds, and what the runs cost, or
        that it is continued.

    Raises:
        ConfigError: As for `make_plan`; or the folder holds something else than a confirmation of
            this choice with these seeds.
    """
    request = request or ConfirmationRequest()
    other_plans = find_plans([sweep])
    # 1. Continue the recorded plan, unless it may be replaced.
    plan = read_plan(folder)
    if plan is not None and plan.sweep is not None:
        planned_sweep = (folder / plan.sweep).resolve()
        if planned_sweep.is_dir() and planned_sweep != sweep.resolve():
            raise ConfigError(f"{folder} confirms {planned_sweep}. Choose another out=DIR.")
    findings = _analyse_choice(sweep, [folder, *other_plans], request, plan)
    if plan is not None and not _may_replace_plan(request, plan, folder):
        _refuse_other_plan(findings, plan, request, folder)
        return plan, f"continues as planned: seeds {write_seeds(plan.seeds)}"
    # 2. Refuse a folder that holds something else.
    is_usable = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if plan is None and not is_usable:
        raise ConfigError(
            f"{folder} exists and holds no confirmation. Choose another folder with out=DIR."
        )
    # 3. Make a new plan on seeds that no other confirmation uses.
    used: set[int] = set()
    for other_folder, other_plan in other_plans.items():
        if other_folder.resolve() != folder.resolve():
            used.update(other_plan.seeds)
    plan, note = make_plan(findings, request, used)
    chosen_runs: list[Run] = []
    for contender in findings.ranked:
        chosen_runs += contender.configuration.latest_runs
    # 4. Add the cost to the note, which may be empty.
    cost = write_cost(len(plan.points()), chosen_runs)
    size = f"{len(plan.contenders)} configurations on {len(plan.seeds)} fresh seeds each"
    notes = [note] if note else []
    notes.append(f"{size}: {cost}. {_ALL_RUN}")
    sweep_path = os.path.relpath(sweep.resolve(), folder.resolve())
    return replace(plan, sweep=sweep_path), ". ".join(notes)


def _analyse_choice(
    sweep: Path,
    beside: Sequence[Path],
    request: ConfirmationRequest,
    plan: ConfirmationPlan | None,
) -> Findings:
    """Analyse the runs of a sweep by the typed metric, baseline and keys, else the planned ones.

    Args:
        sweep: The sweep that is confirmed.
        beside: Folders of confirmations, whose runs are left out.
        request: The typed options.
        plan: The plan so far, if there is one.

    Raises:
        ConfigError: No run is found, or one is a fork of a trunk.
    """
    runs = require_runs([sweep], beside=beside)
    for run in runs:
        if Fork.of(run.summary) is not None:
            raise ConfigError(
                f"confirm {sweep}: {run.label} branched from a trunk, which has one seed:"
                f" {MORE_TRUNKS}."
            )
    metric = request.metric
    baseline = request.baseline
    by = request.by
    if plan is not None:
        metric = metric or plan.metric
        baseline = baseline or plan.reference
        by = by or plan.by
    tuned = tuned_keys(run.path.parent for run in runs)
    return analyse_runs(
        runs,
        metric=metric,
        baseline=baseline,
        by=by,
        tuned=tuned,
    )


def _refuse_other_plan(
    findings: Findings,
    plan: ConfirmationPlan,
    request: ConfirmationRequest,
    folder: Path,
) -> None:
    """Refuse to continue a plan if the sweep now chooses otherwise, or other seeds were typed.

    Raises:
        ConfigError: The sweep now chooses other contenders, another baseline or another metric
            than the plan; or other seeds, power or difference were typed.
    """
    # 1. Compare it with the plan that would be made now; the difference in size is step 2.
    current, _ = make_plan(findings, ConfirmationRequest(seeds=plan.seeds))
    changed = [
        name
        for name, overrides in current.contenders.items()
        if overrides != plan.contenders.get(name)
    ]
    reasons = []
    if changed:
        reasons.append(f"{', '.join(changed)} changed since")
    else:
        for key, value, planned in (
            ("contenders", len(current.contenders), len(plan.contenders)),
            ("baseline", current.reference, plan.reference),
            ("metric", current.metric, plan.metric),
        ):
            if value != planned:
                reasons.append(f"{key}={value}, planned with {planned or 'none'}")
    if reasons:
        raise ConfigError(
            f"{folder} confirms another choice: {'; '.join(reasons)}. To begin another"
            " confirmation, add out=DIR."
        )
    # 2. Compare it with the typed seeds.
    if not _has_same_size(request, plan):
        raise ConfigError(
            f"{folder} was planned with seeds {write_seeds(plan.seeds)}; adding seeds until"
            " something shows would raise the error rate. To continue it, leave out seeds=, power="
            " and difference=; to begin another, add out=DIR."
        )


def _has_same_size(request: ConfirmationRequest, plan: ConfirmationPlan) -> bool:
    """Tell whether the typed seeds, power and difference, if any, agree with the plan."""
    return (
        request.seeds in (None, plan.seeds)
        and request.power in (None, plan.power)
        and request.difference in (None, plan.difference)
    )


def _may_replace_plan(request: ConfirmationRequest, plan: ConfirmationPlan, folder: Path) -> bool:
    """Tell whether a new plan replaces this one.

    It does if other seeds, power or difference were typed, and no planned run has ended.
    """
    if _has_same_size(request, plan):
        return False
    return not any(run.ended for run in load_runs([folder]))


def write_cost(count: int, similar_runs: Iterable[Run]) -> str:
    """Write how many runs there will be and how long they train, from the mean of similar runs.

    Writes only the count if no similar run recorded its wall time.
    """
    seconds = [run.wall_seconds for run in similar_runs if run.wall_seconds]
    runs = plural(count, "run")
    if not seconds:
        return runs
    return f"{runs}, about {duration(count * sum(seconds) / len(seconds))} of training"


def make_plan(
    findings: Findings,
    request: ConfirmationRequest,
    used: Collection[int] = (),
) -> tuple[ConfirmationPlan, str]:
    """Choose the configurations and seeds of a confirmation.

    Args:
        findings: Findings of the sweep that is confirmed.
        request: The typed options. Without seeds, as many are planned as detect the smallest
            difference that matters, whatever difference the sweep observed.
        used: Seeds of earlier confirmations of the sweep. None is chosen again; if the user typed
            one, it is kept and the note names it.

    Returns:
        The plan, and a note about it for the user.

    Raises:
        ConfigError: There is nothing to compare yet, or at all; a seed was used in the sweep; or a
            configuration cannot be typed again.
    """
    contenders = findings.ranked
    # 1. Refuse a sweep without a choice to confirm.
    if findings.incomparable:
        raise ConfigError(f"There is nothing to confirm: {findings.incomparable}.")
    unended = sum(run.is_waiting for run in findings.runs)
    if len(contenders) < 2 and unended:
        raise ConfigError(
            f"There is nothing to confirm yet: the sweep has {unended} of {len(findings.runs)} runs"
            " left. Repeat its command; only these start."
        )
    if len(contenders) < 2:
        raise ConfigError(
            "There is nothing to confirm: it takes results of two or more contenders. Give the"
            " folder of a sweep over optimizers."
        )
    sweep_seeds = {run.seed for run in findings.runs if run.seed is not None}
    # One run of each chosen configuration, whose overrides are repeated.
    runs = {contender.name: contender.configuration.latest_runs[0] for contender in contenders}
    recipes = {(run.config_name, *run.config_dir) for run in runs.values()}
    if len(recipes) > 1:
        raise ConfigError(
            "The contenders come from several recipes: confirm the sweep of each recipe separately."
        )
    # 2. Plan to repeat the chosen configuration of each contender.
    plan = ConfirmationPlan(
        contenders={name: _repeatable_overrides(name, run) for name, run in runs.items()},
        reference=findings.baseline,
        by=findings.compared_keys,
        metric=findings.metric,
        seeds=list(request.seeds or ()),
        config_name=runs[contenders[0].name].config_name,
        config_dir=list(runs[contenders[0].name].config_dir),
    )
    # 3. Choose the seeds, or check the typed ones. The first fresh seed follows all used ones.
    first = max({*sweep_seeds, *used}, default=-1) + 1
    if request.seeds is None:
        return _choose_seeds(plan, findings, request, first)
    refuse_used_seeds(request.seeds, sweep_seeds)
    repeated_seeds = sorted(set(used) & set(request.seeds))
    if not repeated_seeds:
        return plan, ""
    seeds = write_seeds(repeated_seeds)
    return plan, f"seeds {seeds} ran in a confirmation before; unused: from {first} on"


def _repeatable_overrides(name: str, run: Run) -> list[str]:
    """Return the overrides of a run to repeat, without seed, resume and Hydra's keys.

    Args:
        name: Name of the contender, for the message.
        run: The run. Its files may come from elsewhere and contain anything.

    Raises:
        ConfigError: An override is an option such as `--plugin`, or runs the code of a model;
            only a user may type these.
    """
    for token in run.overrides:
        if token.startswith("-") or token.lstrip("+").startswith("model.trust_remote_code="):
            raise ConfigError(
                f"{name}: its run used {token}, which optrun does not take from a file. Type its"
                " command on fresh seeds yourself."
            )
    # `_SET_ANEW` are `seed=`, `resume=` and Hydra's keys; + and ~ may stand before a key.
    return [token for token in run.overrides if not token.lstrip("+~").startswith(_SET_ANEW)]


def _choose_seeds(
    plan: ConfirmationPlan,
    findings: Findings,
    request: ConfirmationRequest,
    first: int,
) -> tuple[ConfirmationPlan, str]:
    """Add as many fresh seeds to a plan as detect the smallest difference that matters.

    1. If the sweep shows no spread between seeds, or no smallest difference is known:
       `SEEDS_WITHOUT_SPREAD`.
    2. Else as many as find the smallest difference with the chance `power`, see `seeds_for`. The
       difference that the sweep observed is not used: it was selected for being large.
    3. If these are more than `MOST_SEEDS`: `MOST_SEEDS`, and the note says so.

    Args:
        plan: The plan without seeds.
        findings: Findings of the sweep.
        request: The typed options.
        first: The smallest new seed.

    Returns:
        The plan, and a note about it for the user.
    """
    # 1. The difference to find, and the spread between seeds.
    ttest = findings.ttest
    power = request.power or POWER
    difference = request.difference or (ttest.matters if ttest is not None else math.nan)
    sd, degrees = residual_sd(
        contender.configuration.finished_scores for contender in findings.ranked
    )
    if not (sd > 0 and difference > 0):
        count = SEEDS_WITHOUT_SPREAD
        seeds = list(range(first, first + count))
        plan = replace(plan, seeds=seeds, power=power, difference=request.difference)
        return plan, f"{count} fresh seeds: the sweep says nothing of the spread between seeds"
    # 2. The number of seeds; None: more than `MOST_SEEDS`.
    needed = seeds_for(
        difference,
        sd=sd,
        degrees=degrees,
        contenders=len(findings.ranked),
        baseline=findings.baseline is not None,
        power=power,
        most=MOST_SEEDS,
    )
    seeds = list(range(first, first + (needed or MOST_SEEDS)))
    # 3. The note; a chance of 0.8 is written as 4 of 5 cases.
    chance = Fraction(power).limit_denominator(100)
    cases = f"{chance.numerator} of {chance.denominator} cases"
    size = f"a difference of {difference:.4g} {plan.metric}"
    spread = f"at the spread of {sd:.2g} between seeds"
    note = f"{len(seeds)} fresh seeds find {size} in {cases}, {spread}"
    if not needed:
        note = (
            f"{len(seeds)} fresh seeds, the most that are planned: to find {size} in {cases} would"
            f" take more, {spread}. difference=NUMBER plans for a larger difference"
        )
    plan = replace(
        plan,
        seeds=seeds,
        power=power,
        difference=difference,
        spread=sd,
    )
    return plan, note


def refuse_used_seeds(seeds: Sequence[int], used_seeds: Collection[int]) -> None:
    """Refuse fewer than `MIN_SEEDS` seeds, and seeds already used in the sweep.

    Args:
        seeds: Seeds of the confirmation.
        used_seeds: Seeds of the sweep that is confirmed.

    Raises:
        ConfigError: The message names the first unused seeds.
    """
    first = max(used_seeds, default=-1) + 1
    last = first + max(len(seeds), MIN_SEEDS) - 1
    repeated = sorted(set(used_seeds) & set(seeds))
    if repeated:
        raise ConfigError(
            f"seeds: {', '.join(map(str, repeated))} took part in the choice, so results on them"
            f" favour the chosen configurations. Use fresh seeds, such as seeds={first}-{last}."
        )
    if len(seeds) < MIN_SEEDS:
        raise ConfigError(
            f"seeds: expected at least {MIN_SEEDS}, got {len(seeds)}: fewer cannot be tested. Use"
            f" more, such as seeds={first}-{last}."
        )


def write_seeds(seeds: Sequence[int]) -> str:
    """Write seeds as text, consecutive ones as a range.

    Example:
        >>> write_seeds([5, 6, 7]), write_seeds([5, 7])
        ('5-7', '5, 7')
    """
    if len(seeds) > 1 and list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"{seeds[0]}-{seeds[-1]}"
    return ", ".join(map(str, seeds))


def find_plans(directories: Sequence[Path]) -> Mapping[Path, ConfirmationPlan]:
    """Find the confirmations with a run beneath some directories, at any depth: folder -> plan.

    A directory that is itself a confirmation is not in the result.
    """
    plans: dict[Path, ConfirmationPlan] = {}
    for directory in directories:
        # The runs of a confirmation lie in one folder; `dict.fromkeys` looks at it once.
        for folder in dict.fromkeys(run.parent for run in find_runs(directory)):
            is_beneath = directory.resolve() in folder.resolve().parents
            if not is_beneath:  # the directory itself, or above it
                continue
            plan = read_plan(folder)
            if plan is not None:
                plans[folder] = plan
    return plans
