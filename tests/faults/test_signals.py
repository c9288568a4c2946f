"""Requests by signal: the update is finished, everything is saved, 75.

And going on leaves no trace of it.
"""

from __future__ import annotations

import contextlib
import os
import pty
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from optrun.artifacts import async_writer as saver_of
from optrun.artifacts.retention import latest_complete
from optrun.artifacts.run_dir import RunDir
from optrun.certify.trial import Child
from optrun.cli import main as cli
from optrun.data.loader import BatchLoader
from optrun.runner import prepare as preparation
from optrun.runner import train as experiment
from optrun.training import evaluate as evaluation
from optrun.training import loop as loop_of
from optrun.training.signals import REPEAT_SECONDS, SignalHandler
from optrun.training.step import TrainStep
from tests.faults.runs import STEPS, Go, Straight
from tests.faults.syscalls import Syscalls, in_child
from tests.running import members, optrun, records, session, summary


def send_at(
    monkeypatch: pytest.MonkeyPatch,
    place: Any,
    name: str,
    count: int,
    number: signal.Signals,
    *,
    group: bool = False,
) -> None:
    """Send this process, or its group, a signal right before the call number `count` of
    something.
    """
    original, calls = getattr(place, name), [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == count:
            (os.killpg if group else os.kill)(os.getpid(), number)
        return original(*args, **kwargs)

    monkeypatch.setattr(place, name, call)


@contextlib.contextmanager
def hurt(monkeypatch: pytest.MonkeyPatch, *args: Any) -> Iterator[None]:
    with monkeypatch.context() as patch:
        send_at(patch, *args)
        yield


PATIENCE = 240.0
"""Seconds within which a busy machine, too, does what it has to do at once."""

PLACES = {
    "update": (TrainStep, "compute_gradients", 2, 2),
    "evaluation": (evaluation, "evaluate_sets", 2, 3),  # the first is before the first step
    "evaluation at the end": (evaluation, "evaluate_sets", 3, 6),
    "save": (saver_of, "save_checkpoint", 3, None),
    "fetch": (loop_of.Loop, "_fetch", 3, 2),
    "metrics line": (loop_of.Loop, "_log", 5, 4),
}


@pytest.mark.parametrize(
    ("place", "number"),
    [(place, signal.SIGHUP if place == "fetch" else signal.SIGTERM) for place in PLACES],
)
def test_a_request_at_any_place(
    straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch, place: str, number: signal.Signals
) -> None:
    where, name, count, step = PLACES[place]
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    }
    with hurt(monkeypatch, where, name, count, number):
        code, said = go(*straight.words, "hydra.run.dir=run")
    assert code == 75
    assert f"{number.name} received after step" in said
    assert "optrun resume=" in said
    done = summary(Path("run"))
    assert done["status"] == "interrupted"
    if step is not None:
        assert done["global_step"] == step
    assert RunDir("run").checkpoint(done["global_step"]).is_dir()
    assert {number: signal.getsignal(number) for number in before} == before
    assert go("resume=run")[0] == 0
    straight.same(Path("run"))


