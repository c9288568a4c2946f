"""kill -9, six times at random.

Each job's steps are done once, and the result is that of a sweep left alone.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from optrun.artifacts import async_writer as saver_of
from optrun.artifacts.run_check import run_problems
from optrun.artifacts.run_dir import RunDir
from tests.running import records, summary
from tests.sweep import forked
from tests.sweep.forked import SAVE, STEPS, jobs, result, same, sweep, whole

GRID = ["lr=1e-3,2e-3,4e-3", "seed=0,1,2", "optimizer=lamb,adamw"]


def wait(pid: int, seconds: float) -> int | None:
    """The exit code of a process, None if it runs longer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None


def at_checkpoint(act: Callable[[int], object]) -> None:
    """Do something right after the commit of a checkpoint of a job that is not at its end.

    In this process for ever.

    Args:
        act: Called in the thread that saves, with the number of such checkpoints since now.
    """
    original, seen = saver_of.save_checkpoint, [0]

    def save(*args: Any, **kwargs: Any) -> Path:
        folder: Path = original(*args, **kwargs)
        if folder.name != f"step-{STEPS:08d}":
            seen[0] += 1
            act(seen[0])
        return folder

    saver_of.save_checkpoint = save


def committed(step: int) -> set[str]:
    """Names of the jobs that have the checkpoint of a step."""
    return {path.parents[1].name for path in Path("sweep").glob(f"*/checkpoints/step-{step:08d}")}


def kill_later(pid: int, kill: str, dead: Path, seconds: float, log: Path) -> None:
    """Kill a sweep some seconds after its first worker was launched, or after one died."""

    def has_begun() -> bool:
        if kill == "clock":
            return any(Path("sweep").glob(".sweep/launch-*.json"))
        return dead.exists()

    while not has_begun():
        assert wait(pid, 0.05) is None, log.read_text()[-2000:]
    assert wait(pid, seconds) is None, log.read_text()[-2000:]
    if kill == "clock":
        os.killpg(pid, signal.SIGKILL)
    else:
        os.kill(pid, signal.SIGKILL)  # a worker alone saves its job, and ends
    os.waitpid(pid, 0)


@pytest.mark.slow
def test_killed_six_times(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the clock, or right behind a committed checkpoint.

    All at once, a worker alone, its sweep alone.

    It is on no machine a matter of luck: a sweep that waits for the clock stands still at its
    second such checkpoint, so that six starts never finish it.
    """
    begun = time.monotonic()
    assert sweep(*GRID, folder="straight") == 0
    job_seconds = (time.monotonic() - begun) / 18
    chance = random.Random(5)
    kills = ["clock", "checkpoint", "worker and sweep"] * 2
    chance.shuffle(kills)
    logged = 0
    cut: set[str] = set()

    def run(kill: str, checkpoint: int, dead: Path) -> int:
        os.setpgid(0, 0)
        parent = os.getpid()

        def act(seen: int) -> None:
            if kill == "checkpoint" and seen == checkpoint:
                os.killpg(0, signal.SIGKILL)
            elif kill == "worker and sweep" and seen == checkpoint and not dead.exists():
                dead.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            while kill != "checkpoint" and seen == 2 and os.getppid() == parent:
                time.sleep(0.01)

        at_checkpoint(act)
        return sweep(*GRID)

    for number, kill in enumerate(kills):
        dead = place / f"dead-{number}"
        pid = forked.fork(partial(run, kill, chance.randint(1, 2), dead), place / "log")
        if kill == "checkpoint":
            assert wait(pid, 240) == -signal.SIGKILL, (place / "log").read_text()[-2000:]
            cut |= committed(SAVE) - committed(STEPS)
        else:
            kill_later(pid, kill, dead, chance.uniform(0, 4 * job_seconds), place / "log")
        for spec in Path("sweep").glob(".sweep/launch-*.json"):
            spec.unlink(missing_ok=True)
        # What a checkpoint holds is in the metrics, and stays there.
        now = sum(len(records(path.parent)) for path in Path("sweep").glob("*/metrics.jsonl"))
        assert now >= logged - SAVE, (now, logged)
        logged = now
    capsys.readouterr()
    assert sweep(*GRID) == 0
    assert "\n18 of 18 finished · 0 running · 0 failed · 0 left\n" in capsys.readouterr().out
    assert len(jobs()) == 18
    assert {job.name for job in jobs()} == {job.name for job in jobs("straight")}
    for job in jobs():
        assert same(job, Path("straight") / job.name), job.name
        assert all(resumed["from_step"] <= STEPS for resumed in summary(job)["resumes"])
        assert run_problems(RunDir(job)) == []
    taken_up = {job.name: len(summary(job)["resumes"]) for job in jobs() if summary(job)["resumes"]}
    assert len(cut) >= 2
    assert cut <= set(taken_up), "what was cut behind a checkpoint was taken up there"
    assert sum(taken_up.values()) <= 8, "only what was cut was taken up"
    assert [row["status"] for row in result().values()] == ["finished"] * 18


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["basic", "joblib"])
def test_the_real_program(launcher: str, place: Path, request: pytest.FixtureRequest) -> None:
    """As a person runs it.

    The worker is killed, then the sweep itself, then the same line again.
    """
    words = [
        *forked.JOB,
        "lr=1e-3,2e-3",
        "seed=0,1",
        "hydra.sweep.dir=sweep",
        f"hydra/launcher={launcher}",
    ]
    if launcher == "joblib":
        words.append("hydra.launcher.n_jobs=2")
    words[words.index("training.max_steps=8")] = "training.max_steps=60"

    def begin() -> subprocess.Popen[bytes]:
        with (place / "out").open("ab") as out:
            started = subprocess.Popen(
                [sys.executable, "-m", "optrun", "-m", *words],
                stdout=out,
                stderr=out,
                env={**os.environ, "PYTHONPATH": str(Path(forked.__file__).parents[2])},
            )
        request.addfinalizer(lambda: (started.kill(), started.wait()))
        return started

    def worker(after: int = 0) -> int:
        """A process that trains, another than the one that was killed.

        The lock of a job that has begun says which.
        """
        while True:
            for lock in Path("sweep").glob("*/.lock"):
                if (lock.parent / "metrics.jsonl").is_file() and summary(lock.parent)[
                    "status"
                ] == "running":
                    found = re.search(r'"pid": (\d+),', lock.read_text())  # it may just be written
                    if found and int(found[1]) != after and Path("/proc", found[1]).exists():
                        return int(found[1])
            assert process.poll() is None, (place / "out").read_text()[-3000:]
            time.sleep(0.02)

    process = begin()
    first = worker()
    os.kill(first, signal.SIGKILL)
    last = worker(first)
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
