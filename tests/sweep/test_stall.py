"""Jobs that hang.

Found by files that stay as they are, killed whatever they do, and tried once more.
"""

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

from optrun.artifacts.lock import RunLock
from optrun.cli import sweep as sweep_command
from optrun.sweeper import driver
from optrun.sweeper.folder import SweepDir
from optrun.sweeper.stall import StallWatch, end_holder
from optrun.sweeper.stop import GRACE_SECONDS, Stop, end_family, family
from optrun.training.step import TrainStep
from tests.sweep.forked import SAVE, ForkServer, jobs, result, same, sweep


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
    original = TrainStep.__call__

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

        monkeypatch.setattr(TrainStep, "__call__", call)

    return begin


def test_a_job_that_hangs_is_ended_and_tried_again(
    hangs: Any, undisturbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hangs(1)
    assert (
        sweep("lr=2e-3,1e-3", "hydra.sweeper.stall_seconds=100", f"checkpoint.save_steps={SAVE}")
        == 0
    )
    assert ForkServer.launches == [2, 1, 1]
    assert all(same(job, undisturbed / job.name) for job in jobs())
    said = capsys.readouterr().out
    told = "made no progress for 2 min"
    for fact in (f"lr=0.002: {told}", "after step", "tried once more", f"0 left · lr=0.002 {told}"):
        assert fact in said
    assert told in result()["lr=0.002"]["message"]
    assert result()["lr=0.001"]["message"] == ""


def test_a_job_that_hangs_twice_is_a_row(hangs: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the key it is killed after an hour, once there is a step.

    Files tell what a long pause is.
    """
    hangs(3)
    assert sweep("lr=2e-3,1e-3") == 1
    assert ForkServer.launches == [2, 1, 1]
    rows = result()
    assert [row["status"] for row in rows.values()] == ["failed", "finished"]
    for fact in (
        "made no progress for 1 h",
        "after step",
        "tried once more",
        "hydra.sweeper.stall_seconds=SECONDS",
    ):
        assert fact in rows["lr=0.002"]["message"]
    assert (
        "1 of 2 finished · 0 running · 1 failed · 0 left · lr=0.002 made no progress"
        in capsys.readouterr().out
    )
    assert sweep("lr=2e-3,1e-3") == 1
    assert ForkServer.launches == [2, 1, 1], "it is left as failed"


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


def test_what_counts_as_no_progress(tmp_path: Path) -> None:
    now = [0.0]
    run = SweepDir(tmp_path).run("job")
    run.path.mkdir()

    def watching(seconds: float | None) -> StallWatch:
        return StallWatch(SweepDir(tmp_path), seconds, lambda: now[0])

    def look(watch: StallWatch, seconds: float) -> float | None:
        """Every minute."""
        found = watch("job")
        for _ in range(round(seconds / 60)):
            now[0] += 60
            found = watch("job")
        return found

    watch = watching(None)
    run.metrics.write_text('{"step": 0}\n')
    assert look(watch, 86_340) is None, "data may take long, and are no file of a run"
    assert look(watch, 60) == 86_400

    watch = watching(None)
    for step, pause in enumerate((120, 600, 60)):
        assert look(watch, pause) is None
        run.metrics.write_text('{"step": 1}\n' * (step + 1))
    run.checkpoints.mkdir()
    assert look(watch, 11_940) is None, "20 times the longest pause of any job"
    (run.checkpoints / "half-written").mkdir()
    assert look(watch, 0) is None
    assert look(watch, 20 * 11_940) == 20 * 11_940

    watch = watching(5.0)
    for passed, found in ((0, None), (4, None), (1, 5.0)):
        now[0] += passed
        assert watch("job") == found
    run.log.write_text("a line")
    for passed, found in ((4, None), (4, None), (1, 5.0)):
        now[0] += passed
        assert watch("job") == found
    watch.forget("job")
    assert watch("job") is None
    now[0] += 1e6
    assert watch("job") == 60, "the sweep itself was suspended: what it has not seen does not count"


def test_a_job_out_of_reach_is_named(tmp_path: Path) -> None:
    """As those of a cluster: its holder is no process that this sweep has started."""
    with RunLock(tmp_path / "job.lock"):
        assert end_holder(tmp_path / "job.lock", 2**30).endswith(f"as process {os.getpid()}")
    assert "unknown" in end_holder(tmp_path / "job.lock", 2**30)


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
        assert len(family(process.pid)) == 2
        end_family(process.pid)
        assert process.stdout.read() == b"", "both ends of the pipe are closed"
    assert process.returncode == -signal.SIGKILL
