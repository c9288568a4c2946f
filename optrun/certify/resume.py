"""Kill a configuration at random, resume it, and prove that nobody could tell."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from optrun.artifacts.metrics import read_metrics, read_summary
from optrun.artifacts.run_dir import RunDir
from optrun.certify.compare import Section, compare
from optrun.certify.trial import Child, Kill, Main, Tempo, TrialFailed, Trials, import_all

_KILLS_PER_RUN = 8


@dataclass
class Certificate:
    """Result of a proof: kills, comparisons and their outcome."""

    argv: list[str]
    """Arguments after `optrun`."""
    steps: int
    seed: int
    config_digest: str
    kills: list[Kill] = field(default_factory=list)
    starts: int = 0
    runs: int = 0
    sections: list[Section] = field(default_factory=list)
    failure: str | None = None
    """A start of the run that came to a bad end."""
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    hardware: dict[str, object] = field(default_factory=dict)

    @property
    def difference(self) -> str | None:
        """The first thing that was not as in the undisturbed run."""
        if self.failure is not None:
            return self.failure
        return next(
            (section.difference for section in self.sections if section.difference is not None),
            None,
        )

    @property
    def fell(self) -> Counter[str]:
        """Count the kills by where they fell."""
        return Counter(kill.fell for kill in self.kills)

    @property
    def victims(self) -> Counter[tuple[str, str]]:
        """Count the kills by what was killed, and where that fell."""
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
            "victims": {
                f"{victim}, {fell}": count for (victim, fell), count in self.victims.most_common()
            },
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
    """Run a configuration undisturbed, then killed and resumed until so many kills are reached.

    Compare.

    Args:
        main: Runs a command line and returns its exit code.
        argv: A command line that trains `steps` steps, saves and logs at each; no directory and no
            resume in it.
        steps: Optimizer steps of each run.
        kills: In all.
        seed: Chooses the moments.
        folder: Empty; takes the runs.
        watch: Told what is being done.

    Returns:
        The certificate, whether it holds or not.

    Raises:
        TrialFailed: The undisturbed run does not come to a good end: there is nothing to prove.
    """
    import optrun.runner.train  # noqa: F401  # before the first fork, so that every trial finds it imported

    begun = time.monotonic()
    watch("the run without a kill")
    straight = RunDir(folder / "straight")
    imported = folder / "imported"
    command = [*argv, f"hydra.run.dir={straight.path}"]
    child = Child(main, command, folder / "straight.log", imported)
    try:
        code = child.wait()
        if code != 0:
            raise TrialFailed(
                f"the run ends with exit code {code} although nobody killed"
                f" it:\n{child.last_lines()}"
            )
    finally:
        child.kill()
    import_all(imported)
    summary = read_summary(straight.summary)
    paper = Certificate(
        list(argv),
        steps,
        seed,
        str(summary["config_digest"]),
        versions=summary["versions"],
        hardware=summary["hardware"],
    )

    def seen(kill: Kill) -> None:
        watch(f"kill {len(trials.kills)} of {kills}: {kill.victim}, {kill.fell}")

    trials = Trials(
        main,
        list(argv),
        folder,
        _estimate_tempo(straight, time.monotonic() - begun),
        random.Random(seed),
        seen,
    )
    paper.kills = trials.kills
    try:
        while len(trials.kills) < kills and paper.difference is None:
            left = kills - len(trials.kills)
            name, most = f"killed-{paper.runs + 1}", min(left, _KILLS_PER_RUN)
            killed = trials.run_with_kills(name, most)
            paper.runs += 1
            paper.sections = compare(straight, killed, steps)
    except TrialFailed as error:
        paper.failure = str(error)
    paper.starts, paper.seconds = trials.starts, time.monotonic() - begun
    return paper


def _estimate_tempo(straight: RunDir, seconds: float) -> Tempo:
    """Estimate start, step and save times from the undisturbed run's metrics."""
    records = read_metrics(straight.metrics).records
    times = [float(record["time"]) for record in records]
    saves = [
        float(record[key])
        for record in records
        for key in record
        if key == "perf/checkpoint_write_seconds"
    ]
    trained = max(times, default=0.0)
    save = sorted(saves)[len(saves) // 2] if saves else 0.01
    return Tempo(start=max(seconds - trained, 0.05), step=trained / max(len(times), 1), save=save)
