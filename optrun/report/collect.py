"""Read run directories; what is missing or torn is shown, instead of failing on it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from optrun.artifacts.lock import is_held
from optrun.artifacts.metrics import MetricsLog, read_metrics, read_summary
from optrun.artifacts.objective import best_evaluation
from optrun.artifacts.run_check import problems_of
from optrun.artifacts.run_dir import CONFIG, HYDRA, METRICS, SUMMARY, RunDir, find_runs
from optrun.errors import EXIT_NONFINITE, OtherFormatError
from optrun.formatting import plain
from optrun.reading import read_text
from optrun.report.config_file import flatten, read_config
from optrun.report.waiting import find_waiting, in_sweep

Array = NDArray[np.float64]
T = TypeVar("T")

STATUSES = ("finished", "running", "interrupted", "failed")
NOT_STARTED = "not started"
"""The status of a job of a sweep that has not begun: it has no summary, and may have no folder."""
_DIVERGED_FACTOR = 1.5  # a loss that ends this much above where it began did not merely fail to learn


@dataclass
class Run:
    """One run as its directory tells it."""

    path: Path
    label: str
    """The path as short as it stays unique among the runs read together."""
    status: str
    """One of `STATUSES`, `NOT_STARTED`, or "unknown" where no summary says it."""
    message: str
    """Why it ended as it did, as far as the run recorded it."""
    config: dict[str, Any]
    """Dotted keys of `config.yaml`; empty where there is none."""
    summary: dict[str, Any]
    """`summary.json`; empty where there is none."""
    log: MetricsLog
    """`metrics.jsonl`."""
    problems: list[str] = field(default_factory=list)
    """One message per file that is missing, torn or unreadable."""
    overrides: list[str] = field(default_factory=list)
    """What was typed to get this configuration."""
    described: bool = True
    """Whether `config` is the whole `config.yaml`, not the little that the command line says."""
    respelt: dict[str, Any] = field(default_factory=dict)
    """Keys whose path another run spells otherwise, and that spelling; see `paths.respell`."""

    def setting(self, key: str) -> Any:
        """What the run is compared by: the value of a key, a path as all runs spell it; None where there is none."""
        return self.respelt.get(key, self.config.get(key))

    @property
    def seed(self) -> int | None:
        """The seed of the configuration."""
        value = self.config.get("seed")
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def optimizer(self) -> str:
        """The name of the optimizer, or nothing."""
        return str(self.config.get("optimizer.name") or "")

    @property
    def lr(self) -> float | None:
        """The peak learning rate."""
        return number(self.config.get("lr"))

    @cached_property
    def global_step(self) -> int:
        """Optimizer steps done."""
        value = self.summary.get("global_step")
        if isinstance(value, int):
            return value
        return max((record["step"] for record in self.log.records), default=0)

    @property
    def max_steps(self) -> int | None:
        """Optimizer steps the schedule was made for."""
        for value in (self.summary.get("max_steps"), self.config.get("training.max_steps")):
            if isinstance(value, int) and value > 0:
                return value
        return None

    @property
    def finished(self) -> bool:
        """Whether the run says that it came to its end."""
        return self.status == "finished"

    def series(self, name: str) -> tuple[Array, Array]:
        """Steps and values of one metric, by rising step; shapes (n,) and (n,)."""
        steps, values = self.log.series(name)
        return np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)

    def trained(self, name: str) -> tuple[Array, Array]:
        """The same after a step of training: without the evaluation before the first step."""
        steps, values = self.series(name)
        return steps[steps > 0], values[steps > 0]

    def before_training(self, name: str) -> float | None:
        """The finite value of a metric before the first step; None where there is none."""
        steps, values = self.series(name)
        return float(values[0]) if len(steps) and steps[0] == 0 and math.isfinite(values[0]) else None

    def elapsed(self, steps: Array) -> Array:
        """Seconds since the start of the run at given logged steps; NaN where no time was logged. Shape (n,)."""
        logged, times = self.series("time")
        if len(times) and times[0] > 1e8:  # seconds since 1970
            times = times - times[0]
        return _between(steps, logged, times)

    def epochs(self, steps: Array) -> Array:
        """Passes over the training data at given logged steps; NaN where none was logged. Shape (n,)."""
        return _between(steps, *self.series("epoch"))

    def last(self, name: str) -> float | None:
        """The last value of a metric, NaN included; None where it was never logged."""
        value = number(_inside(self.summary, "metrics", "last", name))
        if value is not None:
            return value
        _, values = self.series(name)
        return float(values[-1]) if len(values) else None

    def best(self, name: str, mode: str) -> tuple[float, int] | None:
        """Best finite value of a metric and its step."""
        if (step := best_evaluation(self.log, name, mode)) is not None:
            steps, values = self.log.series(name)
            return values[steps.index(step)], step
        value, at = (number(_inside(self.summary, "metrics", "best", name, leaf)) for leaf in ("value", "step"))
        return (value, int(at)) if value is not None and at is not None and math.isfinite(value) else None

    @cached_property
    def diverged(self) -> str:
        """Why the run counts as diverged; empty where it does not.

        Diverged: stopped by the policy for non-finite numbers, a loss that is not finite at its last evaluation or last
        logged step, or a training loss whose last tenth lies more than half above its first value.
        """
        if self.status == "failed" and self.summary.get("exit_code") == EXIT_NONFINITE:
            return f"stopped at step {self.global_step:,} by numbers that are not finite"
        for name in ("train/loss", "eval/loss"):
            steps, values = self.series(name)
            bad = ~np.isfinite(values)
            if len(values) and bad[-1]:
                first = int(steps[np.flatnonzero(~bad)[-1] + 1]) if (~bad).any() else int(steps[0])
                return f"{name} not finite from step {first:,}"
            final = self.last(name)
            if final is not None and not math.isfinite(final):
                return f"{name} not finite at the end"
        _, train = self.series("train/loss")
        train = train[np.isfinite(train)]
        if len(train) >= 10 and train[0] > 0:
            end = float(np.median(train[-max(3, len(train) // 10) :]))
            if end > _DIVERGED_FACTOR * train[0]:
                return f"train/loss rose from {train[0]:.3g} to {end:.3g}"
        return ""

    def score(self, metric: str) -> float | None:
        """The value the run is compared by: the metric's last value if the run finished and it is finite."""
        if not self.finished or self.diverged:
            return None
        value = self.last(metric)
        return value if value is not None and math.isfinite(value) else None

    def perf(self, name: str) -> float | None:
        """A number of the section `perf` of the summary."""
        value = number(_inside(self.summary, "perf", name))
        return value if value is not None and math.isfinite(value) else None

    @property
    def device(self) -> str:
        """The devices it was given, as `CUDA_VISIBLE_DEVICES` named them; empty where nothing was set."""
        return str(_inside(self.summary, "device", "cuda_visible_devices") or "")

    @property
    def wall_seconds(self) -> float | None:
        """Seconds of wall clock the run took."""
        return number(self.summary.get("wall_seconds"))

    @property
    def tokens(self) -> float | None:
        """Tokens trained on so far, to the precision of the clock."""
        speed, seconds = self.perf("tokens_per_second"), self.wall_seconds
        return None if speed is None or seconds is None else speed * seconds

    @property
    def samples(self) -> int | None:
        """Training examples the whole schedule sees, as far as the configuration tells."""
        size = self.config.get("training.per_device_train_batch_size")
        micro = self.config.get("training.gradient_accumulation_steps", 1)
        if self.max_steps is None or not isinstance(size, int) or not isinstance(micro, int):
            return None
        ranks = number(_inside(self.summary, "hardware", "ranks")) or 1
        return self.max_steps * (self.config.get("training.global_batch_size") or size * micro * int(ranks))

    def command(self, *, seeds: Iterable[int] = ()) -> str:
        """Compose the shell line that makes this run again.

        Args:
            seeds: More than one: the line is a sweep over these seeds instead of the run's own.
        """
        seeds, typed = list(seeds), _typed(self.summary.get("command"))
        overrides = [item for item in self.overrides if not item.lstrip("+").startswith(("resume=", "hydra."))]
        if not overrides and typed and len(seeds) < 2:
            return str(self.summary["command"])
        line = ["optrun"]
        if len(seeds) > 1:
            line.append("-m")
            overrides = [item for item in overrides if not item.startswith("seed=")]
            overrides.append("seed=" + ",".join(str(seed) for seed in seeds))
        name = self.summary.get("config_name")
        if name and name != "config":
            line += ["-cn", str(name)]
        line += _config_dir(typed)
        if "hydra.mode=RUN" in typed:  # the recipe is a sweep, of which this is one point
            line += ["hydra/sweeper=grid", "hydra.sweeper.grids=[]"] if len(seeds) > 1 else ["hydra.mode=RUN"]
        return shlex.join(line + overrides)

    @property
    def config_name(self) -> str | None:
        """The recipe; None: the default."""
        name = self.summary.get("config_name")
        return str(name) if name and name != "config" else None

    @property
    def config_dir(self) -> list[str]:
        """`--config-dir DIR`, where it was typed."""
        return _config_dir(_typed(self.summary.get("command")))

    @property
    def changed(self) -> dict[str, Any]:
        """Keys that were changed when the run was resumed, to their last values: no fresh run repeats that."""
        found: dict[str, Any] = {}
        resumes = self.summary.get("resumes")
        for resume in resumes if isinstance(resumes, list) else []:
            changes = _inside(resume, "changes")
            for key, pair in changes.items() if isinstance(changes, dict) else ():
                found[str(key)] = pair[1] if isinstance(pair, list) and len(pair) == 2 else None
        return found


