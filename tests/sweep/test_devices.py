"""Sweeps over devices: one job a device side by side, each pinned, whoever else is on the machine.

There need not be a device: what torch would answer to "which are there?" and "how many do you see?"
is simulated, and jobs train on the CPU of a process that is pinned all the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from optrun.base.errors import OptrunError
from optrun.config.schema.distributed import NoDistributedConfig
from optrun.runner.train import train
from optrun.sweeper import devices as devices_of
from optrun.sweeper import launch
from optrun.sweeper.devices import VISIBLE, find_devices
from optrun.sweeper.worker import SweepTask
from optrun.training.display import PlainDisplay
from tests.running import optrun, summary
from tests.sweep import forked
from tests.sweep.forked import jobs, result, same, sweep, whole

TWO = "hydra.sweeper.devices=auto"
GRID = ["lr=1e-3,2e-3,4e-3,8e-3", "seed=0,1"]
pytestmark = pytest.mark.usefixtures("no_devices_named")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two devices."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)


@pytest.fixture
def two(place: Path, machine: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to sweep in on that machine.

    `spans.jsonl` tells which job was on which device, and when.
    """
    monkeypatch.setattr(launch, "refuse_unseen", lambda visible: None)
    monkeypatch.setattr(
        forked, "JOB", [word for word in forked.JOB if not word.startswith("training.device=")]
    )
    original = SweepTask._train

    def train(self: SweepTask, run: Any, *args: Any) -> None:
        with span(place / "spans.jsonl", run.path.name):
            original(self, run, *args)

    monkeypatch.setattr(SweepTask, "_train", train)
    return place


LINGER = 0.0
"""Seconds by which each job is longer."""


@contextmanager
def span(path: Path, job: str) -> Iterator[None]:
    """Record when a job began and ended, one line each; one that is killed has no end."""

    def tell(what: str) -> None:
        line = {
            "what": what,
            "job": job,
            "devices": os.environ[VISIBLE],
            "pid": os.getpid(),
            "at": time.monotonic(),
        }
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    tell("begin")
    try:
        yield
    finally:
        time.sleep(LINGER)
        tell("end")


def spans(path: Path = Path("spans.jsonl")) -> list[dict[str, Any]]:
    """Lines of the record, in order of time."""
    return sorted(
        (json.loads(line) for line in path.read_text().splitlines()), key=lambda line: line["at"]
    )


def assert_never_two_on_one(found: Sequence[dict[str, Any]], killed: Sequence[float] = ()) -> None:
    """Each device: a job begins when the one before has ended, or was killed in between."""
    names = {name for line in found for name in line["devices"].split(",")}
    for name in names:
        own = [line for line in found if name in line["devices"].split(",")]
        for line, following in pairwise(own):
            dead = any(line["at"] < moment < following["at"] for moment in killed)
            assert dead or (line["what"], following["what"]) in (
                ("begin", "end"),
                ("end", "begin"),
            ), own
            assert line["what"] == "end" or dead or line["pid"] == following["pid"], own


