"""Kill a run, in a process of its own, while it saves, trains or starts, and resume it."""

import contextlib
import importlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optrun.artifacts.atomic import DOOMED
from optrun.artifacts.checkpoint import REPLACED, TEMPORARY
from optrun.artifacts.metrics import read_metrics, read_summary
from optrun.artifacts.retention import latest_complete, step_of
from optrun.artifacts.run_check import run_problems
from optrun.artifacts.run_dir import RunDir
from optrun.base.errors import OptrunError
from optrun.base.reading import read_lines

Main = Callable[[list[str]], int]
"""Runs a command line and returns its exit code."""
_LOOK = 0.0002
"""Seconds between two looks at the run directory."""
_LEAVING_SECONDS = 60.0
"""For the ranks of a run whose starter was killed."""
_HANGING_SECONDS = 900.0
"""For something to happen, where nothing was killed since."""


@dataclass
class Kill:
    """One SIGKILL, and what the run was doing then."""

    aimed_at: str
    """`save`, `training` or `start`."""
    fell: str
    """`inside a save`, `inside a deletion`, `in training`, `before the first step`."""
    committed: int
    """Step of the newest complete checkpoint at that time; -1 if there was none."""
    victim: str
    """`the process` or `a rank`."""


class Child:
    """`optrun ARGS` in a forked process, in a group of its own.

    The parent has imported the heavy modules, so that a trial is fast. It must have computed
    nothing yet: the threads of a pool (OpenMP, autograd) do not survive a fork, and torch would
    wait for them forever ("Avoiding and fighting deadlocks" in torch's notes on multiprocessing).

    Args:
        main: Runs a command line and returns its exit code.
        argv: Arguments after `optrun`.
        log: File for its output.
        imported: File for the names of all modules that it has imported by its end; None: they are
            not written.
    """

    def __init__(
        self,
        main: Main,
        argv: list[str],
        log: Path,
        imported: Path | None = None,
    ) -> None:
        self.log = log
        self.imported = imported
        self.code: int | None = None
        self.process = os.fork()
        if self.process == 0:
            self._become(main, argv)

    def _become(self, main: Main, argv: list[str]) -> None:
        """Run the command line in the forked process, with its output in the log; never returns.

        Leads a new process group, and reads nothing from the standard input.
        """
        code = 1
        try:
            os.setpgid(0, 0)
            # Standard input is empty; standard output and error go to the log.
            output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((nothing, 0), (output, 1), (output, 2)):
                os.dup2(source, target)
            # The parent's streams may lead elsewhere, and hold text of the parent.
            sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8")
            sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8")
            try:
                code = main(argv)
            except SystemExit as stopped:
                code = int(stopped.code or 0)
            if self.imported is not None:
                self.imported.write_text("\n".join(sys.modules))
        except KeyboardInterrupt:  # before optrun's own handler was set
            code = 128 + signal.SIGINT
        finally:
            os._exit(code)

    def ended(self) -> bool:
        """Tell whether the process has ended, without waiting; if so, store its exit `code`."""
        if self.code is None:
            process, status = os.waitpid(self.process, os.WNOHANG)
            if process != 0:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def wait(self) -> int:
        """Wait for the end of the process; return its exit code, negative for a signal."""
        while not self.ended():
            time.sleep(0.005)
        assert self.code is not None
        return self.code

    def ranks(self) -> list[int]:
        """List the process ids of its ranks: children with process groups of their own.

        Empty on systems without /proc.
        """
        children = Path(f"/proc/{self.process}/task/{self.process}/children")
        ranks = []
        with contextlib.suppress(OSError):
            for child in map(int, children.read_text().split()):
                with contextlib.suppress(ProcessLookupError):
                    if os.getpgid(child) == child:
                        ranks.append(child)
        return ranks

    def kill_one(self, ranks: Sequence[int], rng: random.Random) -> str:
        """Kill the process or one of its ranks at random, and wait until all have ended.

        If the victim is a rank, the process notices, and ends by itself. If it is the process, its
        process group is killed. Other ranks lead groups of their own, and end when they notice that
        the process is gone.

        Args:
            ranks: Process ids of its ranks.
            rng: Chooses the victim.

        Returns:
            `the process` or `a rank`.

        Raises:
            TrialFailed: A rank is still alive after a minute.
        """
        # 1. The process, or one of its ranks: then the process ends by itself. `kill` sends SIGKILL
        # to its group, or does nothing if it has ended.
        victim = rng.choice([self.process, *ranks])
        if victim != self.process:
            _send_sigkill(victim)
            self.wait()
        self.kill()
        # 2. Wait for the other ranks.
        start = time.monotonic()
        while any(map(_is_alive, ranks)):
            if time.monotonic() - start > _LEAVING_SECONDS:
                raise TrialFailed("a rank is still alive a minute after its run was killed.")
            time.sleep(0.005)
        if victim == self.process:
            return "the process"
        return "a rank"

    def kill(self) -> None:
        """Send SIGKILL to the process and its group, and wait for its end; nothing if it ended."""
        if not self.ended():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process, signal.SIGKILL)
            _send_sigkill(self.process)  # it may not have a group of its own yet
            self.wait()

    def last_lines(self) -> str:
        """Return the last 15 lines of its output."""
        return "\n".join(self.log.read_text(errors="replace").strip().splitlines()[-15:])