def number(value: object) -> float | None:
    """Convert a number to float; None for anything else, booleans among it."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def load_run(path: Path, *, label: str | None = None) -> Run:
    """Read one run directory; what cannot be read becomes a message in `problems`."""
    files = RunDir(path)
    problems: list[str] = []
    at_work = is_held(files.lock) or is_held(path)
    if in_sweep(path) and files.is_unbegun() and not at_work:
        return _not_started(path, label or path.name, _hydra_overrides(path))

    def attempt(read: Callable[[Path], T], file: Path, absent: T) -> T:
        try:
            return read(file)
        except FileNotFoundError:
            problems.append(f"{file.name} is missing")
        except (OSError, ValueError, OtherFormatError) as error:
            problems.append(f"{file.name} cannot be read: {str(error).removeprefix(f'{file}: ')}")
        return absent

    summary: dict[str, Any] = attempt(read_summary, files.summary, {})
    config = flatten(attempt(read_config, files.config, {}))
    log: MetricsLog = attempt(read_metrics, files.metrics, MetricsLog())
    problems += [problem.removeprefix(f"{path}/") for problem in log.problems]
    problems += [problem.removeprefix(f"{path}/") for problem in problems_of(files, (CONFIG, METRICS, SUMMARY))]
    overrides = summary.get("overrides")
    overrides = [str(item) for item in overrides] if isinstance(overrides, list) else _hydra_overrides(path)
    described = bool(config)
    if not described:
        config = _config_from(overrides)
    status, message = summary.get("status"), str(summary.get("message") or "")
    if not summary and at_work:  # it loads model and data
        status, problems = "running", []
    elif in_sweep(path) and not log.records and not files.summary.exists():  # a job that failed says so
        status, message = "interrupted", "was cut before it logged anything"
    elif not summary and not log.records:
        status, message = "failed", "ended before it wrote anything"
    elif status not in STATUSES:
        status = "unknown"
    problems = [plain(problem) for problem in problems]
    return Run(
        path, plain(label or path.name), status, plain(message), config, summary, log, problems, overrides, described
    )


def load_runs(directories: Iterable[Path], *, beside: Iterable[Path] = ()) -> list[Run]:
    """Read every run at or beneath some directories, each once, in order; unstarted jobs of their sweeps last.

    Args:
        directories: Runs, sweeps, or folders of them.
        beside: Folders whose runs are left out.
    """
    left_out = [path.resolve() for path in beside]
    begun: dict[Path, Path] = {}
    waiting: dict[Path, tuple[Path, list[str]]] = {}
    for directory in directories:
        found = [path for path in find_runs(directory) if not any(map(path.resolve().is_relative_to, left_out))]
        begun |= {path.resolve(): path for path in found}
        for sweep in dict.fromkeys([directory, *(path.parent for path in found if path != directory)]):
            waiting |= {path.resolve(): (path, overrides) for path, overrides in find_waiting(sweep)}
    rest = [job for key, job in waiting.items() if key not in begun]
    labels = _labels([*begun.values(), *(path for path, _ in rest)])
    runs = [load_run(path, label=label) for path, label in zip(begun.values(), labels, strict=False)]
    return runs + [
        _not_started(path, label, overrides) for (path, overrides), label in zip(rest, labels[len(runs) :], strict=True)
    ]


def _not_started(path: Path, label: str, overrides: list[str]) -> Run:
    """Describe a job of a sweep by the little that is known before it begins."""
    name, config = plain(label), _config_from(overrides)
    return Run(path, name, NOT_STARTED, "", config, {}, MetricsLog(), [], overrides, described=False)


def _labels(paths: list[Path]) -> list[str]:
    """Shorten paths by the folders that all share."""
    parts = [path.resolve().parts for path in paths]
    shared = 0
    if len(parts) > 1:
        while all(len(part) > shared + 1 for part in parts) and len({part[shared] for part in parts}) == 1:
            shared += 1
    else:
        shared = len(parts[0]) - 1 if parts else 0
    return ["/".join(part[shared:]) for part in parts]


def _typed(command: object) -> list[str]:
    """Split the command line that a run noted."""
    try:
        return shlex.split(str(command or ""))
    except ValueError:  # a quotation mark without its partner: not written by optrun
        return []


def _config_dir(typed: list[str]) -> list[str]:
    """Find `--config-dir DIR` among the arguments."""
    for index, argument in enumerate(typed):
        name, equals, value = argument.partition("=")
        if name in ("--config-dir", "-cd") and (equals or index + 1 < len(typed)):
            return ["--config-dir", value if equals else typed[index + 1]]
    return []


def _hydra_overrides(path: Path) -> list[str]:
    """Read the overrides that Hydra noted, for a run that wrote no summary."""
    try:
        text = read_text(path / HYDRA / "overrides.yaml")
    except (OSError, ValueError):
        return []
    return [line[2:].strip("'\"") for line in text.splitlines() if line.startswith("- ")]


def _config_from(overrides: list[str]) -> dict[str, Any]:
    """Collect the little that the command line says about a run without `config.yaml`."""
    config: dict[str, Any] = {}
    for item in overrides:
        key, equals, value = item.lstrip("+").partition("=")
        if equals and not key.startswith(("hydra", "~")):
            try:
                parsed: Any = float(value) if any(mark in value for mark in ".eE") else int(value)
            except ValueError:
                parsed = value
            config[key if "." in key or key in ("lr", "seed") else f"{key}.name"] = parsed
    return config


def _inside(value: Any, *keys: str) -> Any:
    """Look up a nested value; None where the path breaks off."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _between(steps: Array, logged: Array, values: Array) -> Array:
    """Interpolate values at steps, in between those logged and not beyond."""
    if not len(logged):
        return np.full(len(steps), np.nan)
    result = np.interp(steps, logged, values)
    result[(steps < logged[0]) | (steps > logged[-1])] = np.nan
    return result
