"""A SLURM of nodes that are all this machine.

`sbatch`, `srun`, `sacct` and `scontrol` for submitit.

The commands on PATH are scripts that leave a request in a folder. The test's process answers, and
forks the tasks, which find everything imported. Run as a program it is one task, whose host has the
name of its node.
"""

from __future__ import annotations

import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from tests import compose_cache
from tests.preloaded import Program

_ASK = """#!/bin/sh
asked=$(mktemp -d "$SLURM_STAND_IN/{name}-XXXXXX")
env -0 > "$asked/env"
for word in "$@"; do printf '%s\\0' "$word"; done > "$asked/args"
touch "$asked/asked"
while [ ! -e "$asked/code" ]; do sleep 0.05; done
cat "$asked/said"
exit $(cat "$asked/code")
"""
_STATES = {None: "RUNNING", 0: "COMPLETED"}


@dataclass
class BatchJob:
    """One element of an array, or a job by itself."""

    script: Path
    name: str
    """As `sacct` shows it."""
    environment: dict[str, str]
    nodes: int
    tasks_per_node: int
    batch: subprocess.Popen[bytes] | None = None
    tasks: list[Program] = field(default_factory=list)
    starts: int = 0

    def kill_batch(self) -> None:
        """End the script, and the `srun` that it waits for."""
        if self.batch is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.batch.pid, signal.SIGKILL)
            self.batch.wait()

    def signal(self, number: int) -> None:
        """As SLURM does it: to every task, not to the script."""
        for task in self.tasks:
            task.send_signal(number)