def _send_sigkill(process: int) -> None:
    """Send SIGKILL to a process; nothing if it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _is_alive(process: int) -> bool:
    """Tell whether a process runs, by /proc; a zombie or dead one (`Z`, `X`) does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@dataclass
class Durations:
    """Seconds of each phase of the undisturbed run, to draw moments for kills from."""

    start: float
    """Seconds to the first step."""
    step: float
    """Seconds of a step."""
    save: float
    """Seconds of a save."""


def import_all(imported: Path) -> None:
    """Import the modules imported by a child, for a faster start of later children.

    Args:
        imported: The file of module names that the child wrote.
    """
    for name in imported.read_text().splitlines():
        if name not in sys.modules and name != "__mp_main__":
            with contextlib.suppress(ImportError):  # a module made at run time has no file
                importlib.import_module(name)


class TrialFailed(OptrunError):
    """A run failed without a kill, or a kill left damage behind."""


@dataclass
class Trials:
    """Runs a command line, kills it at random moments, and resumes it until it ends."""

    main: Main
    """Runs a command line and returns its exit code."""
    argv: list[str]
    """The command line of the run, without its directory."""
    folder: Path
    """Where runs go."""
    durations: Durations
    """Durations of the undisturbed run, from which the moments are drawn."""
    rng: random.Random
    """Chooses moments and victims."""
    watch: Callable[[Kill], None]
    """Called after each kill."""
    kills: list[Kill] = field(default_factory=list)
    """All kills so far."""
    starts: int = 0
    """How often a process was started."""

    def run_with_kills(self, name: str, kills: int) -> RunDir:
        """Start the run, kill it up to `kills` times, and resume it until it ends.

        A kill is aimed at a save in 90 % of the cases, at training in 7.5 %, else at a start. After
        each start and after the end the run is checked.

        Args:
            name: Name of its directory in `folder`, which must not exist.
            kills: Largest number of kills; the run may end before.

        Raises:
            TrialFailed: A start failed, or did not resume from the newest complete checkpoint; or
                `optrun verify` finds damage.
        """
        run = RunDir(self.folder / name)
        run.path.mkdir(parents=True)
        while True:
            # 1. Start the run, or resume it.
            step_before = newest_checkpoint_step(run)
            resumes_before = len(_resumes(run))
            child = Child(
                self.main,
                [*self.argv, f"hydra.run.dir={run.path}", "resume=auto"],
                self.folder / f"{name}.log",
            )
            self.starts += 1
            # 2. Kill it at a random moment, if it is not over before; wait for its end.
            aimed_at = ""
            victim = None
            try:
                if kills > 0:
                    # 18, 1.5 and 0.5 of 20 are 90 %, 7.5 % and 2.5 %.
                    aimed_at = self.rng.choices(("save", "training", "start"), (18, 1.5, 0.5))[0]
                    self._wait_for_moment(aimed_at, run, child)
                    victim = self._kill_unless_ended(child)  # None: it ended before the kill
                code = child.wait()
            finally:
                child.kill()
            # 3. Check how it started, how it ended and what it left. A killed process may have any
            # exit code.
            self._refuse_wrong_start(run, step_before, resumes_before)
            if victim is None and code != 0:
                raise TrialFailed(
                    f"a start of the run ended with exit code {code}:\n{child.last_lines()}"
                )
            _refuse_damage(run)
            # 4. Nobody killed it: it trained to its end.
            if victim is None:
                return run
            # 5. Record the kill, and resume.
            kills -= 1
            phase = _phase_of_kill(run, step_before)
            kill = Kill(aimed_at, phase, newest_checkpoint_step(run), victim)
            self.kills.append(kill)
            self.watch(kill)

    def _kill_unless_ended(self, child: Child) -> str | None:
        """Kill the process or one of its ranks, and return `the process` or `a rank`.

        Returns None if the process had ended before the kill, or ended with exit code 0 although
        one of its ranks was killed.
        """
        if child.ended():
            return None
        victim = child.kill_one(child.ranks(), self.rng)
        if child.code == 0:  # a run may end well although one of its ranks was killed at the end
            return None
        return victim

    def _wait_for_moment(self, phase: str, run: RunDir, child: Child) -> None:
        """Wait for a random moment within a phase, or until the run ends.

        Args:
            phase: `start`: some time after now; `training`: within the step after one or two more
                metrics lines; `save`: some time after one or two more saves have begun.
            run: Directory of the run.
            child: Its process.

        Raises:
            TrialFailed: The run hangs.
        """
        if phase == "start":
            self._wait_randomly(child, self.durations.start)
        elif phase == "training":
            lines = _count_metrics_lines(run) + self.rng.randint(1, 2)
            self._wait_until(child, lambda: _count_metrics_lines(run) >= lines)
            self._wait_randomly(child, self.durations.step)
        else:
            # Each save writes a temporary folder of its own. Those of killed saves are still there,
            # the `leftovers`. That of a fast save is gone soon, so `seen` keeps it.
            saves = self.rng.randint(1, 2)
            leftovers = set(_temporary_folders(run))
            seen: set[str] = set()

            def has_begun_saves() -> bool:
                seen.update(_temporary_folders(run))
                return len(seen - leftovers) >= saves

            self._wait_until(child, has_begun_saves)
            # Less than a whole save, so that the moment lies inside of it.
            self._wait_randomly(child, 0.6 * self.durations.save)

    def _wait_randomly(self, child: Child, longest: float) -> None:
        """Wait for a random time of up to `longest` seconds, or until the child has ended."""
        end = time.monotonic() + self.rng.uniform(0, longest)
        while not child.ended() and time.monotonic() < end:
            time.sleep(_LOOK)

    def _wait_until(self, child: Child, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds or the child has ended.

        Raises:
            TrialFailed: Neither happens within 15 minutes.
        """
        start = time.monotonic()
        while not child.ended() and not condition():
            if time.monotonic() - start > _HANGING_SECONDS:
                raise TrialFailed(
                    f"the run hangs: nothing happened for {_HANGING_SECONDS:g} s. Its last"
                    f" output:\n{child.last_lines()}"
                )
            time.sleep(_LOOK)

    def _refuse_wrong_start(self, run: RunDir, step_before: int, resumes_before: int) -> None:
        """Refuse a start unless it resumed from the newest complete checkpoint.

        The summary lists the resumes. Does nothing if it cannot be read, as after a kill before it
        was written.

        Args:
            run: Directory of the run.
            step_before: Step of the newest complete checkpoint before the start; -1 without one.
            resumes_before: Number of resumes that the summary listed before the start.

        Raises:
            TrialFailed: It resumed from another step.
        """
        for entry in _resumes(run)[resumes_before:]:
            if entry["from_step"] != max(step_before, 0):
                raise TrialFailed(
                    f"a start of the run resumed from step {entry['from_step']}, although the"
                    f" newest complete checkpoint was that of step {step_before}."
                )


def _refuse_damage(run: RunDir) -> None:
    """Raise TrialFailed if `optrun verify` would find damage in a run."""
    problems = run_problems(run)
    if problems:
        raise TrialFailed(f"only the process was killed, but optrun verify says: {problems[0]}")


def newest_checkpoint_step(run: RunDir) -> int:
    """Return the step of the newest complete checkpoint; -1 if there is none."""
    folder, _ = latest_complete(run)
    if folder is None:
        return -1
    return step_of(folder)


def _resumes(run: RunDir) -> list[Any]:
    """List the resumes in the summary of a run; none if it cannot be read."""
    try:
        return list(read_summary(run.summary)["resumes"])
    except (OSError, ValueError, KeyError):
        return []


def _count_metrics_lines(run: RunDir) -> int:
    """Count the lines of the metrics file; 0 if there is none."""
    try:
        return sum(1 for _ in read_lines(run.metrics))
    except FileNotFoundError:
        return 0


def _temporary_folders(run: RunDir) -> list[str]:
    """List the names of folders of unfinished saves; none without a checkpoint folder."""
    try:
        return [name for name in os.listdir(run.checkpoints) if name.startswith(TEMPORARY)]  # noqa: PTH208
    except FileNotFoundError:
        return []


def _phase_of_kill(run: RunDir, step_before: int) -> str:
    """Infer the phase of a killed process from the files left by it.

    A temporary folder means a save, a folder to be deleted a deletion, and a metrics line after
    `step_before` training.

    Args:
        run: Directory of the run.
        step_before: Step of the newest checkpoint when the process was started; -1 without one.

    Returns:
        A value of `Kill.fell`.
    """
    names = os.listdir(run.checkpoints) if run.checkpoints.is_dir() else []  # noqa: PTH208
    if any(name.startswith(TEMPORARY) for name in names):
        return "inside a save"
    if any(name.startswith((DOOMED, REPLACED)) for name in names):
        return "inside a deletion"
    steps: list[int] = []
    if run.metrics.is_file():
        steps = [record["step"] for record in read_metrics(run.metrics).records]
    if max(steps, default=0) > max(step_before, 0):
        return "in training"
    return "before the first step"
