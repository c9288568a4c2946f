"""Sweeps in a test.

Launches forked from this process, which has torch loaded, instead of started anew.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hydra.types import RunMode

from optrun.cli.sweep_worker import train_job
from optrun.config import store
from optrun.sweeper import launch
from optrun.sweeper.devices import VISIBLE
from tests.running import TINY_GPT, optrun, records, summary, tensors

STEPS = 8
SAVE = 4
JOB = [
    *TINY_GPT,
    "model.config.n_embd=16",
    "model.config.n_layer=1",
    "data=files",
    "training.device=cpu",
    f"training.max_steps={STEPS}",
    "training.logging_steps=1",
    "training.eval_steps=4",
    "training.per_device_train_batch_size=4",
    f"checkpoint.save_steps={SAVE}",
    "data.max_eval_examples=4",
]
for _word in ("model.config.n_embd=32", "model.config.n_layer=2"):
    JOB.remove(_word)


def fork(work: Callable[[], int], log: Path) -> int:
    """Run a function in a forked process; returns its id.

    What is there is nothing to the child's collector: it would look through all that is imported,
    and copy the memory.
    """
    gc.freeze()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # torch's idle threads; they are not used in the child
        pid = os.fork()
    if pid:
        gc.unfreeze()
        return pid
    code = 99
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(
                number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            )
        sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class ForkServer:
    """As `launch.LaunchProcess`; dies with its process group, which is that of the sweep."""

    launches: ClassVar[list[int]] = []
    train_run: ClassVar[Any] = staticmethod(train_job)

    def __init__(self, log: Path, devices: Sequence[str]) -> None:
        self.log = log
        self.devices = list(devices)
        self.pid = 0
        self._code: int | None = None

    def send(self, spec: Path) -> None:
        self.launches.append(len(json.loads(spec.read_text())["jobs"]))
        self._code = None
        self.pid = fork(lambda: self._work(spec), self.log)

    def _work(self, spec: Path) -> int:
        """As the process that `launch.LaunchProcess` starts, with the names of its devices."""
        if self.devices:
            os.environ[VISIBLE] = ",".join(self.devices)
        return launch.main(spec, self.train_run)

    def code(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def finish(self) -> None:
        """It ends after each launch."""

    def has_ended(self) -> bool:
        return not self.pid or self.code() is not None

    def close(self, patience: float | None = None) -> None:
        while self.pid and self.code() is None:
            pass


def fork_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sweeps fork their jobs from this process, and their reports draw nothing."""
    _compose_beforehand()
    monkeypatch.setattr("optrun.sweeper.launch.LaunchProcess", ForkServer)
    monkeypatch.setattr("optrun.sweeper.driver._POLL_SECONDS", 0.05)
    monkeypatch.setattr("optrun.report.build.all_pictures", lambda comparison, judged: [])


@functools.cache
def _compose_beforehand() -> None:
    """Compose once what each launch composes for its launcher.

    What is remembered of it, forked processes have.
    """
    for words in ([], ["hydra/sweeper=optuna"]):
        store.compose(
            store.open_hydra(), "config", [*words, "hydra.mode=MULTIRUN"], RunMode.MULTIRUN
        )


def sweep(*words: str, folder: str | Path = "sweep") -> int:
    """`optrun -m` over the small job."""
    given = {word.split("=", 1)[0] for word in words}
    below = [word for word in JOB if word.split("=", 1)[0] not in given]
    return optrun("-m", *below, *words, f"hydra.sweep.dir={folder}")


def jobs(folder: str | Path = "sweep") -> list[Path]:
    """Job folders."""
    return sorted(path.parent for path in Path(folder).glob("*/summary.json"))


def result(folder: str | Path = "sweep") -> dict[str, dict[str, Any]]:
    """Rows of `sweep.json` by the words that tell the jobs apart."""
    rows = json.loads((Path(folder) / "sweep.json").read_text())["jobs"]
    common = set.intersection(*(set(row["overrides"]) for row in rows)) if len(rows) > 1 else set()
    return {" ".join(word for word in row["overrides"] if word not in common): row for row in rows}


def same(job: Path, undisturbed: Path) -> bool:
    """Whether a finished job has the metrics and the last weights and states of another, bit
    for bit.
    """
    return (
        whole(job)
        and records(job) == records(undisturbed)
        and tensors(job, STEPS) == tensors(undisturbed, STEPS)
    )


def steps(job: Path) -> list[int]:
    """The steps of `metrics.jsonl`, as they stand there."""
    return [record["step"] for record in records(job)]


def whole(job: Path, total: int = STEPS) -> bool:
    """Whether a job is finished, each step logged once, with everything a finished run has."""
    return (
        summary(job)["status"] == "finished"
        and steps(job) == list(range(1, total + 1))
        and (job / "model" / "model.safetensors").is_file()
    )
