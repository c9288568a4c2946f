"""Read run directories; missing or torn files become messages, not errors."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from optrun.artifacts.lock import is_held
from optrun.artifacts.metrics import MetricsLog, read_metrics, read_summary
from optrun.artifacts.objective import best_evaluation
from optrun.artifacts.run_dir import RunDir, find_runs
from optrun.base import shell
from optrun.base.bounded_yaml import interpolations, yaml_mapping
from optrun.base.errors import EXIT_NONFINITE, ConfigError, OtherFormatError, printable
from optrun.base.formatting import plain
from optrun.base.plain import flat, lookup
from optrun.report.sweep_folder import find_unended_jobs, in_sweep

Array = NDArray[np.float64]
Setting = str | int | float | None
"""A leaf of a configuration; a list is one, as its text."""
T = TypeVar("T")

STATUSES = ("finished", "running", "interrupted", "failed")
NOT_STARTED = "not started"
"""The status of a job of a sweep that has not begun: it has no summary, and may have no folder."""
_OVERRIDE = re.compile(r"(\+{0,2}[A-Za-z_][\w./@-]*=|~[A-Za-z_])", re.ASCII)
"""The beginning of an override; an option begins with a dash."""
_FLOAT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


@dataclass
class Run:
    """One run, read from its directory."""

    path: Path
    label: str
    """The path as short as it stays unique among the runs read together."""
    status: str
    """One of `STATUSES`, `NOT_STARTED`, or "unknown" without a readable summary."""
    message: str = ""
    """The recorded reason for its end; empty if there is none."""
    config: dict[str, Setting] = field(default_factory=dict)
    """Dotted keys of `config.yaml`; empty where there is none."""
    summary: dict[str, object] = field(default_factory=dict)
    """`summary.json`; empty where there is none."""
    log: MetricsLog = field(default_factory=MetricsLog)
    """`metrics.jsonl`."""
    problems: list[str] = field(default_factory=list)
    """One message per file that is missing, torn or unreadable."""
    overrides: list[str] = field(default_factory=list)
    """What was typed to get this configuration."""
    values: Mapping[str, object] = field(default_factory=dict)
    """The whole `config.yaml`; empty where there is none."""
    is_waiting: bool = False
    """Whether the last command of its sweep is still to begin or end it."""
    respelt: dict[str, Setting] = field(default_factory=dict)
    """Key -> path as another run spells it; see `unify_paths`."""

    @property
    def has_config(self) -> bool:
        """Whether the whole configuration is known."""
        return bool(self.values)

    def setting(self, key: str) -> Setting:
        """Return the value of a key, with paths in the common spelling.

        None if the run has no such key.
        """
        return self.respelt.get(key, self.config.get(key))

    def settings(self, keys: Iterable[str]) -> tuple[object, ...]:
        """Normalise the settings of some keys: 1 and 1.0 are equal, True and 1 are not."""
        return tuple(normalise_setting(self.setting(key)) for key in keys)

    def from_summary(self, *path: str) -> object:
        """Look up a value of the summary, such as `from_summary("data", "fingerprint")`.

        None if it is missing.
        """
        return lookup(self.summary, *path)

    @property
    def seed(self) -> int | None:
        """The seed of the configuration."""
        value = self.config.get("seed")
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        return None

    @property
    def optimizer(self) -> str:
        """The name of the optimizer; empty if it is unknown."""
        return str(self.config.get("optimizer.name") or "")

    @property
    def lr(self) -> float | None:
        """The peak learning rate."""
        return to_number(self.config.get("lr"))

    @cached_property
    def global_step(self) -> int:
        """Optimizer steps done."""
        steps = self.summary.get("global_step")
        if isinstance(steps, int):
            return steps
        return max((record["step"] for record in self.log.records), default=0)

    @property
    def max_steps(self) -> int | None:
        """Planned optimizer steps; None if they are unknown, or follow from the data."""
        for value in (self.summary.get("max_steps"), self.config.get("training.max_steps")):
            if isinstance(value, int) and value > 0:
                return value
        return None

    @property
    def finished(self) -> bool:
        """Tell whether the run recorded its own end."""
        return self.status == "finished"

    @property
    def ended(self) -> bool:
        """Tell whether the run is done, with a result or without."""
        return self.status in ("finished", "failed")

    def series(self, name: str) -> tuple[Array, Array]:
        """Return steps and values of one metric, by rising step; shapes (n,) and (n,)."""
        steps, values = self.log.series(name)
        return np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)

    def finite_values(self, name: str, axis: str) -> tuple[Array, Array]:
        """Return the finite values of a metric, and where they lie on an axis.

        Args:
            name: The metric.
            axis: `step`, or a metric such as `epoch`, which is interpolated.

        Returns:
            x and y, shapes (n,).
        """
        steps, values = self.series(name)
        x = steps if axis == "step" else self.interpolate(axis, steps)
        is_finite = np.isfinite(x) & np.isfinite(values)
        return x[is_finite], values[is_finite]

    def before_training(self, name: str) -> float | None:
        """Return the finite value of a metric before the first step; None if there is none."""
        steps, values = self.series(name)
        if len(steps) and steps[0] == 0 and math.isfinite(values[0]):
            return float(values[0])
        return None

    def untrained_score(self, metric: str, mode: str) -> float | None:
        """Return the metric before the first step, else its worst finite value, if there is one."""
        before = self.before_training(metric)
        if before is not None:
            return before
        finite = [value for value in self.log.series(metric)[1] if math.isfinite(value)]
        if not finite:
            return None
        if mode == "min":
            return max(finite)
        return min(finite)

    def interpolate(self, name: str, steps: Array) -> Array:
        """Interpolate a metric at steps; NaN beyond the logged range. Shape (n,)."""
        logged, values = self.series(name)
        if not len(logged):
            return np.full(len(steps), np.nan)
        return np.interp(steps, logged, values, left=np.nan, right=np.nan)

    def last(self, name: str) -> float | None:
        """Return the last value of a metric, NaN included; None if it was never logged."""
        value = to_number(self.from_summary("metrics", "last", name))
        if value is not None:
            return value
        logged = self.log.series(name)[1]
        if logged:
            return logged[-1]
        return None

    def best(self, name: str, mode: str) -> tuple[float, int] | None:
        """Find the best finite value of a metric after step 0, and its step; None without one."""
        step = best_evaluation(self.log, name, mode)
        if step is None:
            return None
        values = dict(zip(*self.log.series(name), strict=True))
        return values[step], step

    @cached_property
    def diverged(self) -> str:
        """Explain why the run counts as diverged, in a clause; empty if it does not.

        A run diverged if the policy for non-finite numbers stopped it, or if the last value of its
        training loss or evaluation loss is NaN or infinite. A bad finite score is not divergence.
        """
        if self.status == "failed" and self.summary.get("exit_code") == EXIT_NONFINITE:
            return f"stopped at step {self.global_step:,} by numbers that are not finite"
        for name in ("train/loss", "eval/loss"):
            steps, values = self.series(name)
            finite = np.flatnonzero(np.isfinite(values))
            # The index after the last finite value; 0 if none is finite. There is no value at it if
            # the last one is finite.
            first_bad = int(finite[-1]) + 1 if len(finite) else 0
            if first_bad < len(steps):
                return f"{name} not finite from step {int(steps[first_bad]):,}"
        return ""

    def score(self, metric: str) -> float | None:
        """Return the last value of the metric, if the run finished and the value is finite.

        None for a diverged run: `build_configurations` gives it a score that stands in.
        """
        if not self.finished or self.diverged:
            return None
        value = self.last(metric)
        if value is not None and math.isfinite(value):
            return value
        return None

    def perf(self, name: str) -> float | None:
        """Return a number of the section `perf` of the summary."""
        value = to_number(self.from_summary("perf", name))
        if value is not None and math.isfinite(value):
            return value
        return None

    @property
    def device(self) -> str:
        """The recorded `CUDA_VISIBLE_DEVICES`; empty if it was not set."""
        return str(self.from_summary("device", "cuda_visible_devices") or "")

    @property
    def wall_seconds(self) -> float | None:
        """Seconds of wall clock the run took."""
        return to_number(self.from_summary("wall_seconds"))

    @property
    def batch(self) -> int | None:
        """Training examples of an optimizer step over all ranks; None if they are unknown."""
        size = to_number(self.config.get("training.global_batch_size"))
        if not size:
            micro_batch = to_number(self.config.get("training.per_device_train_batch_size"))
            accumulated = to_number(self.config.get("training.gradient_accumulation_steps", 1))
            ranks = to_number(self.from_summary("hardware", "ranks")) or 1
            size = (micro_batch or 0) * (accumulated or 0) * ranks
        return int(size) or None  # 0: one of the factors is unknown

    @property
    def samples(self) -> int | None:
        """Training examples of all planned steps; None if they are unknown."""
        if self.max_steps and self.batch:
            return self.max_steps * self.batch
        return None

    def overrides_without(self, prefixes: tuple[str, ...]) -> list[str]:
        """List the recorded overrides, without those with one of some prefixes.

        Options and other words, which may stand in a file from elsewhere, are left out.
        """
        return [
            token
            for token in self.overrides
            if _OVERRIDE.match(token) and not token.lstrip("+").startswith(prefixes)
        ]

    def command(self, *, seeds: Sequence[int] = ()) -> str:
        """Compose the shell line to repeat this run.

        It is built from the parsed parts of the recorded line, never copied: a run's files may come
        from elsewhere and contain anything.

        Args:
            seeds: If there are several, the line is a sweep over them instead of the run's seed,
                such as `optrun -m optimizer=lamb lr=2e-3 seed=0,1,2`.
        """
        is_sweep = len(seeds) > 1
        # 1. Program, plugins and recipe.
        tokens = ["optrun", *plugins_of([self])]
        if is_sweep:
            tokens.append("-m")
        if self.config_name:
            tokens += ["-cn", self.config_name]
        tokens += self.config_dir
        # 2. The recipe may itself be a sweep, of which this run is one job: turn its grid off.
        if "hydra.mode=RUN" in self._argv and is_sweep:
            tokens += ["hydra/sweeper=grid", "hydra.sweeper.grids=[]"]
        elif "hydra.mode=RUN" in self._argv:
            tokens.append("hydra.mode=RUN")
        # 3. The overrides, and the seeds.
        left_out = ("resume=", "hydra.", "seed=") if is_sweep else ("resume=", "hydra.")
        tokens += self.overrides_without(left_out)
        if is_sweep:
            tokens.append(f"seed={','.join(map(str, seeds))}")
        return shell.join(tokens)

    @property
    def config_name(self) -> str | None:
        """The recipe; None: the default."""
        name = self.summary.get("config_name")
        if name and name != "config":
            return str(name)
        return None

    @property
    def config_dir(self) -> list[str]:
        """Return the words `--config-dir DIR` of the command line; empty if it has none."""
        arguments = iter(self._argv)
        for argument in arguments:
            name, equals, value = argument.partition("=")
            if name in ("--config-dir", "-cd"):
                # Either `-cd=DIR` or `-cd DIR`.
                folder = value if equals else next(arguments, "")
                if folder:
                    return ["--config-dir", folder]
        return []

    @property
    def _argv(self) -> list[str]:
        """Return the recorded command line."""
        try:
            return shlex.split(str(self.summary.get("command") or ""))
        except ValueError:  # a quotation mark without its partner: not written by optrun
            return []

    def values_in_records(self, section: str, key: str, kind: type[T]) -> list[T]:
        """List the values of a key in the records of a section of the summary.

        Values of another type are skipped.

        Args:
            section: A list of records, such as `resumes` or `plugins`; may be missing or torn.
            key: The key of the value in each record.
            kind: Type of the values.
        """
        records = self.summary.get(section)
        if not isinstance(records, list):
            return []
        values: list[T] = []
        for record in records:
            value = lookup(record, key)
            if isinstance(value, kind):
                values.append(value)
        return values


def plugins_of(runs: Iterable[Run]) -> list[str]:
    """List the `--plugin FILE` words of some runs, each plugin once."""
    names: dict[str, None] = {}
    for run in runs:
        names |= dict.fromkeys(run.values_in_records("plugins", "plugin", str))
    arguments: list[str] = []
    for name in names:
        arguments += ["--plugin", name]
    return arguments


def all_keys(runs: Iterable[Run]) -> list[str]:
    """List the configuration keys of some runs, each once."""
    keys: dict[str, None] = {}
    for run in runs:
        keys |= dict.fromkeys(run.config)
    return list(keys)


def normalise_setting(value: object) -> object:
    """Normalise a setting for comparison: 1 equals 1.0, while True and 1 stay different.

    Numbers become float. None, True and False become text, so they equal the texts "None", "True"
    and "False". Anything else, such as a text, is returned unchanged.
    """
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, (int, float)):
        return float(value)
    return value


def to_number(value: object) -> float | None:
    """Convert a number to float.

    None for anything else, such as booleans and integers too large for a float.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    if isinstance(value, float) or abs(value) < 10**300:
        return float(value)
    return None


