"""The process in which a launcher runs: it may die, and the sweep continues.

Hydra's basic launcher trains in the process that calls it, and a killed worker ends joblib's whole
pool. So the sweep itself never calls a launcher: it starts a process for this, watches it, and
starts it again for the remaining jobs.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.artifacts.atomic import replace_text
from optrun.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_STORAGE, is_refused_by_disk
from optrun.base.reading import read_json
from optrun.config import store
from optrun.config.hydra_internals import Callbacks
from optrun.config.literal import quote_path
from optrun.config.overrides import is_hydra
from optrun.config.registry.plugins import load_again
from optrun.sweeper.command import Launch, SweepCommand
from optrun.sweeper.devices import VISIBLE, refuse_unseen
from optrun.sweeper.folder import SweepDir
from optrun.sweeper.stop import kill_process_tree

if TYPE_CHECKING:
    from optrun.sweeper.worker import TrainRun


class LaunchProcess:
    """A process for launches, started when needed and kept, since importing torch is slow.

    It is in its own process group, so that Ctrl-C reaches only the sweep.

    Args:
        log: File for its output.
        devices: The devices that it may see, as `CUDA_VISIBLE_DEVICES` names them; empty: all.
    """

    module = "optrun.cli.sweep_worker"
    """The module that it runs, in a package above this one: it may import the training of a job."""

    def __init__(self, log: Path, devices: Sequence[str]) -> None:
        self.log = log
        self.devices = list(devices)
        self._process = self._start_process()
        self._report = Path()
        """The file that the current launch writes at its end."""

    def _start_process(self) -> subprocess.Popen[bytes]:
        """Start the process, in a process group of its own, with its devices."""
        environment = dict(os.environ)
        if self.devices:
            environment[VISIBLE] = ",".join(self.devices)  # there before torch is imported
        with self.log.open("ab") as out:
            return subprocess.Popen(
                [sys.executable, "-m", self.module],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                env=environment,
                process_group=0,  # setpgid: the terminal sends SIGINT to its foreground group alone
            )

    @property
    def pid(self) -> int:
        """Id of the process and of its process group."""
        return self._process.pid

    def send(self, spec: Path) -> None:
        """Begin a launch.

        Args:
            spec: A `Launch` as JSON.
        """
        if self.has_ended():
            self._process = self._start_process()
        self._report = report_file(spec)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{spec.resolve()}\n".encode())
        self._process.stdin.flush()

    def code(self) -> int | None:
        """Read the exit code of the launch; None while it runs; negative for a signal.

        The report of the launch counts, else the exit code of the process.
        """
        exit_code = self._process.poll()  # first: the process may write its report and then end
        if self._report.is_file():
            return int(read_json(self._report)["code"])
        return exit_code

    def finish(self) -> None:
        """Let the process end after its current launch, by closing its input; do not wait."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def has_ended(self) -> bool:
        """Tell whether the process has ended."""
        return self._process.poll() is not None

    def close(self, patience: float | None = None) -> None:
        """Let the process end, and wait for it.

        Args:
            patience: Seconds until it is killed with all its descendants; None: never.
        """
        self.finish()
        try:
            self._process.wait(None if patience is None else max(0.0, patience))
        except subprocess.TimeoutExpired:
            kill_process_tree(self.pid)


def report_file(spec: Path) -> Path:
    """Return the path of a launch's report: its exit code and error."""
    return spec.with_suffix(".done")


def main(spec: Path, train_run: TrainRun) -> int:
    """Run the jobs of a launch, and write its report.

    Without room on the disk there is no report.

    Args:
        spec: A `Launch` as JSON.
        train_run: Trains a job.

    Returns:
        Exit code: 0; 74 if a full disk stopped a job; 1 if the launcher failed; 130 after SIGINT.
    """
    values = read_json(spec)
    launch = Launch(**{**values, "command": SweepCommand(**values["command"])})
    sweep = SweepDir(Path(launch.folder))
    # A thread watches the sweep process until this event is set.
    launch_ended = _watch_sweep_process(sweep.stop_file(launch.token))
    error_text = ""
    try:
        error_text = _launch(launch, sweep, train_run)  # a disk error, or empty
        code = EXIT_STORAGE if error_text else EXIT_DONE
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        traceback.print_exc()
        error_text = f"{type(error).__name__}: {error}"
        code = EXIT_STORAGE if is_refused_by_disk(error) else EXIT_FAILED
    finally:
        launch_ended.set()
    with contextlib.suppress(OSError):
        replace_text(report_file(spec), json.dumps({"code": code, "why": error_text}))
    return code


