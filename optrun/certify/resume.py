"""Kill a configuration at random, resume it, and prove that nobody could tell."""

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from optrun.artifacts.metrics import read_metrics, read_summary
from optrun.artifacts.run_dir import RunDir
from optrun.certify.compare import Section, compare
from optrun.certify.trial import Child, Durations, Kill, Main, TrialFailed, Trials, import_all

_KILLS_PER_RUN = 8


@dataclass
class Certificate:
    """The result of `optrun certify resume`: kills, comparisons and their outcome."""

    argv: list[str]
    """Arguments after `optrun`."""
    steps: int
    """Optimizer steps of each run."""
    seed: int
    """Chose moments and victims."""
    config_digest: str
    kills: list[Kill] = field(default_factory=list)
    starts: int = 0
    """How often a process was started for the killed runs."""
    runs: int = 0
    """Number of killed runs that came to their end."""
    sections: list[Section] = field(default_factory=list)
    """Comparison of the last killed run with the undisturbed one."""
    failure: str | None = None
    """Why a start of the run failed; None: none did."""
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    hardware: dict[str, object] = field(default_factory=dict)

    @property
    def difference(self) -> str | None:
        """The failure, else the first difference from the undisturbed run; None without any."""
        if self.failure is not None:
            return self.failure
        for section in self.sections:
            if section.difference is not None:
                return section.difference
        return None

    @property
    def fell(self) -> Counter[str]:
        """Count the kills by phase, `Kill.fell`."""
        return Counter(kill.fell for kill in self.kills)

    @property
    def victims(self) -> Counter[tuple[str, str]]:
        """Count the kills by (what was killed, phase)."""
        return Counter((kill.victim, kill.fell) for kill in self.kills)

    def to_dict(self) -> dict[str, object]:
        """Convert to plain values for JSON."""
        return {
            "format": 1,
            "claim": "resume after SIGKILL is bit-equal to an uninterrupted run",
            "holds": self.difference is None,
            "difference": self.difference,
            "words": self.argv,
            "config_digest": self.config_digest,
            "steps": self.steps,
            "seed": self.seed,
            "runs": self.runs,
            "starts": self.starts,
            "kills": [asdict(kill) for kill in self.kills],
            "fell": dict(self.fell),
            "compared": [asdict(section) for section in self.sections],
            "seconds": round(self.seconds, 1),
            "versions": self.versions,
            "hardware": self.hardware,
        }


def certify(
    main: Main,
    argv: Sequence[str],
    *,
    steps: int,
    kills: int,
    seed: int,
    folder: Path,
    watch: Callable[[str], None],
) -> Certificate:
    """Compare an undisturbed run with killed and resumed runs.

    A run is killed up to 8 times. Runs follow each other until there were `kills` kills, or until
    one differs or fails.

    Args:
        main: Runs a command line and returns its exit code.
        argv: A command line that trains `steps` steps, and saves and logs at each. It must not
            contain a directory or `resume`.
        steps: Optimizer steps of each run.
        kills: Number of kills over all runs.
        seed: Chooses moments and victims.
        folder: An empty folder for the runs.
        watch: Called with a text on what is done next, for progress.

    Returns:
        The certificate, whether it holds or not.

    Raises:
        TrialFailed: The undisturbed run fails, so there is nothing to compare with.
    """
    import optrun.runner.train  # noqa: F401  # before the first fork, so that every child has it imported

    # 1. The undisturbed run.
    start = time.monotonic()
    watch("the run without a kill")
    undisturbed = _run_undisturbed(main, argv, folder)
    summary = read_summary(undisturbed.summary)
    certificate = Certificate(
        list(argv),
        steps,
        seed,
        str(summary["config_digest"]),
        versions=summary["versions"],
        hardware=summary["hardware"],
    )

    # 2. Runs with kills, each compared with it.
    # Called by `trials` after each kill, when the variable is set.
    def report_kill(kill: Kill) -> None:
        watch(f"kill {len(trials.kills)} of {kills}: {kill.victim}, {kill.fell}")

    trials = Trials(
        main,
        list(argv),
        folder,
        _estimate_durations(undisturbed, time.monotonic() - start),
        random.Random(seed),
        report_kill,
    )
    certificate.kills = trials.kills
    try:
        while len(trials.kills) < kills and certificate.difference is None:
            remaining = kills - len(trials.kills)
            name = f"killed-{certificate.runs + 1}"
            killed = trials.run_with_kills(name, min(remaining, _KILLS_PER_RUN))
            certificate.runs += 1
            certificate.sections = compare(undisturbed, killed, steps)
    except TrialFailed as error:
        certificate.failure = str(error)
    certificate.starts = trials.starts
    certificate.seconds = time.monotonic() - start
    return certificate


def _run_undisturbed(main: Main, argv: Sequence[str], folder: Path) -> RunDir:
    """Run the command line without a kill, and import the modules imported by it.

    Raises:
        TrialFailed: It ends with another exit code than 0.
    """
    run = RunDir(folder / "straight")
    imported = folder / "imported"
    command = [*argv, f"hydra.run.dir={run.path}"]
    child = Child(main, command, folder / "straight.log", imported)
    try:
        code = child.wait()
    finally:
        child.kill()
    if code != 0:
        raise TrialFailed(
            f"the run ends with exit code {code} although nobody killed it:\n{child.last_lines()}"
        )
    import_all(imported)
    return run


def _estimate_durations(undisturbed: RunDir, seconds: float) -> Durations:
    """Estimate the seconds of start, step and save from the metrics of the undisturbed run.

    A save takes the median of the measured ones, 0.01 s without any. A start takes what training
    does not, at least 0.05 s.

    Args:
        undisturbed: Directory of that run.
        seconds: Duration of its process.
    """
    records = read_metrics(undisturbed.metrics).records
    times = [float(record["time"]) for record in records]
    key = "perf/checkpoint_write_seconds"
    saves = sorted(float(record[key]) for record in records if key in record)
    training_seconds = max(times, default=0.0)
    return Durations(
        start=max(seconds - training_seconds, 0.05),
        step=training_seconds / max(len(times), 1),
        save=saves[len(saves) // 2] if saves else 0.01,
    )
