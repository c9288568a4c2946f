"""Requests by signal: the update is finished, everything is saved, 75; and going on leaves no trace of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from optrun import experiment, preparation
from optrun.artifacts import saver as saver_of
from optrun.artifacts.run_dir import RunDir
from optrun.data.loader import Feed
from optrun.training import evaluation
from optrun.training import loop as loop_of
from optrun.training.interrupts import Interrupts
from optrun.training.step import Stepper
from tests.faults.runs import Go, Straight
from tests.faults.syscalls import in_child
from tests.running import records, summary


def send_at(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, count: int, number: signal.Signals) -> None:
    """Send this process a signal right before the call number `count` of something."""
    original, calls = getattr(place, name), [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == count:
            os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    monkeypatch.setattr(place, name, call)


@contextlib.contextmanager
def hurt(monkeypatch: pytest.MonkeyPatch, *args: Any) -> Iterator[None]:
    with monkeypatch.context() as patch:
        send_at(patch, *args)
        yield


PLACES = {
    "update": (Stepper, "__call__", 2, 2),
    "evaluation": (evaluation, "evaluate", 1, 3),
    "evaluation at the end": (evaluation, "evaluate", 2, 6),
    "save": (saver_of, "save_checkpoint", 3, None),
    "fetch": (loop_of.Loop, "_fetch", 3, 2),
    "metrics line": (loop_of.Loop, "_write", 4, 4),
}


@pytest.mark.parametrize(
    ("place", "number"), [*((place, signal.SIGTERM) for place in PLACES), ("update", signal.SIGHUP)]
)
def test_a_request_at_any_place(
    straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch, place: str, number: signal.Signals
) -> None:
    where, name, count, step = PLACES[place]
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)}
    with hurt(monkeypatch, where, name, count, number):
        code, said = go(*straight.words, "hydra.run.dir=run")
    assert code == 75
    assert f"{number.name} received: stopped after step" in said
    assert "optrun resume=" in said
    done = summary(Path("run"))
    assert done["status"] == "interrupted"
    if step is not None:
        assert done["global_step"] == step
    assert RunDir("run").checkpoint(done["global_step"]).is_dir()
    assert {number: signal.getsignal(number) for number in before} == before
    assert go(*straight.words, "hydra.run.dir=run", "resume=auto")[0] == 0
    straight.same(Path("run"))


@pytest.mark.parametrize("place", ["load_source", "train_tokenizer", "build_model"])
def test_before_the_first_step_there_is_nothing_to_save(
    straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """It ends at once, not when the data is ready; the same command with resume=auto begins again in place."""
    with hurt(monkeypatch, preparation, place, 1, signal.SIGTERM):
        code, said = go(*straight.words, "hydra.run.dir=run", "resume=auto")
    assert code == 75
    assert "nothing to save yet" in said
    assert summary(Path("run"))["status"] == "interrupted"
    assert not RunDir("run").checkpoints.exists()
    code, said = go(*straight.words, "hydra.run.dir=run", "resume=auto")
    assert code == 0
    assert "starts over from step 0" in said
    straight.same(Path("run"))


def test_while_the_first_batch_is_awaited(straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that hangs does not keep the process from ending."""

    def endless(self: Feed, plan: Any, start: int) -> Iterator[Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
        yield

    begun = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(Feed, "training", endless)
        code, said = go(*straight.words, "hydra.run.dir=run", "resume=auto")
    assert code == 75
    assert time.monotonic() - begun < 30
    assert "before the first step" in said
    assert go(*straight.words, "hydra.run.dir=run", "resume=auto")[0] == 0
    straight.same(Path("run"))


def test_sigusr1_saves_and_goes_on(straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch) -> None:
    with hurt(monkeypatch, Stepper, "__call__", 4, signal.SIGUSR1):
        code, _ = go(*straight.words_with("checkpoint.save_steps=null", "checkpoint.keep_best=0"), "hydra.run.dir=run")
    assert code == 0
    found = sorted(path.name for path in RunDir("run").checkpoints.glob("step-*"))
    assert found == ["step-00000004", "step-00000006"]
    assert records(Path("run")) == records(straight.path)


def test_time_is_counted_from_the_start(straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch) -> None:
    """Making data and model ready is part of the budget; each start makes at least one step."""
    original = experiment.prepare

    def slow(*args: Any) -> Any:
        time.sleep(1.2)
        return original(*args)

    monkeypatch.setattr(experiment, "prepare", slow)
    code, said = go(*straight.words, "hydra.run.dir=run", "training.max_seconds=1")
    assert code == 75
    assert "training.max_seconds=1" in said
    assert summary(Path("run"))["global_step"] == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_second_one_ends_the_process(number: signal.Signals) -> None:
    def twice() -> None:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), number)
            assert interrupts.stop_signal is number
            os.kill(os.getpid(), number)

    assert in_child(twice) == 128 + number


