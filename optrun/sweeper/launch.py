"""The process in which a launcher runs: it may die, and the sweep goes on.

Hydra's basic launcher trains in the process that calls it, and a worker that is killed takes
joblib's whole pool with it. So the sweep itself never calls a launcher: it starts a process for
this, watches, and starts it again for what is left.
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
from optrun.sweeper.stop import end_family

if TYPE_CHECKING:
    from optrun.sweeper.worker import TrainRun


class Server:
    """A process for launches, started when needed and kept, since importing torch is slow.

    It is in its own process group, so that Ctrl-C reaches only the sweep.

    Args:
        log: File for its output.
        devices: The devices that it may see, as `CUDA_VISIBLE_DEVICES` names them; empty: all.
    """

    module = "optrun.cli.sweep_worker"
    """What it runs: it brings what trains a job, which stands above this floor."""

    def __init__(self, log: Path, devices: Sequence[str]) -> None:
        self.log = log
        self.devices = list(devices)
        self._process = self._start()
        self._answer = Path()

    def _start(self) -> subprocess.Popen[bytes]:
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
            self._process = self._start()
        self._answer = answer_file(spec)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{spec.resolve()}\n".encode())
        self._process.stdin.flush()

    def code(self) -> int | None:
        """Read the exit code of the launch, None while it runs.

        Negative if a signal ended the process.
        """
        ended = self._process.poll()  # asked first: what is written before the end is seen after it
        if self._answer.is_file():
            return int(read_json(self._answer)["code"])
        return ended

    def finish(self) -> None:
        """Let the process end after its current launch, without waiting for it."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def has_ended(self) -> bool:
        """Tell whether there is no process."""
        return self._process.poll() is not None

    def close(self, patience: float | None = None) -> None:
        """Let the process end, and wait for it.

        Args:
            patience: Seconds until it is killed; None: never.
        """
        self.finish()
        try:
            self._process.wait(None if patience is None else max(0.0, patience))
        except subprocess.TimeoutExpired:
            end_family(self.pid)


def answer_file(spec: Path) -> Path:
    """Return the file with the exit code of a launch and its error."""
    return spec.with_suffix(".done")


def main(spec: Path, train_run: TrainRun) -> int:
    """Run the jobs of a launch.

    Args:
        spec: A `Launch` as JSON.
        train_run: Trains a job.

    Returns:
        0; 74 if a full disk stopped a job; 1 if the launcher failed. `answer_file` gets it, too, if
        the disk has room.
    """
    values = read_json(spec)
    launch = Launch(**{**values, "command": SweepCommand(**values["command"])})
    sweep = SweepDir(Path(launch.folder))
    over = _follow(sweep.stop(launch.token))
    why = ""
    code = EXIT_DONE
    try:
        why = _launch(launch, sweep, train_run)
        code = EXIT_STORAGE if why else EXIT_DONE
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        traceback.print_exc()
        why = f"{type(error).__name__}: {error}"
        code = EXIT_STORAGE if is_refused_by_disk(error) else EXIT_FAILED
    finally:
        over.set()
    with contextlib.suppress(OSError):
        replace_text(answer_file(spec), json.dumps({"code": code, "why": why}))
    return code


def _launch(launch: Launch, sweep: SweepDir, train_run: TrainRun) -> str:
    """Call the launcher; return the disk error that stopped a job, or an empty text."""
    from hydra.core.plugins import Plugins
    from hydra.types import HydraContext, RunMode

    from optrun.sweeper.worker import REFUSED, SweepTask

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
    jobs = [
        [*tokens, f"hydra.sweep.subdir={quote_path(Path(name))}"]
        for name, tokens in launch.jobs.items()
    ]
    batches = [jobs]
    if cfg.hydra.runtime.choices["hydra/launcher"] == "basic":
        # One after the other anyway; of jobs launched together it keeps every configuration.
        batches = [[job] for job in jobs]
    refused = ""
    for number, batch in enumerate(batches):
        for answer in launcher.launch(batch, initial_job_idx=number):
            answer_text = getattr(answer, "_return_value", None)
            if not refused and isinstance(answer_text, str) and answer_text.startswith(REFUSED):
                refused = answer_text
    return refused


def _follow(stop: Path) -> threading.Event:
    """Start a thread that asks the workers to save and end once the sweep process is gone."""
    parent = os.getppid()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.2):
            if os.getppid() != parent:
                with contextlib.suppress(OSError):
                    stop.touch()
                return

    threading.Thread(target=look, name="optrun-sweep-follow", daemon=True).start()
    return over


def serve(train_run: TrainRun) -> None:
    """Run launches, whose paths arrive one per line on stdin, until it closes.

    Exits the process if a launch wrote no answer file, with the launch's code, or `EXIT_STORAGE`
    for 0.

    Args:
        train_run: Trains a job.
    """
    for line in sys.stdin:
        spec = Path(line.rstrip("\n"))
        code = main(spec, train_run)
        if not answer_file(spec).is_file():
            sys.exit(code or EXIT_STORAGE)  # an exit code takes no room