def load_run(path: Path, *, label: str = "", planned: Sequence[str] = ()) -> Run:
    """Read one run directory; unreadable files become messages in `problems`.

    The status is that of the summary. Without a readable one it is inferred: `running` while the
    run holds its lock, `not started` or `interrupted` for a job of a sweep, `failed` if the run
    wrote nothing, else `unknown`.

    Args:
        path: The directory.
        label: Name in the report; empty: the directory's name.
        planned: Overrides of a sweep's job that has not begun.
    """
    # 1. Read the files; keep a message for each that cannot be read.
    files = RunDir(path)
    problems: list[str] = []
    # The locks are checked before the files are read, because the run may write them meanwhile.
    is_locked = is_held(files.lock) or is_held(path)
    is_unbegun = in_sweep(path) and (files.is_unbegun() or not path.exists())

    def read_or_note(read: Callable[[Path], T], file: Path, absent: T) -> T:
        try:
            return read(file)
        except FileNotFoundError:
            problems.append(f"{file.name} is missing")
        except (OSError, ValueError, OtherFormatError) as error:
            problems.append(f"{file.name} cannot be read: {str(error).removeprefix(f'{file}: ')}")
        return absent

    summary: dict[str, object] = read_or_note(read_summary, files.summary, {})
    values: dict[str, object] = read_or_note(read_config, files.config, {})
    log: MetricsLog = read_or_note(read_metrics, files.metrics, MetricsLog())
    problems += log.problems
    recorded = summary.get("overrides")
    overrides = recorded if isinstance(recorded, list) else planned
    status = str(summary.get("status"))
    message = str(summary.get("message") or "")
    # 2. Infer the status of a run without a summary; the order of the cases matters.
    if is_locked and not summary:  # it loads model and data, and has written nothing yet
        status = "running"
        problems = []
    elif is_unbegun:
        status = NOT_STARTED
        problems = []
    elif in_sweep(path) and not log.records and not files.summary.exists():
        # A failed job of a sweep has a summary.
        status = "interrupted"
        message = "was cut before it logged anything"
    elif not summary and not log.records:
        status = "failed"
        message = "ended before it wrote anything"
    elif status not in STATUSES:
        status = "unknown"
    return Run(
        path=path,
        label=plain(label or path.name),
        status=status,
        message=plain(message),
        config=flatten(values),
        summary=summary,
        log=log,
        problems=[plain(problem.removeprefix(f"{path}/")) for problem in problems],
        overrides=[str(item) for item in overrides],
        values=values,
    )