def test_a_worker_leaves_signals_to_the_main_process() -> None:
    """Also in the moment after the fork, before it has set them aside."""
    with Interrupts():

        def work() -> None:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGTERM)

        assert in_child(work) == 0


# In processes of their own --------------------------------------------------------------------------------------------


def start(words: list[str], cwd: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "optrun", *words, "hydra.run.dir=run", "resume=auto", *more],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.005)


def steps_done(folder: Path) -> int:
    try:
        return (folder / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def members(session: int) -> list[int]:
    """Processes of a session that are still alive."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rsplit(")", 1)[1].split()
            if int(fields[3]) == session and fields[0] not in "ZX":
                found.append(int(path.parent.name))
    return found


LONG = ["training.max_steps=100000", "checkpoint.save_steps=5"]


@pytest.mark.slow
def test_a_group_signal_with_workers_leaves_nobody(straight: Straight, tmp_path: Path) -> None:
    process = start(straight.words_with(*LONG), tmp_path, "training.dataloader_num_workers=2")
    wait_for(lambda: steps_done(tmp_path / "run") >= 2, process)
    assert len(members(process.pid)) >= 3
    os.killpg(process.pid, signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 75, said
    assert "everything is saved" in said
    assert members(process.pid) == []


@pytest.mark.slow
def test_a_second_signal_ends_at_once(straight: Straight, tmp_path: Path) -> None:
    """With workers, whatever the first one began."""
    process = start(straight.words_with(*LONG), tmp_path, "training.dataloader_num_workers=2")
    wait_for(lambda: steps_done(tmp_path / "run") >= 2, process)
    for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):  # both are there when it wakes
        process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 143, said
    assert "stopped at once" in said
    end = time.monotonic() + 10
    while members(process.pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert members(process.pid) == []


@pytest.mark.slow
def test_workers_die_with_a_killed_parent_and_free_the_run(straight: Straight, tmp_path: Path) -> None:
    process = start(straight.words_with(*LONG), tmp_path, "training.dataloader_num_workers=2")
    wait_for(lambda: steps_done(tmp_path / "run") >= 2, process)
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
    again = start(straight.words_with(*LONG), tmp_path, "training.max_seconds=0.1")  # at once: the lock is free
    said, _ = again.communicate(timeout=120)
    assert again.returncode == 75, said
    end = time.monotonic() + 10
    while members(process.pid) and time.monotonic() < end:
        time.sleep(0.1)
    assert members(process.pid) == []


@pytest.mark.slow
def test_a_killed_worker_is_an_error_at_once(straight: Straight, tmp_path: Path) -> None:
    process = start(straight.words_with(*LONG), tmp_path, "training.dataloader_num_workers=2")
    wait_for(lambda: steps_done(tmp_path / "run") >= 6 and len(members(process.pid)) > 1, process)
    worker = max(members(process.pid))
    begun = time.monotonic()
    os.kill(worker, signal.SIGKILL)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert time.monotonic() - begun < 10
    assert "a loader worker is gone" in said
    assert "killed" in said.lower()
    assert "Traceback" not in said
    assert members(process.pid) == []


@pytest.mark.slow
def test_a_worker_that_hangs_is_an_error_in_time(straight: Straight, tmp_path: Path) -> None:
    words = straight.words_with(*LONG, "training.dataloader_num_workers=2", "training.dataloader_timeout=3")
    process = start(words, tmp_path)
    wait_for(lambda: steps_done(tmp_path / "run") >= 6, process)
    for worker in members(process.pid):
        if worker != process.pid:
            os.kill(worker, signal.SIGSTOP)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "no loader worker has answered in time (training.dataloader_timeout)" in said
    assert "Its examples: " in said
    assert members(process.pid) == []
