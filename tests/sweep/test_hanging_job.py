"""Jobs that hang are killed when the time of the whole sweep is up, whatever they do."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from optrun.cli import sweep as sweep_command
from optrun.sweeper import driver
from optrun.sweeper.stop import GRACE_SECONDS, Stop, kill_process_tree, process_tree
from optrun.training.step import TrainStep
from tests.sweep.forked import jobs, same, sweep


class Clock:
    """Time that passes by a minute a look, only while a job hangs, and only until something is
    due.
    """

    def __init__(self, hanging: Path) -> None:
        self.hanging = hanging
        self.now = 0.0
        self.until = math.inf

    def __call__(self) -> float:
        if self.hanging.exists() and Path("/proc", self.hanging.read_text()).exists():
            self.now = min(self.now + 60.0, self.until)
        return self.now


@pytest.fixture
def hangs(place: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the job with lr 2e-3 hang in C so many times.

    No Python of it runs any more, and it ignores SIGTERM.
    """
    clock = Clock(place / "hanging")
    monkeypatch.setattr(sweep_command, "Stop", partial(Stop, clock=clock))
    monkeypatch.setattr(driver, "_POLL_SECONDS", 0.005)
    original = TrainStep.compute_gradients

    def begin(times: int, until: float = math.inf) -> None:
        clock.until = until

        def call(self: TrainStep, batches: list[dict], *rest: Any) -> object:
            done = original(self, batches, *rest)
            self.count = getattr(self, "count", 0) + 1  # type: ignore[attr-defined]
            mine = abs(self.optimizer.param_groups[0]["initial_lr"] - 2e-3) < 1e-9
            if mine and self.count == 2 and len(list(place.glob("hung-*"))) < times:  # type: ignore[attr-defined]
                (place / f"hung-{os.getpid()}").touch()
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                (place / "aside").write_text(str(os.getpid()))
                (place / "aside").rename(clock.hanging)
                ctypes.PyDLL(None).sleep(120)  # holds the interpreter's lock
            return done

        monkeypatch.setattr(TrainStep, "compute_gradients", call)

    return begin


def test_the_timeout_holds_whatever_a_job_does(
    hangs: Any, undisturbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hangs(1, until=60 + GRACE_SECONDS)
    assert sweep("lr=2e-3,1e-3", "hydra.sweeper.timeout=60") == 75
    said = capsys.readouterr().out
    for fact in (
        "lr=0.002: not stopped 5 min 00 s after hydra.sweeper.timeout",
        "0 running",
        "2 left",
    ):
        assert fact in said
    assert sweep("lr=2e-3,1e-3", "hydra.sweeper.timeout=60") == 0
    assert all(same(job, undisturbed / job.name) for job in jobs())


def test_ranks_end_with_who_started_them() -> None:
    """torch's agent gives each rank a session of its own."""
    sleeps = "import time; print(flush=True); time.sleep(60)"
    rank = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleeps!r}],"
        " start_new_session=True).wait()"
    )
    process = subprocess.Popen([sys.executable, "-c", rank], stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        assert len(process_tree(process.pid)) == 2
        kill_process_tree(process.pid)
        assert process.stdout.read() == b"", "both ends of the pipe are closed"
    assert process.returncode == -signal.SIGKILL
