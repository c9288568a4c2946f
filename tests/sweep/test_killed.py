"""kill -9, ten times at random: each job's steps are done once, and the result is that of a sweep left alone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from optrun.artifacts.run_check import problems_of
from optrun.artifacts.run_dir import RunDir
from tests.running import records, summary
from tests.sweep import forked
from tests.sweep.forked import SAVE, STEPS, jobs, result, same, sweep, whole

GRID = ["lr=1e-3,2e-3,4e-3,8e-3", "seed=0,1,2", "optimizer=lamb,adamw"]


def wait(pid: int, seconds: float) -> int | None:
    """The exit code of a process, None if it runs longer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None


@pytest.mark.slow
def test_killed_ten_times(place: Path) -> None:
    assert sweep(*GRID, folder="straight") == 0
    chance = random.Random(5)
    kills, logged = 0, 0
    while kills < 10:
        pid = forked.fork(lambda: (os.setpgid(0, 0), sweep(*GRID))[1], place / "log")
        while not list(Path("sweep").glob(".sweep/launch-*.json")):  # past the composing
            code = wait(pid, 0.05)
            assert code is None, (place / "log").read_text()[-2000:]
        assert wait(pid, chance.uniform(0.3, 2.5)) is None, "it finished before it could be killed often enough"
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for spec in Path("sweep").glob(".sweep/launch-*.json"):
            spec.unlink()
        kills += 1
        # What a checkpoint holds is in the metrics, and stays there.
        now = sum(len(records(path.parent)) for path in Path("sweep").glob("*/metrics.jsonl"))
        assert now >= logged - SAVE, (now, logged)
        logged = now
    assert sweep(*GRID) == 0
    assert len(jobs()) == 24
    assert {job.name for job in jobs()} == {job.name for job in jobs("straight")}
    for job in jobs():
        assert same(job, Path("straight") / job.name), job.name
        for resumed in summary(job)["resumes"]:
            assert resumed["from_step"] <= STEPS
        assert problems_of(RunDir(job)) == []
    taken_up = sum(len(summary(job)["resumes"]) for job in jobs())
    assert 0 < taken_up <= 10, "only what was cut was taken up"
    assert [row["status"] for row in result().values()] == ["finished"] * 24


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["basic", "joblib"])
def test_the_real_program(launcher: str, place: Path) -> None:
    """As a person runs it: the worker is killed, then the sweep itself, then the same line again."""
    words = [*forked.JOB, "lr=1e-3,2e-3", "seed=0,1", "hydra.sweep.dir=sweep", f"hydra/launcher={launcher}"]
    if launcher == "joblib":
        words.append("hydra.launcher.n_jobs=2")
    words[words.index("training.max_steps=8")] = "training.max_steps=60"

    def begin() -> subprocess.Popen[bytes]:
        with (place / "out").open("ab") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "optrun", "-m", *words],
                stdout=out,
                stderr=out,
                env={**os.environ, "PYTHONPATH": str(Path(forked.__file__).parents[2])},
            )

    def worker() -> int:
        """A process that trains: the lock of a job that has begun says which."""
        while True:
            for lock in Path("sweep").glob("*/.lock"):
                if (lock.parent / "metrics.jsonl").is_file() and summary(lock.parent)["status"] == "running":
                    return int(lock.read_text().split('"pid": ')[1].split(",")[0])
            assert process.poll() is None, (place / "out").read_text()[-3000:]
            time.sleep(0.02)

    process = begin()
    os.kill(worker(), signal.SIGKILL)
    time.sleep(0.5)
    last = worker()
    process.kill()
    process.wait()
    patience = time.monotonic() + 30
    while Path(f"/proc/{last}").exists() and time.monotonic() < patience:
        time.sleep(0.05)
    assert not Path(f"/proc/{last}").exists(), "a worker outlives its sweep"
    process = begin()
    assert process.wait(timeout=240) == 0, (place / "out").read_text()[-3000:]
    assert len(jobs()) == 4
    assert all(whole(job, 60) for job in jobs())