def load_runs(directories: Iterable[Path], *, beside: Iterable[Path] = ()) -> list[Run]:
    """Read every run at or beneath some directories, each once.

    First the runs with files: by directory as given, in natural order within each (2 before 10).
    Then the jobs of their sweeps that have no files yet, in the order of the sweep's record. The
    label of a run is its path below the folder that all of them share.

    Args:
        directories: Runs, sweeps, or folders that hold runs or sweeps.
        beside: Folders whose runs are left out, such as those of confirmations. It does not apply
            to jobs that a sweep has yet to end, if the sweep is one of `directories` or holds a run
            that is not left out.
    """
    left_out = [path.resolve() for path in beside]
    # Both map a real path to the path as it was found and the planned overrides, which count only
    # for a job without files. `jobs` are found by their files. `waiting` are found in the record of
    # their sweep, which has yet to begin or end them. A job that was begun and has not ended is in
    # both: it stays where `jobs` has it, and `is_waiting` of its run is set.
    jobs: dict[Path, tuple[Path, list[str]]] = {}
    waiting: dict[Path, tuple[Path, list[str]]] = {}
    for directory in directories:
        # 1. Find the runs, and the folders that may be their sweeps.
        sweeps = {directory: None}  # an ordered set
        for path in find_runs(directory):
            if any(map(path.resolve().is_relative_to, left_out)):
                continue
            jobs[path.resolve()] = (path, [])
            if path != directory:
                sweeps[path.parent] = None
        # 2. Find the jobs that these sweeps have yet to begin or to end.
        for sweep in sweeps:
            for path, overrides in find_unended_jobs(sweep).items():
                waiting[path.resolve()] = (path, overrides)
    for real_path, job in waiting.items():
        jobs.setdefault(real_path, job)  # what has files is in `jobs` already
    # 3. Read all of them; the labels begin below the folder that all share.
    common = os.path.commonpath([real_path.parent for real_path in jobs]) if jobs else ""
    runs = []
    for real_path, (path, overrides) in jobs.items():
        label = real_path.relative_to(common).as_posix()
        run = load_run(path, label=label, planned=overrides)
        run.is_waiting = real_path in waiting and not run.ended
        runs.append(run)
    return runs