class Slurm:
    """The cluster.

    Args:
        folder: For its files; its commands are in `bin` there.
        cwd: Where its jobs run.
    """

    def __init__(self, folder: Path, cwd: Path) -> None:
        self.folder, self.cwd = folder, cwd
        self.jobs: list[BatchJob] = []
        self.scripts: list[str] = []
        """Texts of what was submitted."""
        self._steps: list[tuple[Path, BatchJob]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        (folder / "bin").mkdir(parents=True)
        for name in ("sbatch", "srun", "sacct", "scontrol"):
            command = folder / "bin" / name
            command.write_text(_ASK.format(name=name))
            command.chmod(0o755)
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        self.environment = {"PATH": path, "SLURM_STAND_IN": str(folder)}
        """For who submits."""

    def __enter__(self) -> Slurm:
        self._thread.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._over.set()
        self._thread.join()
        for job in self.jobs:
            job.signal(signal.SIGKILL)
            job.kill_batch()

    def _serve(self) -> None:
        while not self._over.wait(0.02):
            for asked in self.folder.glob("*-*/asked"):
                asked.unlink()
                args = (asked.parent / "args").read_text().split("\0")[:-1]
                getattr(self, f"_{asked.parent.name.partition('-')[0]}")(asked.parent, args)
            for step, job in list(self._steps):
                codes = [task.poll() for task in job.tasks]
                if None not in codes:
                    self._steps.remove((step, job))
                    _answer(step, max(map(abs, filter(None, codes)), default=0))  # type: ignore[type-var]

    def _sbatch(self, asked: Path, args: list[str]) -> None:
        script = Path(args[-1])
        text = script.read_text()
        self.scripts.append(text)
        given = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", text, re.M))
        nodes, tasks = int(given["nodes"]), int(given.get("ntasks-per-node", 1))
        number = 1000 + 10 * len(self.scripts)
        elements = (
            range(int(given["array"].split("%")[0].partition("-")[2]) + 1)
            if "array" in given
            else [None]
        )
        hosts = f"127.0.0.[1-{nodes}]" if nodes > 1 else "127.0.0.1"
        for element in elements:
            own = (
                {}
                if element is None
                else {"SLURM_ARRAY_JOB_ID": number, "SLURM_ARRAY_TASK_ID": element}
            )
            job_env = {
                **own,
                "SLURM_JOB_ID": number + (element or 0),
                "SLURM_JOB_NUM_NODES": nodes,
                "SLURM_NNODES": nodes,
                "SLURM_NTASKS": nodes * tasks,
                "SLURM_NTASKS_PER_NODE": tasks,
                "SLURM_JOB_NODELIST": hosts,
                **dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), 0),
            }
            environment = {
                **_environment(asked),
                **{name: str(value) for name, value in job_env.items()},
            }
            name = str(number) if element is None else f"{number}_{element}"
            self.jobs.append(BatchJob(script, name, environment, nodes, tasks))
            self._start(self.jobs[-1])
        _answer(asked, 0, f"Submitted batch job {number}\n")

    def _start(self, job: BatchJob) -> None:
        job.starts += 1
        copy = self.folder / f"script-of-{job.name}"
        copy.write_bytes(
            job.script.read_bytes() if job.script.exists() else copy.read_bytes()
        )  # submitit moves its own
        job.batch = subprocess.Popen(
            ["bash", str(copy)], cwd=self.cwd, env=job.environment, start_new_session=True
        )

    def _srun(self, asked: Path, args: list[str]) -> None:
        environment = _environment(asked)
        (job,) = (
            job
            for job in self.jobs
            if job.environment["SLURM_JOB_ID"] == environment["SLURM_JOB_ID"]
        )
        job.tasks = []
        for rank in range(job.nodes * job.tasks_per_node):
            node, local_rank = divmod(rank, job.tasks_per_node)
            step = {
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_NUM_TASKS": environment["SLURM_NTASKS"],
                "SLURM_STEP_NUM_NODES": environment["SLURM_NNODES"],
                "SLURM_STEP_NODELIST": environment["SLURM_JOB_NODELIST"],
                "SLURM_STEP_TASKS_PER_NODE": f"{job.tasks_per_node}(x{job.nodes})",
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(local_rank),
                "SLURM_NODEID": str(node),
                "SLURMD_NODENAME": f"127.0.0.{node + 1}",
            }
            given = args[args.index("-m") + 1 :]
            if args[0] == "torchrun":
                given = ["torch.distributed.run", *args[1:]]
            with patch.object(
                compose_cache, "folder", None
            ):  # submitit's plugin is imported anew, and does not pickle
                job.tasks.append(
                    Program(__name__, given, self.cwd, {**environment, **step}, merged=True)
                )
        self._steps.append((asked, job))

    def _sacct(self, asked: Path, args: list[str]) -> None:
        states = [(job.name, job.batch.poll() if job.batch else None) for job in self.jobs]
        rows = [f"{name}|{_STATES.get(code, 'FAILED')}|127.0.0.1" for name, code in states]
        _answer(asked, 0, "\n".join(["JobID|State|NodeList", *rows, ""]))

    def _scontrol(self, asked: Path, args: list[str]) -> None:
        if args[:2] == ["show", "hostnames"]:
            _answer(asked, 0, "127.0.0.1\n127.0.0.2\n")
            return
        _answer(asked, 0)
        self.requeue(next(job for job in self.jobs if job.name == args[-1]))

    def requeue(self, job: BatchJob) -> None:
        """End a job at once, and start it anew under its number, as after the loss of a node."""
        job.kill_batch()
        job.signal(signal.SIGKILL)
        for task in job.tasks:
            task.wait()
        self._steps = [(step, other) for step, other in self._steps if other is not job]
        self._start(job)


def _environment(asked: Path) -> dict[str, str]:
    pairs = (asked / "env").read_text().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def _answer(asked: Path, code: int, said: str = "") -> None:
    (asked / "said").write_text(said)
    (asked / "code.new").write_text(str(code))
    with suppress(FileNotFoundError):
        (asked / "code.new").rename(asked / "code")


if __name__ == "__main__":
    node = os.environ["SLURMD_NODENAME"]
    socket.gethostname = lambda: node
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