def test_jobs_run_side_by_side(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight jobs: each once, pinned, never two on one device at one time, on both devices."""
    monkeypatch.setattr("tests.sweep.test_devices.LINGER", 0.3)
    assert sweep(*GRID, TWO, "training.max_steps=4") == 0
    assert len(jobs()) == 8
    assert all(whole(job, 4) for job in jobs())
    found = spans()
    begun = [line for line in found if line["what"] == "begin"]
    assert_never_two_on_one(found)
    assert sorted(line["job"] for line in begun) == sorted(job.name for job in jobs()), (
        "each job once"
    )
    assert {line["devices"] for line in begun} == {"0", "1"}, "both devices, one for each job"
    overlapping = [
        one for one, other in pairwise(found) if (one["what"], other["what"]) == ("begin", "begin")
    ]
    assert overlapping, "jobs ran side by side"
    for line in begun:
        assert result()[_label(line["job"])]["devices"] == [line["devices"]]
        assert (
            summary(Path("sweep") / line["job"])["device"]["cuda_visible_devices"]
            == line["devices"]
        )


def _label(name: str) -> str:
    return next(label for label, row in result().items() if row["name"] == name)


def test_a_killed_tree_is_repeated(two: Path, undisturbed: Path) -> None:
    """kill -9 of the sweep and its workers while both devices are in use.

    The same command, with equal results.
    """

    def run() -> int:
        os.setpgid(0, 0)
        original = SweepTask._train

        def train(self: SweepTask, run: Any, *args: Any) -> None:
            original(self, run, *args)
            if len([line for line in spans() if line["what"] == "begin"]) >= 3:
                os.killpg(
                    0, signal.SIGKILL
                )  # one more than devices: something is done, and both are held

        SweepTask._train = train  # type: ignore[method-assign]
        return sweep("lr=1e-3,2e-3", "seed=0,1", TWO)

    pid = forked.fork(run, two / "log")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, (
        two / "log"
    ).read_text()[-3000:]
    moment = time.monotonic()
    assert sweep("lr=1e-3,2e-3", "seed=0,1", TWO) == 0
    assert len(jobs()) == 4
    assert all(same(job, undisturbed / job.name) for job in jobs())
    assert_never_two_on_one(spans(), [moment])


def test_a_killed_worker_frees_its_device(
    two: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job goes on, on a device, and is the run it would have been."""
    original = SweepTask._train

    def train(self: SweepTask, run: Any, *args: Any) -> None:
        if not (two / "killed").exists():
            (two / "killed").write_text(run.path.name)
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, run, *args)

    monkeypatch.setattr(SweepTask, "_train", train)
    assert sweep("lr=1e-3,2e-3", "seed=0", TWO) == 0
    assert all(same(job, undisturbed / job.name) for job in jobs())
    assert {len(row["devices"]) for row in result().values()} == {1}


def train_alone(request: Any, run: Any, console: Any, resume: Any, stop_at: int | None) -> None:
    """In place of ranks."""
    alone = replace(
        request.config, distributed=NoDistributedConfig(name="none", timeout_seconds=60.0)
    )
    train(replace(request, config=alone), run, PlainDisplay(console), resume, stop_at=stop_at)