@pytest.mark.parametrize("place", ["train_tokenizer", "build_model"])
def test_before_the_first_step_there_is_nothing_to_save(
    straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """It ends at once, not when the data is ready.

    The same command with resume=auto begins again in place.
    """
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


def test_while_the_first_batch_is_awaited(
    straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader that hangs does not keep the process from ending."""

    def endless(self: BatchLoader, *_: Any) -> Iterator[Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(2 * PATIENCE)
        yield

    begun = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(BatchLoader, "training", endless)
        code, said = go(*straight.words, "hydra.run.dir=run", "resume=auto")
    assert code == 75
    assert time.monotonic() - begun < PATIENCE
    assert "before the first step" in said
    assert go(*straight.words, "hydra.run.dir=run", "resume=auto")[0] == 0
    straight.same(Path("run"))


def test_sigusr1_saves_and_goes_on(
    straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hurt(monkeypatch, TrainStep, "compute_gradients", 4, signal.SIGUSR1):
        code, _ = go(
            *straight.words_with("checkpoint.save_steps=null", "checkpoint.keep_best=0"),
            "hydra.run.dir=run",
        )
    assert code == 0
    found = sorted(path.name for path in RunDir("run").checkpoints.glob("step-*"))
    assert found == ["step-00000004", "step-00000006"]
    assert records(Path("run")) == records(straight.path)


def test_time_is_counted_from_the_start(
    straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making data and model ready is part of the budget; each start makes at least one step."""
    original = experiment.prepare

    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(1.2)
        return original(*args, **options)

    monkeypatch.setattr(experiment, "prepare", slow)
    code, said = go(*straight.words, "hydra.run.dir=run", "training.max_seconds=1")
    assert code == 75
    assert "training.max_seconds=1" in said
    assert summary(Path("run"))["global_step"] == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_second_one_ends_the_process(number: signal.Signals) -> None:
    def twice() -> None:
        with SignalHandler() as signal_handler:
            os.kill(os.getpid(), number)
            assert signal_handler.stop_signal is number
            os.kill(os.getpid(), number)

    assert in_child(twice) == 128 + number


def test_a_second_one_inside_a_save_leaves_the_checkpoint_before(
    straight: Straight, go: Go, tmp_path: Path
) -> None:
    """Whoever does not want to wait for the save loses it, and nothing else."""

    def twice(name: str, args: tuple[Any, ...], real: Callable[..., Any]) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)

    def run() -> None:
        original, calls = saver_of.save_checkpoint, [0]

        def save(run: RunDir, *given: Any) -> Path:
            calls[0] += 1
            with Syscalls(run.checkpoints, 6 if calls[0] == 3 else 0, twice):
                return original(run, *given)

        saver_of.save_checkpoint = save
        optrun(*straight.words, "hydra.run.dir=run")

    assert in_child(run) == 143
    run_dir = RunDir("run")
    assert latest_complete(run_dir)[0] == run_dir.checkpoint(2)
    assert any(
        path.name.startswith(".saving-step-00000003") for path in run_dir.checkpoints.iterdir()
    )
    assert go("resume=run")[0] == 0
    straight.same(run_dir)


def test_a_closed_terminal_is_a_request(straight: Straight, go: Go, tmp_path: Path) -> None:
    """The kernel sends SIGHUP, and refuses every further word to a terminal that is gone."""
    words = straight.words_with("training.max_steps=100000", "checkpoint.save_steps=50")
    child, terminal = pty.fork()
    if child == 0:
        code = 1
        try:
            sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
            code = optrun(*words, "hydra.run.dir=run")
        finally:
            os._exit(code)
    reader = threading.Thread(
        target=read_all, args=(terminal, lambda: steps_done(Path("run")) >= 3), daemon=True
    )
    reader.start()
    reader.join(120)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 75
    done = summary(Path("run"))
    assert done["status"] == "interrupted"
    assert "SIGHUP received" in done["message"]
    step = done["global_step"]
    assert RunDir("run").checkpoint(step).is_dir()
    assert go("resume=run", f"training.max_steps={step + 2}")[0] == 0


def read_all(descriptor: int, enough: Callable[[], bool]) -> None:
    """Take what a terminal shows, so that nobody waits for room in it."""
    while not enough():
        with contextlib.suppress(OSError):
            if select.select([descriptor], [], [], 0.02)[0]:
                os.read(descriptor, 65536)


def test_nohup_is_heard() -> None:
    def ignored() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with SignalHandler() as signal_handler:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal_handler.stop_signal is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

    assert in_child(ignored) == 0


def test_a_worker_leaves_signals_to_the_main_process() -> None:
    """Also in the moment after the fork, before it has set them aside."""
    with SignalHandler():

        def work() -> None:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGTERM)

        assert in_child(work) == 0


def test_a_rank_takes_a_signal_that_comes_twice_at_once_as_one() -> None:
    """As from SLURM and from torchrun, which passes its own on; a later one ends it at once."""

    def rank() -> None:
        with SignalHandler(is_rank=True) as signal_handler:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
            assert signal_handler.stop_signal == signal.SIGTERM
            signal_handler.stopped_at -= REPEAT_SECONDS
            os.kill(os.getpid(), signal.SIGTERM)

    assert in_child(rank) == 128 + signal.SIGTERM