def require_runs(directories: Sequence[Path], *, beside: Iterable[Path]) -> list[Run]:
    """Read the runs of directories as `load_runs`.

    Raises:
        ConfigError: No run is found.
    """
    runs = load_runs(directories, beside=beside)
    if not runs:
        raise ConfigError(
            f"{', '.join(map(str, directories))}: no run found here or beneath (a run has"
            " metrics.jsonl or summary.json). Give the folder of a run or a sweep."
        )
    return runs


def read_config(path: Path) -> dict[str, object]:
    """Read a resolved configuration.

    Args:
        path: A YAML file with a mapping at the top.

    Returns:
        Nested plain values; `1e-3`, a string in YAML 1.1, is a number here.

    Raises:
        OSError: The file cannot be read.
        ValueError: It holds no YAML mapping of resolved values.
    """
    config = yaml_mapping(path)
    for key, _ in interpolations(config):  # the first one is reason enough
        raise ValueError(f"{path}: {key} holds `${{`: expected a resolved value")
    return dict(_convert_numbers(config))


def flatten(config: Mapping[str, object]) -> dict[str, Setting]:
    """Flatten a configuration to dotted keys and leaf values; lists and empty mappings are texts.

    Two values become part of a name: the `kind` of a plugin's choice, which is the choice of optrun
    that it builds on, and the class of an optimizer of pytorch-optimizer, since the library's
    `lamb` is not optrun's.

    Example:
        >>> flatten({"lr": 1.0, "optimizer": {"name": "lamb", "betas": [0.9, 0.999]}})
        {'lr': 1.0, 'optimizer.name': 'lamb', 'optimizer.betas': '[0.9, 0.999]'}
        >>> flatten({"optimizer": {"name": "mine", "kind": "lamb"}})
        {'optimizer.name': 'mine (lamb)'}
        >>> flatten({"optimizer": {"name": "pytorch_optimizer", "class_name": "lamb"}})
        {'optimizer.name': 'lamb (pytorch_optimizer)'}
    """
    named = {
        key: _name_with_kind(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
    }
    settings = flat(named)
    for key, value in settings.items():
        if not isinstance(value, str | int | float | None):
            settings[key] = repr(value)
    return settings


def _name_with_kind(section: Mapping[str, object]) -> dict[str, object]:
    """Fold `kind` and `class_name` of a section into its name.

    A plugin's choice becomes `NAME (KIND)`, a class of a library `CLASS (NAME)`. Other sections are
    copied as they are.

    Example:
        >>> _name_with_kind({"name": "mine", "kind": "lamb", "eps": 1e-6})
        {'name': 'mine (lamb)', 'eps': 1e-06}
    """
    named = dict(section)
    if {"kind", "name"} <= set(named):
        named["name"] = f"{named['name']} ({named.pop('kind')})"
    if {"class_name", "name"} <= set(named):
        named["name"] = f"{named.pop('class_name')} ({named['name']})"
    return named


def _convert_numbers(value: object) -> Any:
    """Turn texts such as `1e-3` into numbers, at any depth; other texts become printable."""
    if isinstance(value, str):
        if _FLOAT.fullmatch(value):
            return float(value)
        return printable(value)
    if isinstance(value, dict):
        return {printable(str(key)): _convert_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_convert_numbers(item) for item in value]
    return value