def test_jobs_of_several_devices(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes both runs when both are free, beside none; `auto` takes all."""
    monkeypatch.setattr(forked.ForkServer, "train_run", staticmethod(train_alone))
    words = ["distributed=ddp", "training.nproc_per_node=1,2,auto", "training.max_steps=3", TWO]
    assert sweep(*words) == 0
    found = spans()
    assert_never_two_on_one(found)
    begun = {line["job"]: line["devices"].split(",") for line in found if line["what"] == "begin"}
    taken = {label.partition("=")[2]: sorted(begun[row["name"]]) for label, row in result().items()}
    assert taken["2"] == taken["auto"] == ["0", "1"]
    assert taken["1"] in (["0"], ["1"])


def test_jobs_of_several_devices_are_paused_at_rungs(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked.ForkServer, "train_run", staticmethod(train_alone))
    assert (
        sweep(
            "distributed=ddp",
            "hydra/sweeper=optuna",
            "lr=tag(log,interval(1e-4,1e-2))",
            "hydra.sweeper.n_trials=4",
            "hydra.sweeper.pruner=asha",
            "hydra.sweeper.min_resource=2",
            "training.max_steps=4",
            TWO,
        )
        == 0
    )
    assert {forked.steps(job)[-1] for job in jobs()} == {2, 4}


def test_ranks_that_cannot_be_are_refused_before_any_job(
    two: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = ["distributed=fsdp", "training.nproc_per_node=2", "training.device=cpu"]
    assert sweep("lr=1e-3,2e-3", *ranks, "distributed.data_parallel_shard_degree=3") == 2
    said = capsys.readouterr().err
    for fact in ("distributed.data_parallel_shard_degree=3", "there are 2", "In the job"):
        assert fact in said
    assert not (two / "sweep").exists()


def test_a_list_of_devices_stands_in_brackets(
    two: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep("lr=1e-3,2e-3", "hydra.sweeper.devices=0,1") == 2
    said = capsys.readouterr().err
    for fact in ("hydra.sweeper.devices=0,1", "hydra.sweeper.devices=[0,1]"):
        assert fact in said


@pytest.mark.slow
def test_the_real_program(two: Path, request: pytest.FixtureRequest) -> None:
    """Workers are pinned in their environment, keep their device until they have saved, and
    then free it.
    """
    steps = 600
    words = [*forked.JOB, "lr=1e-3,2e-3", "seed=0,1", "hydra.sweep.dir=sweep", TWO]
    # A job outlasts the start of a worker, so that two train again after one was killed.
    words[words.index("training.max_steps=8")] = f"training.max_steps={steps}"

    def begin() -> subprocess.Popen[bytes]:
        with (two / "out").open("ab") as out:
            started = subprocess.Popen(
                [sys.executable, "-m", "tests.sweep.simulated", "-m", *words],
                stdout=out,
                stderr=out,
                env={**os.environ, "PYTHONPATH": str(Path(forked.__file__).parents[2])},
            )
        request.addfinalizer(lambda: (started.kill(), started.wait()))
        return started

    def workers() -> dict[int, str]:
        """Processes that train, and what they are pinned to, as the kernel knows it."""
        found = {}
        for lock in Path("sweep").glob("*/.lock"):
            match = re.search(r'"pid": (\d+),', lock.read_text())
            with contextlib.suppress(OSError):
                if match and (lock.parent / "metrics.jsonl").is_file():
                    variables = Path("/proc", match[1], "environ").read_bytes().split(b"\0")
                    pinned = [
                        variable.decode()
                        for variable in variables
                        if variable.startswith(VISIBLE.encode())
                    ]
                    found[int(match[1])] = (
                        pinned[0].partition("=")[2] if pinned else ""
                    )  # a zombie shows nothing
        return found

    process = begin()
    while len(found := workers()) < 2:
        assert process.poll() is None, (two / "out").read_text()[-3000:]
        time.sleep(0.02)
    assert sorted(found.values()) == ["0", "1"]
    os.kill(min(found), signal.SIGKILL)  # its device and its job come back
    while len(now := workers()) < 2 or min(found) in now:
        assert process.poll() is None, (two / "out").read_text()[-3000:]
        time.sleep(0.02)
    process.kill()  # its workers save, and free their devices when they are gone
    process.wait()
    process = begin()
    assert process.wait(timeout=240) == 0, (two / "out").read_text()[-3000:]
    assert len(jobs()) == 4
    assert all(whole(job, steps) for job in jobs())
    assert {summary(job)["device"]["cuda_visible_devices"] for job in jobs()} == {"0", "1"}


@pytest.mark.slow
def test_ranks_of_the_real_program(two: Path) -> None:
    """Two ranks a job, on both devices, one job after the other; each rank holds them."""
    words = [
        *forked.JOB,
        "lr=1e-3,2e-3",
        "hydra.sweep.dir=sweep",
        TWO,
        "distributed=ddp",
        "training.nproc_per_node=2",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.sweep.simulated", "-m", *words],
        env={**os.environ, "PYTHONPATH": str(Path(forked.__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert len(jobs()) == 2
    assert all(whole(job) for job in jobs())
    assert [summary(job)["device"]["cuda_visible_devices"] for job in jobs()] == ["0,1"] * 2


def test_a_search_uses_the_devices(two: Path) -> None:
    search = ["hydra/sweeper=optuna", "lr=tag(log, interval(1e-3, 1e-2))", "training.max_steps=3"]
    assert sweep(*search, "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=2", TWO) == 0
    found = spans()
    assert_never_two_on_one(found)
    assert len(jobs()) == 3
    assert {line["devices"] for line in found} == {"0", "1"}


def test_a_search_of_one_trial_at_a_time_says_so(
    two: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    search = ["hydra/sweeper=optuna", "lr=tag(log, interval(1e-3, 1e-2))", "training.max_steps=2"]
    assert sweep(*search, "hydra.sweeper.n_trials=1", TWO) == 0
    said = capsys.readouterr().out
    for fact in ("hydra.sweeper.n_jobs=1", "hydra.sweeper.n_jobs=2", "2 devices"):
        assert fact in said


def test_a_device_that_the_worker_does_not_see_is_left_out(
    two: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It fell off its bus, say: the other one does the work, and the CPU does not."""

    def refuse(visible: Sequence[str]) -> None:
        if visible == ["0"]:
            raise OptrunError("CUDA_VISIBLE_DEVICES=0: torch sees 0 CUDA devices instead of 1.")

    monkeypatch.setattr(launch, "refuse_unseen", refuse)
    assert sweep("lr=1e-3,2e-3", "training.max_steps=2", TWO) == 0
    assert {line["devices"] for line in spans()} == {"1"}
    assert "device 0 is not used any more" in capsys.readouterr().out
    monkeypatch.setattr(launch, "refuse_unseen", lambda visible: refuse(["0"]))
    assert sweep("lr=1e-3,2e-3", "training.max_steps=2", TWO, folder="none") == 1
    assert jobs("none") == [], "no job was begun"


def test_a_worker_sees_whether_its_device_is_there() -> None:
    devices_of.refuse_unseen([])
    with pytest.raises(OptrunError, match=r"CUDA_VISIBLE_DEVICES=7.*torch sees \d+ CUDA devices"):
        devices_of.refuse_unseen(["7"] * 99)


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (
            ["hydra.sweeper.devices=[2]"],
            ["hydra.sweeper.devices=[2]", "no device 2", "devices: 0, 1"],
        ),
        (["hydra.sweeper.devices=[0,0]"], ["each device once"]),
        (["hydra.sweeper.devices=[]"], ["auto, or a list"]),
        (["hydra.sweeper.devices=[cuda:0]"], ["cuda:0", "auto, or a list"]),
        (["hydra.sweeper.devices=[true]"], ["auto, or a list"]),
        (["hydra.sweeper.devices=[-1]"], ["-1", "auto, or a list"]),
        (["hydra.sweeper.devices=1"], ["auto, or a list", "[0,1]"]),
        (["hydra.sweeper.devices=all"], ["all", "auto, or a list"]),
        ([TWO, "training.device=cuda:1"], ["training.device=cuda:1", "auto or cuda"]),
        ([TWO, "training.device=cpu"], ["training.device=cpu", "auto or cuda"]),
        (
            [TWO, "hydra/launcher=joblib", "hydra.launcher.n_jobs=4"],
            ["hydra/launcher=joblib", "hydra.sweeper.devices"],
        ),
        (
            [TWO, "hydra/launcher=submitit_local"],
            ["hydra/launcher=submitit_local", "gpus_per_node"],
        ),
        ([TWO, "hydra.sweeper.max_batch_size=2"], ["hydra.sweeper.max_batch_size=2", "no effect"]),
        (
            ["hydra.sweeper.devices=[0]", "distributed=ddp", "training.nproc_per_node=2"],
            ["training.nproc_per_node=2", "the sweep has 1"],
        ),
        (
            [TWO, "distributed=ddp", "training.nproc_per_node=1,3"],
            ["training.nproc_per_node=3", "the sweep has 2", "In the job"],
        ),
    ],
)
def test_a_wrong_line_starts_nothing(
    words: list[str],
    facts: list[str],
    place: Path,
    machine: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = {word.split("=", 1)[0] for word in words}
    job = [
        word
        for word in [*forked.JOB, "training.device=auto", "seed=0,1"]
        if word.split("=", 1)[0] not in given
    ]
    job.remove("training.device=cpu") if "training.device=cpu" in job else None
    assert optrun("-m", *job, *words, "hydra.sweep.dir=sweep") == 2
    said = capsys.readouterr().err
    for fact in facts:
        assert fact in said
    assert not Path("sweep").exists()


def test_a_machine_without_devices(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert sweep("lr=1e-3", TWO) == 2
    assert "hydra.sweeper.devices=auto: torch sees no CUDA device" in capsys.readouterr().err
    assert sweep("lr=1e-3", "hydra.sweeper.devices=[0]") == 2
    assert "there is no device 0" in capsys.readouterr().err
    assert not Path("sweep").exists()


@pytest.mark.parametrize(
    ("inherited", "asked", "expected"),
    [
        (None, "auto", ["0", "1"]),
        (None, [1, 0], ["1", "0"]),
        (None, ["GPU-bbbb", "MIG-a"], ["GPU-bbbb", "MIG-a"]),
        ("1", "auto", ["1"]),
        ("1, 0", [0], ["1"]),
        ("MIG-aaaa-0,MIG-bbbb-1", "auto", ["MIG-aaaa-0", "MIG-bbbb-1"]),
        ("MIG-aaaa-0,MIG-bbbb-1", [1], ["MIG-bbbb-1"]),
    ],
)
def test_indices_are_of_the_visible_devices(
    inherited: str | None,
    asked: Any,
    expected: list[str],
    machine: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the environment shows is what there is, under the names that stand there."""
    if inherited is not None:
        monkeypatch.setenv(VISIBLE, inherited)
    assert find_devices(asked) == expected