# In processes of their own
# --------------------------------------------------------------------------------------------


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start runs that do not outlive the test."""
    with contextlib.ExitStack() as stack:

        def begin(words: list[str], cwd: Path, *more: str) -> subprocess.Popen[str]:
            command = [
                sys.executable,
                "-m",
                "optrun",
                *words,
                "hydra.run.dir=run",
                "resume=auto",
                *more,
            ]
            return stack.enter_context(
                session(command, cwd, {"PYTHONPATH": os.pathsep.join(sys.path)})
            )

        yield begin


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.005)


def steps_done(folder: Path) -> int:
    try:
        return (folder / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


# Without evaluations, whose workers come and go, and may be killed unnoticed when their last batch
# is there.
LONG = ["training.max_steps=100000", "checkpoint.save_steps=5", "training.eval_steps=100000"]


@pytest.mark.slow
def test_a_group_signal_with_workers_leaves_nobody(
    straight: Straight, start: Start, tmp_path: Path
) -> None:
    process = start(straight.words_with(*LONG), tmp_path, "training.dataloader_num_workers=2")
    wait_for(lambda: steps_done(tmp_path / "run") >= 2, process)
    assert len(members(process.pid)) >= 3
    os.killpg(process.pid, signal.SIGTERM)
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 75, said
    assert "everything is saved" in said
    assert members(process.pid) == []


@pytest.mark.slow
def test_a_second_signal_ends_at_once(straight: Straight, start: Start, tmp_path: Path) -> None:
    """With workers, whatever the first one began."""
    process = start(straight.words_with(*LONG), tmp_path, "training.dataloader_num_workers=2")
    wait_for(lambda: steps_done(tmp_path / "run") >= 2, process)
    for number in (
        signal.SIGSTOP,
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGCONT,
    ):  # both are there when it wakes
        process.send_signal(number)
    said, _ = process.communicate(timeout=PATIENCE)
    # Which of two pending signals a process with several threads hears first is the kernel's
    # choice.
    assert process.returncode in (130, 143), said
    assert "stopped at once" in said
    end = time.monotonic() + PATIENCE
    while members(process.pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert members(process.pid) == []


@pytest.mark.slow
def test_workers_die_with_a_killed_parent_and_free_the_run(
    straight: Straight, start: Start, tmp_path: Path
) -> None:
    process = start(straight.words_with(*LONG), tmp_path, "training.dataloader_num_workers=2")
    wait_for(lambda: steps_done(tmp_path / "run") >= 2, process)
    process.kill()
    process.wait()
    again = start(
        straight.words_with(*LONG), tmp_path, "training.max_seconds=0.1"
    )  # at once: the lock is free
    said, _ = again.communicate(timeout=PATIENCE)
    assert again.returncode == 75, said
    end = time.monotonic() + PATIENCE
    while members(process.pid) and time.monotonic() < end:
        time.sleep(0.1)
    assert members(process.pid) == []


@pytest.mark.slow
def test_a_killed_worker_is_an_error_at_once(
    straight: Straight, start: Start, tmp_path: Path
) -> None:
    """At once, and not when its answer is overdue."""
    words = straight.words_with(
        *LONG, "training.dataloader_num_workers=2", "training.dataloader_timeout=100000"
    )
    process = start(words, tmp_path)
    wait_for(lambda: steps_done(tmp_path / "run") >= 6 and len(members(process.pid)) > 1, process)
    os.kill(max(members(process.pid)), signal.SIGKILL)
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "a loader worker is gone" in said
    assert "killed" in said.lower()
    assert "Traceback" not in said
    assert members(process.pid) == []


@pytest.mark.slow
def test_a_worker_that_hangs_is_an_error_in_time(
    straight: Straight, start: Start, tmp_path: Path
) -> None:
    words = straight.words_with(
        *LONG, "training.dataloader_num_workers=2", "training.dataloader_timeout=3"
    )
    process = start(words, tmp_path)
    wait_for(lambda: steps_done(tmp_path / "run") >= 6, process)
    for worker in members(process.pid):
        if worker != process.pid:
            os.kill(worker, signal.SIGSTOP)
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "no loader worker has answered in time (training.dataloader_timeout)" in said
    assert "Its examples: " in said
    assert members(process.pid) == []


SIGNALS = int(os.environ.get("OPTRUN_SIGNALS", "20"))


@pytest.mark.slow
def test_random_moments(
    straight: Straight, go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`OPTRUN_SIGNALS` requests, to the process or, with loader workers, to its group, at any
    moment of its life.

    A third comes by the clock over its whole life, a third while it trains, a third right before an
    update.

    Everything is saved (75) or done (0); before the run has begun and after it has finished it is
    any process.
    """
    chance = random.Random(11)
    child = Child(cli.run, [*straight.words, "hydra.run.dir=timed"], tmp_path / "timed.log")
    begun = time.monotonic()
    assert child.wait() == 0
    lifetime = time.monotonic() - begun
    ends: dict[str, int] = {}
    for trial in range(SIGNALS):
        run, workers = RunDir(f"run-{trial}"), 2 * (trial % 2)
        words = [
            *straight.words_with(f"training.dataloader_num_workers={workers}"),
            f"hydra.run.dir={run.path}",
        ]
        number = chance.choice([signal.SIGTERM, signal.SIGINT])
        moment = ("life", "update", "training")[trial % 3]
        with monkeypatch.context() as patch:
            if moment == "update":  # from within, so that no machine is too quick for it
                send_at(
                    patch,
                    TrainStep,
                    "compute_gradients",
                    chance.randint(1, STEPS - 1),
                    number,
                    group=workers > 0,
                )
            child = Child(cli.run, [*words, "resume=auto"], tmp_path / f"{trial}.log")
        try:
            if moment == "training":  # of which most of a life of such a small run does not consist
                steps = chance.randrange(5)
                while not child.ended() and not (
                    run.summary.exists() and steps_done(run.path) >= steps
                ):
                    time.sleep(0.001)
                time.sleep(chance.uniform(0, 0.02))
            elif moment == "life":
                time.sleep(chance.uniform(0.05, 0.95) * lifetime)
            if moment != "update" and not child.ended():
                (os.killpg if workers else os.kill)(child.process, number)
            code = child.wait()
        finally:
            child.kill()
        status = summary(run.path)["status"] if run.summary.exists() else "not begun"
        ends[status] = ends.get(status, 0) + 1
        assert code == 75 or moment != "update", (trial, code, status)
        if code == 75:
            assert status == "interrupted", (trial, code, status)
        elif code != 0:
            assert code in (-number, 128 + number), (trial, code, status)
            assert status in ("not begun", "finished"), (trial, code, status)
        left = sorted(str(path) for path in run.path.rglob("*"))
        code, said = go(*words, "resume=auto")
        assert code == 0, (said, left)
        straight.same(run)
        assert members(child.process) == []
    assert ends["interrupted"] >= SIGNALS // 3, ends