def _launch(launch: Launch, sweep: SweepDir, train_run: TrainRun) -> str:
    """Call Hydra's launcher with the jobs of a launch, and wait until all have ended.

    The launcher is the one that the sweep's command line chose, such as joblib or submitit. The
    basic launcher is called once for each job: it keeps the configuration of every job of a call in
    memory, and runs them one after the other anyway.

    Returns:
        The first disk error that stopped a job; empty if there is none.

    Raises:
        OptrunError: torch does not see the devices of the launch.
        Exception: Whatever the launcher raises.
    """
    from hydra.core.plugins import Plugins
    from hydra.types import HydraContext, RunMode

    from optrun.sweeper.worker import REFUSED, SweepTask

    # 1. Build the launcher, as the command line of the sweep configures it.
    command = launch.command
    if launch.devices:
        refuse_unseen(launch.devices)
    load_again(command.plugins, changes_allowed=command.plugins_may_change)
    hydra = store.open_hydra(command.config_dir)
    cfg = store.compose(
        hydra,
        command.config_name,
        [
            *filter(is_hydra, command.overrides),
            "hydra.mode=MULTIRUN",
            f"hydra.sweep.dir={quote_path(sweep.path)}",
        ],
        RunMode.MULTIRUN,
    )
    launcher = Plugins.instance().instantiate_launcher(
        hydra_context=HydraContext(config_loader=hydra.config_loader, callbacks=Callbacks(cfg)),
        task_function=SweepTask(launch, train_run),
        config=cfg,
    )
    # 2. Call it with the overrides of each job.
    jobs = [
        [*tokens, f"hydra.sweep.subdir={quote_path(Path(name))}"]
        for name, tokens in launch.jobs.items()
    ]
    # Whatever the jobs of a batch do is in their folders; their results tell only of disk errors.
    batches = [jobs]
    if cfg.hydra.runtime.choices["hydra/launcher"] == "basic":
        batches = [[job] for job in jobs]
    disk_error = ""
    for number, batch in enumerate(batches):
        for job_return in launcher.launch(batch, initial_job_idx=number):
            # What `SweepTask` returned. `return_value` would raise the error of a failed job.
            outcome = getattr(job_return, "_return_value", None)
            if not disk_error and isinstance(outcome, str) and outcome.startswith(REFUSED):
                disk_error = outcome
    return disk_error


def _watch_sweep_process(stop_file: Path) -> threading.Event:
    """Start a thread that makes the stop file if the sweep process dies.

    The workers then save and end. The sweep process is the parent of this one.

    Returns:
        An event; set it to end the thread.
    """
    sweep_pid = os.getppid()
    launch_ended = threading.Event()

    def watch() -> None:
        while not launch_ended.wait(0.2):
            if os.getppid() != sweep_pid:
                with contextlib.suppress(OSError):
                    stop_file.touch()
                return

    threading.Thread(target=watch, name="optrun-sweep-follow", daemon=True).start()
    return launch_ended


def serve(train_run: TrainRun) -> None:
    """Run launches until stdin closes; each line is the path of a launch's JSON file.

    If a launch cannot write its report, exit this process with the launch's code instead, 74 for 0:
    an exit code takes no room on the disk.

    Args:
        train_run: Trains a job.
    """
    for line in sys.stdin:
        spec = Path(line.rstrip("\n"))
        code = main(spec, train_run)
        if not report_file(spec).is_file():
            sys.exit(code or EXIT_STORAGE)
